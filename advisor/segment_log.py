"""The event log in segment files, for local speed: one write and one fdatasync an append (docs/log.md)."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator, Sequence
from pathlib import Path

import structlog

from advisor.batch_marks import BatchMarks
from advisor.entries import EntryKind, LogEntry, LogStat, NewEntry
from advisor.errors import LogError
from advisor.log_faults import os_fault
from advisor.log_folder import make_folder, require_folder, sync_folder
from advisor.log_lock import WriterLock
from advisor.open_reads import OpenReads, pruned_under_reader
from advisor.segment_catalogue import CATALOGUE, Catalogue
from advisor.segment_files import (
    RAW_SUFFIX,
    SEALED_SUFFIX,
    TEMPORARY_SUFFIX,
    FileBytes,
    SegmentDamaged,
    read_groups,
    read_index,
    read_sealed,
    write_all,
)
from advisor.segment_format import encode_group, later_frames
from advisor.segment_keeper import Keeper
from advisor.segment_shelf import Segment, Shelf, raw_path

SEGMENT_BYTES = 64 << 20
"""Of a full segment; an append that is larger gets a segment of its own."""
ATTEMPTS = 5
"""To open a segment beside a process that renames them."""

_log = structlog.get_logger()


class SegmentLog:
    """`advisor.entries.EventLog` in a folder of segment files with an SQLite catalogue.

    For writing it makes the folder and holds a lock, so that a second writer is refused; what a killed writer left half
    done is cut off. `append` and `next_term` belong to one thread, all else may be called from any. With `read_only`
    it takes no lock and changes nothing. A producer's batches must come in rising order of sequence. Every method
    raises `LogError`.
    """

    def __init__(self, folder: Path, *, read_only: bool = False, segment_bytes: int = SEGMENT_BYTES) -> None:
        self.name = str(folder)
        self._segment_bytes = segment_bytes
        self._shelf = Shelf(folder)
        self._reads = OpenReads()
        self._marks = BatchMarks(folder)
        self._tail = _Tail()
        self._writer: _Writer | None = None
        self._failed = False
        if read_only:
            require_folder(folder)
            return
        make_folder(folder)
        self._lock = WriterLock(folder / CATALOGUE)
        try:
            self._open(folder)
        except BaseException:
            self._lock.release()
            raise

    def _open(self, folder: Path) -> None:
        _clear_leftovers(folder)
        self._shelf.relist()
        self._catalogue = Catalogue(folder, self._shelf.segments())
        self._keeper = Keeper(self._shelf, self._catalogue, self._segment_bytes)
        try:
            segments = self._shelf.segments()
            if segments and segments[-1].last is None:
                self._writer = self._recovered(segments[-1])
            else:
                self._begin_segment((segments[-1].last or 0) + 1 if segments else 1)
        except BaseException:
            self._catalogue.close()
            raise
        self._keeper.start()

    def append(self, new: Sequence[NewEntry], recorded_us: int) -> int:
        """All or nothing; durable when it returns. Returns the first entry's position."""
        writer = self._require_writer()
        first = self._tail.last + 1
        if not new:
            return first
        marks = self._marks.check(new, first)
        try:
            buffers, count_bytes = encode_group(new, first, recorded_us)
        except ValueError as error:
            raise LogError(f"cannot append to {self.name}: {error}") from error
        if writer.end and writer.end + count_bytes > self._segment_bytes:
            writer = self._begin_segment(first)
        try:
            writer.write(buffers, count_bytes)
        except OSError as error:
            raise os_fault(self.name, "append to", error) from error
        try:
            os.fdatasync(writer.descriptor)
        except OSError as error:
            # What the disk holds now is known only after a restart; asked again, it might say that all is well.
            self._failed = True
            raise os_fault(self.name, "append to", error) from error
        writer.segment.passed(first, writer.end)
        writer.end += count_bytes
        self._marks.take(marks)
        self._tail = _Tail(writer.segment, writer.end, first + len(new) - 1, recorded_us)
        return first

    def read(
        self, from_position: int = 1, to_position: int | None = None, kind: EntryKind | None = None
    ) -> Iterator[LogEntry]:
        """Entries in order up to the newest of this moment, of one kind or all."""
        last = self.last_position()
        end = last if to_position is None else min(to_position, last)
        from_position = max(from_position, 1)
        with self._reads.open(from_position) as under_way:
            while under_way.position <= end:
                segment, path, descriptor = self._open_at(under_way.position)
                try:
                    if segment.first > under_way.position > from_position:
                        raise pruned_under_reader(self.name, under_way.position, segment.first)
                    for entry in _entries(path, descriptor, segment, under_way.position, kind, end):
                        under_way.position = entry.position
                        yield entry
                finally:
                    os.close(descriptor)
                under_way.position = end + 1 if segment.last is None else segment.last + 1

    def newest(self, limit: int, kind: EntryKind | None) -> list[LogEntry]:
        """The last `limit` entries of one kind or all, ascending."""
        found: list[LogEntry] = []
        last = self.last_position()
        for segment in reversed(self._shelf.segments()):
            end = last if segment.last is None else segment.last
            first = segment.first if kind is not None else max(segment.first, end - limit + len(found) + 1)
            found = [*self.read(first, end, kind), *found][-limit:]
            if len(found) == limit:
                break
        return found

    def piece_before(self, position: int, *, whole: bool = False) -> int:
        """Where a read begins that ends before `position` and reads little beside it; 0 where nothing older is kept.

        `whole`: of a sealed segment from its first entry on, for reads of a kind that few blocks hold.
        """
        segment = self._shelf.holding(position - 1)
        if segment is None or segment.first >= position:
            return 0
        try:
            path, descriptor = self._shelf.open(segment)
        except FileNotFoundError:
            return 0  # it was dropped meanwhile
        except OSError as error:
            raise os_fault(segment.path, "read", error) from error
        try:
            if path.suffix != SEALED_SUFFIX:
                return segment.near(position - 1)[0]
            if whole:
                return segment.first
            return max((b.first for b in read_index(path, descriptor).blocks if b.first < position), default=0)
        finally:
            os.close(descriptor)

    def first_position(self) -> int:
        segments = self._listed()
        return segments[0].first if segments else 1

    def last_position(self) -> int:
        """Read-only, it sees what another process has appended since."""
        if self._writer is None:
            self._follow()
        return self._tail.last

    def prune(self, through: int) -> int:
        """Drops whole segments."""
        self._require_writer()
        before = self.first_position()
        try:
            dropped = self._shelf.drop(self._reads.spare(min(through, self._tail.last - 1)))
        except OSError as error:
            raise os_fault(self.name, "prune", error) from error
        if dropped:
            self._catalogue.forget(dropped)
        return self.first_position() - before

    def stat(self) -> LogStat:
        last = self.last_position()
        tail = self._tail
        first = self.first_position()
        stored_bytes = tail.end + sum(s.stored_bytes for s in self._shelf.segments() if s.last is not None)
        return LogStat(first, last, stored_bytes, self._recorded_us(first), tail.recorded_us or self._recorded_us(last))

    def _recorded_us(self, position: int) -> int:
        return next((entry.recorded_us for entry in self.read(position, position)), 0)

    def files(self) -> list[tuple[Path, int | None]]:
        """Every segment's file, oldest first; with the one that is written to, the bytes of its whole appends."""
        self.last_position()
        return [(each.path, self._tail.end if each.last is None else None) for each in self._shelf.segments()]

    def next_term(self, started_us: int, host: str, pid: int, version: str) -> int:
        self._require_writer()
        return self._catalogue.next_term(started_us, host, pid, version)

    def terms(self) -> list[tuple[int, int, str, int, str]]:
        """Every start of the advisor, oldest first: term, µs since 1970, host, process, version."""
        self._require_writer()
        return self._catalogue.terms()

    def close(self) -> None:
        if self._writer is None:
            return
        self._keeper.close()
        with contextlib.suppress(OSError):
            # The room that was reserved; a start reserves it again.
            os.ftruncate(self._writer.descriptor, self._writer.end)
        os.close(self._writer.descriptor)
        self._writer = None
        self._catalogue.close()
        self._lock.release()

    # -- writing

    def _require_writer(self) -> _Writer:
        if self._writer is None:
            raise LogError(f"{self.name} is not open for writing: open it without read_only, and before close")
        if self._failed:
            raise LogError(f"{self.name} is not written to after its disk failed: check it, then start again")
        return self._writer

    def _begin_segment(self, first: int) -> _Writer:
        path = raw_path(self._shelf.folder, first)
        try:
            os.rename(self._keeper.take_prepared(), path)
            sync_folder(self._shelf.folder)
            descriptor = os.open(path, os.O_RDWR | os.O_CLOEXEC)
        except OSError as error:
            raise os_fault(self.name, "append to", error) from error
        before = self._writer
        segment = Segment(first, path)
        self._shelf.add(segment, first - 1, before.end if before is not None else 0)
        self._writer = _Writer(segment, descriptor)
        self._tail = _Tail(segment, 0, first - 1, self._tail.recorded_us)
        if before is not None:
            os.close(before.descriptor)
            self._keeper.wake()
        return self._writer

    def _recovered(self, segment: Segment) -> _Writer:
        """The last segment, ready to go on after its last whole append."""
        try:
            descriptor = os.open(segment.path, os.O_RDWR | os.O_CLOEXEC)
        except OSError as error:
            raise os_fault(segment.path, "open", error) from error
        try:
            writer = _Writer(segment, descriptor)
            for group in self._followed(segment, descriptor, _Tail(segment, 0, segment.first - 1)):
                for entry in group:
                    self._marks.restore(entry)
            writer.end = self._tail.end
            self._cut(writer)
        except OSError as error:
            os.close(descriptor)
            raise os_fault(segment.path, "recover", error) from error
        except BaseException:
            os.close(descriptor)
            raise
        return writer

    def _cut(self, writer: _Writer) -> None:
        """Forget what follows the last whole append: it was never acknowledged. Reserve the room again."""
        size = os.fstat(writer.descriptor).st_size
        torn_bytes = _written_after(writer.descriptor, writer.end)
        if torn_bytes:
            name = writer.segment.path.name
            _log.warning("an append that was not acknowledged is cut off", bytes=torn_bytes, segment=name)
        if torn_bytes or size < self._segment_bytes:
            os.ftruncate(writer.descriptor, writer.end)
            os.posix_fallocate(writer.descriptor, 0, max(self._segment_bytes, writer.end))
            os.fsync(writer.descriptor)

    # -- reading

    def _listed(self) -> list[Segment]:
        if self._writer is None:
            self._shelf.relist()
        return self._shelf.segments()

    def _open_at(self, position: int) -> tuple[Segment, Path, int]:
        """The segment that holds `position`, or the first one after it; its file and a descriptor."""
        for _ in range(ATTEMPTS):
            segment = self._shelf.holding(position)
            if segment is None:
                raise LogError(f"{self.name} lacks position {position}: restore a backup of the log")
            try:
                return segment, *self._shelf.open(segment)
            except FileNotFoundError:
                # Another process has sealed or dropped it since we listed the folder.
                self._listed()
            except OSError as error:
                raise os_fault(segment.path, "read", error) from error
        raise LogError(f"{self.name} lacks the segment of position {position}: restore a backup of the log")

    def _follow(self) -> None:
        """Move the tail of a log that another process may be writing to."""
        opened = self._open_newest()
        if opened is None:
            return
        newest, descriptor = opened
        known = self._tail.segment is not None and self._tail.segment.first == newest.first
        start = self._tail if known else _Tail(newest, 0, newest.first - 1)
        try:
            for _ in self._followed(newest, descriptor, start):
                pass
        finally:
            os.close(descriptor)

    def _open_newest(self) -> tuple[Segment, int] | None:
        """The segment that is written to, and a descriptor. None where there is none: the last one's end is the tail.

        Raises `LogError`.
        """
        for attempts_left in reversed(range(ATTEMPTS)):
            segments = self._listed()
            if not segments:
                return None
            newest = segments[-1]
            if newest.last is not None:
                self._tail = _Tail(newest, 0, newest.last)
                return None
            try:
                return newest, self._shelf.open(newest)[1]
            except OSError as error:
                # A full one that another process has sealed since we listed the folder is no fault.
                if not (attempts_left and isinstance(error, FileNotFoundError)):
                    raise os_fault(newest.path, "read", error) from error
        return None

    def _followed(self, segment: Segment, descriptor: int, start: _Tail) -> Iterator[list[LogEntry]]:
        """The whole appends after `start`, with the tail moved past each.

        Raises `SegmentDamaged` where a later append follows one that is not whole: that one was acknowledged.
        """
        self._tail = start
        for attempt in (1, 2):
            try:
                groups = read_groups(
                    segment.path, FileBytes(descriptor), self._tail.last + 1, offset=self._tail.end
                )
                for group in groups:
                    last = group.entries[-1]
                    segment.passed(group.first, group.start)
                    self._tail = _Tail(segment, group.end, last.position, last.recorded_us)
                    yield group.entries
            except SegmentDamaged:
                rest = memoryview(os.pread(descriptor, os.fstat(descriptor).st_size, self._tail.end))
                if next(later_frames(rest, self._tail.last + 1), None) is None:
                    return
                # A writer in another process may have finished the append meanwhile: look once more.
                if attempt == 2:
                    raise


