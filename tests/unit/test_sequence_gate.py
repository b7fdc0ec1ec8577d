"""The sequence gate: order, copies, gaps, epochs, restarts that nobody announces."""

from __future__ import annotations

from dataclasses import replace

import pytest

from event_plane.sequence import (
    CLOSED_EPOCHS_MAX,
    FOREIGN_REMEDIES,
    FOREIGN_VERDICTS,
    OWN_REMEDIES,
    OWN_VERDICTS,
    REASON_CLOSED_EPOCH,
    REASON_CROWDED,
    REASON_DISCONNECTED,
    REASON_EPOCH_ENDED,
    REASON_KIND,
    REASON_LATE,
    REASON_SUPERSEDED,
    Accept,
    Action,
    Arrival,
    AskResend,
    AskSnapshot,
    Duplicate,
    Lost,
    Refused,
    Remedy,
    SequenceGate,
    Standing,
)

PRODUCER = 7


def own(sequence: int, epoch: int = 1) -> Arrival:
    return Arrival(PRODUCER, epoch, sequence, checksum=1000 * epoch + sequence)


def begin(sequence: int, epoch: int = 1) -> Arrival:
    return Arrival(PRODUCER, epoch, sequence, checksum=1000 * epoch + sequence, begins_snapshot=True)


def foreign(sequence: int, life: int = 1) -> Arrival:
    return Arrival(PRODUCER, None, sequence, checksum=1000 * life + sequence)


def offer_all(gate: SequenceGate, arrivals: list[Arrival], now_us: int = 0) -> list[Action]:
    return [action for arrival in arrivals for action in gate.offer(arrival, now_us)]


def accepted(actions: list[Action]) -> list[tuple[int, int]]:
    return [(each.epoch, each.arrival.sequence) for each in actions if isinstance(each, Accept)]


def test_batches_in_order_are_accepted_and_the_first_opens_the_epoch() -> None:
    actions = offer_all(SequenceGate(), [own(0), own(1)])
    assert actions == [Accept(own(0), 1, new_epoch=True), Accept(own(1), 1, new_epoch=False)]


def test_batch_seen_twice_changes_nothing() -> None:
    gate = SequenceGate()
    offer_all(gate, [own(0), own(1)])
    assert gate.offer(own(0), 0) == [Duplicate(own(0))]
    assert gate.cursor(PRODUCER) == (1, 1)


def test_gap_asks_for_a_resend_and_holds_what_follows() -> None:
    gate = SequenceGate()
    actions = offer_all(gate, [own(0), own(2), own(3), own(2)])
    assert actions[1:] == [AskResend(PRODUCER, 1), Duplicate(own(2))]
    assert gate.waiting() == 2


def test_resent_batches_fill_the_gap_and_release_in_order() -> None:
    gate = SequenceGate()
    offer_all(gate, [own(0), own(4), own(3)])
    assert accepted(gate.offer(own(1), 0)) == [(1, 1)]
    assert accepted(gate.offer(own(2), 0)) == [(1, 2), (1, 3), (1, 4)]
    assert gate.waiting() == 0
    assert gate.resend_ended(PRODUCER, 0) == []
    assert gate.tick(10**12) == []


def test_foreign_gap_that_no_resend_fills_is_lost_after_the_last_attempt() -> None:
    gate = SequenceGate(resend_attempts_max=3)
    offer_all(gate, [foreign(0), foreign(5), foreign(6)])
    assert gate.resend_ended(PRODUCER, 0) == [AskResend(PRODUCER, 0)]
    assert gate.resend_ended(PRODUCER, 0) == [AskResend(PRODUCER, 0)]
    assert gate.resend_ended(PRODUCER, 0) == [
        Lost(PRODUCER, 1, from_sequence=1, through=4),
        Accept(foreign(5), 1, new_epoch=False),
        Accept(foreign(6), 1, new_epoch=False),
    ]
    assert gate.resend_ended(PRODUCER, 0) == []


def test_gap_older_than_the_buffer_asks_for_a_snapshot_and_goes_on_holding() -> None:
    gate = SequenceGate(resend_attempts_max=2)
    offer_all(gate, [own(0), own(5), own(6)])
    assert gate.resend_ended(PRODUCER, 0) == [AskResend(PRODUCER, 1)]
    assert gate.resend_ended(PRODUCER, 0) == [AskSnapshot(PRODUCER, 1)]
    assert gate.resend_ended(PRODUCER, 0) == []
    assert gate.offer(own(7), 0) == []
    assert gate.waiting() == 3


