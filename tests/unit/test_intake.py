"""What the intake makes of messages: garbage, foreign dialects, our own heartbeats and losses, late copies."""

from __future__ import annotations

import random
from typing import Any

import msgspec
import numpy as np
from structlog.testing import capture_logs

from advisor.entries import LogEntry, logged
from advisor.fold import Fold
from advisor.index import ArrayIndex, IndexSize
from advisor.intake import MISREAD, Cursors, Intake, SourceFacts, Taken, Unreadable
from advisor.pipeline import UNREADABLE_QUIET_S, UnreadableLog
from event_plane import wire
from event_plane.schema import RECORD_DTYPE, Batch, BatchKind, SnapshotRange, producer_id
from event_plane.sequence import PRODUCERS_MAX, REASON_LATE, REASON_PRODUCERS, SequenceGate, StreamState
from event_plane.transport import Message

PRODUCER = 7
NEGATIVE = -(2**62)
"""A hash as only SGLang writes it."""


def stored(*hashes: int) -> dict[str, Any]:
    return {
        "type": "BlockStored", "block_hashes": list(hashes), "parent_block_hash": None,
        "token_ids": list(range(16 * len(hashes))), "block_size": 16, "medium": "GPU",
    }  # fmt: skip


def removed(*hashes: int) -> dict[str, Any]:
    return {"type": "BlockRemoved", "block_hashes": list(hashes), "medium": "GPU"}


def foreign(sequence: int, *events: dict[str, Any], source: str = "engine", topic: bytes = b"kv") -> Message:
    return Message(source, topic, sequence, msgspec.msgpack.encode([float(sequence), list(events), 0]))


def ours(sequence: int, kind: BatchKind = BatchKind.EVENTS, epoch: int = 1, through: int | None = None) -> Message:
    snapshot = None if through is None else SnapshotRange(through=through)
    batch = Batch(PRODUCER, epoch, sequence, np.empty(0, RECORD_DTYPE), kind, snapshot=snapshot)
    return Message("core", b"", 0, wire.encode(batch))


class Advisor:
    """Intake and fold in a row, without a log between."""

    def __init__(self, *sources: SourceFacts, gate: SequenceGate | None = None) -> None:
        self.intake = Intake(sources or [SourceFacts("engine"), SourceFacts("core")], gate)
        self.fold = Fold(ArrayIndex(IndexSize.for_blocks(256, 1024)))
        self.log: list[LogEntry] = []

    def take(self, taken: Taken) -> Taken:
        for accepted in taken.accepted:
            self.log.append(logged(len(self.log) + 1, accepted.entry, 0))
            self.fold.apply(self.log[-1], accepted.batch)
        return taken

    def offer(self, *messages: Message, now_us: int = 0) -> list[Taken]:
        return [self.take(self.intake.offer(message, now_us)) for message in messages]

    def live(self) -> set[int]:
        return {block.key.sequence_hash for block in self.fold.index.page(limit=1_000)[0]}


def test_a_thousand_different_garbage_messages_are_one_reason_and_each_says_its_detail() -> None:
    chance = random.Random(1)
    for dialect, reason in (("vllm", "undecodable message"), ("kvadvisor", "undecodable batch")):
        intake = Intake([SourceFacts("engine", dialect)])
        details = set()
        for number in range(1_000):
            garbage = b"\xc1" + chance.randbytes(chance.randrange(200))
            (unreadable,) = intake.offer(Message("engine", b"", number, garbage), 0).unreadable
            assert (unreadable.source, unreadable.reason) == ("engine", reason)
            details.add(unreadable.detail)
        assert intake.refused == {reason: 1_000}
        assert len(details) > 100


