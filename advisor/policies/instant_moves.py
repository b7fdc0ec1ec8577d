"""A fold whose plans are carried out at once: shows what a policy does without agents, and holds it to its contract.

Every step is a log entry, as in the service: `entries` folded again give the same state.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from advisor.entries import (
    Control,
    EntryKind,
    LogEntry,
    MoveStep,
    SettingsEntry,
    Tick,
    VolumeEntry,
    control_entry,
    logged,
)
from advisor.fold import Fold
from advisor.index import ArrayIndex, BlockRow, IndexSize, Key
from advisor.moves import Move, MoveKind
from advisor.policies.registry import policy_version
from event_plane import wire
from event_plane.schema import Batch, BatchTables, EventRecord, EventType, Namespace, RecordFlag, to_records

PRODUCER = 7
STEPS = {
    MoveKind.PROMOTE: ("begin", "verify", "switch", "keep"),
    MoveKind.DEMOTE: ("begin", "verify", "switch", "free"),
    MoveKind.DROP: ("verify", "switch", "free"),
    MoveKind.DELETE: ("switch", "free"),
}


class InstantFold:
    """Volumes by descriptor, blocks by hash; a block's parent is 0 at the root."""

    def __init__(
        self, volumes: Sequence[Mapping[str, Any]], policy: Mapping[str, Any], *, blocks_max: int = 4_096
    ) -> None:
        self.size = IndexSize.for_blocks(blocks_max, blocks_max * max(2, len(volumes)))
        self.fold = Fold(ArrayIndex(self.size))
        self.entries: list[LogEntry] = []
        self.done: list[Move] = []
        """Moves carried out, in order."""
        self._tiers = {str(v["id"]): int(v.get("tier", 3)) for v in volumes}
        self._sequence = 0
        admission = str(policy.get("admission", "auto"))
        self.log(SettingsEntry({"policy": dict(policy)}, policy_version(admission)))
        for volume in volumes:
            whole = {"tier": 3, "speed_rank": 0, "high_watermark": 0.9, "low_watermark": 0.75, **volume}
            self.log(VolumeEntry(whole, "agent", PRODUCER))
        planned = sorted((v.as_planned() for v in self.fold.volumes.values()), key=lambda v: v.order)
        self._by_speed = [(v.volume_id, v.place) for v in planned]

    def log(self, control: Control) -> None:
        """Append and fold one entry."""
        self._apply(logged(len(self.entries) + 1, control_entry(control), 0))

    def _apply(self, entry: LogEntry, batch: Batch | None = None) -> None:
        self.entries.append(entry)
        self.fold.apply(entry, batch)

    def send(self, events: Sequence[EventRecord]) -> None:
        tables = BatchTables()
        records = to_records(list(events), tables, 0)
        batch = Batch(
            PRODUCER, 1, self._sequence, records, namespaces=tuple(tables.namespaces), locations=tuple(tables.locations)
        )
        self._sequence += 1
        self._apply(LogEntry(len(self.entries) + 1, EntryKind.BATCH, wire.encode(batch), source="instant"), batch)

    def event(
        self, kind: EventType, volume: str, h: int, namespace: Namespace, parent: int = 0, *, size: int = 4_096,
        hits: int = 0, flags: int = 0,
    ) -> EventRecord:  # fmt: skip
        event = EventRecord(
            kind, self._tiers[volume], h, namespace, volume, parent, block_size=size, hits=hits, flags=flags
        )
        event.depth = 0xFFFF_FFFF if parent else 0
        return event

    def store(self, volume: str, chain: Sequence[int], namespace: Namespace, *, size: int = 4_096) -> None:
        """Blocks of one sequence, root first, as a copy; each is the parent of the next."""
        parents = [0, *chain[:-1]]
        self.send(
            [
                self.event(EventType.STORE, volume, h, namespace, parent, size=size, flags=RecordFlag.COPY)
                for h, parent in zip(chain, parents, strict=True)
            ]
        )

    def use(self, chain: Sequence[int], namespace: Namespace) -> None:
        """One use of each block where it is fastest; blocks that are nowhere are passed over."""
        events = [
            self.event(EventType.ACCESS, volume, h, namespace, hits=1)
            for h in chain
            if (volume := self.fastest(h, namespace)) is not None
        ]
        if events:
            self.send(events)

    def block(self, h: int, namespace: Namespace) -> BlockRow | None:
        return self.fold.index.get(Key(namespace.namespace_id, 0, h))

    def held(self, h: int, namespace: Namespace) -> list[str]:
        """Volumes that hold a block, fastest first."""
        block = self.block(h, namespace)
        if block is None:
            return []
        return [volume for volume, place in self._by_speed if block.placed_in(place) is not None]

    def fastest(self, h: int, namespace: Namespace) -> str | None:
        return next(iter(self.held(h, namespace)), None)

    def tick(self, now_us: int) -> list[Move]:
        """Plan, and carry out all of it. Returns the moves."""
        self.log(Tick(now_us))
        return self.carry_out_open()

    def carry_out_open(self) -> list[Move]:
        """All moves that are open."""
        moves = list(self.fold.moves.open.values())
        for kind in STEPS:
            self._carry_out([move for move in moves if move.kind is kind])
        self.done += moves
        return moves

    def _carry_out(self, moves: Sequence[Move]) -> None:
        """Of one kind, a step at a time."""
        if not moves:
            return
        for trigger in STEPS[moves[0].kind]:
            if trigger == "begin":
                self.send([self._stored(move) for move in moves])
            if trigger == "free":
                self.send(
                    [
                        self.event(
                            EventType.REMOVE, m.source, m.key.sequence_hash, self.fold.namespaces[m.key.namespace_id]
                        )
                        for m in moves
                    ]
                )
            self.log(MoveStep(trigger, [move.move_id for move in moves]))

    def _stored(self, move: Move) -> EventRecord:
        namespace, h = self.fold.namespaces[move.key.namespace_id], move.key.sequence_hash
        block = self.block(h, namespace)
        assert block is not None
        parent = self.fold.index.block(block.parent).key.sequence_hash if block.parent >= 0 else 0
        return self.event(
            EventType.STORE, move.target, h, namespace, parent, size=move.block_bytes, flags=RecordFlag.COPY
        )

    def refolded(self, through: int | None = None) -> Fold:
        """The entries, or the first `through`, folded by a fresh fold."""
        fold = Fold(ArrayIndex(self.size))
        for entry in self.entries[:through]:
            fold.apply(entry)
        return fold