def test_snapshot_supersedes_what_is_held_below_it_and_the_stream_goes_on_from_there() -> None:
    gate = SequenceGate(resend_attempts_max=1)
    offer_all(gate, [own(0), own(5), own(9), own(6)])
    assert gate.resend_ended(PRODUCER, 0) == [AskSnapshot(PRODUCER, 1)]
    assert gate.offer(begin(8), 0) == [
        Refused(own(5), REASON_SUPERSEDED),
        Refused(own(6), REASON_SUPERSEDED),
        Accept(begin(8), 1, new_epoch=False),
        Accept(own(9), 1, new_epoch=False),
    ]
    assert (gate.waiting(), gate.incomplete()) == (0, [])
    assert gate.offer(own(7), 0) == [Duplicate(own(7))]


def test_snapshot_ahead_leaves_nothing_to_ask_for() -> None:
    gate = SequenceGate()
    assert offer_all(gate, [own(0), begin(4)])[1:] == [Accept(begin(4), 1, new_epoch=False)]
    assert gate.offer(begin(7, epoch=2), 0) == [Accept(begin(7, epoch=2), 2, new_epoch=True)]
    assert gate.cursor(PRODUCER) == (2, 7)


def test_late_copy_of_a_snapshot_is_a_duplicate() -> None:
    gate = SequenceGate()
    offer_all(gate, [own(0), begin(1), own(2)])
    assert gate.offer(begin(1), 0) == [Duplicate(begin(1))]


def test_snapshot_that_never_comes_is_asked_for_again_and_then_what_is_missing_is_lost() -> None:
    gate = SequenceGate(resend_attempts_max=1, snapshot_wait_us=100, snapshot_attempts_max=2)
    offer_all(gate, [own(0), own(5)])
    assert gate.resend_ended(PRODUCER, 1000) == [AskSnapshot(PRODUCER, 1)]
    assert gate.tick(1099) == []
    assert gate.tick(1100) == [AskSnapshot(PRODUCER, 1)]
    assert gate.tick(1200) == [Lost(PRODUCER, 1, 1, 4), Accept(own(5), 1, new_epoch=False)]


def test_source_that_cannot_resend_our_batches_is_asked_for_a_snapshot_at_once() -> None:
    gate = SequenceGate()
    offer_all(gate, [own(0), own(5)])
    assert gate.cannot_resend(PRODUCER, 0) == [AskSnapshot(PRODUCER, 1)]
    assert gate.cannot_resend(PRODUCER, 0) == []
    assert gate.give_up(PRODUCER, 0) == [Lost(PRODUCER, 1, 1, 4), Accept(own(5), 1, new_epoch=False)]


def test_source_that_cannot_resend_loses_a_foreign_gap_at_once() -> None:
    gate = SequenceGate()
    offer_all(gate, [foreign(0), foreign(5)])
    assert gate.cannot_resend(PRODUCER, 0) == [Lost(PRODUCER, 1, 1, 4), Accept(foreign(5), 1, new_epoch=False)]


def test_resend_that_never_comes_is_asked_for_again_at_each_deadline() -> None:
    gate = SequenceGate(resend_wait_us=100, resend_attempts_max=2)
    offer_all(gate, [foreign(0), foreign(2)], now_us=1000)
    assert gate.tick(1099) == []
    assert gate.tick(1100) == [AskResend(PRODUCER, 0)]
    assert gate.tick(1199) == []
    assert gate.tick(1200) == [Lost(PRODUCER, 1, 1, 1), Accept(foreign(2), 1, new_epoch=False)]


def test_resend_that_makes_progress_is_waited_for() -> None:
    gate = SequenceGate(resend_wait_us=100, resend_attempts_max=1)
    offer_all(gate, [foreign(0), foreign(4)], now_us=1000)
    gate.offer(foreign(1), 1090)
    assert gate.tick(1150) == []
    gate.offer(foreign(2), 1180)
    assert gate.tick(1279) == []
    assert accepted(gate.tick(1280)) == [(1, 4)]


def test_gap_older_than_the_buffer_loses_only_what_the_buffer_lacks() -> None:
    gate = SequenceGate(resend_attempts_max=1)
    offer_all(gate, [foreign(n) for n in (0, 9, 5, 6, 7, 8)])
    actions = gate.resend_ended(PRODUCER, 0)
    assert actions[0] == Lost(PRODUCER, 1, 1, 4)
    assert accepted(actions) == [(1, 5), (1, 6), (1, 7), (1, 8), (1, 9)]


