"""What a log on PostgreSQL does beyond the contract of every log."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path

import pytest

from advisor.entries import EntryKind, NewEntry, Tick, control_entry
from advisor.errors import LogError
from advisor.log import SqlLog
from advisor.log_queries import EntryFilter, SqlQueries, Term
from tests.ports import free_ports
from tests.postgres import PASSWORD, PostgresServer


def batch(sequence: int, payload: bytes = b"batch") -> NewEntry:
    return NewEntry(kind=EntryKind.BATCH, payload=payload, producer=1, epoch=1, sequence=sequence)


@pytest.fixture
def url(postgres: PostgresServer) -> str:
    return postgres.emptied_database()


@pytest.fixture
def log(postgres: PostgresServer, url: str) -> Iterator[SqlLog]:
    opened = SqlLog(url, password_file=postgres.password_file, partition_entries=100)
    yield opened
    opened.close()


def partitions(postgres: PostgresServer) -> list[str]:
    return postgres.psql("postgres", "SELECT relid FROM pg_partition_tree('entries') WHERE isleaf ORDER BY 1").split()


def test_partitions_are_made_ahead_and_dropped_whole(postgres: PostgresServer, log: SqlLog) -> None:
    assert partitions(postgres) == [f"entries_p{0:020d}"]
    for sequence in range(0, 320, 40):
        log.append([batch(sequence + i) for i in range(40)], 1)
    assert partitions(postgres) == [f"entries_p{first:020d}" for first in (0, 100, 200, 300)]
    assert log.prune(250) == 199
    assert partitions(postgres) == [f"entries_p{first:020d}" for first in (200, 300)]
    assert [entry.position for entry in log.read()] == list(range(200, 321))
    assert log.append([batch(9_999)], 1) == 321


def test_payloads_are_not_compressed_and_commits_wait_for_the_disk(
    postgres: PostgresServer, log: SqlLog
) -> None:
    for table in ("entries", f"entries_p{0:020d}"):
        storage = f"SELECT attstorage FROM pg_attribute WHERE attrelid = '{table}'::regclass AND attname = 'payload'"
        assert postgres.psql("postgres", storage) == "e"
    log.append([batch(1, bytes(100_000))], 1)
    assert log.stat().stored_bytes > 100_000


def test_large_append_and_pages_of_many_bytes(log: SqlLog) -> None:
    log.append([batch(i, bytes(300_000)) for i in range(40)], 1)
    assert [len(entry.payload) for entry in log.read()] == [300_000] * 40


def test_queries_page_forward_backward_and_by_kind(
    postgres: PostgresServer, url: str, log: SqlLog
) -> None:
    log.append([batch(1), control_entry(Tick(1)), batch(2), control_entry(Tick(2)), batch(3)], 5)
    log.next_term(77, "host", 42, "0.1.0")

    async def ask() -> None:
        queries = SqlQueries(url, password_file=postgres.password_file)
        assert await queries.page() == list(log.read())
        assert [e.position for e in await queries.page(limit=2)] == [4, 5]
        assert [e.position for e in await queries.page(2, limit=2)] == [2, 3]
        assert [e.position for e in await queries.page(wanted=EntryFilter(EntryKind.TICK))] == [2, 4]
        assert await queries.last_position() == 5
        assert await queries.terms() == [Term(1, 77, "host", 42, "0.1.0")]
        assert await queries.size_bytes() > 0
        await queries.close()
        await queries.close()

    asyncio.run(ask())


def test_no_sentence_holds_the_password(postgres: PostgresServer, url: str, tmp_path: Path) -> None:
    wrong = tmp_path / "wrong"
    wrong.write_text("let me in\n")
    with pytest.raises(LogError, match="the server refuses the user or password: check"):
        SqlLog(url, password_file=wrong)
    with pytest.raises(LogError, match="has no such database: make it with `createdb`"):
        SqlLog(postgres.url("absent"), password_file=postgres.password_file)
    with pytest.raises(LogError, match=r"log\.password_file .*absent cannot be read") as caught:
        SqlLog(url, password_file=tmp_path / "absent")
    with pytest.raises(LogError, match=r"log\.url holds a password: move it to a file") as given:
        SqlLog(url.replace("advisor@", f"advisor:{PASSWORD}@"))
    with pytest.raises(LogError, match="names no database"):
        SqlLog("postgresql://advisor@127.0.0.1")
    assert PASSWORD not in str(caught.value) + str(given.value)


def test_server_that_is_away_is_named(tmp_path: Path) -> None:
    (port,) = free_ports(1)
    for read_only in (False, True):
        with pytest.raises(LogError, match=rf"cannot open .*:{port}/log: the server cannot be reached") as caught:
            SqlLog(f"postgresql://advisor@127.0.0.1:{port}/log", read_only=read_only)
        assert "\n" not in str(caught.value)


def test_database_of_another_program_is_refused(postgres: PostgresServer, url: str) -> None:
    postgres.psql("postgres", "CREATE TABLE songs (name text)")
    with pytest.raises(LogError, match="another program's database"):
        SqlLog(url, password_file=postgres.password_file)
    with pytest.raises(LogError, match="holds no log"):
        SqlLog(url, password_file=postgres.password_file, read_only=True)


def test_schema_of_a_newer_version_is_refused(postgres: PostgresServer, url: str, log: SqlLog) -> None:
    log.close()
    postgres.psql("postgres", "UPDATE alembic_version SET version_num = '0999'")
    for read_only in (False, True):
        with pytest.raises(LogError, match="schema 0999, made by a newer kvadvisor"):
            SqlLog(url, password_file=postgres.password_file, read_only=read_only)


def test_writer_whose_session_ended_writes_no_more(
    postgres: PostgresServer, url: str, log: SqlLog
) -> None:
    """With its session went its lock: another one may write by now."""
    log.append([batch(1)], 1)
    ended = "SELECT count(pg_terminate_backend(pid)) FROM pg_locks WHERE locktype = 'advisory'"
    assert postgres.psql("postgres", ended) == "1"
    with pytest.raises(LogError, match="the server cannot be reached or went away"):
        log.append([batch(2)], 1)
    other = SqlLog(url, password_file=postgres.password_file)
    assert other.append([batch(3)], 1) == 2
    with pytest.raises(LogError, match="not written to after it failed"):
        log.append([batch(4)], 1)
    other.close()
