"""Replay: recordings and traces through the live fold (ARCHITECTURE.md, section 3). No second simulator.

A trace's request becomes Access for each block that is present and Store for each that is absent; a full cache asks the
live eviction order for its coldest block, which comes back as Remove. Definitions: data README, "How reference.json
counts".
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import msgspec
import xxhash

from advisor.entries import EntryKind, LogEntry, SettingsEntry, Tick, VolumeEntry, encode_control
from advisor.errors import AdvisorError
from advisor.fold import Fold, Row
from advisor.index import Block, Key, PlaceKey
from advisor.intake import Intake, SourceFacts, Taken
from advisor.policies.eviction import EVICTION_ORDERS
from advisor.policies.tiering import POLICY_VERSION
from event_plane.recording import TraceRequest, capture_dialect, read_capture, read_trace
from event_plane.schema import EventType, Namespace, Tier
from event_plane.transport import Message

TRACE_BLOCK_TOKENS = 512
CAPACITY_BLOCKS_MAX = 2**31 - 1
_CACHE = "cache"
_PRODUCER = 1


class ReplayError(AdvisorError):
    """A replay that cannot be run as asked."""


@dataclass(frozen=True, slots=True)
class TraceResult:
    """One policy at one capacity. `run_*` sum the leading blocks present at arrival, cold start included."""

    policy: str
    capacity_blocks: int
    run_blocks: int
    run_tokens: int
    seq_block_hits: int


@dataclass(frozen=True, slots=True)
class Trace:
    """A parsed trace: per request its time in ms, its prompt's tokens and its blocks' keys, root to leaf."""

    requests: list[tuple[float, int, list[Key]]]

    @property
    def accesses(self) -> int:
        return sum(len(keys) for _, _, keys in self.requests)


def load_trace(path: Path) -> Trace:
    """Read a Mooncake trace. A block is the same only if its whole path is, so its hash chains over the path.

    Raises `RecordingError` naming the line.
    """
    namespace_id = Namespace(block_tokens=TRACE_BLOCK_TOKENS, hash_scheme="xxh3-128-path").namespace_id
    known: dict[tuple[int, int], Key] = {}
    requests = read_trace(path)
    return Trace([(r.timestamp_ms, r.input_tokens, _path(r, namespace_id, known)) for r in requests])


def _path(request: TraceRequest, namespace_id: int, known: dict[tuple[int, int], Key]) -> list[Key]:
    keys: list[Key] = []
    parent = 0
    for block_id in request.block_ids:
        key = known.get((parent, block_id))
        if key is None:
            link = parent.to_bytes(16, "little") + (block_id & 0xFFFF_FFFF_FFFF_FFFF).to_bytes(8, "little")
            key = known[parent, block_id] = Key(namespace_id, 0, xxhash.xxh3_128_intdigest(link))
        keys.append(key)
        parent = key.sequence_hash
    return keys


class TraceReplay:
    """Runs a trace through a fold whose one volume is a cache of `capacity_blocks`, evicting in `policy`'s order."""

    def __init__(self, policy: str, capacity_blocks: int) -> None:
        if policy not in EVICTION_ORDERS:
            known = ", ".join(sorted(EVICTION_ORDERS))
            raise ReplayError(f"policy {policy!r} is not known: choose one of {known}")
        if not 1 <= capacity_blocks <= CAPACITY_BLOCKS_MAX:
            raise ReplayError(f"capacity {capacity_blocks} is no number of blocks: give 1 to {CAPACITY_BLOCKS_MAX}")
        self.policy = policy
        self.capacity_blocks = capacity_blocks
        self.fold = Fold()
        self._position = 0
        self._enter(
            EntryKind.SETTINGS,
            encode_control(SettingsEntry({"policy": {"eviction": policy}}, policy_version=POLICY_VERSION)),
        )
        self._enter(EntryKind.VOLUME, encode_control(VolumeEntry(_descriptor(capacity_blocks), "replay", _PRODUCER)))
        self._cache = self.fold.index.place(PlaceKey(_PRODUCER, Tier.G3, _CACHE))
        self._run_blocks = self._run_tokens = self._hits = 0
        self._now_ms = -1.0

    def request(self, timestamp_ms: float, input_tokens: int, keys: list[Key]) -> None:
        """One request at its arrival."""
        if timestamp_ms != self._now_ms:
            self._now_ms = timestamp_ms
            self._enter(EntryKind.TICK, encode_control(Tick(now_us=int(timestamp_ms * 1000))))
        if not keys:
            return
        index, cache = self.fold.index, self._cache
        last = len(keys) - 1
        last_tokens = input_tokens - last * TRACE_BLOCK_TOKENS
        run = index.match(keys[0].namespace_id, 0, [key.sequence_hash for key in keys], cache)
        self._run_blocks += run
        self._run_tokens += run * TRACE_BLOCK_TOKENS if run <= last else last * TRACE_BLOCK_TOKENS + last_tokens
        parent = 0
        # Rows wait until an eviction needs the order that they make: a request's blocks are all different.
        rows: list[Row] = []
        victim: Block | None = None
        room = self.capacity_blocks - len(cache.blocks)
        for depth, key in enumerate(keys):
            tokens = TRACE_BLOCK_TOKENS if depth < last else last_tokens
            block = index.blocks.get(key)
            if block is not None and block.placements and block is not victim:
                self._hits += 1
                rows.append(_row(_ACCESS, key, parent, depth, tokens))
            else:
                if room:
                    room -= 1
                else:
                    self._fold_rows(rows)
                    victim = next(cache.coldest())
                    rows = [_row(_REMOVE, victim.key, 0, victim.depth, 0)]
                rows.append(_row(_STORE, key, parent, depth, tokens))
            parent = key.sequence_hash
        self._fold_rows(rows)

    def result(self) -> TraceResult:
        return TraceResult(self.policy, self.capacity_blocks, self._run_blocks, self._run_tokens, self._hits)

    def _fold_rows(self, rows: list[Row]) -> None:
        self.fold.apply_rows(_PRODUCER, self._namespaces, (_CACHE,), rows)

    _namespaces = (Namespace(block_tokens=TRACE_BLOCK_TOKENS, hash_scheme="xxh3-128-path").namespace_id,)

    def _enter(self, kind: EntryKind, payload: bytes) -> None:
        self._position += 1
        self.fold.apply(LogEntry(self._position, kind, payload))