def test_second_gap_is_asked_for_when_the_first_is_given_up() -> None:
    gate = SequenceGate(resend_attempts_max=1)
    offer_all(gate, [foreign(0), foreign(2), foreign(4)])
    assert gate.resend_ended(PRODUCER, 0) == [
        Lost(PRODUCER, 1, 1, 1), Accept(foreign(2), 1, new_epoch=False), AskResend(PRODUCER, 2),
    ]  # fmt: skip


def test_full_hold_gives_up_a_foreign_gap_at_once() -> None:
    gate = SequenceGate(hold_max=2)
    offer_all(gate, [foreign(0), foreign(5), foreign(6)])
    actions = gate.offer(foreign(7), 0)
    assert actions[0] == Lost(PRODUCER, 1, 1, 4)
    assert accepted(actions) == [(1, 5), (1, 6), (1, 7)]
    assert gate.waiting() == 0


def test_full_hold_of_our_own_asks_for_a_snapshot_and_lets_the_oldest_go() -> None:
    gate = SequenceGate(hold_max=2)
    offer_all(gate, [own(0), own(5), own(6)])
    assert gate.offer(own(7), 0) == [Refused(own(5), REASON_CROWDED), AskSnapshot(PRODUCER, 1)]
    assert gate.offer(own(8), 0) == [Refused(own(6), REASON_CROWDED)]
    assert gate.waiting() == 2
    assert accepted(gate.offer(begin(9), 0)) == [(1, 9)]


def test_closed_epochs_are_remembered_up_to_a_bound_and_the_oldest_go_first() -> None:
    gate = SequenceGate()
    for epoch in range(CLOSED_EPOCHS_MAX + 2):
        gate.offer(own(0, epoch), 0)
    (state,) = gate.export()
    assert state.closed == list(range(1, CLOSED_EPOCHS_MAX + 1))
    assert gate.offer(own(5, 1), 0) == [Refused(own(5, 1), REASON_CLOSED_EPOCH)]


def test_hold_is_bounded_by_bytes_too() -> None:
    gate = SequenceGate(hold_bytes_max=250)
    gate.offer(own(0), 0)
    large = [replace(own(sequence), payload_bytes=100) for sequence in (2, 3, 4, 5)]
    assert gate.offer(large[0], 0) == [AskResend(PRODUCER, 1)]
    assert gate.offer(large[1], 0) == []
    assert gate.offer(large[2], 0) == [Refused(large[0], REASON_CROWDED), AskSnapshot(PRODUCER, 1)]
    assert gate.offer(large[3], 0) == [Refused(large[1], REASON_CROWDED)]
    assert gate.waiting() == 2


def test_bytes_of_what_was_released_count_no_more() -> None:
    gate = SequenceGate(hold_bytes_max=250)
    gate.offer(own(0), 0)
    for first in range(1, 40, 3):
        sizes = [replace(own(sequence), payload_bytes=100) for sequence in (first, first + 1, first + 2)]
        gate.offer(sizes[1], 0)
        gate.offer(sizes[2], 0)
        assert [type(action) for action in gate.offer(sizes[0], 0)] == [Accept] * 3


def test_what_went_for_want_of_room_is_lost_with_the_gap() -> None:
    gate = SequenceGate(hold_max=2)
    offer_all(gate, [own(0), own(5), own(6), own(7)])
    actions = gate.give_up(PRODUCER, 0)
    assert actions[0] == Lost(PRODUCER, 1, 1, 5)
    assert accepted(actions) == [(1, 6), (1, 7)]


def test_full_hold_keeps_a_batch_that_a_resend_brings() -> None:
    gate = SequenceGate(hold_max=2)
    offer_all(gate, [foreign(0), foreign(8), foreign(9)])
    actions = gate.offer(foreign(4), 0)
    assert actions[0] == Lost(PRODUCER, 1, 1, 3)
    assert accepted(actions) == [(1, 4)]
    assert actions[-1] == AskResend(PRODUCER, 4)
    assert gate.waiting() == 2


def test_epoch_attached_to_late_asks_from_its_start_and_then_is_partial() -> None:
    gate = SequenceGate(resend_attempts_max=1)
    assert gate.offer(foreign(3), 0) == [AskResend(PRODUCER, 0)]
    assert gate.cursor(PRODUCER) is None
    assert gate.resend_ended(PRODUCER, 0) == [Lost(PRODUCER, 1, 0, 2), Accept(foreign(3), 1, new_epoch=True)]


