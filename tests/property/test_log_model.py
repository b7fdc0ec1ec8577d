"""Append, read and prune of the logs equal a plain list."""

from __future__ import annotations

import tempfile
from pathlib import Path

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from advisor.entries import EntryKind, EventLog, LogEntry, NewEntry
from advisor.errors import LogError
from advisor.log import SqlLog
from advisor.memory_log import MemoryLog
from advisor.segment_log import SegmentLog
from tests.examples import examples

U64 = st.sampled_from([0, 1, 2**63 - 1, 2**63, 2**64 - 1])
ENTRIES = st.one_of(
    st.builds(
        NewEntry,
        kind=st.just(EntryKind.BATCH),
        payload=st.binary(max_size=200),
        producer=U64,
        epoch=U64,
        sequence=st.integers(0, 2**64 - 1) | U64,
        source=st.text(max_size=5).filter(lambda text: "\0" not in text),
        foreign_crc=st.none() | st.integers(0, 2**32 - 1),
    ),
    st.builds(
        NewEntry, kind=st.sampled_from(sorted(set(EntryKind) - {EntryKind.BATCH})), payload=st.binary(max_size=50)
    ),
)


class LogModel(RuleBasedStateMachine):
    log: EventLog

    @initialize()
    def begin(self) -> None:
        self.expected: list[LogEntry] = []
        self.last = 0

    def is_refused(self, new: list[NewEntry]) -> bool:
        keys = [(e.producer, e.epoch, e.sequence) for e in [*self.expected, *new] if e.producer is not None]
        return len(keys) != len(set(keys))

    @rule(new=st.lists(ENTRIES, max_size=4), recorded_us=st.integers(0, 2**62))
    def append(self, new: list[NewEntry], recorded_us: int) -> None:
        if self.is_refused(new):
            with pytest.raises(LogError, match="nothing was written"):
                self.log.append(new, recorded_us)
            return
        first = self.last + 1
        self.last += len(new)
        assert self.log.append(new, recorded_us) == first
        self.expected += [
            LogEntry(
                first + i, e.kind, e.payload, e.producer, e.epoch, e.sequence, e.source, e.foreign_crc, recorded_us
            )
            for i, e in enumerate(new)
        ]

    @rule(through=st.integers(0, 20))
    def prune(self, through: int) -> None:
        first = self.log.first_position()
        dropped = self.log.prune(through)
        assert self.log.first_position() == first + dropped
        assert 0 <= dropped <= max(0, min(through, self.last - 1) - first + 1)
        self.expected = self.expected[dropped:]

    @rule(first=st.integers(0, 8), last=st.none() | st.integers(0, 8))
    def read_range(self, first: int, last: int | None) -> None:
        wanted = [e for e in self.expected if e.position >= first and (last is None or e.position <= last)]
        assert list(self.log.read(first, last)) == wanted

    @invariant()
    def log_equals_list(self) -> None:
        if hasattr(self, "expected"):
            assert list(self.log.read()) == self.expected
            assert self.log.last_position() == self.last


class MemoryLogModel(LogModel):
    @initialize()
    def begin(self) -> None:
        super().begin()
        self.log = MemoryLog()


class SqlLogModel(LogModel):
    @initialize()
    def begin(self) -> None:
        super().begin()
        self.folder = tempfile.TemporaryDirectory()
        self.log = SqlLog(Path(self.folder.name) / "log.db")

    @rule()
    def reopen(self) -> None:
        self.log.close()
        self.log = SqlLog(Path(self.folder.name) / "log.db")

    def teardown(self) -> None:
        if hasattr(self, "folder"):
            self.log.close()
            self.folder.cleanup()


class SegmentLogModel(LogModel):
    @initialize()
    def begin(self) -> None:
        super().begin()
        self.folder = tempfile.TemporaryDirectory()
        self.highest: dict[tuple[int | None, int | None], int] = {}
        self.open()

    def open(self) -> None:
        self.log = SegmentLog(Path(self.folder.name), segment_bytes=600)

    def is_refused(self, new: list[NewEntry]) -> bool:
        """A life's sequences must rise; what was pruned or sealed before a reopening is not remembered."""
        highest = dict(self.highest)
        for entry in new:
            if entry.sequence is not None:
                life = (entry.producer, entry.epoch)
                if entry.sequence <= highest.get(life, -1):
                    return True
                highest[life] = entry.sequence
        self.highest = highest
        return False

    @rule()
    def reopen(self) -> None:
        self.log.close()
        self.open()
        raw = sorted(Path(self.folder.name).glob("*.seg"))
        first = int(raw[-1].stem)
        self.highest = {}
        for entry in self.expected:
            if entry.position >= first and entry.sequence is not None:
                self.highest[entry.producer, entry.epoch] = entry.sequence

    def teardown(self) -> None:
        if hasattr(self, "folder"):
            self.log.close()
            self.folder.cleanup()


TestMemoryLog = MemoryLogModel.TestCase
TestMemoryLog.settings = settings(max_examples=examples(50), stateful_step_count=15, deadline=None)
TestSqlLog = SqlLogModel.TestCase
TestSqlLog.settings = settings(max_examples=15, stateful_step_count=12, deadline=None)
TestSegmentLog = SegmentLogModel.TestCase
TestSegmentLog.settings = settings(max_examples=15, stateful_step_count=12, deadline=None)