def _descriptor(capacity_blocks: int) -> dict[str, object]:
    # Watermarks at the brim: the planner never moves anything, the capacity alone evicts.
    return {
        "id": _CACHE,
        "tier": int(Tier.G3),
        "speed_rank": 0,
        "capacity_blocks": capacity_blocks,
        "high_watermark": 1.0,
        "low_watermark": 1.0,
    }


_MASK = 0xFFFF_FFFF_FFFF_FFFF
_STORE, _REMOVE, _ACCESS = int(EventType.STORE), int(EventType.REMOVE), int(EventType.ACCESS)


def _row(event_type: int, key: Key, parent: int, depth: int, tokens: int) -> Row:
    h = key.sequence_hash
    return (
        event_type, 0, 3, 0, depth, h & _MASK, h >> 64, 0, 0, parent & _MASK, parent >> 64,
        0, tokens & 0xFFFF, 0, 0, 0, 0, 0, 1,
    )  # fmt: skip


def replay_trace(
    trace: Trace, policy: str, capacity_blocks: int, progress: Callable[[int], None] = lambda _: None
) -> TraceReplay:
    """Run the whole trace; `progress` is told how many requests have been done since it was last told."""
    replay = TraceReplay(policy, capacity_blocks)
    told = 0
    for number, (timestamp_ms, input_tokens, keys) in enumerate(trace.requests, start=1):
        replay.request(timestamp_ms, input_tokens, keys)
        if number - told >= 256:
            progress(number - told)
            told = number
    progress(len(trace.requests) - told)
    return replay


@dataclass(frozen=True, slots=True)
class CaptureReplay:
    """A capture after its last message. `refused` counts what could not be read, by reason."""

    fold: Fold
    messages: int
    refused: dict[str, int]


def replay_capture(path: Path, progress: Callable[[int], None] = lambda _: None) -> CaptureReplay:
    """Run a capture's messages through intake, gate and fold, as the live service does.

    Raises `RecordingError` for a file that is damaged or not of our engines, `ReplayError` for a message in it that
    cannot be read at all. Events that make no sense, and batches that the file lacks, are counted.
    """
    fold = Fold()
    intake = Intake([SourceFacts(path.name, capture_dialect(path))])
    position = 0
    messages = 0
    for frames in read_capture(path):
        if len(frames) != 3 or len(frames[1]) != 8:
            sizes = ", ".join(str(len(frame)) for frame in frames)
            raise ReplayError(f"{path}: message {messages} is damaged (frames of {sizes} bytes): record it again")
        message = Message(path.name, frames[0], int.from_bytes(frames[1], "big"), frames[2])
        taken = intake.offer(message, 0)
        if taken.unreadable:
            raise ReplayError(f"{path}: message {messages} is damaged ({taken.unreadable[0].detail}): record it again")
        position = _fold_taken(fold, taken, position)
        messages += 1
        progress(1)
    # A file cannot fill a gap: what is still held is released after its gap is declared lost.
    for taken in _exhaust(intake, path.name):
        position = _fold_taken(fold, taken, position)
    lacking = {"batch that the file lacks": sum(intake.lost.values())} if intake.lost else {}
    return CaptureReplay(fold, messages, dict(intake.refused) | lacking)


def _exhaust(intake: Intake, source: str) -> Iterator[Taken]:
    while intake.gate.waiting():
        yield intake.resend_ended(source, 0)


def _fold_taken(fold: Fold, taken: Taken, position: int) -> int:
    for accepted in taken.accepted:
        position += 1
        entry = LogEntry(position, EntryKind.BATCH, accepted.entry.payload, source=accepted.entry.source)
        fold.apply(entry, accepted.batch)
    return position


def live_blocks(fold: Fold) -> list[int]:
    """Low 64 bits of the hash of each block that is placed somewhere, sorted."""
    return sorted(key.sequence_hash & _MASK for key, block in fold.index.blocks.items() if block.placements)


def as_json(result: TraceResult) -> dict[str, object]:
    return dict(msgspec.to_builtins(result))
