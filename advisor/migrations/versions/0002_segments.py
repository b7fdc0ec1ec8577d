"""The catalogue of a segment log."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0002"
down_revision = "0001"
branch_labels = None
depends_on = None

_ROW_ID = sa.BigInteger().with_variant(sa.Integer(), "sqlite")


def upgrade() -> None:
    op.create_table(
        "segments",
        sa.Column("first_position", _ROW_ID, primary_key=True, autoincrement=False),
        sa.Column("last_position", sa.BigInteger(), nullable=False),
        sa.Column("raw_bytes", sa.BigInteger(), nullable=False),
        sa.Column("stored_bytes", sa.BigInteger(), nullable=False),
        sa.Column("first_recorded_us", sa.BigInteger(), nullable=False),
        sa.Column("last_recorded_us", sa.BigInteger(), nullable=False),
    )


def downgrade() -> None:
    op.drop_table("segments")
