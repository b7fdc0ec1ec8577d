"""The requests behind a recording of events, so that policies can be replayed on it (docs/recordings.md).

Events say which blocks were used, not which request used them: requests are put together again from chains.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path

import xxhash

from advisor.recorded import Reading, is_log, read_recorded
from advisor.traces import Trace, TraceRequests, load_trace
from event_plane.parquet_rows import RecordedBatch
from event_plane.recording import detect_format
from event_plane.schema import NAMESPACE_ALL, TIER_ALL, Batch, BatchKind, EventType, RecordFlag

CONTINUES_S = 2.0
"""A block that follows a request's last one within so long belongs to it: prefill in pieces, and what is answered."""

_MICROSECONDS = 1_000_000
_Block = tuple[int, int, int, int]
"""Namespace, group, and the hash's halves, low first."""


@dataclass(slots=True)
class _Request:
    begun_us: int
    last_us: int
    blocks: list[_Block]


@dataclass(slots=True)
class RequestsOfEvents:
    """Takes batches in the recording's order.

    A use is an Access, or a Store that is no copy: not flagged as one, and of nothing that its producer holds in a
    faster tier. Uses that follow one another as child and parent are one request; one that begins with a child whose
    ancestors are known used those too, which is how an engine that tells of Stores alone shows a hit. An Access of
    n hits that nobody's descendants account for is n requests.
    """

    requests: list[_Request] = field(default_factory=list)
    _parents: dict[_Block, _Block | None] = field(default_factory=dict)
    _tokens: dict[_Block, int] = field(default_factory=dict)
    _ends: dict[_Block, _Request] = field(default_factory=dict)
    _held: dict[int, dict[_Block, int]] = field(default_factory=dict)
    _epochs: dict[int, int] = field(default_factory=dict)
    _spare: dict[_Block, int] = field(default_factory=dict)
    _block_bytes: int = 0

    def add(self, recorded: RecordedBatch) -> None:
        batch = recorded.batch
        if self._epochs.get(batch.producer) != batch.epoch or batch.kind in (BatchKind.LOST, BatchKind.SNAPSHOT_BEGIN):
            self._epochs[batch.producer] = batch.epoch
            self._held.pop(batch.producer, None)
        self._spare.clear()
        self._block_bytes = max(self._block_bytes, int(batch.records["block_size"].max(initial=0)))
        shown = batch.kind is BatchKind.EVENTS
        for row in _rows(batch, recorded.received_us):
            self._take(batch.producer, row, shown=shown)
        self._repeat_spare()

    def trace(self) -> Trace:
        """All of them by time. Blocks whose size in tokens nobody told count as one token each."""
        digests: dict[_Block, bytes] = {}
        requests = TraceRequests()
        for request in sorted(self.requests, key=lambda each: each.begun_us):
            for block in request.blocks:
                if block not in digests:
                    digests[block] = xxhash.xxh3_128_digest(b"".join(part.to_bytes(8, "little") for part in block))
            whole = max(self._tokens[block] for block in request.blocks)
            tokens = (len(request.blocks) - 1) * whole + self._tokens[request.blocks[-1]]
            requests.add(request.begun_us / 1000, tokens, whole, [digests[block] for block in request.blocks])
        return requests.trace(self._block_bytes)

    def _take(self, producer: int, row: _Row, *, shown: bool) -> None:
        held = self._held.setdefault(producer, {})
        match row.kind:
            case EventType.REMOVE:
                left = held.get(row.block, 0) & ~(1 << row.tier)
                if left:
                    held[row.block] = left
                else:
                    held.pop(row.block, None)
            case EventType.CLEAR:
                _clear(held, row)
            case EventType.STORE | EventType.ACCESS:
                self._learn(row)
                faster = held.get(row.block, 0) & ((1 << row.tier) - 1)
                if row.kind == EventType.STORE:
                    held[row.block] = held.get(row.block, 0) | 1 << row.tier
                if shown and not row.is_copy and (row.kind == EventType.ACCESS or not faster):
                    self._use(row)

    def _learn(self, row: _Row) -> None:
        if row.parent is not None or row.block not in self._parents:
            self._parents[row.block] = row.parent
        self._tokens[row.block] = max(row.tokens, self._tokens.get(row.block, 1))

    def _use(self, row: _Row) -> None:
        parent = self._parents[row.block]
        request = self._ends.pop(parent, None) if parent is not None else None
        if request is None or row.now_us - request.last_us > CONTINUES_S * _MICROSECONDS:
            ancestors = self._ancestors(row.block)
            for block in ancestors:
                if self._spare.get(block, 0):
                    self._spare[block] -= 1
            request = _Request(row.now_us, row.now_us, ancestors)
            self.requests.append(request)
        request.blocks.append(row.block)
        request.last_us = row.now_us
        self._ends[row.block] = request
        if row.hits > 1:
            self._spare[row.block] = row.hits - 1

    def _ancestors(self, block: _Block) -> list[_Block]:
        """Root first. Ends at one that nobody has told of, and at one met before: a chain can be damaged."""
        found: dict[_Block, None] = {}
        parent = self._parents.get(block)
        while parent is not None and parent in self._parents and parent not in found and parent != block:
            found[parent] = None
            parent = self._parents[parent]
        return list(found)[::-1]

    def _repeat_spare(self) -> None:
        """What was used more often than by those that follow it ended a request each time."""
        while left := [block for block, count in self._spare.items() if count > 0]:
            followed = {self._parents[block] for block in left}
            now_us = self.requests[-1].begun_us
            for block in left:
                if block not in followed:
                    path = [*self._ancestors(block), block]
                    self.requests.append(_Request(now_us, now_us, path))
                    for used in path:
                        if self._spare.get(used, 0):
                            self._spare[used] -= 1


