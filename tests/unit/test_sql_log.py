"""What an SQLite log does beyond the contract of every log."""

from __future__ import annotations

import asyncio
import os
import sqlite3
import subprocess
import sys
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest
from sqlalchemy import Engine, event

from advisor.entries import EntryKind, NewEntry, Tick, control_entry
from advisor.errors import LogError
from advisor.log import PAGE_BYTES_MAX, PAGE_ENTRIES_MAX, SqlLog
from advisor.log_backup import back_up
from advisor.log_queries import EntryFilter, SqlQueries, Term
from advisor.settings import AdvisorSettings
from tests.disks import disk_of


def batch(sequence: int, payload: bytes = b"batch") -> NewEntry:
    return NewEntry(kind=EntryKind.BATCH, payload=payload, producer=1, epoch=1, sequence=sequence)


def pragma(path: Path, name: str) -> object:
    connection = sqlite3.connect(path)
    try:
        return connection.execute(f"PRAGMA {name}").fetchone()[0]
    finally:
        connection.close()


def edit(path: Path, statement: str) -> None:
    connection = sqlite3.connect(path)
    try:
        with connection:
            connection.execute(statement)
    finally:
        connection.close()


def test_file_has_large_pages_and_a_wal(tmp_path: Path) -> None:
    SqlLog(tmp_path / "made" / "log.db").close()
    assert pragma(tmp_path / "made" / "log.db", "page_size") == 16_384
    assert pragma(tmp_path / "made" / "log.db", "journal_mode") == "wal"


def test_url_names_the_same_file_as_a_path(tmp_path: Path) -> None:
    log = SqlLog(f"sqlite:///{tmp_path}/log.db")
    log.append([batch(1)], 1)
    log.close()
    again = SqlLog(tmp_path / "log.db")
    assert again.last_position() == 1
    assert again.append([batch(2)], 2) == 2
    again.close()


@pytest.mark.parametrize("url", ["mysql://host/log", "sqlite://", "sqlite:///:memory:", "nonsense://"])
def test_other_database_is_refused_with_the_remedy(url: str) -> None:
    with pytest.raises(LogError, match="sqlite:///PATH"):
        SqlLog(url)


def test_path_with_odd_characters_opens_for_reading(tmp_path: Path) -> None:
    path = tmp_path / "a ?#%20&b" / "log.db"
    log = SqlLog(path)
    log.append([batch(1)], 1)
    reader = SqlLog(path, read_only=True)
    assert reader.last_position() == 1
    reader.close()
    log.close()


