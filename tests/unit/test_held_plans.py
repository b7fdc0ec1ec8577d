"""Plans that wait for a person: approved, rejected, lapsed, withdrawn; plans applied and moves tried again."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from advisor.entries import MoveStep, OperatorEntry, SettingsEntry, Tick, VolumeEntry
from advisor.fold import Fold
from advisor.fold_state import export_state, restore_state
from advisor.moves import IllegalMove, Move, MoveKind, MoveState
from advisor.plan_desk import ENDED_KEPT_MAX, HeldPlan, IllegalPlanStep, PlanState, diagram
from advisor.policies.instant_moves import PRODUCER, InstantFold
from event_plane.schema import EventType, Namespace

SPACE, OTHER = Namespace(tenant="acme"), Namespace(tenant="other")
S = 1_000_000
POLICY = {"admission": "always", "hysteresis_s": 0.0, "approve": True, "approve_within_s": 60.0}
FAST = {"id": "fast", "capacity_blocks": 4, "high_watermark": 0.75, "low_watermark": 0.5}
SLOW = {"id": "slow", "capacity_blocks": 64, "speed_rank": 1}


def begun(policy: dict[str, Any] | None = None, **fast: Any) -> InstantFold:
    """Blocks 1 and 2 on slow, used."""
    instant = InstantFold([{**FAST, **fast}, SLOW], {**POLICY, **(policy or {})})
    for block in (1, 2):
        instant.store("slow", [block], SPACE)
        instant.use([block], SPACE)
    return instant


def waiting(instant: InstantFold) -> HeldPlan:
    plan = instant.fold.plans.waiting
    assert plan is not None
    return plan


def last(instant: InstantFold) -> HeldPlan:
    return instant.fold.plans.ended[-1]


def decide(instant: InstantFold, action: str, plan_id: str | None = None) -> None:
    instant.log(OperatorEntry("ann", action, move=waiting(instant).plan_id if plan_id is None else plan_id))


def remove(instant: InstantFold, volume: str, *blocks: int) -> None:
    instant.send([instant.event(EventType.REMOVE, volume, block, SPACE) for block in blocks])


def brought(moves: list[Move]) -> list[tuple[int, str]]:
    return [(move.key.sequence_hash, move.target) for move in moves]


def left_out(instant: InstantFold) -> list[tuple[int, str]]:
    return [(refusal.key.sequence_hash, refusal.reason) for refusal in last(instant).refusals]


def require_same_after_restore(instant: InstantFold) -> None:
    again = Fold(instant.refolded().index)
    restore_state(again, export_state(instant.fold))
    assert again.digest() == instant.fold.digest() == instant.refolded().digest()


def test_a_plan_waits_and_its_moves_are_opened_when_it_is_approved() -> None:
    instant = begun()
    instant.log(Tick(S))
    held = waiting(instant)
    assert (held.planned_us, brought(held.moves)) == (S, [(1, "fast"), (2, "fast")])
    assert instant.fold.moves.open == {}
    instant.use([1], SPACE)
    instant.log(Tick(2 * S))
    assert waiting(instant) is held, "no other is made meanwhile"
    require_same_after_restore(instant)
    decide(instant, "approve")
    assert list(instant.fold.moves.open) == [f"{held.plan_id}-0", f"{held.plan_id}-1"]
    assert (held.state, held.actor, held.opened_total, held.refused) == (PlanState.APPROVED, "ann", 2, 0)
    instant.carry_out_open()
    assert instant.held(1, SPACE) == ["fast", "slow"]
    require_same_after_restore(instant)
    instant.log(Tick(3 * S))
    assert instant.fold.plans.waiting is None, "of an empty plan there is nothing to decide"
    assert instant.fold.skipped == {}


def test_what_is_not_possible_any_more_is_left_out_with_a_reason() -> None:
    instant = InstantFold([{**FAST, "capacity_blocks": 8}, SLOW], POLICY)
    for block in (1, 2, 3):
        instant.store("slow", [block], SPACE)
        instant.use([block], SPACE)
    instant.store("slow", [4], OTHER)
    instant.use([4], OTHER)
    instant.log(Tick(S))
    assert len(waiting(instant).moves) == 4
    remove(instant, "slow", 1)
    instant.store("fast", [2], SPACE)
    instant.log(OperatorEntry("bo", "delete", deletion="d-1", tenant="other"))
    decide(instant, "approve")
    assert brought(list(instant.fold.moves.open.values())) == [(3, "fast")]
    assert dict(left_out(instant)) == {
        1: "promote: its block is not on slow any more",
        2: "promote: fast or a faster volume holds it already",
        4: "promote: tenant other was deleted and is refused until it is enabled again",
    }
    require_same_after_restore(instant)


@pytest.mark.parametrize(
    ("policy", "happens", "why"),
    [
        ({}, "pause", "fast is paused, away, being drained or not registered any more"),
        ({}, "away", "fast is paused, away, being drained or not registered any more"),
        ({}, "drain", "fast is paused, away, being drained or not registered any more"),
        ({}, "full", "fast has no room below its high watermark"),
        ({}, "tenants", "fast is not for tenant acme"),
    ],
)
def test_volumes_that_changed_since_leave_moves_out(policy: dict[str, Any], happens: str, why: str) -> None:
    instant = begun(policy)
    instant.log(Tick(S))
    state = instant.fold.volumes["fast"]
    match happens:
        case "pause" | "drain":
            instant.log(OperatorEntry("bo", happens, "fast"))
        case "away":
            instant.log(VolumeEntry(state.descriptor, state.agent, PRODUCER, away="its disk is gone"))
        case "full":
            instant.store("fast", [7], SPACE)
            instant.store("fast", [8], SPACE)
            instant.store("fast", [9], SPACE)
        case "tenants":
            instant.log(VolumeEntry({**state.descriptor, "tenants": ["other"]}, state.agent, PRODUCER))
    decide(instant, "approve")
    assert instant.fold.moves.open == {}
    assert left_out(instant) == [(1, f"promote: {why}"), (2, f"promote: {why}")]


def test_a_child_does_not_come_where_its_parent_is_not() -> None:
    instant = InstantFold([FAST, SLOW], POLICY)
    instant.store("slow", [1, 2], SPACE)
    instant.use([1, 2], SPACE)
    instant.log(Tick(S))
    assert brought(waiting(instant).moves) == [(1, "fast"), (2, "fast")]
    parent, child = waiting(instant).moves
    assert [proposal.block.key for proposal in instant.fold.reopened([parent, child]).proposals] == [
        parent.key, child.key,
    ]  # fmt: skip
    (refusal,) = instant.fold.reopened([child]).refusals
    assert refusal.reason == "promote: its parent is not on fast, so a read would stop before it"


def test_a_last_copy_is_not_deleted_where_its_room_is_not_needed_any_more() -> None:
    instant = InstantFold([{**FAST, "high_watermark": 1.0}], POLICY)
    for block in (1, 2, 3, 4):
        instant.store("fast", [block], SPACE)
    instant.log(Tick(S))
    assert [move.kind for move in waiting(instant).moves] == [MoveKind.DELETE, MoveKind.DELETE]
    going = waiting(instant).moves[0].key.sequence_hash
    remove(instant, "fast", *[block for block in (1, 2, 3, 4) if block != going][:2])
    decide(instant, "approve")
    reasons = dict(left_out(instant))
    assert instant.fold.moves.open == {}
    assert reasons[going] == "delete: fast is at its low watermark, so nothing need be deleted"


def test_a_rejected_plan_is_dropped_and_the_next_tick_plans_anew() -> None:
    instant = begun()
    instant.log(Tick(S))
    first = waiting(instant)
    decide(instant, "reject")
    assert (first.state, first.moves, instant.fold.moves.open) == (PlanState.REJECTED, [], {})
    require_same_after_restore(instant)
    instant.use([1], SPACE)
    instant.log(Tick(2 * S))
    assert brought(waiting(instant).moves) == [(1, "fast")]


def test_a_plan_that_nobody_decides_on_lapses_and_cannot_be_approved_then() -> None:
    instant = begun()
    instant.log(Tick(S))
    first = waiting(instant)
    instant.log(Tick(60 * S))
    assert waiting(instant) is first
    instant.log(OperatorEntry("bo", "pause"))
    instant.log(Tick(61 * S))
    instant.log(OperatorEntry("bo", "resume"))
    with pytest.raises(IllegalPlanStep, match="has lapsed, it was not decided in time"):
        instant.fold.plans.require_waiting(first.plan_id, instant.fold.now_us, 60.0)
    decide(instant, "approve")
    assert instant.fold.moves.open == {}
    instant.use([2], SPACE)
    instant.log(Tick(62 * S))
    assert (first.state, brought(waiting(instant).moves)) == (PlanState.LAPSED, [(2, "fast")])
    decide(instant, "approve", first.plan_id)
    assert instant.fold.skipped == {"operator action approve that cannot be": 2}
    assert instant.fold.moves.open == {}
    require_same_after_restore(instant)


def test_blocks_leave_a_drained_volume_when_that_is_approved() -> None:
    instant = InstantFold([{**FAST, "capacity_blocks": 8}, SLOW], POLICY)
    instant.store("fast", [1], SPACE)
    instant.store("fast", [2], SPACE)
    instant.store("slow", [2], SPACE)
    instant.log(OperatorEntry("bo", "drain", "fast"))
    instant.log(Tick(S))
    assert {(m.kind, m.key.sequence_hash) for m in waiting(instant).moves} == {(MoveKind.DEMOTE, 1), (MoveKind.DROP, 2)}
    decide(instant, "approve")
    assert (last(instant).opened_total, last(instant).refused) == (2, 0)
    instant.carry_out_open()
    assert instant.held(1, SPACE) == instant.held(2, SPACE) == ["slow"]


@pytest.mark.parametrize("gone", ["copy", "order"])
def test_a_copy_is_not_dropped_where_the_one_that_would_stay_is_gone_or_not_slower(gone: str) -> None:
    instant = InstantFold([{**FAST, "high_watermark": 1.0}, SLOW], POLICY)
    for block in (1, 2, 3, 4):
        instant.store("fast", [block], SPACE)
        instant.store("slow", [block], SPACE)
    instant.log(Tick(S))
    assert {move.kind for move in waiting(instant).moves} == {MoveKind.DROP}
    if gone == "copy":
        remove(instant, "slow", 1, 2, 3, 4)
        why = "drop: slow holds no copy any more"
    else:
        state = instant.fold.volumes["slow"]
        instant.log(VolumeEntry({**state.descriptor, "speed_rank": -1}, state.agent, PRODUCER))
        why = "drop: slow is faster than fast by now"
    decide(instant, "approve")
    assert instant.fold.moves.open == {}
    assert {reason for _, reason in left_out(instant)} == {why}


def test_a_block_does_not_leave_from_above_children_that_came_since() -> None:
    instant = InstantFold([{**FAST, "high_watermark": 1.0}, SLOW], POLICY)
    for block in (1, 2, 3, 4):
        instant.store("fast", [block], SPACE)
    instant.log(Tick(S))
    going = waiting(instant).moves[0].key.sequence_hash
    remove(instant, "fast", *[block for block in (1, 2, 3, 4) if block != going])
    instant.store("fast", [going, 77], SPACE)
    decide(instant, "approve")
    assert dict(left_out(instant))[going] == "demote: its children would be on a faster volume than it"


def test_no_more_moves_are_opened_than_may_be_open() -> None:
    instant = InstantFold([{**FAST, "capacity_blocks": 8}, SLOW], {**POLICY, "moves_open_max": 2})
    instant.store("slow", [3], SPACE)
    instant.use([3], SPACE)
    instant.log(OperatorEntry("ann", "apply"))
    (first,) = instant.fold.moves.open.values()
    instant.log(OperatorEntry("bo", "cancel"))
    for block in (1, 2):
        instant.store("slow", [block], SPACE)
        instant.use([block], SPACE)
    instant.log(Tick(S))
    assert len(waiting(instant).moves) == 2
    instant.log(OperatorEntry("ann", "retry", move=first.move_id))
    decide(instant, "approve")
    assert (len(instant.fold.moves.open), last(instant).opened_total) == (2, 1)
    assert left_out(instant) == [(2, "promote: 2 moves are open, the most that policy.moves_open_max allows")]


def test_a_plan_is_withdrawn_when_the_settings_change_and_stays_when_they_are_logged_again() -> None:
    instant = begun()
    instant.log(Tick(S))
    first = waiting(instant)
    instant.log(SettingsEntry({"policy": POLICY}, "version"))
    assert waiting(instant) is first
    instant.log(SettingsEntry({"policy": {**POLICY, "approve": False}}, "version"))
    assert (first.state, instant.fold.plans.waiting) == (PlanState.WITHDRAWN, None)
    instant.use([1], SPACE)
    instant.log(Tick(2 * S))
    assert brought(list(instant.fold.moves.open.values())) == [(1, "fast")]


def test_deletes_that_people_order_do_not_wait() -> None:
    instant = begun()
    instant.log(OperatorEntry("bo", "delete", deletion="d-1", namespace_id=SPACE.namespace_id, prefix=f"{1:032x}"))
    instant.log(Tick(S))
    (order,) = instant.fold.moves.open.values()
    assert (order.kind, order.deletion) == (MoveKind.DELETE, "d-1")
    assert [key for key, _ in brought(waiting(instant).moves)] == [2]
    instant.carry_out_open()
    instant.log(OperatorEntry("bo", "delete", deletion="d-2", namespace_id=SPACE.namespace_id, prefix=f"{2:032x}"))
    instant.log(Tick(2 * S))
    assert [move.deletion for move in instant.fold.moves.open.values()] == ["d-2"], "nor while a plan waits"
    decide(instant, "approve")
    assert len(instant.fold.moves.open) == 1
    assert "its block has an open move already" in left_out(instant)[0][1]
    require_same_after_restore(instant)


@pytest.mark.parametrize("policy", [{"approve": False, "dry_run": True}, {"approve": True}])
def test_a_plan_is_applied_at_once_in_a_dry_run_and_instead_of_the_one_that_waits(policy: dict[str, Any]) -> None:
    instant = begun(policy)
    if policy["approve"]:
        instant.log(Tick(S))
        instant.use([1, 2], SPACE)
        first = waiting(instant)
    instant.log(OperatorEntry("ann", "apply"))
    assert brought(list(instant.fold.moves.open.values())) == [(1, "fast"), (2, "fast")]
    assert (last(instant).state, last(instant).actor, last(instant).opened_total) == (PlanState.APPROVED, "ann", 2)
    if policy["approve"]:
        assert first.state is PlanState.WITHDRAWN
    require_same_after_restore(instant)


def test_nothing_is_applied_approved_or_tried_again_while_all_is_paused() -> None:
    instant = begun()
    instant.log(Tick(S))
    held = waiting(instant)
    instant.log(OperatorEntry("bo", "pause"))
    with pytest.raises(IllegalPlanStep, match="all moves are paused by an operator: POST /api/v1/resume"):
        instant.fold.require_unpaused()
    for action in ("apply", "approve", "retry"):
        instant.log(OperatorEntry("ann", action, move=held.plan_id))
    assert waiting(instant) is held
    assert sum(instant.fold.skipped.values()) == 3
    decide(instant, "reject")
    assert held.state is PlanState.REJECTED


def test_an_aborted_move_is_tried_again_and_says_so() -> None:
    instant = begun({"approve": False})
    instant.log(Tick(S))
    first, second = list(instant.fold.moves.open.values())
    with pytest.raises(IllegalMove, match=f"{first.move_id} is not aborted, or not kept any more"):
        instant.fold.retried(first.move_id, "ann", "")
    instant.log(OperatorEntry("bo", "cancel"))
    instant.log(OperatorEntry("ann", "retry", move=first.move_id))
    (fresh,) = instant.fold.moves.open.values()
    assert fresh.move_id == f"{instant.fold.position}-0"
    assert fresh.reason == f"retried by ann; {first.reason}"
    assert (fresh.kind, fresh.key, fresh.source, fresh.target) == (MoveKind.PROMOTE, first.key, "slow", "fast")
    instant.log(OperatorEntry("ann", "retry", move=first.move_id))
    assert instant.fold.skipped == {"operator action retry that cannot be": 1}, "it is open already"
    instant.carry_out_open()
    assert fresh.state is MoveState.KEPT
    remove(instant, "slow", 2)
    with pytest.raises(IllegalMove, match="not possible any more: promote: its block is not on slow any more"):
        instant.fold.retried(second.move_id, "ann", "")
    require_same_after_restore(instant)


def test_an_ordered_delete_is_not_tried_again_by_hand() -> None:
    instant = begun({"approve": False})
    instant.log(OperatorEntry("bo", "delete", deletion="d-1", namespace_id=SPACE.namespace_id, prefix=f"{1:032x}"))
    instant.log(Tick(S))
    order = next(move for move in instant.fold.moves.open.values() if move.deletion)
    instant.log(MoveStep("abort", [order.move_id], "the agent was away"))
    with pytest.raises(IllegalMove, match="is deletion d-1's, which frees its block by itself"):
        instant.fold.retried(order.move_id, "ann", "")


def test_a_plan_that_never_waited_and_one_that_ended_are_told_apart() -> None:
    instant = begun()
    instant.log(Tick(S))
    desk, held = instant.fold.plans, waiting(instant)
    with pytest.raises(IllegalPlanStep, match=rf"plan 9999 is not known: plan {held.plan_id} waits now"):
        desk.require_waiting("9999", S, 60.0)
    with pytest.raises(IllegalPlanStep, match=f"plan {held.plan_id} waits already"):
        desk.hold(held)
    decide(instant, "reject")
    with pytest.raises(IllegalPlanStep, match=f"plan {held.plan_id} is rejected already: none waits now"):
        desk.require_waiting(held.plan_id, S, 60.0)
    for _ in range(ENDED_KEPT_MAX + 3):
        instant.log(OperatorEntry("ann", "apply"))
    assert len(desk.ended) == ENDED_KEPT_MAX


def test_the_documented_diagram_is_the_table() -> None:
    page = Path(__file__).parents[2] / "docs" / "moves.md"
    assert diagram() in page.read_text(), "put advisor.plan_desk.diagram() into docs/moves.md"