def test_unreadable_messages_are_said_once_per_source_and_reason_then_once_a_minute() -> None:
    said = UnreadableLog()
    with capture_logs() as lines:
        for number in range(100):
            said.say(Unreadable("engine", "undecodable message", f"message {number}"), 10.0 + number / 100)
        said.say(Unreadable("core", "undecodable batch", "cut"), 11.0)
        said.say(Unreadable("engine", "undecodable batch", "cut too"), 11.0)
        said.say(Unreadable("engine", "undecodable message", "a minute later"), 10.0 + UNREADABLE_QUIET_S)
    assert [(line["source"], line["event"], line["detail"], line["unsaid"]) for line in lines] == [
        ("engine", "undecodable message", "message 0", 0),
        ("core", "undecodable batch", "cut", 0),
        ("engine", "undecodable batch", "cut too", 0),
        ("engine", "undecodable message", "a minute later", 99),
    ]


# -- our own


def test_heartbeat_is_counted_not_logged_and_shows_a_lost_tail() -> None:
    advisor = Advisor()
    advisor.offer(ours(0))
    (taken,) = advisor.offer(ours(2, BatchKind.HEARTBEAT))
    assert (taken.accepted, taken.resends) == ([], [("core", PRODUCER, 1)])
    assert advisor.intake.heartbeats == {"core": 1}
    assert advisor.intake.gaps_open() == {"core": 1}


def test_gap_that_resends_do_not_fill_asks_the_producer_for_a_snapshot() -> None:
    advisor = Advisor(gate=SequenceGate(resend_attempts_max=1))
    advisor.offer(ours(0), ours(4))
    assert advisor.intake.resend_ended("core", 0, PRODUCER).snapshots == [("core", PRODUCER, 1)]
    (taken,) = advisor.offer(ours(6, BatchKind.SNAPSHOT_BEGIN))
    assert [each.batch.sequence for each in taken.accepted] == [6]
    assert taken.acknowledged == [("core", PRODUCER, 1, 6)]
    assert advisor.intake.snapshots == {PRODUCER: 1}


def test_gap_is_lost_where_neither_resend_nor_snapshot_can_be_asked_for() -> None:
    advisor = Advisor()
    advisor.offer(ours(0), ours(4))
    assert advisor.intake.cannot_resend("core", 0, PRODUCER).snapshots == [("core", PRODUCER, 1)]
    taken = advisor.take(advisor.intake.cannot_ask_snapshot(PRODUCER, 0))
    assert [(each.batch.kind, each.batch.sequence) for each in taken.accepted] == [
        (BatchKind.LOST, 1), (BatchKind.EVENTS, 4),
    ]  # fmt: skip
    assert advisor.intake.lost == {PRODUCER: 3}


def test_loss_that_the_publisher_tells_of_is_logged_and_asks_for_its_snapshot() -> None:
    advisor = Advisor()
    advisor.offer(ours(0), ours(1, BatchKind.LOST, through=1))
    assert advisor.intake.tick(0).snapshots == [("core", PRODUCER, 1)]
    assert advisor.fold.producers[PRODUCER].partial
    assert advisor.offer(ours(2))[0].resends == []


def test_wanted_snapshot_is_asked_for_a_few_times_and_no_more_once_it_came() -> None:
    advisor = Advisor()
    advisor.offer(ours(0))
    advisor.intake.want_snapshot(PRODUCER, 1)
    asked_us = [s * 1_000_000 for s in range(60) if advisor.intake.tick(s * 1_000_000).snapshots]
    assert asked_us == [0, 10_000_000, 20_000_000]
    advisor.intake.want_snapshot(PRODUCER, 1)
    assert advisor.intake.tick(0).snapshots == [("core", PRODUCER, 1)]
    advisor.offer(ours(1, BatchKind.SNAPSHOT_BEGIN), ours(2, BatchKind.SNAPSHOT_END))
    assert advisor.intake.tick(60_000_000).snapshots == []


def test_new_life_of_a_producer_needs_no_snapshot_of_the_former() -> None:
    advisor = Advisor()
    advisor.offer(ours(0), ours(1, BatchKind.LOST, through=1), ours(0, epoch=2))
    assert advisor.intake.tick(0).snapshots == []


def test_loss_that_a_publisher_tells_of_beyond_its_own_number_is_refused() -> None:
    (taken,) = Advisor().offer(ours(1, BatchKind.LOST, through=9))
    assert taken.accepted == []
    assert taken.unreadable[0].detail == "lost batch 1 says through 9: a publisher's own says its own number"


