"""The events of an engine that serves simulated requests: what it stores, finds again and lets go of on its GPU."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from advisor.path_hashes import HASH_SCHEME, NO_HASH, path_hash
from advisor.simulation.requests import SimulatedRequest
from advisor.simulation.workload import Restart
from event_plane.recording import TRACE_BLOCK_TOKENS
from event_plane.schema import Batch, BatchTables, EventRecord, EventType, Namespace, Tier, producer_id, to_records

MODEL = "simulated"
LOCATION = "gpu"
TOKEN_BYTES = 327_680
"""KV of a token, as in docs/policies.md."""
BEGIN_US = 1_767_225_600_000_000
"""Midnight of 1 January 2026, UTC: when a simulation begins."""

_BATCH_EVENTS = 512
_BATCH_MS = 200


@dataclass(frozen=True, slots=True)
class _Block:
    tenant: str
    hash: int
    parent: int
    prefix: int
    depth: int
    tokens: int


class SimulatedEngine:
    """Caches `cache_blocks`, evicting the least recently used, the end of a request before its beginning."""

    def __init__(self, cache_blocks: int, restarts: Iterable[Restart] = ()) -> None:
        self._cache_blocks = cache_blocks
        self._restarts_ms = sorted(int(restart.at_s * 1000) for restart in restarts)
        self._cached: OrderedDict[tuple[str, int], _Block] = OrderedDict()
        self._namespaces: dict[str, Namespace] = {}
        self._epoch = 1
        self._sequence = 0
        self._events_sent = 0
        self._waiting: list[EventRecord] = []

    def batches(self, requests: Iterable[SimulatedRequest]) -> Iterator[Batch]:
        """Serve `requests`, which come by time. A restart is a new epoch that begins with nothing."""
        begun_ms = now_ms = 0
        for request in requests:
            now_ms = request.timestamp_ms
            restarted = bool(self._restarts_ms) and now_ms >= self._restarts_ms[0]
            late = len(self._waiting) >= _BATCH_EVENTS or now_ms - begun_ms >= _BATCH_MS
            if self._waiting and (late or restarted):
                yield self._batch()
            if restarted:
                self._restart(now_ms)
            if not self._waiting:
                begun_ms = now_ms
            self._serve(request)
        if self._waiting:
            yield self._batch()

    def _restart(self, now_ms: int) -> None:
        while self._restarts_ms and self._restarts_ms[0] <= now_ms:
            self._restarts_ms.pop(0)
        self._epoch += 1
        self._sequence = self._events_sent = 0
        self._cached.clear()

    def _serve(self, request: SimulatedRequest) -> None:
        path = _path(request)
        for block in path:
            key = (block.tenant, block.hash)
            self._tell(EventType.ACCESS if key in self._cached else EventType.STORE, block, request.timestamp_ms)
            self._cached[key] = block
        for block in reversed(path):
            self._cached.move_to_end((block.tenant, block.hash))
        while len(self._cached) > self._cache_blocks:
            self._tell(EventType.REMOVE, self._cached.popitem(last=False)[1], request.timestamp_ms)

    def _tell(self, kind: EventType, block: _Block, now_ms: int) -> None:
        self._waiting.append(
            EventRecord(
                kind,
                Tier.G1,
                block.hash,
                self._namespace(block.tenant),
                LOCATION,
                parent_hash=block.parent,
                prefix_hash=block.prefix,
                depth=block.depth,
                block_size=block.tokens * TOKEN_BYTES,
                block_tokens=block.tokens,
                timestamp_us=BEGIN_US + now_ms * 1000,
                hits=1,
            )
        )

    def _namespace(self, tenant: str) -> Namespace:
        if tenant not in self._namespaces:
            self._namespaces[tenant] = Namespace(
                tenant=tenant, model=MODEL, block_tokens=TRACE_BLOCK_TOKENS, hash_scheme=HASH_SCHEME
            )
        return self._namespaces[tenant]

    def _batch(self) -> Batch:
        tables = BatchTables()
        records = to_records(self._waiting, tables, self._events_sent)
        batch = Batch(
            producer_id(MODEL),
            self._epoch,
            self._sequence,
            records,
            first_event_sequence=self._events_sent,
            timestamp_us=self._waiting[-1].timestamp_us,
            namespaces=tuple(tables.namespaces),
            locations=tuple(tables.locations),
        )
        self._sequence += 1
        self._events_sent += len(records)
        self._waiting = []
        return batch


def _path(request: SimulatedRequest) -> list[_Block]:
    path: list[_Block] = []
    parent = NO_HASH
    tokens_left = request.input_tokens
    for depth, block_id in enumerate(request.block_ids):
        digest = path_hash(parent, block_id)
        number = int.from_bytes(digest, "little")
        prefix = path[0].hash if path else number
        tokens = min(TRACE_BLOCK_TOKENS, tokens_left)
        path.append(_Block(request.tenant, number, int.from_bytes(parent, "little"), prefix, depth, tokens))
        tokens_left -= tokens
        parent = digest
    return path
