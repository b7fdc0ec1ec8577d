"""What the fold makes of cancels, dry runs and volumes that are away; and that a checkpoint keeps it."""

from __future__ import annotations

from typing import Any

import pytest

from advisor.entries import MoveStep, OperatorEntry, SettingsEntry, Tick, VolumeEntry
from advisor.fold import Fold
from advisor.fold_state import export_state, restore_state
from advisor.moves import Move, MoveKind, MoveState
from advisor.policies.instant_moves import PRODUCER, InstantFold
from event_plane.schema import Namespace

SPACE = Namespace(tenant="acme")
S = 1_000_000
POLICY = {"admission": "always", "hysteresis_s": 0.0}
FAST = {"id": "fast", "capacity_blocks": 4, "high_watermark": 0.75, "low_watermark": 0.5}
SLOW = {"id": "slow", "capacity_blocks": 64, "speed_rank": 1}


def begun(policy: dict[str, Any] | None = None, **slow: Any) -> InstantFold:
    """Blocks 1 and 2 on slow, used."""
    instant = InstantFold([FAST, {**SLOW, **slow}], {**POLICY, **(policy or {})})
    for block in (1, 2):
        instant.store("slow", [block], SPACE)
        instant.use([block], SPACE)
    return instant


def planned(instant: InstantFold, now_s: int = 1) -> list[Move]:
    before = set(instant.fold.moves.open)
    instant.log(Tick(now_s * S))
    return [move for move_id, move in instant.fold.moves.open.items() if move_id not in before]


def set_away(instant: InstantFold, volume: str, why: str) -> None:
    state = instant.fold.volumes[volume]
    instant.log(VolumeEntry(state.descriptor, state.agent, PRODUCER, away=why))


def require_same_after_restore(instant: InstantFold) -> None:
    again = Fold(instant.refolded().index)
    restore_state(again, export_state(instant.fold))
    assert again.digest() == instant.fold.digest() == instant.refolded().digest()


def test_a_cancelled_move_takes_no_step_that_was_on_its_way_and_others_go_on() -> None:
    instant = begun()
    first, second = planned(instant)
    instant.log(MoveStep("begin", [first.move_id, second.move_id]))
    instant.log(OperatorEntry("ann", "cancel", move=first.move_id))
    instant.log(MoveStep("verify", [first.move_id, second.move_id]))
    assert (first.state, first.note) == (MoveState.ABORTED, "cancelled by ann")
    assert second.state is MoveState.VERIFIED
    instant.log(MoveStep("switch", [second.move_id]))
    instant.log(OperatorEntry("ann", "cancel"))
    assert second.state is MoveState.SWITCHED, "past its switch"
    assert instant.fold.skipped == {}
    instant.log(MoveStep("verify", [second.move_id]))
    assert instant.fold.skipped == {"illegal move step": 1}
    require_same_after_restore(instant)


def test_a_dry_run_plans_and_shows_and_has_nothing_open() -> None:
    instant = begun()
    waiting, under_way = planned(instant)
    instant.log(MoveStep("begin", [under_way.move_id]))
    instant.log(SettingsEntry({"policy": {**POLICY, "dry_run": True}}, "version"))
    assert (waiting.state, waiting.note) == (MoveState.ABORTED, "dry run")
    assert under_way.state is MoveState.COPYING, "what has begun is ended"
    instant.use([1], SPACE)
    digest = instant.fold.plans_digest
    assert planned(instant, 2) == []
    assert instant.fold.plans_digest != digest
    assert [(move.key.sequence_hash, move.target) for move in instant.fold.moves.dry] == [(1, "fast")]
    assert instant.fold.moves.dry_total == 1
    require_same_after_restore(instant)


def test_a_look_at_the_plan_changes_nothing_and_is_the_plan_that_follows() -> None:
    instant = begun()
    digest = instant.fold.digest()
    looked = instant.fold.preview(S)
    assert instant.fold.digest() == digest
    moves = planned(instant)
    assert [(p.block.key, p.target, p.reason) for p in looked.proposals] == [(m.key, m.target, m.reason) for m in moves]
    assert len(moves) == 2


def test_moves_of_a_volume_that_is_away_are_aborted_and_it_is_back_as_it_was() -> None:
    instant = begun()
    moves = planned(instant)
    instant.log(MoveStep("begin", [moves[0].move_id]))
    place = instant.fold.volumes["fast"].place
    set_away(instant, "fast", "its disk is gone")
    assert {(move.state, move.note) for move in moves} == {(MoveState.ABORTED, "its disk is gone")}
    instant.use([1], SPACE)
    assert planned(instant, 2) == []
    require_same_after_restore(instant)
    set_away(instant, "fast", "")
    instant.use([1], SPACE)
    assert [move.target for move in planned(instant, 3)] == ["fast"]
    assert instant.fold.volumes["fast"].place == place


def test_a_promotion_past_its_switch_is_kept_when_its_source_is_lost() -> None:
    instant = begun()
    move, _ = planned(instant)
    for trigger in ("begin", "verify", "switch"):
        instant.log(MoveStep(trigger, [move.move_id]))
    state = instant.fold.volumes["slow"]
    instant.log(VolumeEntry(state.descriptor, state.agent, PRODUCER, registered=False))
    assert move.state is MoveState.KEPT
    assert instant.fold.moves.open == {}


@pytest.mark.parametrize("optional", [False, True])
@pytest.mark.parametrize("out", ["paused", "away"])
def test_last_copies_are_deleted_for_room_only_where_no_slower_volume_is_to_come_back(out: str, optional: bool) -> None:
    instant = InstantFold([FAST, {**SLOW, "optional": optional}], POLICY)
    instant.store("fast", [1], SPACE)
    instant.store("fast", [2], SPACE)
    instant.store("fast", [3], SPACE)
    if out == "paused":
        instant.log(OperatorEntry("ann", "pause", "slow"))
    else:
        set_away(instant, "slow", "unplugged")
    moves = planned(instant)
    gone_for_good = out == "away" and optional
    assert {move.kind for move in moves} == ({MoveKind.DELETE} if gone_for_good else set())
    if not gone_for_good:
        assert "slow is paused or away" in instant.fold.refusals[-1].reason
        instant.log(OperatorEntry("ann", "resume", "slow"))
        set_away(instant, "slow", "")
        assert {move.kind for move in planned(instant, 2)} == {MoveKind.DEMOTE}