# -- where to go on


def test_source_is_asked_for_everything_at_first_and_then_from_each_producers_last_batch() -> None:
    advisor = Advisor()
    assert advisor.intake.connected("engine", 0).resends == [("engine", None, 0)]
    advisor.offer(foreign(0, stored(1)), foreign(1, stored(2)), foreign(0, stored(3), topic=b"other"))
    first, second = producer_id("engine/kv/dp0"), producer_id("engine/other/dp0")
    assert advisor.intake.connected("engine", 0).resends == [("engine", first, 1), ("engine", second, 0)]
    assert advisor.intake.resume("engine") == {first: (1, 1), second: (1, 0)}
    assert advisor.intake.resume("core") == {}


def test_only_foreign_producers_that_are_silent_are_probed() -> None:
    advisor = Advisor()
    assert advisor.intake.probe("engine", 10, 0).resends == [("engine", None, 0)]
    advisor.offer(foreign(0, stored(1)), now_us=100)
    advisor.offer(foreign(0, stored(2), topic=b"other"), ours(0), now_us=195)
    first = producer_id("engine/kv/dp0")
    assert advisor.intake.probe("engine", 50, 200).resends == [("engine", first, 0)]
    assert advisor.intake.probe("engine", 50, 210).resends == []
    assert advisor.intake.probe("core", 50, 10_000).resends == []


def test_cursors_restore_names_dialects_and_places() -> None:
    advisor = Advisor()
    advisor.offer(foreign(0, stored(NEGATIVE)), ours(0))
    copy = Intake([SourceFacts("engine"), SourceFacts("core")])
    copy.load(msgspec.msgpack.decode(msgspec.msgpack.encode(advisor.intake.cursors()), type=type(copy.cursors())))
    assert copy.cursors() == advisor.intake.cursors()
    assert copy.cursors().dialects == {"engine/kv": "sglang"}


# -- dialects


def test_sender_is_read_in_the_dialect_that_its_messages_show() -> None:
    advisor = Advisor()
    advisor.offer(foreign(0, stored(NEGATIVE)), foreign(1, stored(5)))
    schemes = {namespace.hash_scheme for namespace in advisor.fold.namespaces.values()}
    assert schemes == {"sglang"}
    assert not advisor.intake.refused


def test_sender_that_shows_another_dialect_later_is_read_anew_in_it() -> None:
    advisor = Advisor()
    _, told = advisor.offer(foreign(0, stored(4)), foreign(1, stored(NEGATIVE)))
    producer = producer_id("engine/kv/dp0")
    assert advisor.intake.refused[MISREAD] == 1
    assert told.resends == [("engine", producer, 0)]
    advisor.offer(foreign(0, stored(4)))
    assert {namespace.hash_scheme for namespace in advisor.fold.namespaces.values()} == {"vllm", "sglang"}
    state = advisor.fold.producers[producer]
    assert (state.epoch, state.sequence, state.epochs_closed) == (2, 1, 1)
    assert advisor.live() == {4, NEGATIVE & 0xFFFF_FFFF_FFFF_FFFF}


def test_configured_dialect_is_kept_whatever_the_messages_show() -> None:
    advisor = Advisor(SourceFacts("engine", "vllm"))
    advisor.offer(foreign(0, stored(4)), foreign(1, stored(NEGATIVE)))
    assert {namespace.hash_scheme for namespace in advisor.fold.namespaces.values()} == {"vllm"}
    assert advisor.intake.refused[MISREAD] == 0


def test_dialect_is_remembered_from_the_log() -> None:
    advisor = Advisor()
    advisor.offer(foreign(0, stored(NEGATIVE)))
    again = Advisor()
    for entry in advisor.log:
        again.intake.restore(entry, wire.decode(entry.payload))
        again.fold.apply(entry)
    again.offer(foreign(1, stored(6)))
    assert {namespace.hash_scheme for namespace in again.fold.namespaces.values()} == {"sglang"}


