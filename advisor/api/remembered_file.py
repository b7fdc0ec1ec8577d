"""Remembered answers in an SQLite file, so that a repeated write finds its answer after a restart too."""

from __future__ import annotations

import contextlib
import json
import os
import sqlite3
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path

from advisor.api.errors import ApiError
from advisor.api.remembered import Answer, Entry, State

_SCHEMA = """
CREATE TABLE IF NOT EXISTS remembered (
    slot BLOB PRIMARY KEY, fingerprint BLOB NOT NULL, begun_us INTEGER NOT NULL, state TEXT NOT NULL,
    status INTEGER, headers TEXT, body BLOB
)"""


class RememberedFile:
    """Keeps `Entry`s. Safe from any thread; a method returns when it is on the disk.

    Raises `ApiError` for a file that cannot be used, `sqlite3.Error` where it cannot be written.
    """

    def __init__(self, path: Path) -> None:
        self._lock = threading.Lock()
        try:
            # Made by us before SQLite does: answers are for those alone who asked.
            os.close(os.open(path, os.O_RDWR | os.O_CREAT, 0o600))
        except OSError as error:
            raise ApiError(f"{path} cannot be opened: {error.strerror}; make its folder writable") from error
        self._connection = sqlite3.connect(path, check_same_thread=False, isolation_level=None)
        try:
            self._connection.execute("PRAGMA synchronous=FULL")
            self._connection.execute(_SCHEMA)
        except sqlite3.DatabaseError as error:
            self._connection.close()
            raise ApiError(f"{path} holds no remembered answers ({error}): move it away, and start again") from error

    def load(self) -> list[Entry]:
        """All entries, oldest first."""
        with self._lock:
            rows = self._connection.execute(
                "SELECT slot, fingerprint, begun_us, state, status, headers, body FROM remembered ORDER BY begun_us"
            ).fetchall()
        return [
            Entry(
                slot, fingerprint, begun_us, State(state),
                None if status is None else Answer(status, tuple((n, v) for n, v in json.loads(headers)), body),
            )
            for slot, fingerprint, begun_us, state, status, headers, body in rows
        ]  # fmt: skip

    def put(self, entry: Entry, dropped: Sequence[bytes] = ()) -> None:
        """Write one, and take those out that went to make room."""
        answer = entry.answer
        facts = (None, None, None) if answer is None else (answer.status, json.dumps(answer.headers), answer.body)
        row = (entry.slot, entry.fingerprint, entry.begun_us, entry.state.value, *facts)
        with self._transaction() as connection:
            connection.executemany("DELETE FROM remembered WHERE slot = ?", [(slot,) for slot in dropped])
            connection.execute("INSERT OR REPLACE INTO remembered VALUES (?, ?, ?, ?, ?, ?, ?)", row)

    def remove(self, slots: Sequence[bytes]) -> None:
        with self._transaction() as connection:
            connection.executemany("DELETE FROM remembered WHERE slot = ?", [(slot,) for slot in slots])

    def close(self) -> None:
        """Idempotent."""
        with self._lock:
            self._connection.close()

    @contextlib.contextmanager
    def _transaction(self) -> Iterator[sqlite3.Connection]:
        with self._lock:
            self._connection.execute("BEGIN IMMEDIATE")
            with self._connection:
                yield self._connection
