"""The log's entries and the advisor's terms."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0001"
down_revision = None
branch_labels = None
depends_on = None

_ROW_ID = sa.BigInteger().with_variant(sa.Integer(), "sqlite")


def upgrade() -> None:
    on_postgres = op.get_bind().dialect.name == "postgresql"
    op.create_table(
        "entries",
        sa.Column("position", _ROW_ID, primary_key=True, autoincrement=False),
        sa.Column("kind", sa.String(), nullable=False),
        sa.Column("source", sa.String(), nullable=False),
        sa.Column("producer", sa.BigInteger()),
        sa.Column("epoch", sa.BigInteger()),
        sa.Column("sequence", sa.BigInteger()),
        sa.Column("foreign_crc", sa.BigInteger()),
        sa.Column("recorded_us", sa.BigInteger(), nullable=False),
        sa.Column("payload", sa.LargeBinary(), nullable=False),
        # PostgreSQL checks across partitions only what holds the position; each partition has an index of its own.
        *([] if on_postgres else [sa.UniqueConstraint("producer", "epoch", "sequence", name="entries_batch")]),
        postgresql_partition_by="RANGE (position)",
    )
    if on_postgres:
        # Batches do not shrink by PostgreSQL's own compression.
        op.execute("ALTER TABLE entries ALTER COLUMN payload SET STORAGE EXTERNAL")
    op.create_index("entries_kind", "entries", ["kind", "position"])
    op.create_table(
        "terms",
        sa.Column("term", _ROW_ID, primary_key=True, autoincrement=True),
        sa.Column("started_us", sa.BigInteger(), nullable=False),
        sa.Column("host", sa.String(), nullable=False),
        sa.Column("pid", sa.BigInteger(), nullable=False),
        sa.Column("version", sa.String(), nullable=False),
        sqlite_autoincrement=True,
    )


def downgrade() -> None:
    op.drop_table("terms")
    op.drop_index("entries_kind", "entries")
    op.drop_table("entries")
