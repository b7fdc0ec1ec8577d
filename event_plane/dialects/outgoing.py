"""Our batches in other engines' words, so that a router that listens to engines can listen to us.

`Restater` keeps what is placed where, and tells what changes as a set: a block is stored when its first copy in a tier
appears and removed with its last. So a Clear, a snapshot and a new epoch come out as plain Stores and Removes. Pure.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any, Final, Literal, NamedTuple

import msgspec

from event_plane.dialects import dynamo, vllm
from event_plane.dialects.block_events import REMOVED, STORED, TAG_FIELD
from event_plane.schema import LOCATION_ALL, NAMESPACE_ALL, TIER_ALL, Batch, BatchKind, EventType, Tier

Style = Literal["vllm", "dynamo"]
MEDIA: Final[dict[int, str]] = {Tier.G1: "GPU", Tier.G2: "CPU", Tier.G3: "STORAGE", Tier.G4: "OBJ"}
STORAGE_TIERS: Final[dict[int, str]] = {int(tier): name for name, tier in dynamo.TIERS.items()}
BLOCKS_MAX: Final = 4_096
"""Blocks of one payload; a snapshot becomes several."""
TOPIC: Final = "kv-events"
_U64: Final = 0xFFFF_FFFF_FFFF_FFFF

assert all(vllm.TIERS[medium] == tier for tier, medium in MEDIA.items())


class Shelf(NamedTuple):
    """Where a router knows a block to be. `worker` is the producer, 0 where all are one."""

    worker: int
    tier: int
    group: int


@dataclass(slots=True)
class Change:
    """Blocks that appear on or vanish from one shelf, in this order. Stored: each follows the one before."""

    stored: bool
    shelf: Shelf
    hashes: list[int] = field(default_factory=list)
    parent: int = 0
    block_tokens: int = 0


class _Placed(NamedTuple):
    """One copy of a block: who placed it, and where in the shelf."""

    producer: int
    location: str
    namespace_id: int
    group: int


class _Block(NamedTuple):
    shelf: Shelf
    sequence_hash: int


_Stores = dict[tuple[_Block, _Placed], tuple[int, int]]
"""Parent and tokens of a snapshot's blocks, in its order."""


