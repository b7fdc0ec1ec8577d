"""The sequence gate: order, copies, gaps, epochs, restarts that nobody announces."""

from __future__ import annotations

import pytest

from event_plane.sequence import (
    FOREIGN_VERDICTS,
    OWN_VERDICTS,
    REASON_CLOSED_EPOCH,
    REASON_EPOCH_ENDED,
    REASON_KIND,
    Accept,
    Action,
    Arrival,
    AskResend,
    Duplicate,
    Lost,
    Refused,
    SequenceGate,
    Standing,
)

PRODUCER = 7


def own(sequence: int, epoch: int = 1) -> Arrival:
    return Arrival(PRODUCER, epoch, sequence, checksum=1000 * epoch + sequence)


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


def test_gap_that_no_resend_fills_is_lost_after_the_last_attempt() -> None:
    gate = SequenceGate(resend_attempts_max=3)
    offer_all(gate, [own(0), own(5), own(6)])
    assert gate.resend_ended(PRODUCER, 0) == [AskResend(PRODUCER, 1)]
    assert gate.resend_ended(PRODUCER, 0) == [AskResend(PRODUCER, 1)]
    assert gate.resend_ended(PRODUCER, 0) == [
        Lost(PRODUCER, 1, from_sequence=1, through=4),
        Accept(own(5), 1, new_epoch=False),
        Accept(own(6), 1, new_epoch=False),
    ]
    assert gate.resend_ended(PRODUCER, 0) == []


def test_resend_that_never_comes_is_asked_for_again_at_each_deadline() -> None:
    gate = SequenceGate(resend_wait_us=100, resend_attempts_max=2)
    offer_all(gate, [own(0), own(2)], now_us=1000)
    assert gate.tick(1099) == []
    assert gate.tick(1100) == [AskResend(PRODUCER, 1)]
    assert gate.tick(1199) == []
    assert gate.tick(1200) == [Lost(PRODUCER, 1, 1, 1), Accept(own(2), 1, new_epoch=False)]


def test_resend_that_makes_progress_is_waited_for() -> None:
    gate = SequenceGate(resend_wait_us=100, resend_attempts_max=1)
    offer_all(gate, [own(0), own(4)], now_us=1000)
    gate.offer(own(1), 1090)
    assert gate.tick(1150) == []
    gate.offer(own(2), 1180)
    assert gate.tick(1279) == []
    assert accepted(gate.tick(1280)) == [(1, 4)]


def test_gap_older_than_the_buffer_loses_only_what_the_buffer_lacks() -> None:
    gate = SequenceGate(resend_attempts_max=1)
    offer_all(gate, [own(0), own(9), own(5), own(6), own(7), own(8)])
    actions = gate.resend_ended(PRODUCER, 0)
    assert actions[0] == Lost(PRODUCER, 1, 1, 4)
    assert accepted(actions) == [(1, 5), (1, 6), (1, 7), (1, 8), (1, 9)]


def test_second_gap_is_asked_for_when_the_first_is_given_up() -> None:
    gate = SequenceGate(resend_attempts_max=1)
    offer_all(gate, [own(0), own(2), own(4)])
    assert gate.resend_ended(PRODUCER, 0) == [
        Lost(PRODUCER, 1, 1, 1), Accept(own(2), 1, new_epoch=False), AskResend(PRODUCER, 3),
    ]  # fmt: skip


def test_full_hold_gives_up_the_gap_at_once() -> None:
    gate = SequenceGate(hold_max=2)
    offer_all(gate, [own(0), own(5), own(6)])
    actions = gate.offer(own(7), 0)
    assert actions[0] == Lost(PRODUCER, 1, 1, 4)
    assert accepted(actions) == [(1, 5), (1, 6), (1, 7)]
    assert gate.waiting() == 0


def test_full_hold_keeps_a_batch_that_a_resend_brings() -> None:
    gate = SequenceGate(hold_max=2)
    offer_all(gate, [own(0), own(8), own(9)])
    actions = gate.offer(own(4), 0)
    assert actions[0] == Lost(PRODUCER, 1, 1, 3)
    assert accepted(actions) == [(1, 4)]
    assert actions[-1] == AskResend(PRODUCER, 5)
    assert gate.waiting() == 2


def test_epoch_attached_to_late_asks_from_its_start_and_then_is_partial() -> None:
    gate = SequenceGate(resend_attempts_max=1)
    assert gate.offer(own(3), 0) == [AskResend(PRODUCER, 0)]
    assert gate.cursor(PRODUCER) is None
    assert gate.resend_ended(PRODUCER, 0) == [Lost(PRODUCER, 1, 0, 2), Accept(own(3), 1, new_epoch=True)]


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
    assert gate.offer(own(3, epoch=2), 0) == [Duplicate(own(3, epoch=2))]
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


def test_every_standing_has_a_verdict() -> None:
    assert set(OWN_VERDICTS) == set(Standing)
    assert set(FOREIGN_VERDICTS) == set(Standing) - {Standing.CLOSED_EPOCH}


@pytest.mark.parametrize("name", ["hold_max", "resend_wait_us", "resend_attempts_max", "checksums_kept"])
def test_limits_below_one_are_named(name: str) -> None:
    with pytest.raises(ValueError, match=f"{name}=0"):
        SequenceGate(**{name: 0})