class _Tail:
    """Where the last whole append ends."""

    __slots__ = ("end", "last", "recorded_us", "segment")

    def __init__(self, segment: Segment | None = None, end: int = 0, last: int = 0, recorded_us: int = 0) -> None:
        self.segment = segment
        self.end = end
        self.last = last
        self.recorded_us = recorded_us


class _Writer:
    """The segment that is written to."""

    __slots__ = ("descriptor", "end", "segment")

    def __init__(self, segment: Segment, descriptor: int) -> None:
        self.segment = segment
        self.descriptor = descriptor
        self.end = 0

    def write(self, buffers: list[bytes], count_bytes: int) -> None:
        write_all(self.descriptor, buffers, self.end)


def _entries(
    path: Path, descriptor: int, segment: Segment, first: int, kind: EntryKind | None, end: int
) -> Iterator[LogEntry]:
    """Entries of one segment from `first` to `end`. Raises `LogError` where it ends too early."""
    if path.suffix == SEALED_SUFFIX:
        entries = read_sealed(path, descriptor, segment.last or 0, from_position=first, kind=kind)
    else:
        entries = _raw_entries(path, descriptor, segment, first, kind, end)
    for entry in entries:
        if entry.position > end:
            return
        yield entry
        if entry.position == end:
            return


def _raw_entries(
    path: Path, descriptor: int, segment: Segment, first: int, kind: EntryKind | None, end: int
) -> Iterator[LogEntry]:
    begin, offset = segment.near(first)
    position = begin - 1
    for group in read_groups(path, FileBytes(descriptor), begin, offset=offset, from_position=first, kind=kind):
        yield from group.entries
        position, offset = group.first + group.count - 1, group.end
        if position >= end:
            return
    if position < (end if segment.last is None else segment.last):
        raise SegmentDamaged(path, offset, position + 1, "the segment ends there")


def _written_after(descriptor: int, offset: int) -> int:
    """Bytes from `offset` to the last one that is not zero."""
    content = os.pread(descriptor, os.fstat(descriptor).st_size, offset)
    return len(content.rstrip(b"\0"))


def _clear_leftovers(folder: Path) -> None:
    """What a killed writer or keeper was making, and raw segments whose sealed form is whole."""
    for path in folder.glob(f"*{TEMPORARY_SUFFIX}"):
        path.unlink(missing_ok=True)
    for path in folder.glob(f"*{SEALED_SUFFIX}"):
        path.with_suffix(RAW_SUFFIX).unlink(missing_ok=True)