class Restater:
    """What every producer of a stream has placed.

    For `dynamo` each producer is a worker, whose groups are one; for `vllm` all producers are one engine with groups.
    Memory: one entry a placement. Give it each producer's batches in order, each once (`sequence.SequenceGate`), and
    none of an engine that counts copies: those are a set here.
    """

    def __init__(self, style: Style) -> None:
        self._style = style
        self._copies: dict[_Block, set[_Placed]] = {}
        self._epochs: dict[int, int] = {}
        self._snapshots: dict[int, _Stores] = {}

    def take(self, batch: Batch) -> list[Change]:
        """What `batch` changes. Records that make no sense are stepped over; Access changes nothing."""
        changes: list[Change] = []
        if self._epochs.setdefault(batch.producer, batch.epoch) != batch.epoch:
            self._epochs[batch.producer] = batch.epoch
            self._snapshots.pop(batch.producer, None)
            if batch.kind is not BatchKind.SNAPSHOT_BEGIN:
                self._remove_where(changes, lambda placed, _: placed.producer == batch.producer)
        match batch.kind:
            case BatchKind.EVENTS:
                self._take_events(changes, batch)
            case BatchKind.SNAPSHOT_BEGIN:
                self._snapshots[batch.producer] = {}
            case BatchKind.SNAPSHOT_CHUNK if batch.producer in self._snapshots:
                stores = self._snapshots[batch.producer]
                for _, block, placed, parent, tokens in self._read(batch):
                    stores[block, placed] = (parent, tokens)
            case BatchKind.SNAPSHOT_END if batch.producer in self._snapshots:
                self._replace(changes, batch.producer, self._snapshots.pop(batch.producer))
            case BatchKind.LOST:
                self._snapshots.pop(batch.producer, None)
                self._remove_where(changes, lambda placed, _: placed.producer == batch.producer)
        return changes

    def _take_events(self, changes: list[Change], batch: Batch) -> None:
        for kind, block, placed, parent, tokens in self._read(batch):
            if kind == EventType.STORE:
                self._store(changes, block, placed, parent, tokens)
            elif kind == EventType.REMOVE:
                self._remove(changes, block, placed)
            elif kind == EventType.CLEAR:
                self._clear(changes, batch.producer, block.shelf.tier, placed)

    def _read(self, batch: Batch) -> Iterator[tuple[int, _Block, _Placed, int, int]]:
        """Kind, block, place, parent and tokens of each record; a Clear of every location has an empty one."""
        records = batch.records
        is_dynamo = self._style == "dynamo"
        worker = batch.producer if is_dynamo else 0
        names = ["event_type", "tier", "group", "storage_location", "namespace", "block_tokens"]
        hashes = ["sequence_hash_lo", "sequence_hash_hi", "parent_hash_lo", "parent_hash_hi"]
        columns = [records[name].tolist() for name in names + hashes]
        for kind, tier, group, location, namespace, tokens, low, high, parent_low, parent_high in zip(
            *columns, strict=True
        ):
            clears = kind == EventType.CLEAR
            where = "" if clears and location == LOCATION_ALL else _at(batch.locations, location)
            whose = NAMESPACE_ALL if clears and namespace == NAMESPACE_ALL else _at(batch.namespace_ids, namespace)
            if where is None or whose is None or not (clears or (tier in MEDIA and (low or high))):
                continue
            block = _Block(Shelf(worker, tier, 0 if is_dynamo else group), high << 64 | low)
            placed = _Placed(batch.producer, where, whose, group)
            yield kind, block, placed, parent_high << 64 | parent_low, tokens

    def _store(self, changes: list[Change], block: _Block, placed: _Placed, parent: int, tokens: int) -> None:
        copies = self._copies.get(block)
        if copies is not None:
            copies.add(placed)
            return
        self._copies[block] = {placed}
        last = changes[-1] if changes else None
        follows = last is not None and last.stored and last.shelf == block.shelf and last.block_tokens == tokens
        if last is None or not follows or last.hashes[-1] != parent:
            last = Change(True, block.shelf, parent=parent, block_tokens=tokens)
            changes.append(last)
        last.hashes.append(block.sequence_hash)

    def _remove(self, changes: list[Change], block: _Block, placed: _Placed) -> None:
        copies = self._copies.get(block)
        if copies is None or placed not in copies:
            return
        copies.remove(placed)
        if copies:
            return
        del self._copies[block]
        last = changes[-1] if changes else None
        if last is None or last.stored or last.shelf != block.shelf:
            last = Change(False, block.shelf)
            changes.append(last)
        last.hashes.append(block.sequence_hash)

    def _clear(self, changes: list[Change], producer: int, tier: int, given: _Placed) -> None:
        def meant(placed: _Placed, shelf: Shelf) -> bool:
            return (
                placed.producer == producer
                and tier in (TIER_ALL, shelf.tier)
                and given.location in ("", placed.location)
                and given.namespace_id in (NAMESPACE_ALL, placed.namespace_id)
            )

        self._remove_where(changes, meant)

    def _remove_where(self, changes: list[Change], meant: Callable[[_Placed, Shelf], bool]) -> None:
        """The latest first, so that children go before their parents."""
        found = [
            (block, placed) for block, copies in self._copies.items() for placed in copies if meant(placed, block.shelf)
        ]
        for block, placed in reversed(found):
            self._remove(changes, block, placed)

    def _replace(self, changes: list[Change], producer: int, stores: _Stores) -> None:
        for (block, placed), (parent, tokens) in stores.items():
            self._store(changes, block, placed, parent, tokens)
        gone = [
            (block, placed)
            for block, copies in self._copies.items()
            for placed in copies
            if placed.producer == producer and (block, placed) not in stores
        ]
        for block, placed in reversed(gone):
            self._remove(changes, block, placed)


