"""Alembic migrations of the log's database, run by `advisor.log` when it opens one for writing."""