def test_unseen_epoch_closes_the_older_for_good() -> None:
    gate = SequenceGate()
    offer_all(gate, [own(0), own(1), own(3)])
    actions = gate.offer(own(0, epoch=2), 0)
    assert actions == [Refused(own(3), REASON_EPOCH_ENDED), Accept(own(0, epoch=2), 2, new_epoch=True)]
    assert gate.offer(own(2), 0) == [Refused(own(2), REASON_CLOSED_EPOCH)]
    assert gate.offer(own(1), 0) == [Refused(own(1), REASON_CLOSED_EPOCH)]
    assert gate.cursor(PRODUCER) == (2, 0)


def test_foreign_epochs_are_assigned_from_one() -> None:
    gate = SequenceGate()
    assert accepted(offer_all(gate, [foreign(0), foreign(1)])) == [(1, 0), (1, 1)]


def test_foreign_copy_with_the_kept_checksum_is_a_duplicate() -> None:
    gate = SequenceGate()
    offer_all(gate, [foreign(0), foreign(1)])
    assert gate.offer(foreign(0), 0) == [Duplicate(foreign(0))]


def test_foreign_restart_shows_by_other_bytes_under_a_known_number() -> None:
    gate = SequenceGate()
    offer_all(gate, [foreign(0), foreign(1), foreign(2)])
    assert gate.offer(foreign(0, life=2), 0) == [Accept(foreign(0, life=2), 2, new_epoch=True)]
    assert gate.cursor(PRODUCER) == (2, 0)


def test_foreign_number_whose_checksum_was_forgotten_is_a_restart() -> None:
    gate = SequenceGate(checksums_kept=2)
    offer_all(gate, [foreign(0), foreign(1), foreign(2)])
    assert gate.offer(foreign(1), 0) == [Duplicate(foreign(1))]
    assert accepted(gate.offer(foreign(0), 0)) == [(2, 0)]


def test_foreign_restart_in_the_middle_asks_from_the_start_of_its_epoch() -> None:
    gate = SequenceGate()
    offer_all(gate, [foreign(0), foreign(1), foreign(2)])
    assert gate.offer(foreign(2, life=2), 0) == [AskResend(PRODUCER, 0)]
    assert accepted(offer_all(gate, [foreign(0, life=2), foreign(1, life=2)])) == [(2, 0), (2, 1), (2, 2)]


def test_foreign_gap_is_asked_for_from_the_last_one_so_that_an_overtaking_restart_shows() -> None:
    gate = SequenceGate()
    offer_all(gate, [foreign(0), foreign(1)])
    assert gate.offer(foreign(9, life=2), 0) == [AskResend(PRODUCER, 1)]
    actions = gate.offer(foreign(1, life=2), 0)
    assert actions == [Refused(foreign(9, life=2), REASON_EPOCH_ENDED), AskResend(PRODUCER, 0)]
    assert gate.waiting() == 1


def test_other_bytes_under_a_held_number_are_a_restart() -> None:
    gate = SequenceGate()
    offer_all(gate, [foreign(0), foreign(5)])
    actions = gate.offer(foreign(5, life=2), 0)
    assert actions == [Refused(foreign(5), REASON_EPOCH_ENDED), AskResend(PRODUCER, 0)]


def test_producer_cannot_be_both_foreign_and_ours() -> None:
    gate = SequenceGate()
    gate.offer(own(0), 0)
    assert gate.offer(foreign(1), 0) == [Refused(foreign(1), REASON_KIND)]


def test_producers_do_not_disturb_each_other() -> None:
    gate = SequenceGate()
    other = Arrival(8, 1, 0, 0)
    gate.offer(own(3), 0)
    assert gate.offer(other, 0) == [Accept(other, 1, new_epoch=True)]
    assert gate.producers() == [PRODUCER, 8]
    assert gate.cursor(9) is None


def test_restored_gate_goes_on_where_the_log_ends() -> None:
    gate = SequenceGate()
    gate.restore(PRODUCER, 1, 0, None, foreign=False)
    gate.restore(PRODUCER, 2, 0, None, foreign=False)
    gate.restore(PRODUCER, 2, 1, None, foreign=False, through=4)
    gate.restore(PRODUCER, 2, 5, None, foreign=False)
    assert gate.cursor(PRODUCER) == (2, 5)
    assert gate.offer(own(0), 0) == [Refused(own(0), REASON_CLOSED_EPOCH)]
    assert gate.offer(own(0, epoch=2), 0) == [Duplicate(own(0, epoch=2))]
    assert gate.offer(own(3, epoch=2), 0) == [Refused(own(3, epoch=2), REASON_LATE)]
    assert gate.offer(own(6, epoch=2), 0) == [Accept(own(6, epoch=2), 2, new_epoch=False)]