@dataclass(frozen=True, slots=True)
class _Row:
    """One record. `namespace` and `tier` tell what a Clear means, of which 0 and None are all."""

    kind: int
    is_copy: bool
    tier: int
    namespace: int | None
    block: _Block
    parent: _Block | None
    tokens: int
    hits: int
    now_us: int


def _rows(batch: Batch, received_us: int) -> Iterable[_Row]:
    columns = [
        batch.records[name].tolist()
        for name in (
            "event_type", "flags", "tier", "group", "namespace", "sequence_hash_lo", "sequence_hash_hi",
            "parent_hash_lo", "parent_hash_hi", "block_tokens", "hits", "timestamp_us",
        )
    ]  # fmt: skip
    batch_us = batch.timestamp_us or received_us
    ids = batch.namespace_ids
    block_tokens = [namespace.block_tokens for namespace in batch.namespaces]
    for kind, flags, tier, group, number, low, high, parent_low, parent_high, tokens, hits, now_us in zip(
        *columns, strict=True
    ):
        told = number < len(ids)
        namespace = ids[number] if told else 0
        yield _Row(
            kind,
            bool(flags & RecordFlag.COPY),
            tier,
            None if number == NAMESPACE_ALL else namespace,
            (namespace, group, low, high),
            (namespace, group, parent_low, parent_high) if parent_low or parent_high else None,
            tokens or (block_tokens[number] if told else 0),
            hits,
            now_us or batch_us,
        )


def _clear(held: dict[_Block, int], row: _Row) -> None:
    kept = 0 if row.tier == TIER_ALL else ~(1 << row.tier)
    for block in [block for block in held if row.namespace is None or block[0] == row.namespace]:
        held[block] &= kept
        if not held[block]:
            del held[block]


def requests_of(path: Path) -> tuple[Trace, dict[str, int]]:
    """A trace's own requests, or those behind a recording's events; what could not be used of it, by reason.

    Raises as `load_trace` and `trace_of_recording` do.
    """
    if not is_log(path) and detect_format(path) == "trace":
        return load_trace(path), {}
    reading = Reading()
    return trace_of_recording(path, reading), dict(reading.refused)


def trace_of_recording(path: Path, reading: Reading) -> Trace:
    """The requests behind a capture, a Parquet recording or an advisor's log.

    Raises `RecordingError` or `LogError` as `read_recorded` does.
    """
    requests = RequestsOfEvents()
    for recorded in read_recorded(path, reading):
        requests.add(recorded)
    return requests.trace()
