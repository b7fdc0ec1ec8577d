"""What the planner promotes, demotes, drops and deletes, and why not."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from advisor.index import ArrayIndex, IndexSize, Key, PlaceKey
from advisor.moves import Move, MoveKind, MoveTable
from advisor.policies.limits import Limits
from advisor.policies.plan import Plan, Volume
from advisor.policies.tiering import plan_moves
from event_plane.schema import BatchTables, EventRecord, EventType, Namespace, RecordFlag, to_records

NOW_US = 100_000_000
NAMESPACE = Namespace(tenant="acme")


class Shelf:
    """A fast and a slow volume over one index."""

    def __init__(self, fast_blocks: int = 10, slow_blocks: int = 100) -> None:
        self.index = ArrayIndex(IndexSize.for_blocks(1_000, 4_000))
        self.moves = MoveTable()
        self.fast = self.volume("fast", 0, fast_blocks)
        self.slow = self.volume("slow", 1, slow_blocks)

    def volume(self, name: str, rank: int, capacity: int, **rates: float) -> Volume:
        tier = min(3 + rank, 4)
        place = self.index.place(PlaceKey(1, tier, name))
        self.index.set_volume(place, True)
        return Volume(name, "agent", place, tier, rank, capacity, 0.9, 0.5, **rates)

    def put(self, volume: Volume, h: int, parent: int = 0, touches: int = 1, at_us: int = 1_000_000) -> None:
        event = EventRecord(
            EventType.STORE, volume.tier, h, NAMESPACE, volume.volume_id, parent, block_size=4096, flags=RecordFlag.COPY
        )
        event.depth = 0xFFFF_FFFF if parent else 0
        use = replace(event, event_type=EventType.ACCESS, hits=touches, flags=0)
        self.send([event, use] if touches else [event], at_us)

    def send(self, events: list[EventRecord], at_us: int) -> None:
        tables = BatchTables()
        records = to_records(events, tables, 0)
        ids = [namespace.namespace_id for namespace in tables.namespaces]
        self.index.apply(records, producer=1, namespace_ids=ids, locations=list(tables.locations), now_us=at_us)

    def plan(self, paused: frozenset[str] = frozenset(), admission: str = "touch-2", **limits: Any) -> Plan:
        """A plan by a planner that remembers nothing."""
        told = Limits(admission=admission, **limits)
        return plan_moves(self.index, [self.slow, self.fast], self.moves, self.index.touched(), told, NOW_US, paused)


def moves(plan: Plan) -> list[tuple[MoveKind, int, str, str]]:
    return [(p.kind, p.block.key.sequence_hash, p.source, p.target) for p in plan.proposals]


def test_block_is_promoted_from_its_second_touch_with_a_reason() -> None:
    shelf = Shelf()
    shelf.put(shelf.slow, 1, touches=1)
    shelf.put(shelf.slow, 2, touches=2, at_us=60_000_000)
    plan = shelf.plan()
    assert moves(plan) == [(MoveKind.PROMOTE, 2, "slow", "fast")]
    assert plan.proposals[0].reason == "2nd touch in 40 s, 4.1 kB"
    assert [(r.key.sequence_hash, r.reason) for r in plan.refusals] == [(1, "1st touch of 2 needed")]
    untimed = Shelf()
    untimed.put(untimed.slow, 2, touches=2, at_us=0)
    assert untimed.plan().proposals[0].reason == "2nd touch, 4.1 kB"


def test_reason_names_the_time_saved_once_both_volumes_are_measured() -> None:
    shelf = Shelf()
    shelf.fast = shelf.volume("fast", 0, 10, read_bytes_per_s=4_096_000.0)
    shelf.slow = shelf.volume("slow", 1, 100, read_bytes_per_s=2_048_000.0)
    shelf.put(shelf.slow, 1, touches=3, at_us=60_000_000)
    assert shelf.plan().proposals[0].reason == "3rd touch in 40 s, est. 1 ms saved a hit, 4.1 kB"


def test_parents_are_promoted_before_their_children_and_never_left_behind() -> None:
    shelf = Shelf()
    shelf.put(shelf.slow, 1, touches=2)
    shelf.put(shelf.slow, 2, parent=1, touches=2)
    shelf.put(shelf.slow, 3, parent=2, touches=2)
    assert [h for _, h, _, _ in moves(shelf.plan())] == [1, 2, 3]
    assert [h for _, h, _, _ in moves(shelf.plan(promote_moves_max=2))] == [1, 2]


def test_child_of_a_block_that_is_not_promoted_is_refused() -> None:
    shelf = Shelf()
    shelf.put(shelf.slow, 1, touches=1)
    shelf.put(shelf.slow, 2, parent=1, touches=5)
    plan = shelf.plan()
    assert moves(plan) == []
    assert "its parent is not on fast" in plan.refusals[1].reason


def test_nothing_is_promoted_past_the_high_watermark() -> None:
    shelf = Shelf(fast_blocks=4)
    for h in range(1, 9):
        shelf.put(shelf.slow, h, touches=2)
    plan = shelf.plan()
    assert len(plan.proposals) == 3
    assert plan.refused == 5
    assert "no room below its high watermark" in plan.refusals[0].reason


def test_full_volume_drops_what_a_slower_one_holds_and_copies_the_rest_coldest_first() -> None:
    shelf = Shelf()
    for h in range(1, 10):
        shelf.put(shelf.fast, h, touches=1, at_us=h * 1_000_000)
    shelf.put(shelf.slow, 2, touches=0)
    shelf.index.touched_since_drain()
    plan = shelf.plan()
    assert moves(plan) == [
        (MoveKind.DEMOTE, 1, "fast", "slow"),
        (MoveKind.DROP, 2, "fast", "slow"),
        (MoveKind.DEMOTE, 3, "fast", "slow"),
        (MoveKind.DEMOTE, 4, "fast", "slow"),
    ]
    assert "fast reached its high watermark of 90%" in plan.proposals[0].reason


def test_head_of_a_chain_stays_as_long_as_its_tail() -> None:
    shelf = Shelf()
    for h in range(1, 10):
        shelf.put(shelf.fast, h, parent=h - 1, touches=1, at_us=h * 1_000_000)
    assert [h for _, h, _, _ in moves(shelf.plan())] == [9, 8, 7, 6]


def test_ancestors_of_a_block_in_an_open_move_stay() -> None:
    shelf = Shelf()
    for h in range(1, 10):
        shelf.put(shelf.fast, h, parent=h - 1, touches=1)
    shelf.moves.add([Move("1-0", MoveKind.PROMOTE, Key(NAMESPACE.namespace_id, 0, 9), "slow", "fast", 4096, "", 0, 0)])
    assert moves(shelf.plan()) == []


def test_slowest_volume_deletes_coldest_leaves_that_have_no_other_copy() -> None:
    shelf = Shelf(slow_blocks=10)
    for h in range(1, 10):
        shelf.put(shelf.slow, h, touches=1, at_us=h * 1_000_000)
    shelf.put(shelf.fast, 1, touches=0)
    shelf.index.touched_since_drain()
    assert moves(shelf.plan()) == [(MoveKind.DELETE, h, "slow", "") for h in (2, 3, 4, 5)]


def test_open_moves_count_against_their_target_and_the_budget() -> None:
    shelf = Shelf(fast_blocks=4)
    for h in (1, 2, 3, 4):
        shelf.put(shelf.slow, h, touches=2)
    shelf.moves.add([Move("1-0", MoveKind.PROMOTE, Key(NAMESPACE.namespace_id, 0, 4), "slow", "fast", 4096, "", 0, 0)])
    assert [h for _, h, _, _ in moves(shelf.plan())] == [1, 2]
    assert [h for _, h, _, _ in moves(shelf.plan(moves_open_max=2))] == [1]
    assert moves(shelf.plan(moves_bytes_max=4095)) == []


def test_paused_volume_takes_no_part() -> None:
    shelf = Shelf()
    shelf.put(shelf.slow, 1, touches=2)
    assert moves(shelf.plan(paused=frozenset({"fast"}))) == []


def test_no_volumes_no_plan() -> None:
    index = ArrayIndex(IndexSize.for_blocks(16))
    assert plan_moves(index, [], MoveTable(), [], Limits(), NOW_US) == Plan()


def test_block_that_a_plan_deletes_is_not_promoted_by_it_too() -> None:
    shelf = Shelf(slow_blocks=10)
    for h in range(1, 10):
        shelf.put(shelf.slow, h, touches=5, at_us=h)
    proposed = moves(shelf.plan())
    assert proposed[:4] == [(MoveKind.DELETE, h, "slow", "") for h in range(1, 5)]
    assert proposed[4:] == [(MoveKind.PROMOTE, h, "slow", "fast") for h in range(5, 10)]


def test_block_on_two_full_volumes_leaves_one_of_them_in_a_plan() -> None:
    shelf = Shelf()
    middle = shelf.volume("middle", 1, 10)
    slow = shelf.volume("slow", 2, 100)
    for h in range(1, 10):
        for volume in (shelf.fast, middle, slow):
            shelf.put(volume, h, touches=0)
    plan = plan_moves(shelf.index, [shelf.fast, middle, slow], shelf.moves, [], Limits(), NOW_US)
    assert moves(plan) == [
        *((MoveKind.DROP, h, "fast", "middle") for h in range(1, 5)),
        *((MoveKind.DROP, h, "middle", "slow") for h in range(5, 9)),
    ]