def test_dialect_told_after_a_restart_reads_anew_what_the_log_has_in_another() -> None:
    advisor = Advisor()
    advisor.offer(foreign(0, stored(4)))
    again = Advisor()
    for entry in advisor.log:
        again.intake.restore(entry, wire.decode(entry.payload))
        again.fold.apply(entry)
    again.offer(foreign(1, stored(NEGATIVE)), foreign(0, stored(4)))
    assert again.fold.producers[producer_id("engine/kv/dp0")].epochs_closed == 1
    assert again.live() == {4, NEGATIVE & 0xFFFF_FFFF_FFFF_FFFF}


# -- late


def test_a_late_replay_that_would_resurrect_a_removed_block_changes_nothing() -> None:
    advisor = Advisor()
    store, remove = foreign(0, stored(5)), foreign(1, removed(5))
    advisor.offer(store, remove, foreign(2, stored(6)))
    advisor.offer(store, remove, store)
    assert advisor.live() == {6}
    assert sum(advisor.intake.duplicates.values()) == 3


def test_a_late_replay_of_what_was_declared_lost_resurrects_nothing() -> None:
    advisor = Advisor()
    advisor.offer(foreign(0, stored(1)), foreign(2, removed(5)))
    advisor.take(advisor.intake.give_up("engine", 0))
    advisor.offer(foreign(3, stored(6)))
    advisor.offer(foreign(1, stored(5)))
    assert advisor.live() == {6}
    assert advisor.intake.refused[REASON_LATE] == 1
    (state,) = advisor.fold.producers.values()
    assert (state.epoch, state.partial) == (1, True)


def test_attaching_late_is_partial_until_the_engine_clears_everything() -> None:
    advisor = Advisor()
    advisor.offer(foreign(7, stored(1)))
    advisor.take(advisor.intake.give_up("engine", 0))
    (state,) = advisor.fold.producers.values()
    assert (state.partial, state.note[:12], state.sequence) == (True, "batches 0–6 ", 7)
    assert advisor.live() == {1}
    advisor.offer(foreign(8, {"type": "AllBlocksCleared"}))
    assert not state.partial


def test_engine_overtaking_the_cursor_while_we_were_away_is_a_new_life() -> None:
    advisor = Advisor()
    advisor.offer(foreign(0, stored(1)), foreign(1, stored(2)))
    producer = producer_id("engine/kv/dp0")
    advisor.take(advisor.intake.connected("engine", 0))
    second_life = [foreign(n, stored(100 + n)) for n in range(3)]
    (live,) = advisor.offer(second_life[2])
    assert live.accepted == []
    (answer,) = advisor.offer(second_life[1])
    assert answer.resends == [("engine", producer, 0)]
    advisor.offer(*second_life)
    assert advisor.live() == {100, 101, 102}
    assert advisor.fold.producers[producer].epochs_closed == 1


def test_nothing_is_remembered_of_producers_beyond_those_that_are_kept() -> None:
    intake = Intake([SourceFacts("engine"), SourceFacts("core")])
    states = [StreamState(1_000 + n, False, 1, 0, True, [], []) for n in range(PRODUCERS_MAX)]
    names = {state.producer: "core" for state in states}
    intake.load(Cursors(states, names))
    before = intake.cursors()
    for message in (ours(0), ours(0, BatchKind.HEARTBEAT), foreign(0, stored(1))):
        assert intake.offer(message, 0) == Taken()
    assert intake.refused == {REASON_PRODUCERS: 3}
    assert intake.cursors() == before
    assert intake.by_source({PRODUCER: 1, producer_id("engine/kv/dp0"): 1}) == {"": 2}
    assert not intake.probe("core", 0, 1).resends


def test_copy_of_a_publishers_own_loss_is_acknowledged_after_a_restart_too() -> None:
    before = Advisor()
    for message in (ours(0), ours(1, BatchKind.LOST, through=1)):
        before.take(before.intake.offer(message, 0))
    after = Intake([SourceFacts("core")])
    for entry in before.log:
        after.restore(entry, wire.decode(entry.payload))
    taken = after.offer(ours(1, BatchKind.LOST, through=1), 1)
    assert (taken.accepted, taken.acknowledged) == ([], [("core", PRODUCER, 1, 1)])
    assert not after.refused
