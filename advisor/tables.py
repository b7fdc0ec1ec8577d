"""The tables of the log's database, for SQLite and for PostgreSQL. `advisor/migrations` creates them."""

from __future__ import annotations

from sqlalchemy import (
    BigInteger,
    Column,
    Dialect,
    Index,
    Integer,
    LargeBinary,
    MetaData,
    String,
    Table,
    TypeDecorator,
    UniqueConstraint,
)

_U64_END = 1 << 64
_I64_END = 1 << 63


class U64(TypeDecorator[int]):
    """An unsigned 64-bit integer kept, bit for bit, in the database's signed one: no database here has the former.

    Equality holds in SQL, order does not. Raises `ValueError` for a number outside 0 … 2**64 - 1.
    """

    impl = BigInteger
    cache_ok = True

    def process_bind_param(self, value: int | None, dialect: Dialect) -> int | None:
        if value is None:
            return None
        if not 0 <= value < _U64_END:
            raise ValueError(f"{value} is outside 0 … 2**64 - 1")
        return value - _U64_END if value >= _I64_END else value

    def process_result_value(self, value: int | None, dialect: Dialect) -> int | None:
        return value + _U64_END if value is not None and value < 0 else value


# SQLite makes a column its row id, which costs nothing, only when its type is spelled INTEGER.
_ROW_ID = BigInteger().with_variant(Integer, "sqlite")

metadata = MetaData()

entries = Table(
    "entries",
    metadata,
    Column("position", _ROW_ID, primary_key=True, autoincrement=False),
    Column("kind", String, nullable=False),
    Column("source", String, nullable=False),
    Column("producer", U64),
    Column("epoch", U64),
    Column("sequence", U64),
    Column("foreign_crc", BigInteger),
    Column("recorded_us", BigInteger, nullable=False),
    Column("payload", LargeBinary, nullable=False),
    UniqueConstraint("producer", "epoch", "sequence", name="entries_batch"),
    Index("entries_kind", "kind", "position"),
)
"""One row a log entry. `producer`, `epoch` and `sequence` are NULL for all but batches, and NULLs are never equal.

On PostgreSQL `entries` is partitioned by position, and `entries_batch` is an index of each partition.
"""

terms = Table(
    "terms",
    metadata,
    Column("term", _ROW_ID, primary_key=True, autoincrement=True),
    Column("started_us", BigInteger, nullable=False),
    Column("host", String, nullable=False),
    Column("pid", BigInteger, nullable=False),
    Column("version", String, nullable=False),
    sqlite_autoincrement=True,
)
"""One row a start of the advisor. A term is never given twice."""

segments = Table(
    "segments",
    metadata,
    Column("first_position", _ROW_ID, primary_key=True, autoincrement=False),
    Column("last_position", BigInteger, nullable=False),
    Column("raw_bytes", BigInteger, nullable=False),
    Column("stored_bytes", BigInteger, nullable=False),
    Column("first_recorded_us", BigInteger, nullable=False),
    Column("last_recorded_us", BigInteger, nullable=False),
)
"""One row a sealed segment of a segment log, whose catalogue is a database with this schema and no `entries`."""
