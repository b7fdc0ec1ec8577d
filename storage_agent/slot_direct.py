"""Blocks between slots and memory of callers' with no copy in the host, checked by a checksum reckoned where they lie.

A get writes into the span before the bytes are checked, and a transfer that failed may write there later still. So an
outcome that is no hit says nothing about what is in the span; one in doubt closes the span for good.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple, Protocol, runtime_checkable

from storage_agent.block_header import BlockHeader
from storage_agent.direct_memory import DirectSpan
from storage_agent.errors import CorruptBlock, ShardError, TransferError
from storage_agent.port import BlockKey, Outcome, PutBlock, Result
from storage_agent.shards import Shard
from storage_agent.sliced_read import plan_read
from storage_agent.slot_store import SlotRead, SlotWrite
from storage_agent.slot_table import SlotTable
from storage_agent.volume import ReadResult

MAY_BE_WRITTEN_STILL = "the memory it was read into may be written still; keep nothing there until this process ends"


@runtime_checkable
class DirectStore(Protocol):
    """What a `SlotStore` offers besides where its medium and a caller's memory reach one another."""

    @property
    def batch_slots(self) -> int:
        """See `SlotStore.batch_slots`."""

    def span_fault(self, span: DirectSpan, payload_bytes: int, offset: int = 0) -> str:
        """Why `payload_bytes` from byte `offset` of a payload on cannot go from or to the span's start, or ''."""

    def write_spans(self, writes: Sequence[SlotWrite], spans: Sequence[DirectSpan]) -> None:
        """Sum each payload where it lies, write it from there, then the headers. Raises as `SlotStore.write`."""

    def read_spans(self, reads: Sequence[SlotRead], spans: Sequence[DirectSpan]) -> Mapping[int, CorruptBlock | None]:
        """Read into the spans and check there; what is wrong with each, by number.

        Left out is what the host must read: a header that names a checksum of the host's, a transfer that never began.
        Raises `TransferError`, always in doubt: any of the spans may be written still.
        """


PutBatch = Callable[[Sequence[PutBlock], Callable[[Sequence[SlotWrite]], None]], list[Outcome]]
"""Takes slots, writes by the function given, makes durable, announces and serves."""


class _Asked(NamedTuple):
    number: int
    read: SlotRead
    span: DirectSpan


class SlotDirect:
    """Of one volume. Thread-safe. Calls take at most `batch_slots` blocks."""

    def __init__(
        self,
        volume: str,
        table: SlotTable,
        unpinned: threading.Condition,
        store: DirectStore,
        *,
        put_batch: PutBatch,
        free_corrupt: Callable[[Sequence[tuple[BlockHeader, str]]], None],
        degrade: Callable[[str], None],
        count_read: Callable[[int, float], None],
    ) -> None:
        """`unpinned` guards `table`. `count_read`: bytes and seconds."""
        self._volume = volume
        self._table = table
        self._unpinned = unpinned
        self._store = store
        self._put_batch = put_batch
        self._free_corrupt = free_corrupt
        self._degrade = degrade
        self._count_read = count_read

    @property
    def batch_slots(self) -> int:
        return self._store.batch_slots

    def takes(self, span: DirectSpan) -> bool:
        """Whether the span as a payload goes directly."""
        return not self._store.span_fault(span, span.nbytes)

    def put(self, blocks: Sequence[PutBlock], spans: Sequence[DirectSpan]) -> list[Outcome]:
        """Put blocks whose payloads are `spans`, each of which it `takes`."""

        def write_all(writes: Sequence[SlotWrite]) -> None:
            self._store.write_spans(writes, [spans[write.number] for write in writes])

        return self._put_batch(blocks, write_all)

    def read(
        self, keys: Sequence[BlockKey], spans: Mapping[int, DirectSpan], wanted: Shard | None
    ) -> dict[int, ReadResult]:
        """Read those of `keys` that have a span into it. Left out is what the host must read, or does not find."""
        numbers = list(spans)
        with self._unpinned:
            pinned = self._table.pin([keys[number] for number in numbers])
        try:
            asked = [
                _Asked(numbers[place], read, spans[numbers[place]])
                for place, header in pinned
                if (read := self._planned(header, spans[numbers[place]], wanted)) is not None
            ]
            results, corrupt = self._read(asked) if asked else ({}, [])
        finally:
            with self._unpinned:
                self._table.unpin([header.slot for _, header in pinned])
                self._unpinned.notify_all()
        self._free_corrupt(corrupt)
        return results

    def _planned(self, header: BlockHeader, span: DirectSpan, wanted: Shard | None) -> SlotRead | None:
        try:
            asked, slices = plan_read(header, wanted)
        except ShardError:
            return None  # the host says why
        if slices or span.nbytes < asked.payload_bytes:
            return None
        return None if self._store.span_fault(span, asked.payload_bytes, asked.offset) else asked

    def _read(self, asked: Sequence[_Asked]) -> tuple[dict[int, ReadResult], list[tuple[BlockHeader, str]]]:
        """Results by number, and the headers of those that are corrupt, with what is wrong."""
        started = time.monotonic()
        results: dict[int, ReadResult] = {}
        corrupt: list[tuple[BlockHeader, str]] = []
        try:
            found = self._store.read_spans([each.read for each in asked], [each.span for each in asked])
        except TransferError as error:
            self._degrade(str(error))
            reason = f"{error}; {MAY_BE_WRITTEN_STILL}"
            for number, read, _ in asked:
                outcome = Outcome(read.header.key, Result.FAILED, self._volume, reason=reason)
                results[number] = ReadResult(outcome, in_doubt=True)
            return results, corrupt
        read_bytes = 0
        for place, fault in found.items():
            number, read, _ = asked[place]
            header = read.header
            if fault is not None:
                reason = f"{type(fault).__name__}: {fault}"
                corrupt.append((header, reason))
                results[number] = ReadResult(Outcome(header.key, Result.CORRUPT, self._volume, reason=reason))
                continue
            read_bytes += read.payload_bytes
            results[number] = ReadResult(Outcome(header.key, Result.HIT, self._volume, read.payload_bytes), header)
        self._count_read(read_bytes, time.monotonic() - started)
        return results, corrupt