def _at(table: tuple[Any, ...], index: int) -> Any:
    """None outside the table."""
    return table[index] if index < len(table) else None


def in_payloads(changes: Iterable[Change]) -> Iterator[list[Change]]:
    """Cut into payloads of at most `BLOCKS_MAX` blocks; a long run goes on in the next one."""
    payload: list[Change] = []
    room = BLOCKS_MAX
    for change in changes:
        at, parent = 0, change.parent
        while at < len(change.hashes):
            hashes = change.hashes[at : at + room]
            payload.append(Change(change.stored, change.shelf, hashes, parent, change.block_tokens))
            at, parent, room = at + len(hashes), hashes[-1], room - len(hashes)
            if not room:
                yield payload
                payload, room = [], BLOCKS_MAX
    if payload:
        yield payload


def vllm_payload(changes: Iterable[Change], timestamp_us: int, *, arrays: bool = False) -> bytes:
    """vLLM's `[timestamp s, events, rank]`, of data-parallel rank 0. Hashes are 16 bytes, so nothing of them is lost.

    `arrays`: events as releases up to 0.23 write them; else maps. Our records tell no tokens: `token_ids` is empty.
    """
    events = [_vllm_event(change) for change in changes]
    if arrays:
        events = [[event[TAG_FIELD], *_in_order(event, vllm.FIELDS[event[TAG_FIELD]])] for event in events]
    return msgspec.msgpack.encode([timestamp_us / 1e6, events, 0])


def _vllm_event(change: Change) -> Any:
    hashes = [each.to_bytes(16, "big") for each in change.hashes]
    place = {"medium": MEDIA[change.shelf.tier], "group_idx": change.shelf.group}
    if not change.stored:
        return {TAG_FIELD: REMOVED, "block_hashes": hashes, **place}
    return {
        TAG_FIELD: STORED,
        "block_hashes": hashes,
        "parent_block_hash": change.parent.to_bytes(16, "big") if change.parent else None,
        "token_ids": [],
        "block_size": change.block_tokens,
        "lora_id": None,
        "lora_name": None,
        "extra_keys": None,
        **place,
    }


def _in_order(event: dict[str, Any], names: tuple[str, ...]) -> list[Any]:
    """Values of an event that is an array, up to the last that says something."""
    values = [event.get(name) for name in names]
    while values and values[-1] is None:
        values.pop()
    return values


def dynamo_payload(
    changes: Iterable[Change], timestamp_us: int, *, publisher: int, sequence: int, first_event: int, json: bool = False
) -> bytes:
    """Dynamo's envelope of router events, numbered from `first_event`, each with its true tier.

    A router's hashes are u64: the low half. It finds a block by the hash of its own tokens; ours tell that of the
    sequence alone, which is given for both.
    """
    encode = msgspec.json.encode if json else msgspec.msgpack.encode
    events = encode([_router_event(change, first_event + number) for number, change in enumerate(changes)])
    envelope = {
        "publisher_id": publisher,
        "sequence": sequence,
        "published_at": timestamp_us // 1000,
        "topic": TOPIC,
        "payload": events.decode() if json else events,
    }
    return encode(envelope)


def _router_event(change: Change, event_id: int) -> dict[str, Any]:
    hashes = [each & _U64 for each in change.hashes]
    data: dict[str, Any] = {"removed": {"block_hashes": hashes}}
    if change.stored:
        blocks = [{"block_hash": each, "tokens_hash": each, "mm_extra_info": None} for each in hashes]
        parent = change.parent & _U64 if change.parent else None
        data = {"stored": {"parent_hash": parent, "start_position": None, "blocks": blocks}}
    return {
        "worker_id": change.shelf.worker,
        "storage_tier": STORAGE_TIERS[change.shelf.tier],
        "residency_domain": "worker",
        "event": {"event_id": event_id, "data": data, "dp_rank": 0},
    }