def test_read_crosses_pages_by_count_and_by_bytes(tmp_path: Path) -> None:
    log = SqlLog(tmp_path / "log.db")
    log.append([batch(i, b"small") for i in range(PAGE_ENTRIES_MAX + 5)], 1)
    log.append([batch(100_000 + i, bytes(PAGE_BYTES_MAX // 2)) for i in range(3)], 2)
    assert [entry.position for entry in log.read()] == list(range(1, PAGE_ENTRIES_MAX + 9))
    log.close()


def test_number_beyond_u64_is_refused(tmp_path: Path) -> None:
    log = SqlLog(tmp_path / "log.db")
    with pytest.raises(LogError, match=r"18446744073709551616 is outside 0 … 2\*\*64 - 1"):
        log.append([batch(2**64)], 1)
    assert log.last_position() == 0
    log.close()


def test_terms_go_on_after_a_restart(tmp_path: Path) -> None:
    for term in (1, 2, 3):
        log = SqlLog(tmp_path / "log.db")
        assert log.next_term(term, "host", 9, "0.1.0") == term
        log.close()


def test_second_writer_is_told_who_has_the_log(tmp_path: Path) -> None:
    log = SqlLog(tmp_path / "log.db")
    with pytest.raises(LogError, match=rf"process {os.getpid()} on .*: stop that one first"):
        SqlLog(tmp_path / "log.db")
    log.append([batch(1)], 1)
    log.close()
    SqlLog(tmp_path / "log.db").close()


def test_writer_in_another_process_is_named(tmp_path: Path) -> None:
    holder = (
        "import sys; from advisor.log import SqlLog; log = SqlLog(sys.argv[1]); print('open', flush=True);"
        "sys.stdin.read()"
    )
    with subprocess.Popen(
        [sys.executable, "-c", holder, str(tmp_path / "log.db")], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as child:
        assert child.stdout is not None
        assert child.stdout.readline() == b"open\n"
        with pytest.raises(LogError, match=rf"process {child.pid} on "):
            SqlLog(tmp_path / "log.db")
        child.kill()


def test_reader_sees_what_the_writer_appends_meanwhile(tmp_path: Path) -> None:
    log = SqlLog(tmp_path / "log.db")
    reader = SqlLog(tmp_path / "log.db", read_only=True)
    assert reader.last_position() == 0
    log.append([batch(1)], 1)
    assert reader.last_position() == 1
    assert [entry.sequence for entry in reader.read()] == [1]
    with pytest.raises(LogError, match="not open for writing"):
        reader.append([batch(2)], 1)
    with pytest.raises(LogError, match="not open for writing"):
        reader.next_term(1, "host", 1, "0.1.0")
    reader.close()
    log.close()


def test_read_only_needs_a_log(tmp_path: Path) -> None:
    with pytest.raises(LogError, match="there is no log at"):
        SqlLog(tmp_path / "log.db", read_only=True)
    assert list(tmp_path.iterdir()) == []


def test_file_that_is_no_database_is_refused_and_kept(tmp_path: Path) -> None:
    path = tmp_path / "log.db"
    path.write_bytes(b"these are notes, not a log\n" * 1000)
    before = path.read_bytes()
    for read_only in (False, True):
        with pytest.raises(LogError, match=r"log\.db: the file is no SQLite database: move it away"):
            SqlLog(path, read_only=read_only)
    assert path.read_bytes() == before


def test_database_of_another_program_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "log.db"
    edit(path, "CREATE TABLE songs (name TEXT)")
    with pytest.raises(LogError, match="another program's database"):
        SqlLog(path)
    with pytest.raises(LogError, match="holds no log"):
        SqlLog(path, read_only=True)


def test_damaged_file_is_reported_where_it_is_read(tmp_path: Path) -> None:
    path = tmp_path / "log.db"
    log = SqlLog(path)
    log.append([batch(i, os.urandom(40_000)) for i in range(20)], 1)
    log.close()
    content = bytearray(path.read_bytes())
    content[16_384:] = os.urandom(len(content) - 16_384)
    path.write_bytes(content)
    with pytest.raises(LogError, match=r"log\.db: the file is damaged: restore a copy"):
        list(SqlLog(path, read_only=True).read())


def test_cut_file_is_reported(tmp_path: Path) -> None:
    path = tmp_path / "log.db"
    log = SqlLog(path)
    log.append([batch(i, os.urandom(40_000)) for i in range(20)], 1)
    log.close()
    os.truncate(path, path.stat().st_size // 2)
    with pytest.raises(LogError, match=r"log\.db: the file is damaged"):
        list(SqlLog(path).read())


@pytest.mark.parametrize("read_only", [False, True])
def test_schema_of_a_newer_version_is_refused(tmp_path: Path, read_only: bool) -> None:
    path = tmp_path / "log.db"
    SqlLog(path).close()
    edit(path, "UPDATE alembic_version SET version_num = '0999'")
    with pytest.raises(LogError, match="schema 0999, made by a newer kvadvisor than this one, which knows up to 0002"):
        SqlLog(path, read_only=read_only)


def test_migrations_make_the_tables_that_the_code_uses(tmp_path: Path) -> None:
    from alembic.autogenerate import compare_metadata
    from alembic.runtime.migration import MigrationContext

    from advisor.log_database import open_writer
    from advisor.tables import metadata

    engine = open_writer(tmp_path / "log.db")
    with engine.connect() as connection:
        assert compare_metadata(MigrationContext.configure(connection), metadata) == []
    engine.dispose()


@pytest.fixture
def pages_max() -> Iterator[None]:
    """Makes each SQLite database opened meanwhile end at 40 pages (640 KiB)."""

    def limit(connection: sqlite3.Connection, _record: object) -> None:
        connection.execute("PRAGMA max_page_count = 40").close()

    event.listen(Engine, "connect", limit)
    yield
    event.remove(Engine, "connect", limit)


def test_full_database_refuses_the_whole_append(tmp_path: Path, pages_max: None) -> None:
    path = tmp_path / "log.db"
    log = SqlLog(path)
    log.append([batch(0)], 1)
    with pytest.raises(LogError, match=r"^cannot append to .*log\.db: the disk is full: free space there"):
        log.append([batch(1), batch(2, bytes(1_000_000))], 2)
    assert [entry.sequence for entry in log.read()] == [0]
    assert log.append([batch(1)], 3) == 2
    log.close()


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    with disk_of(tmp_path / "disk", 2) as disk:
        yield disk


def test_full_disk_refuses_the_append_and_keeps_what_was_acknowledged(small_disk: Path) -> None:
    log = SqlLog(small_disk / "log.db")
    positions = (log.append([batch(sequence, os.urandom(100_000))], 1) for sequence in range(100))
    acknowledged: list[int] = []
    with pytest.raises(LogError, match=r"^cannot append to .*log\.db: the disk is full"):
        acknowledged.extend(positions)
    assert len(acknowledged) > 3
    assert [entry.position for entry in log.read()] == acknowledged
    log.close()
    reader = SqlLog(small_disk / "log.db", read_only=True)
    assert [entry.position for entry in reader.read()] == acknowledged
    reader.close()


def test_full_disk_at_the_first_start_is_one_sentence(small_disk: Path) -> None:
    (small_disk / "filler").write_bytes(bytes(2 * 1024 * 1024))
    with pytest.raises(LogError, match=r"disk is full|No space left") as caught:
        SqlLog(small_disk / "log.db")
    assert "\n" not in str(caught.value)


def test_queries_page_forward_backward_and_by_kind(tmp_path: Path) -> None:
    log = SqlLog(tmp_path / "log.db")
    log.append([batch(1), control_entry(Tick(1)), batch(2), control_entry(Tick(2)), batch(3)], 5)
    log.next_term(77, "host", 42, "0.1.0")

    async def ask() -> None:
        queries = SqlQueries(tmp_path / "log.db")
        assert [e.position for e in await queries.page()] == [1, 2, 3, 4, 5]
        assert [e.position for e in await queries.page(limit=2)] == [4, 5]
        assert [e.position for e in await queries.page(2, limit=2)] == [2, 3]
        assert [e.position for e in await queries.page(wanted=EntryFilter(EntryKind.TICK))] == [2, 4]
        assert [e.position for e in await queries.page(3, wanted=EntryFilter(EntryKind.BATCH))] == [3, 5]
        assert [e.position for e in await queries.page(limit=1, wanted=EntryFilter(EntryKind.BATCH))] == [5]
        assert await queries.page(6) == []
        assert await queries.page() == list(log.read())
        assert await queries.last_position() == 5
        assert await queries.terms() == [Term(1, 77, "host", 42, "0.1.0")]
        size = await queries.size_bytes()
        assert size >= 2 * 16_384
        assert size % 16_384 == 0
        log.append([batch(9, bytes(200_000))], 6)
        assert await queries.size_bytes() > max(size, 200_000)
        assert await queries.last_position() == 6
        await queries.close()
        await queries.close()

    asyncio.run(ask())
    log.close()


def test_queries_need_a_log(tmp_path: Path) -> None:
    with pytest.raises(LogError, match="there is no log at"):
        SqlQueries(tmp_path / "log.db")


SCHEMA_0001 = """
CREATE TABLE alembic_version (version_num VARCHAR(32) NOT NULL PRIMARY KEY);
INSERT INTO alembic_version VALUES ('0001');
CREATE TABLE entries (
    position INTEGER NOT NULL PRIMARY KEY, kind VARCHAR NOT NULL, source VARCHAR NOT NULL, producer BIGINT,
    epoch BIGINT, sequence BIGINT, foreign_crc BIGINT, recorded_us BIGINT NOT NULL, payload BLOB NOT NULL,
    CONSTRAINT entries_batch UNIQUE (producer, epoch, sequence)
);
CREATE INDEX entries_kind ON entries (kind, position);
CREATE TABLE terms (
    term INTEGER NOT NULL PRIMARY KEY AUTOINCREMENT, started_us BIGINT NOT NULL, host VARCHAR NOT NULL,
    pid BIGINT NOT NULL, version VARCHAR NOT NULL
);
INSERT INTO entries VALUES (1, 'batch', 'core', -1, 2, 3, NULL, 5, x'626174636831');
INSERT INTO entries VALUES (2, 'tick', '', NULL, NULL, NULL, NULL, 6, x'627463');
INSERT INTO terms VALUES (7, 5, 'host', 42, '0.1.0');
"""
"""What version 0.1.0 left."""


def test_log_of_an_older_version_is_brought_up_to_date(tmp_path: Path) -> None:
    path = tmp_path / "log.db"
    connection = sqlite3.connect(path)
    connection.executescript(SCHEMA_0001)
    connection.close()
    with pytest.raises(LogError, match=r"has schema 0001, older than this version's 0002: start `kvadvisor"):
        SqlLog(path, read_only=True)
    log = SqlLog(path)
    first, second = log.read()
    assert (first.payload, first.producer, first.epoch, first.sequence) == (b"batch1", 2**64 - 1, 2, 3)
    assert (second.kind, second.payload, second.recorded_us) == (EntryKind.TICK, b"btc", 6)
    assert log.append([batch(1)], 1) == 3
    assert log.next_term(1, "host", 1, "0.2.0") == 8
    log.close()
    reader = SqlLog(path, read_only=True)
    assert reader.last_position() == 3
    reader.close()


def test_pruned_room_is_used_again_and_the_file_does_not_grow(tmp_path: Path) -> None:
    path = tmp_path / "log.db"
    log = SqlLog(path)
    sizes = []
    for sequence in range(0, 1_500, 50):
        log.append([batch(sequence + i, os.urandom(20_000)) for i in range(50)], 1)
        log.prune(log.last_position() - 200)
        sizes.append(path.stat().st_size)
        assert log.stat().stored_bytes < 7_000_000
    assert max(sizes[15:]) == max(sizes[10:15]) < 10_000_000
    log.close()


def test_backup_that_is_refused_makes_nothing(tmp_path: Path) -> None:
    state, folder = tmp_path / "state", tmp_path / "backup"
    state.mkdir()
    settings = AdvisorSettings(directory=state)
    with pytest.raises(LogError, match="there is no log"):
        back_up(settings, folder)
    with closing(sqlite3.connect(state / "log.db")) as connection:
        connection.executescript(SCHEMA_0001)
    with pytest.raises(LogError, match=r"state/log.db has schema 0001, older than"):
        back_up(settings, folder)
    assert not folder.exists()
    SqlLog(state / "log.db").close()
    assert back_up(settings, folder).position == 2
