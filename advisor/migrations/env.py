"""Alembic's entry: runs the migrations on the connection that `advisor.log` hands over, inside its transaction."""

from __future__ import annotations

from alembic import context

from advisor.tables import metadata

context.configure(
    connection=context.config.attributes["connection"], target_metadata=metadata, transactional_ddl=True
)
with context.begin_transaction():
    context.run_migrations()
