"""What the fold makes of drained volumes and of watermarks that a person sets; and that a checkpoint keeps it."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from advisor.entries import Measurement, MoveStep, OperatorEntry, Tick, VolumeEntry
from advisor.fold import NOTHING_WRITTEN, Fold, WrittenBytes
from advisor.fold_state import export_state, restore_state
from advisor.moves import MoveState
from advisor.policies.instant_moves import PRODUCER, InstantFold
from advisor.volume_picture import drain_view, heat_view, sample_of
from event_plane.schema import Namespace

SPACE = Namespace(tenant="acme")
S = 1_000_000
DAY_US = 86_400 * S
FAST = {"id": "fast", "capacity_blocks": 16}
SLOW = {"id": "slow", "capacity_blocks": 64, "speed_rank": 1}


def begun(fast: dict[str, Any] = FAST, slow: dict[str, Any] = SLOW, **policy: Any) -> InstantFold:
    return InstantFold([fast, slow], {"admission": "always", "hysteresis_s": 0.0, **policy})


def drain(instant: InstantFold, volume: str, action: str = "drain") -> None:
    instant.log(OperatorEntry("ann", action, volume))


def require_same_after_restore(instant: InstantFold) -> Fold:
    again = Fold(instant.refolded().index)
    restore_state(again, export_state(instant.fold))
    assert again.digest() == instant.fold.digest() == instant.refolded().digest()
    return again


def test_a_drained_volume_ends_empty_and_stays_so() -> None:
    instant = begun()
    instant.store("fast", [1, 2, 3], SPACE)
    instant.store("slow", [1], SPACE)
    drain(instant, "fast")
    moves = {move.key.sequence_hash: (str(move.kind), move.target, move.reason) for move in instant.tick(S)}
    assert moves == {
        1: ("drop", "slow", "fast is being drained, slow holds a copy"),
        2: ("demote", "slow", "fast is being drained, slow has room, 4.1 kB to write"),
        3: ("demote", "slow", "fast is being drained, slow has room, 4.1 kB to write"),
    }
    assert [instant.held(block, SPACE) for block in (1, 2, 3)] == [["slow"]] * 3
    instant.use([1, 2, 3], SPACE)
    assert instant.tick(2 * S) == [], "what is used is not brought back"
    require_same_after_restore(instant)
    drain(instant, "fast", "undrain")
    instant.use([1], SPACE)
    assert [move.target for move in instant.tick(3 * S)] == ["fast"]


def test_the_slowest_volume_is_drained_to_faster_ones_parents_first() -> None:
    instant = begun(demote_moves_max=2)
    instant.store("slow", [1, 2, 3], SPACE)
    drain(instant, "slow")
    rounds = [[move.key.sequence_hash for move in instant.tick(second * S)] for second in (1, 2, 3)]
    assert rounds == [[1, 2], [3], []]
    assert [instant.held(block, SPACE) for block in (1, 2, 3)] == [["fast"]] * 3


def test_where_nothing_has_room_blocks_stay_and_it_is_said() -> None:
    instant = begun({**FAST, "capacity_blocks": 4, "high_watermark": 0.75, "low_watermark": 0.5})
    for block in (1, 2, 3):
        instant.store("slow", [block], SPACE)
    drain(instant, "slow")
    assert len(instant.tick(S)) == 2, "one slot below the high watermark stays free"
    assert instant.tick(2 * S) == []
    obstacle = "no other volume that may hold it has room below its high watermark"
    assert instant.fold.refusals[-1].reason == f"slow is being drained, but {obstacle}"
    state = instant.fold.volumes["slow"]
    view = drain_view(instant.fold, state)
    assert view is not None
    assert (view.blocks_at_start, view.blocks_left, view.left_s, view.obstacle) == (3, 1, 1.0, obstacle)
    require_same_after_restore(instant)
    assert [block for block in (1, 2, 3) if not instant.held(block, SPACE)] == []


def test_nothing_is_deleted_for_room_while_the_slowest_volume_is_drained() -> None:
    instant = begun({**FAST, "capacity_blocks": 4, "high_watermark": 0.5, "low_watermark": 0.25})
    for block in range(1, 5):
        instant.store("fast", [block], SPACE)
    drain(instant, "slow")
    assert instant.tick(S) == []
    assert [note.reason.split(", ")[-1] for note in instant.fold.refusals] == ["but slow is being drained"] * 3


@pytest.mark.parametrize("deletes", ["for room", "for age"])
def test_what_is_drained_does_not_come_where_room_would_be_made_by_last_copies_that_are_spared(deletes: str) -> None:
    retention_s = 1.0 if deletes == "for age" else 0.0
    marks = {"capacity_blocks": 8, "high_watermark": 0.5, "low_watermark": 0.25, "retention_s": retention_s}
    instant = begun({**FAST, **marks})
    for block in range(1, 5):
        instant.store("fast", [block], SPACE)
    for block in range(5, 8):
        instant.store("slow", [block], SPACE)
    drain(instant, "slow")
    assert instant.tick(10 * S) == []
    instant.log(OperatorEntry("ann", "apply"))
    applied = instant.fold.plans.ended[-1]
    assert (applied.opened_total, applied.refusals) == (0, [])


def test_moves_on_their_way_into_a_drained_volume_are_aborted_and_a_paused_one_waits() -> None:
    instant = begun()
    for block in (1, 2):
        instant.store("slow", [block], SPACE)
        instant.use([block], SPACE)
    instant.log(Tick(S))
    coming, switched = instant.fold.moves.open.values()
    for step in ("begin", "verify", "switch"):
        instant.log(MoveStep(step, [switched.move_id]))
    drain(instant, "fast")
    assert (coming.state, coming.note) == (MoveState.ABORTED, "fast is being drained")
    assert switched.state is MoveState.SWITCHED, "past its switch"
    instant.log(OperatorEntry("ann", "pause", "fast"))
    view = drain_view(instant.fold, instant.fold.volumes["fast"])
    assert view is not None
    assert view.obstacle == "", "nothing is left"
    instant.store("fast", [9], SPACE)
    instant.log(MoveStep("keep", [switched.move_id]))
    assert instant.tick(2 * S) == []
    view = drain_view(instant.fold, instant.fold.volumes["fast"])
    assert view is not None
    assert view.obstacle == "paused by an operator: resume it"


def test_watermarks_of_a_person_stand_until_the_volume_is_unregistered() -> None:
    instant = begun()
    instant.log(OperatorEntry("ann", "watermarks", "fast", low_watermark=0.25, high_watermark=0.5))
    state = instant.fold.volumes["fast"]
    assert (state.as_planned().slots_low, state.as_planned().slots_high) == (4, 8)
    larger = {**state.descriptor, "capacity_blocks": 32}
    instant.log(VolumeEntry(larger, "agent", PRODUCER))
    assert instant.fold.volumes["fast"].as_planned().slots_high == 16
    assert require_same_after_restore(instant).volumes["fast"].watermarks == (0.25, 0.5)
    instant.log(VolumeEntry(larger, "agent", PRODUCER, registered=False))
    instant.log(VolumeEntry(larger, "agent", PRODUCER))
    assert instant.fold.volumes["fast"].as_planned().high_watermark == 0.9


@pytest.mark.parametrize(("low", "high"), [(0.0, 0.5), (0.5, 0.5), (0.5, 1.1), (float("nan"), 0.9)])
def test_orders_that_cannot_be_are_counted_and_change_nothing(low: float, high: float) -> None:
    instant = begun()
    before = instant.fold.volumes["fast"].watermarks
    instant.log(OperatorEntry("ann", "watermarks", "fast", low_watermark=low, high_watermark=high))
    drain(instant, "tape")
    assert instant.fold.volumes["fast"].watermarks == before
    assert instant.fold.skipped == {
        "operator action watermarks that cannot be": 1, "operator action drain that cannot be": 1
    }  # fmt: skip


def test_what_was_written_is_counted_by_day() -> None:
    instant = begun()
    for day, written_bytes in ((0, 5), (0, 7), (1, 11)):
        instant.log(Tick(day * DAY_US + S))
        instant.log(Measurement("fast", "write", written_bytes, 0.1))
        instant.log(Measurement("fast", "read", 1_000, 0.1))
    state = instant.fold.volumes["fast"]
    assert state.written == WrittenBytes(1, 11, 12)
    assert state.written.on(2 * DAY_US) == WrittenBytes(2, 0, 11)
    assert state.written.on(9 * DAY_US) == WrittenBytes(9, 0, 0)
    assert instant.fold.volumes["slow"].written == NOTHING_WRITTEN
    require_same_after_restore(instant)


def test_heat_counts_blocks_by_age_and_touches_and_says_when_it_is_a_sample() -> None:
    instant = InstantFold([FAST, {**SLOW, "capacity_blocks": 20_000}], {"admission": "touch-2"}, blocks_max=20_000)
    instant.store("fast", [1, 2], SPACE)
    instant.log(Tick(50 * S))
    instant.use([2], SPACE)
    place = instant.fold.volumes["fast"].place
    heat = heat_view(sample_of(instant.fold.index, place), place, 2, instant.fold.now_us)
    assert (heat.sampled, heat.looked_at) == (False, 2)
    assert [(each.at_least, each.blocks) for each in heat.by_age_s if each.blocks] == [(0.0, 1), (10.0, 1)]
    assert [(each.at_least, each.blocks) for each in heat.by_touches if each.blocks] == [(0.0, 1), (1.0, 1)]
    for first in range(10, 10_010, 500):
        instant.store("slow", range(first, first + 500), SPACE)
    slow = instant.fold.volumes["slow"].place
    sample = sample_of(instant.fold.index, slow)
    heat = heat_view(sample, slow, 10_000, instant.fold.now_us)
    assert heat.sampled
    assert 3_500 < heat.looked_at <= 4_096
    depths = sorted(block.depth for block in sample)
    assert len({block.row for block in sample}) == len(depths) == heat.looked_at


def test_a_deletion_goes_on_while_its_volume_is_drained() -> None:
    instant = begun()
    other = Namespace(tenant="other")
    instant.store("fast", [1, 2], SPACE)
    instant.store("fast", [3], other)
    drain(instant, "fast")
    instant.log(OperatorEntry("ann", "delete", deletion="d-1", tenant="acme"))
    moves = sorted((str(move.kind), move.key.sequence_hash) for move in instant.tick(S))
    assert moves == [("delete", 1), ("delete", 2), ("demote", 3)]
    assert (instant.held(1, SPACE), instant.held(3, other)) == ([], ["slow"])


def test_a_checkpoint_that_knew_no_drained_volumes_is_read() -> None:
    instant = begun()
    instant.store("fast", [1], SPACE)
    saved = msgspec.msgpack.decode(export_state(instant.fold))
    before = {**saved, "version": 4, "volumes": [volume[:7] for volume in saved["volumes"]]}
    again = Fold(instant.refolded().index)
    restore_state(again, msgspec.msgpack.encode(before))
    assert again.digest() == instant.fold.digest()