def test_restored_foreign_producer_keeps_its_epoch_and_checksums() -> None:
    gate = SequenceGate()
    gate.restore(PRODUCER, 4, 0, foreign(0).checksum, foreign=True)
    gate.restore(PRODUCER, 4, 1, foreign(1).checksum, foreign=True)
    assert gate.offer(foreign(1), 0) == [Duplicate(foreign(1))]
    assert accepted(gate.offer(foreign(2), 0)) == [(4, 2)]
    assert accepted(gate.offer(foreign(0, life=2), 0)) == [(5, 0)]


def test_gate_restored_between_a_loss_and_what_follows_asks_past_the_loss() -> None:
    gate = SequenceGate()
    gate.restore(PRODUCER, 1, 0, None, foreign=True, through=4)
    assert gate.offer(foreign(9), 0) == [AskResend(PRODUCER, 5)]


# -- heartbeats


def test_heartbeat_ahead_of_the_cursor_shows_a_lost_tail() -> None:
    gate = SequenceGate(resend_wait_us=100, resend_attempts_max=1, snapshot_attempts_max=1, snapshot_wait_us=100)
    offer_all(gate, [own(0)])
    assert gate.heartbeat(PRODUCER, 1, 0, 0) == []
    assert gate.heartbeat(PRODUCER, 1, 2, 0) == [AskResend(PRODUCER, 1)]
    assert gate.heartbeat(PRODUCER, 1, 2, 50) == []
    assert accepted(gate.offer(own(1), 60)) == [(1, 1)]
    assert gate.incomplete() == [PRODUCER]
    assert gate.tick(160) == [AskSnapshot(PRODUCER, 1)]
    assert gate.tick(260) == [Lost(PRODUCER, 1, 2, 2)]
    assert gate.cursor(PRODUCER) == (1, 2)


def test_heartbeat_that_tells_of_more_widens_what_is_missing() -> None:
    gate = SequenceGate()
    offer_all(gate, [own(0), own(3)])
    assert gate.heartbeat(PRODUCER, 1, 6, 0) == []
    assert offer_all(gate, [own(1), own(2)])[-1] == AskResend(PRODUCER, 4)
    assert accepted(offer_all(gate, [own(4), own(5), own(6)])) == [(1, 4), (1, 5), (1, 6)]
    assert gate.incomplete() == []


def test_heartbeat_of_an_unseen_epoch_opens_it() -> None:
    gate = SequenceGate()
    offer_all(gate, [own(0), own(2)])
    assert gate.heartbeat(PRODUCER, 2, 4, 0) == [Refused(own(2), REASON_EPOCH_ENDED), AskResend(PRODUCER, 0)]
    assert accepted(gate.offer(own(0, epoch=2), 0)) == [(2, 0)]
    (refused,) = gate.heartbeat(PRODUCER, 1, 9, 0)
    assert isinstance(refused, Refused)
    assert refused.reason == REASON_CLOSED_EPOCH


def test_heartbeat_of_a_producer_never_heard_of_asks_for_everything() -> None:
    assert SequenceGate().heartbeat(PRODUCER, 1, 4, 0) == [AskResend(PRODUCER, 0)]


def test_heartbeat_under_a_foreign_name_is_refused() -> None:
    gate = SequenceGate()
    gate.offer(foreign(0), 0)
    (refused,) = gate.heartbeat(PRODUCER, 1, 4, 0)
    assert isinstance(refused, Refused)
    assert refused.reason == REASON_KIND


# -- fences


def away(last: int = 2, **limits: int) -> SequenceGate:
    """A foreign producer was heard up to `last`, then the connection was lost and stands again."""
    gate = SequenceGate(**limits)
    offer_all(gate, [foreign(n) for n in range(last + 1)])
    assert gate.connected(PRODUCER, 0) == [AskResend(PRODUCER, last)]
    return gate


def test_engine_overtaking_the_cursor_while_we_were_away_is_seen_though_its_live_batch_came_first() -> None:
    gate = away()
    assert gate.offer(foreign(3, life=2), 0) == []
    actions = gate.offer(foreign(2, life=2), 0)
    assert actions == [Refused(foreign(3, life=2), REASON_EPOCH_ENDED), AskResend(PRODUCER, 0)]
    rest = offer_all(gate, [foreign(n, life=2) for n in (3, 0, 1)])
    assert accepted(rest) == [(2, 0), (2, 1), (2, 2), (2, 3)]


def test_live_batches_wait_until_the_same_engine_has_answered() -> None:
    gate = away()
    assert offer_all(gate, [foreign(4), foreign(3)]) == []
    actions = gate.offer(foreign(2), 0)
    assert actions[0] == Duplicate(foreign(2))
    assert accepted(actions) == [(1, 3), (1, 4)]


