"""Volumes of kind `directory-view`: a directory volume that another host's agent owns, read from here."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Annotated

import msgspec

from storage_agent.block_header import BlockHeader
from storage_agent.corruption_log import CorruptionLog
from storage_agent.descriptor import VolumeDescriptor
from storage_agent.directory_reading import DirectoryReader, Seen
from storage_agent.errors import CorruptBlock, ShardError, VolumeError
from storage_agent.inspection import SlotFinding, SlotReport
from storage_agent.kinds import Opening, VolumeKind
from storage_agent.port import BlockKey, CompactReport, Outcome, PutBlock, Result, ScrubReport, VolumeStat
from storage_agent.shards import Shard, gather
from storage_agent.sliced_read import SlicedRead, plan_read
from storage_agent.slot_store import SlotRead
from storage_agent.transfers import Transfers
from storage_agent.volume import Accept, ReadResult

BATCH_SLOTS = 64
_READERS = 4


class DirectoryViewOptions(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """`look_s`: a block that is not known is looked for in the folder, but no more often than this."""

    look_s: Annotated[float, msgspec.Meta(ge=0.0, le=3600.0)] = 1.0


class DirectoryView:
    """Implements `volume.Volume`, but for what only an owner may do: that is refused with the owner's name."""

    def __init__(self, descriptor: VolumeDescriptor, path: Path, options: DirectoryViewOptions) -> None:
        """`path` is validated already. Raises `VolumeError` where there is no such volume."""
        self.descriptor = descriptor
        self._reader = DirectoryReader(descriptor, path)
        self._look_s = options.look_s
        self._lock = threading.Lock()
        self._looked_s = -float("inf")
        self._corrupt_total = 0
        self._corruption = CorruptionLog(descriptor.id)
        self._reads = Transfers()
        self._degraded = ""
        self._pool = ThreadPoolExecutor(_READERS, thread_name_prefix=f"view-{descriptor.id}")
        self._look_again()
        if self._degraded:
            self.close()
            raise VolumeError(f"volume {descriptor.id!r}: {self._degraded}")

    @property
    def batch_slots(self) -> int:
        """See `Volume.batch_slots`."""
        return BATCH_SLOTS

    @property
    def retired_total(self) -> int:
        """See `Volume.retired_total`."""
        return self._reader.gone_total

    def live_headers(self) -> list[BlockHeader]:
        """See `Volume.live_headers`: as of the last look."""
        return [seen.header for seen in self._reader.blocks()]

    def live_header(self, key: BlockKey) -> BlockHeader | None:
        """See `Volume.live_header`. Looks into the folder for a block that is not known."""
        seen = self._seen(key)
        return seen.header if seen is not None else None

    def stat(self) -> VolumeStat:
        """See `Volume.stat`: as of the last look."""
        headers = self.live_headers()
        with self._lock:
            return VolumeStat(
                descriptor=self.descriptor,
                blocks=len(headers),
                payload_bytes=sum(header.payload_bytes for header in headers),
                slots_free=max(0, self.descriptor.capacity_blocks - len(headers)),
                mode="buffered, read only",
                read_bytes_total=self._reads.payload_bytes,
                read_seconds_total=self._reads.seconds,
                read_times=list(self._reads.times),
                degraded=self._degraded,
                corrupt_total=self._corrupt_total,
            )

    def put(self, blocks: Sequence[PutBlock], *, read_back: bool = False) -> list[Outcome]:
        """Refused."""
        return self._refused([block.key for block in blocks])

    def delete(self, keys: Sequence[BlockKey]) -> list[Outcome]:
        """Refused."""
        return self._refused(keys)

    def read(self, keys: Sequence[BlockKey], accept: Accept, wanted: Shard | None = None) -> list[ReadResult]:
        """See `Volume.read`; what is corrupt is left to the owner's next read or scrub."""
        results: list[ReadResult] = []
        for start in range(0, len(keys), BATCH_SLOTS):
            started_s = time.monotonic()
            part = keys[start : start + BATCH_SLOTS]
            fetched = self._pool.map(lambda key: self._fetch(key, wanted), part)
            for number, (key, answer) in enumerate(zip(part, fetched, strict=True), start):
                results.append(self._hand_over(number, key, answer, accept))
            with self._lock:
                self._reads.add(0, time.monotonic() - started_s)
        return results

    def scrub(self) -> ScrubReport:
        """See `Volume.scrub`; frees nothing."""
        results = self.read([header.key for header in self.live_headers()], lambda number, header, payload: "")
        kinds = [read.outcome.result for read in results]
        payload_bytes = sum(read.outcome.payload_bytes for read in results)
        return ScrubReport(
            kinds.count(Result.HIT), kinds.count(Result.CORRUPT), kinds.count(Result.FAILED), payload_bytes
        )

    def compact(self) -> int:
        """Raises `VolumeError`: the owner's to do."""
        raise VolumeError(self._why_not())

    def lay_out(self, keys: Sequence[BlockKey]) -> CompactReport:
        """Raises `VolumeError`: the owner's to do."""
        raise VolumeError(self._why_not())

    def resize(self, capacity_blocks: int) -> VolumeStat:
        """Raises `VolumeError`: the owner's to do."""
        raise VolumeError(self._why_not())

    def close(self) -> None:
        """See `Volume.close`."""
        self._pool.shutdown()
        self._corruption.close()
        self._reader.close()

    def _seen(self, key: BlockKey) -> Seen | None:
        seen = self._reader.find(key)
        if seen is None and self._may_look():
            self._look_again()
            seen = self._reader.find(key)
        return seen

    def _may_look(self) -> bool:
        with self._lock:
            return time.monotonic() - self._looked_s >= self._look_s

    def _look_again(self) -> None:
        reason = ""
        try:
            self._reader.look()
        except OSError as error:
            reason = f"{self._reader.path} cannot be read: {error.strerror}"
        with self._lock:
            self._looked_s = time.monotonic()
            self._degraded = reason

    def _fetch(self, key: BlockKey, wanted: Shard | None) -> tuple[Seen, SlicedRead, memoryview] | Outcome:
        """The bytes of a block, looked for once more where its segment went meanwhile."""
        seen = self._seen(key)
        for is_last in (False, True):
            if seen is None:
                return self._outcome(key, Result.MISS, reason=f"{self.descriptor.id!r} does not hold it")
            try:
                sliced = plan_read(seen.header, wanted)
                return seen, sliced, self._reader.read(seen, sliced.asked)
            except ShardError as error:
                return self._outcome(key, Result.FAILED, reason=str(error))
            except (CorruptBlock, OSError) as error:
                if is_last:
                    return self._fault(key, error)
            self._look_again()
            seen = self._reader.find(key)
        raise AssertionError("the second round returns")

    def _fault(self, key: BlockKey, error: CorruptBlock | OSError) -> Outcome:
        if isinstance(error, CorruptBlock):
            with self._lock:
                self._corrupt_total += 1
            reason = f"{type(error).__name__}: {error}"
            self._corruption.found(key, reason)
            return self._outcome(key, Result.CORRUPT, reason=reason)
        return self._outcome(key, Result.FAILED, reason=f"{self._reader.path} cannot be read: {error.strerror}")

    def _hand_over(
        self, number: int, key: BlockKey, answer: tuple[Seen, SlicedRead, memoryview] | Outcome, accept: Accept
    ) -> ReadResult:
        if isinstance(answer, Outcome):
            return ReadResult(answer)
        seen, sliced, stored = answer
        payload = gather(sliced.slices, stored, sliced.slices[0].shard) if sliced.slices else stored
        refused = accept(number, seen.header, payload)
        with self._lock:
            self._reads.payload_bytes += payload.nbytes
        result = Result.FAILED if refused else Result.HIT
        return ReadResult(self._outcome(key, result, payload.nbytes, refused), seen.header)

    def _why_not(self) -> str:
        return f"volume {self.descriptor.id!r} is only read from here; ask its owner, {self._reader.owner}"

    def _refused(self, keys: Sequence[BlockKey]) -> list[Outcome]:
        return [self._outcome(key, Result.FAILED, reason=self._why_not()) for key in keys]

    def _outcome(self, key: BlockKey, result: Result, payload_bytes: int = 0, reason: str = "") -> Outcome:
        return Outcome(key, result, self.descriptor.id, payload_bytes, reason)