def test_what_was_missed_while_away_follows_the_answer() -> None:
    gate = away()
    assert offer_all(gate, [foreign(6)]) == []
    assert gate.offer(foreign(2), 0) == [Duplicate(foreign(2)), AskResend(PRODUCER, 2)]
    assert accepted(offer_all(gate, [foreign(3), foreign(4), foreign(5)])) == [(1, 3), (1, 4), (1, 5), (1, 6)]


def test_fence_waits_for_an_engine_that_is_away_and_from_its_first_message_on_for_an_answer() -> None:
    gate = away(resend_wait_us=100, resend_attempts_max=2)
    assert gate.tick(10**9) == []
    assert gate.offer(foreign(3), 10**9) == []
    assert gate.tick(10**9 + 99) == []
    assert gate.tick(10**9 + 100) == [AskResend(PRODUCER, 2)]
    assert accepted(gate.tick(10**9 + 200)) == [(1, 3)]


def test_source_that_cannot_resend_has_no_fence() -> None:
    gate = away()
    assert gate.offer(foreign(3), 0) == []
    assert accepted(gate.cannot_resend(PRODUCER, 0)) == [(1, 3)]


def overtaken(**limits: int) -> SequenceGate:
    """A foreign producer was away, nobody could send its batch 2 again, and what may be another's 3 came next."""
    gate = away(**limits)
    assert gate.cannot_resend(PRODUCER, 0) == []
    assert accepted(gate.offer(foreign(3, life=2), 0)) == [(1, 3)]
    return gate


def test_engine_that_went_on_in_anothers_place_is_seen_as_soon_as_it_can_resend() -> None:
    gate = overtaken()
    assert gate.probe(PRODUCER, 0) == [AskResend(PRODUCER, 2)]
    assert gate.offer(foreign(2, life=2), 0) == [AskResend(PRODUCER, 0)]
    assert accepted(offer_all(gate, [foreign(n, life=2) for n in (0, 1)])) == [(2, 0), (2, 1), (2, 2)]


def test_engine_that_went_on_in_anothers_place_is_seen_by_a_gap_and_by_a_gate_that_was_saved() -> None:
    saved = SequenceGate()
    saved.load(overtaken().export())
    assert saved.connected(PRODUCER, 0) == [AskResend(PRODUCER, 2)]
    gate = overtaken()
    assert gate.offer(foreign(5, life=2), 0) == [AskResend(PRODUCER, 2)]


def test_engine_that_lived_on_is_not_doubted_once_it_has_sent_its_known_batch_again() -> None:
    gate = away()
    gate.cannot_resend(PRODUCER, 0)
    gate.offer(foreign(3), 0)
    assert gate.probe(PRODUCER, 0) == [AskResend(PRODUCER, 2)]
    assert offer_all(gate, [foreign(2), foreign(3)]) == [Duplicate(foreign(2)), Duplicate(foreign(3))]
    assert gate.probe(PRODUCER, 0) == [AskResend(PRODUCER, 3)]


def test_batch_that_nobody_has_any_more_is_asked_for_no_longer() -> None:
    gate = overtaken(resend_attempts_max=2)
    assert gate.probe(PRODUCER, 0) == [AskResend(PRODUCER, 2)]
    assert gate.resend_ended(PRODUCER, 0) == [AskResend(PRODUCER, 2)]
    assert gate.resend_ended(PRODUCER, 0) == [AskResend(PRODUCER, 3)]
    assert gate.offer(foreign(3, life=2), 0) == [Duplicate(foreign(3, life=2))]
    assert gate.probe(PRODUCER, 0) == [AskResend(PRODUCER, 3)]
    forgetful = overtaken(checksums_kept=3)
    assert accepted(offer_all(forgetful, [foreign(n, life=2) for n in (4, 5)])) == [(1, 4), (1, 5)]
    assert forgetful.probe(PRODUCER, 0) == [AskResend(PRODUCER, 5)]


def test_more_than_may_be_held_behind_a_fence_lowers_it() -> None:
    gate = away(hold_max=2)
    assert offer_all(gate, [foreign(3), foreign(4)]) == []
    assert accepted(gate.offer(foreign(5), 0)) == [(1, 3), (1, 4), (1, 5)]


def test_engine_that_cannot_send_its_last_batch_has_begun_anew_and_is_asked_for_all() -> None:
    gate = away()
    assert gate.resend_ended(PRODUCER, 0) == [AskResend(PRODUCER, 0)]
    assert accepted(offer_all(gate, [foreign(0, life=2), foreign(1, life=2)])) == [(2, 0), (2, 1)]
    assert gate.resend_ended(PRODUCER, 0) == []


def test_engine_that_has_sent_nothing_since_it_began_anew_is_asked_once() -> None:
    gate = away()
    assert gate.resend_ended(PRODUCER, 0) == [AskResend(PRODUCER, 0)]
    assert gate.resend_ended(PRODUCER, 0) == []
    assert accepted(gate.offer(foreign(0, life=2), 0)) == [(2, 0)]


def test_restart_far_ahead_is_read_from_its_start_though_more_came_than_may_be_held() -> None:
    gate = away(hold_max=2)
    actions = offer_all(gate, [foreign(n, life=2) for n in range(2, 8)])
    assert [each for each in actions if isinstance(each, AskResend)] == [AskResend(PRODUCER, 0)]
    assert not any(isinstance(each, Lost) for each in actions)
    assert gate.waiting() == 2
    rest = offer_all(gate, [foreign(n, life=2) for n in range(8)])
    assert accepted(rest) == [(2, n) for n in range(8)]


def test_answer_that_begins_after_the_last_known_batch_is_a_gap_like_any_other() -> None:
    gate = away(resend_attempts_max=1)
    assert offer_all(gate, [foreign(6), foreign(7)]) == []
    assert gate.resend_ended(PRODUCER, 0) == [AskResend(PRODUCER, 2)]
    assert gate.resend_ended(PRODUCER, 0)[0] == Lost(PRODUCER, 1, 3, 5)


def test_answer_without_the_last_known_batch_but_with_what_follows_may_be_another_lifes() -> None:
    """A buffer that has passed the one batch that could tell: what it holds is no continuation of what we know."""
    gate = away(resend_attempts_max=2)
    assert offer_all(gate, [foreign(3, life=2), foreign(4, life=2)]) == []
    assert gate.resend_ended(PRODUCER, 0) == [AskResend(PRODUCER, 2)]
    actions = gate.resend_ended(PRODUCER, 0)
    assert accepted(actions) == []
    assert actions[-1] == AskResend(PRODUCER, 0)
    offer_all(gate, [foreign(3, life=2), foreign(4, life=2)])
    gate.resend_ended(PRODUCER, 0)
    lost, *rest = gate.resend_ended(PRODUCER, 0)
    assert lost == Lost(PRODUCER, 2, 0, 2)
    assert accepted(rest) == [(2, 3), (2, 4)]


def test_answer_that_lacked_the_last_known_batch_once_is_asked_for_again() -> None:
    gate = away()
    assert offer_all(gate, [foreign(3), foreign(4)]) == []
    assert gate.resend_ended(PRODUCER, 0) == [AskResend(PRODUCER, 2)]
    assert accepted(gate.offer(foreign(2), 0)) == [(1, 3), (1, 4)]


def test_probe_without_an_answer_is_asked_again_when_the_connection_stands_again() -> None:
    gate = SequenceGate()
    offer_all(gate, [foreign(0), foreign(1)])
    assert gate.probe(PRODUCER, 0) == [AskResend(PRODUCER, 1)]
    assert accepted(gate.offer(foreign(2, life=2), 0)) == [(1, 2)]
    assert gate.connected(PRODUCER, 0) == [AskResend(PRODUCER, 1)]
    assert gate.offer(foreign(1, life=2), 0) == [AskResend(PRODUCER, 0)]


def test_what_was_held_when_the_connection_was_lost_is_not_taken_for_the_next_lifes() -> None:
    gate = SequenceGate()
    offer_all(gate, [foreign(0), foreign(4)])
    assert gate.connected(PRODUCER, 0) == [Refused(foreign(4), REASON_DISCONNECTED), AskResend(PRODUCER, 0)]
    assert gate.waiting() == 0


def test_own_producer_is_asked_from_its_last_batch_when_it_can_be_heard_again() -> None:
    gate = SequenceGate()
    offer_all(gate, [own(0), own(1)])
    assert gate.connected(PRODUCER, 0) == [AskResend(PRODUCER, 1)]
    assert accepted(gate.offer(own(2), 0)) == [(1, 2)]
    assert gate.connected(99, 0) == []