class DirectoryInspection:
    """Implements `inspection.Inspection`. Slots are numbered as they are found."""

    def __init__(self, descriptor: VolumeDescriptor, path: Path) -> None:
        """Raises `VolumeError` where there is no such volume."""
        self._capacity = descriptor.capacity_blocks
        self._reader = DirectoryReader(descriptor, path)
        try:
            self._reader.look()
        except OSError as error:
            self._reader.close()
            raise VolumeError(f"volume {descriptor.id!r}: {path} cannot be read: {error.strerror}") from error

    @property
    def was_closed_in_order(self) -> bool:
        """See `Inspection.was_closed_in_order`: an owner that closes leaves no segment open."""
        return not self._reader.is_being_written

    def reports(self) -> Iterator[SlotReport]:
        """See `Inspection.reports`."""
        blocks = self._reader.blocks()
        for slot, seen in enumerate(blocks):
            header = seen.header
            reason = ""
            try:
                self._reader.read(seen, SlotRead(header, 0, header.parts))
            except CorruptBlock as error:
                reason = str(error)
            except OSError as error:
                reason = f"segment {seen.segment.number} cannot be read: {error.strerror}"
            state: SlotFinding = "torn" if reason else "live"
            yield SlotReport(slot, state, header.key, header.generation, header.payload_bytes, reason)
        yield from (SlotReport(slot, "free") for slot in range(len(blocks), self._capacity))

    def close(self) -> None:
        """See `Inspection.close`."""
        self._reader.close()


def _open(opening: Opening) -> DirectoryView:
    options = opening.options
    assert isinstance(options, DirectoryViewOptions)
    return DirectoryView(opening.descriptor, opening.required_path, options)


def inspect(opening: Opening) -> DirectoryInspection:
    """A directory volume looked at without an agent."""
    return DirectoryInspection(opening.descriptor, opening.required_path)


KIND = VolumeKind(options=DirectoryViewOptions, open=_open, inspect=inspect, is_view=True)