def test_probe_finds_a_lost_tail_and_holds_nothing_back() -> None:
    gate = SequenceGate()
    offer_all(gate, [foreign(0), foreign(1)])
    assert gate.probe(PRODUCER, 0) == [AskResend(PRODUCER, 1)]
    assert gate.probe(PRODUCER, 0) == []
    assert accepted(gate.offer(foreign(2), 0)) == [(1, 2)]
    assert offer_all(gate, [foreign(1), foreign(2)]) == [Duplicate(foreign(1)), Duplicate(foreign(2))]
    assert gate.resend_ended(PRODUCER, 0) == []
    assert gate.probe(PRODUCER, 0) == [AskResend(PRODUCER, 2)]


def test_probe_finds_a_restart() -> None:
    gate = SequenceGate()
    offer_all(gate, [foreign(0), foreign(1)])
    gate.probe(PRODUCER, 0)
    assert gate.offer(foreign(1, life=2), 0) == [AskResend(PRODUCER, 0)]


def test_our_own_producers_are_not_probed() -> None:
    gate = SequenceGate()
    gate.offer(own(0), 0)
    assert gate.probe(PRODUCER, 0) == []
    assert gate.probe(99, 0) == []


# -- late


def partial(**limits: int) -> SequenceGate:
    """Of a foreign producer 0 … 4 were declared lost, 5 and 6 accepted."""
    gate = SequenceGate(**limits)
    offer_all(gate, [foreign(5), foreign(6)])
    gate.give_up(PRODUCER, 0)
    assert gate.cursor(PRODUCER) == (1, 6)
    return gate


def test_late_copy_of_what_was_declared_lost_is_dropped_and_the_engine_asked_who_it_is() -> None:
    gate = partial()
    assert gate.offer(foreign(3), 0) == [Refused(foreign(3), REASON_LATE), AskResend(PRODUCER, 6)]
    assert gate.offer(foreign(4), 0) == [Refused(foreign(4), REASON_LATE)]
    assert gate.offer(foreign(6), 0) == [Duplicate(foreign(6))]
    assert gate.offer(foreign(4), 1) == [Refused(foreign(4), REASON_LATE)]
    assert gate.cursor(PRODUCER) == (1, 6)


def test_restart_under_numbers_that_were_declared_lost_is_seen() -> None:
    gate = partial()
    assert gate.offer(foreign(0, life=2), 0) == [Refused(foreign(0, life=2), REASON_LATE), AskResend(PRODUCER, 6)]
    assert gate.resend_ended(PRODUCER, 0) == [AskResend(PRODUCER, 0)]
    assert accepted(gate.offer(foreign(0, life=2), 0)) == [(2, 0)]


def test_restart_under_lost_numbers_is_seen_of_an_engine_that_never_resends() -> None:
    gate = partial(resend_wait_us=100, resend_attempts_max=1)
    gate.offer(foreign(0, life=2), 0)
    assert gate.tick(100) == []
    assert gate.offer(foreign(1, life=2), 100) == [AskResend(PRODUCER, 0)]
    assert gate.cannot_resend(PRODUCER, 100)[0] == Lost(PRODUCER, 2, 0, 0)


def test_what_is_late_stays_late_for_a_restored_gate() -> None:
    gate = SequenceGate()
    gate.load(partial().export())
    assert gate.offer(foreign(3), 0)[0] == Refused(foreign(3), REASON_LATE)


# -- tables and limits


def test_producer_that_was_read_wrongly_begins_its_next_epoch() -> None:
    gate = SequenceGate()
    offer_all(gate, [foreign(0), foreign(1), foreign(4)])
    assert gate.restart(PRODUCER) == [Refused(foreign(4), REASON_EPOCH_ENDED)]
    assert gate.offer(foreign(5), 0) == [AskResend(PRODUCER, 0)]
    assert accepted(gate.offer(foreign(0), 0)) == [(2, 0)]
    assert gate.restart(99) == []


def test_every_standing_has_a_verdict() -> None:
    assert set(OWN_VERDICTS) == set(Standing) - {Standing.FENCED}
    assert set(FOREIGN_VERDICTS) == set(Standing) - {Standing.CLOSED_EPOCH, Standing.SNAPSHOT_AHEAD}


def test_every_remedy_has_a_successor_and_ends() -> None:
    assert set(OWN_REMEDIES) == set(Remedy)
    assert set(FOREIGN_REMEDIES) == {Remedy.RESEND}


@pytest.mark.parametrize(
    "name",
    [
        "hold_max", "resend_wait_us", "resend_attempts_max", "snapshot_wait_us", "snapshot_attempts_max",
        "checksums_kept",
    ],
)  # fmt: skip
def test_limits_below_one_are_named(name: str) -> None:
    with pytest.raises(ValueError, match=f"{name}=0"):
        SequenceGate(**{name: 0})
