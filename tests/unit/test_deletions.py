"""Deletions in the fold: every copy on every volume, leaves first, proven by answers; a tenant stays refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from advisor.deletion_planning import WAVE_KEYS_MAX
from advisor.deletions import Deletion, DeletionState, Sweep, diagram
from advisor.entries import DeletionStep, EntryKind, LogEntry, MoveStep, OperatorEntry, OutcomeBatch, Tick, VolumeEntry
from advisor.fold import Fold
from advisor.fold_state import export_state, restore_state
from advisor.moves import MoveState
from advisor.policies.instant_moves import PRODUCER, InstantFold
from event_plane.schema import (
    RECORD_COUNT_MAX,
    Batch,
    BatchTables,
    EventRecord,
    EventType,
    Namespace,
    RecordFlag,
    to_records,
)

ACME, FORGE = Namespace(tenant="acme", model="m"), Namespace(tenant="forge", model="m")
SALTED = Namespace(tenant="acme", model="m", hash_root="salt")
FAST: dict[str, Any] = {"id": "fast", "speed_rank": 0, "capacity_blocks": 1_000}
SLOW: dict[str, Any] = {"id": "slow", "speed_rank": 1, "capacity_blocks": 1_000}
SECOND = 1_000_000


class Deleting(InstantFold):
    """Plans are carried out at once, and an agent that has freed everything answers when it is asked."""

    now_s = 0

    def order(self, deletion_id: str, **scope: Any) -> None:
        self.log(OperatorEntry("ann", "delete", deletion=deletion_id, **scope))

    def step(self) -> None:
        self.now_s += 2
        self.tick(self.now_s * SECOND)

    def answer(self, deletion_id: str, volume: str, **changes: Any) -> None:
        sweep = self.sweep(deletion_id, volume)
        whole = {"asked": len(sweep.keys), "missing": len(sweep.keys), "outcome": self.cursor()}
        self.log(DeletionStep(deletion_id, volume, sweep.wave, **(whole | changes)))

    def cursor(self) -> OutcomeBatch:
        producer = self.fold.producers.get(PRODUCER)
        return OutcomeBatch(PRODUCER, 1, -1 if producer is None else producer.sequence)

    def run(self, deletion_id: str, steps: int = 12) -> Deletion:
        """Until it has ended: each sweep that asks is answered."""
        for _ in range(steps):
            self.step()
            deletion = self.deletion(deletion_id)
            if not deletion.is_open:
                return deletion
            for sweep in deletion.sweeps.values():
                if sweep.is_asking and sweep.answer is None:
                    self.answer(deletion_id, sweep.volume)
        raise AssertionError(f"not ended within {steps} ticks: {self.deletion(deletion_id)}")

    def deletion(self, deletion_id: str) -> Deletion:
        found = self.fold.deletions.get(deletion_id)
        assert found is not None
        return found

    def sweep(self, deletion_id: str, volume: str) -> Sweep:
        return self.deletion(deletion_id).sweeps[volume]


def shelf(**policy: Any) -> Deleting:
    return Deleting([FAST, SLOW], {"admission": "touch-2", **policy})


def deletes(fold: Deleting) -> list[tuple[str, int]]:
    return [(move.source, move.key.sequence_hash) for move in fold.done if move.deletion]


def test_every_copy_on_every_volume_goes_leaves_first_and_nothing_of_others() -> None:
    fold = shelf()
    fold.store("slow", [1, 2, 3], ACME)
    fold.store("fast", [1, 2, 3], ACME)
    fold.store("slow", [11, 12], SALTED)
    fold.store("slow", [1, 2], FORGE)
    fold.order("d", tenant="acme")
    ended = fold.run("d")
    assert [h for volume, h in deletes(fold) if volume == "fast"] == [3, 2, 1]
    assert sorted(h for volume, h in deletes(fold) if volume == "slow") == [1, 2, 3, 11, 12]
    assert (ended.state, ended.blocks, ended.block_bytes) == (DeletionState.DONE, 8, 8 * 4_096)
    assert {sweep.volume: (sweep.blocks, sweep.asked) for sweep in ended.sweeps.values()} == {
        "fast": (3, 3),
        "slow": (5, 5),
    }
    assert [fold.held(h, ACME) for h in (1, 2, 3)] == [[], [], []]
    assert [fold.held(h, FORGE) for h in (1, 2)] == [["slow"], ["slow"]]
    assert fold.fold.deletions.deleted_blocks == 8


def test_it_is_not_done_before_every_key_was_answered_with_a_miss() -> None:
    fold = shelf()
    fold.store("slow", [1, 2], ACME)
    fold.order("d", tenant="acme")
    for _ in range(4):
        fold.step()
    assert fold.deletion("d").state is DeletionState.PROVING
    assert not fold.held(1, ACME)
    fold.answer("d", "slow", missing=1, found_bytes=4_096)
    fold.answer("d", "fast")
    fold.step()
    assert fold.deletion("d").state is DeletionState.PROVING
    assert (fold.sweep("d", "slow").found, fold.sweep("d", "slow").blocks) == (1, 3)
    fold.answer("d", "slow", asked=1, missing=1)
    fold.step()
    assert fold.deletion("d").state is DeletionState.PROVING
    fold.answer("d", "slow")
    fold.step()
    assert fold.deletion("d").state is DeletionState.DONE


def test_an_answer_counts_once_the_events_before_it_are_folded() -> None:
    fold = shelf()
    fold.store("slow", [1], ACME)
    fold.order("d", tenant="acme")
    for _ in range(3):
        fold.step()
    fold.answer("d", "fast")
    ahead = OutcomeBatch(PRODUCER, 1, fold.cursor().sequence + 1)
    fold.answer("d", "slow", outcome=ahead)
    fold.step()
    assert fold.deletion("d").state is DeletionState.PROVING
    fold.store("slow", [7], ACME)
    fold.step()
    assert fold.sweep("d", "slow").keys
    assert fold.run("d").blocks == 2
    assert not fold.held(7, ACME)


def test_an_answer_of_an_agents_former_life_is_asked_for_again() -> None:
    fold = shelf()
    fold.store("slow", [1], ACME)
    fold.order("d", tenant="acme")
    for _ in range(3):
        fold.step()
    fold.answer("d", "slow", outcome=OutcomeBatch(PRODUCER, 99, 5))
    fold.step()
    sweep = fold.sweep("d", "slow")
    assert (sweep.is_asking, sweep.answer) == (True, None)
    assert fold.run("d").state is DeletionState.DONE


def test_a_namespace_goes_and_the_tenants_other_namespaces_stay() -> None:
    fold = shelf()
    fold.store("slow", [1, 2], ACME)
    fold.store("slow", [11, 12], SALTED)
    fold.order("d", namespace_id=SALTED.namespace_id)
    assert fold.run("d").blocks == 2
    assert not fold.held(11, SALTED)
    assert fold.held(1, ACME) == ["slow"]
    assert not fold.fold.deletions.refused


def test_a_prefix_goes_with_all_that_follows_it() -> None:
    fold = shelf()
    fold.store("slow", [1, 2, 3, 4], ACME)
    fold.send([fold.event(EventType.STORE, "slow", h, ACME, 2, flags=RecordFlag.COPY) for h in (20, 21)])
    fold.store("slow", [9], ACME)
    fold.store("slow", [1, 2, 3], FORGE)
    fold.order("d", namespace_id=ACME.namespace_id, prefix=f"{2:032x}")
    assert fold.run("d").blocks == 5
    assert {h for _, h in deletes(fold)} == {2, 3, 4, 20, 21}
    assert deletes(fold)[-1] == ("slow", 2)
    assert fold.held(1, ACME) == fold.held(9, ACME) == fold.held(3, FORGE) == ["slow"]


@pytest.mark.parametrize("scope", [{"tenant": "nobody"}, {"namespace_id": 5}, {"namespace_id": 5, "prefix": "ab"}])
def test_what_nobody_has_is_asked_for_and_done(scope: dict[str, Any]) -> None:
    fold = shelf()
    fold.store("slow", [1], ACME)
    fold.order("d", **scope)
    ended = fold.run("d")
    asked = {sweep.asked for sweep in ended.sweeps.values()}
    assert (ended.state, ended.blocks, asked) == (DeletionState.DONE, 0, {1 if "prefix" in scope else 0})
    assert fold.held(1, ACME) == ["slow"]


@pytest.mark.parametrize(
    "scope",
    [
        {},
        {"tenant": "a", "namespace_id": 1},
        {"prefix": "ab"},
        {"namespace_id": 1, "prefix": "no hash"},
        {"namespace_id": 1, "prefix": "1" * 33},
        {"namespace_id": 1, "prefix": "-1"},
        {"tenant": "ü" * 129},
    ],
)
def test_an_order_without_one_clear_scope_changes_nothing(scope: dict[str, Any]) -> None:
    fold = shelf()
    fold.order("d", **scope)
    assert not fold.fold.deletions.open
    assert fold.fold.skipped["operator action delete that cannot be"] == 1


def test_a_second_deletion_of_the_same_joins_the_first_and_after_its_end_is_one_of_its_own() -> None:
    fold = shelf()
    fold.store("slow", [1], ACME)
    fold.order("d", tenant="acme")
    fold.order("e", tenant="acme")
    assert list(fold.fold.deletions.open) == ["d"]
    assert fold.run("d").blocks == 1
    fold.order("e", tenant="acme")
    assert fold.run("e").blocks == 0
    fold.order("d", tenant="forge")
    assert fold.fold.skipped["operator action delete that cannot be"] == 2


@pytest.mark.parametrize(
    ("scope", "words"),
    [
        ({"tenant": "acme"}, "tenant acme was deleted and is refused until it is enabled again"),
        ({"namespace_id": ACME.namespace_id}, "it is being deleted, by d"),
        ({"namespace_id": ACME.namespace_id, "prefix": "1"}, "it is being deleted, by d"),
    ],
)
def test_no_move_brings_blocks_anywhere_that_are_to_go_and_the_reason_is_said(
    scope: dict[str, Any], words: str
) -> None:
    fold = shelf(delete_moves_max=1)
    for namespace in (ACME, FORGE):
        fold.store("slow", [1, 2, 3], namespace)
        for _ in range(3):
            fold.use([1, 2, 3], namespace)
    fold.order("d", **scope)
    fold.step()
    assert fold.held(1, ACME) == ["slow"], "not its turn yet"
    assert {note.key.sequence_hash for note in fold.fold.refusals if note.reason == words} == {1, 2}
    assert [fold.held(h, FORGE) for h in (1, 2, 3)] == [["fast", "slow"]] * 3


def test_a_block_that_comes_back_is_deleted_again_and_counted_until_the_tenant_is_enabled() -> None:
    fold = shelf()
    fold.store("slow", [1], ACME)
    fold.order("d", tenant="acme")
    fold.run("d")
    fold.store("slow", [5, 6], ACME)
    fold.step()
    (again,) = fold.fold.deletions.open.values()
    assert (again.is_again, again.actor, again.scope.tenant) == (True, "advisor", "acme")
    assert fold.run(again.deletion_id).blocks == 2
    assert fold.fold.deletions.refused["acme"].returned_blocks == 2
    fold.log(OperatorEntry("ann", "enable", tenant="acme"))
    fold.store("slow", [5], ACME)
    for _ in range(3):
        fold.step()
    assert fold.held(5, ACME) == ["slow"]
    assert not fold.fold.deletions.open


def test_a_tenant_is_not_enabled_while_it_is_being_deleted() -> None:
    fold = shelf()
    fold.order("d", tenant="acme")
    fold.log(OperatorEntry("ann", "enable", tenant="acme"))
    assert "acme" in fold.fold.deletions.refused
    fold.log(OperatorEntry("ann", "enable", tenant="forge"))
    assert fold.fold.skipped["operator action enable that cannot be"] == 2


def test_a_promotion_that_has_not_begun_is_ended_and_one_under_way_is_awaited() -> None:
    fold = shelf()
    for h in (1, 2):
        fold.store("slow", [h], ACME)
        fold.use([h], ACME)
        fold.use([h], ACME)
    fold.log(Tick(2 * SECOND))
    begun, waiting = fold.fold.moves.open.values()
    fold.log(MoveStep("begin", [begun.move_id]))
    fold.order("d", tenant="acme")
    fold.log(Tick(4 * SECOND))
    assert (waiting.state, waiting.note) == (MoveState.ABORTED, "its block is deleted, by d")
    assert begun.state is MoveState.COPYING
    ordered = [move for move in fold.fold.moves.open.values() if move.deletion]
    assert [move.key.sequence_hash for move in ordered] == [waiting.key.sequence_hash]
    h = begun.key.sequence_hash
    fold.store("fast", [h], ACME)
    for trigger in ("verify", "switch", "keep"):
        fold.log(MoveStep(trigger, [begun.move_id]))
    fold._carry_out([ordered[0]])
    fold.now_s = 4
    assert fold.run("d").blocks == 3
    assert not fold.held(h, ACME)


def test_pauses_and_dry_runs_hold_a_deletion_and_say_so() -> None:
    fold = shelf()
    fold.store("slow", [1], ACME)
    fold.store("fast", [2], ACME)
    fold.log(OperatorEntry("ann", "pause", "slow"))
    fold.order("d", tenant="acme")
    fold.step()
    fold.step()
    assert (fold.held(1, ACME), fold.held(2, ACME)) == (["slow"], [])
    fold.answer("d", "fast")
    fold.step()
    assert fold.deletion("d").state is DeletionState.WAITING
    assert fold.sweep("d", "slow").reason == "paused by an operator: resume it"
    fold.log(OperatorEntry("ann", "pause"))
    fold.log(OperatorEntry("ann", "resume", "slow"))
    fold.step()
    assert fold.deletion("d").state is DeletionState.WAITING
    fold.log(OperatorEntry("ann", "resume"))
    assert fold.run("d").state is DeletionState.DONE


def test_a_volume_that_is_away_keeps_it_open_and_others_are_finished() -> None:
    fold = shelf()
    fold.store("slow", [1], ACME)
    fold.store("fast", [2], ACME)
    slow = fold.fold.volumes["slow"].descriptor
    fold.log(VolumeEntry(slow, "agent", PRODUCER, away="its medium is absent"))
    fold.order("d", tenant="acme")
    for _ in range(3):
        fold.step()
    fold.answer("d", "fast")
    fold.step()
    assert (fold.deletion("d").state, fold.sweep("d", "fast").is_clear) == (DeletionState.WAITING, True)
    fold.log(VolumeEntry(slow, "agent", PRODUCER))
    assert fold.run("d").blocks == 2


def test_an_unregistered_volume_is_waited_for_until_it_is_back_or_the_deletion_is_abandoned() -> None:
    fold = shelf()
    fold.store("slow", [1], ACME)
    fold.order("d", tenant="acme")
    fold.log(Tick(SECOND))
    slow = fold.fold.volumes["slow"].descriptor
    fold.log(VolumeEntry(slow, "agent", PRODUCER, registered=False))
    fold.step()
    fold.answer("d", "fast")
    fold.step()
    assert fold.sweep("d", "slow").reason.startswith("slow is not registered: register it again")
    fold.log(OperatorEntry("bo", "abandon", deletion="d"))
    ended = fold.deletion("d")
    assert (ended.state, ended.note) == (DeletionState.FAILED, "given up by bo: not proven gone from slow")
    fold.log(VolumeEntry(slow, "agent", PRODUCER))
    fold.step()
    (again,) = fold.fold.deletions.open.values()
    assert fold.run(again.deletion_id).blocks == 1
    assert not fold.held(1, ACME)


def test_copies_in_engines_are_counted_and_left() -> None:
    fold = shelf()
    fold.store("slow", [1, 2], ACME)
    gpu = EventRecord(EventType.STORE, 1, 2, ACME, "gpu", 1, block_size=64, depth=1)
    fold.send([gpu])
    fold.order("d", tenant="acme")
    ended = fold.run("d")
    assert (ended.blocks, ended.engine_blocks, ended.left_blocks) == (2, 1, 0)
    assert fold.block(2, ACME) is not None


def test_a_prefix_that_is_stored_again_meanwhile_ends_all_the_same_and_says_what_it_left() -> None:
    fold = shelf()
    fold.store("slow", [1, 2, 3], ACME)
    fold.order("d", namespace_id=ACME.namespace_id, prefix=f"{1:032x}")
    for _ in range(3):
        fold.step()
    fold.answer("d", "fast")
    fold.store("slow", [1, 2, 3], ACME)
    fold.answer("d", "slow")
    fold.step()
    ended = fold.deletion("d")
    assert (ended.state, ended.blocks, ended.left_blocks) == (DeletionState.DONE, 3, 3)


def bulk(fold: InstantFold, kind: EventType, hashes: np.ndarray) -> None:
    """Many events on the slow volume at once."""
    tables = BatchTables()
    record = to_records([fold.event(kind, "slow", 1, ACME, flags=RecordFlag.COPY)], tables, 0)
    for part in np.array_split(hashes, -(-len(hashes) // RECORD_COUNT_MAX)):
        records = np.repeat(record, len(part))
        records["sequence_hash_lo"], records["depth"] = part, part % 50
        fold._sequence += 1
        batch = Batch(
            PRODUCER, 1, fold._sequence, records, namespaces=tuple(tables.namespaces), locations=tuple(tables.locations)
        )
        fold._apply(LogEntry(len(fold.entries) + 1, EntryKind.BATCH, b"", source="bulk"), batch)


@pytest.mark.parametrize("blocks", [20_000, pytest.param(100_000, marks=pytest.mark.long)])
def test_a_large_tenant_goes_in_bounded_steps(blocks: int) -> None:
    most = blocks // 10
    instant = InstantFold([{**SLOW, "capacity_blocks": 2 * blocks}], {"delete_moves_max": most}, blocks_max=2 * blocks)
    fold = instant.fold
    bulk(instant, EventType.STORE, np.arange(1, blocks + 1))
    instant.log(OperatorEntry("ann", "delete", deletion="d", tenant="acme"))
    sizes = []
    while "d" in fold.deletions.open:
        instant.log(Tick(len(instant.entries) * SECOND))
        moves = [move.move_id for move in fold.moves.open.values()]
        sizes.append(len(moves))
        assert len(sizes) < 40
        if moves:
            bulk(instant, EventType.REMOVE, np.array([m.key.sequence_hash for m in fold.moves.open.values()]))
            instant.log(MoveStep("switch", moves))
            instant.log(MoveStep("free", moves))
        for sweep in fold.deletions.open["d"].sweeps.values() if "d" in fold.deletions.open else ():
            if sweep.is_asking and sweep.answer is None:
                assert len(sweep.keys) <= WAVE_KEYS_MAX
                keys = len(sweep.keys)
                instant.log(DeletionStep("d", "slow", sweep.wave, keys, keys, outcome=OutcomeBatch(PRODUCER, 1, 0)))
    (deletion,) = fold.deletions.finished
    assert (deletion.state, deletion.blocks, deletion.sweeps["slow"].asked) == (DeletionState.DONE, blocks, blocks)
    assert max(sizes) == most
    assert len(fold.index) == 0


def test_the_documented_diagram_is_the_table() -> None:
    page = Path(__file__).resolve().parents[2] / "docs" / "deletions.md"
    assert diagram() in page.read_text(), "put advisor.deletions.diagram() into docs/deletions.md"


def test_the_log_folded_again_and_a_checkpoint_at_each_step_give_the_same_state() -> None:
    fold = shelf()
    fold.store("slow", [1, 2, 3], ACME)
    fold.store("fast", [1], ACME)
    fold.order("d", tenant="acme")
    fold.order("e", namespace_id=FORGE.namespace_id, prefix=f"{1 << 100:032x}")
    fold.run("d")
    fold.run("e")
    fold.store("slow", [5], ACME)
    fold.step()
    assert fold.refolded().digest() == fold.fold.digest()
    for through in range(1, len(fold.entries)):
        half = fold.refolded(through)
        restored = Fold(half.index)
        restore_state(restored, export_state(half))
        assert restored.digest() == half.digest()
        for entry in fold.entries[through : through + 3]:
            restored.apply(entry)
    whole = fold.refolded(len(fold.entries) // 2)
    resumed = Fold(whole.index)
    restore_state(resumed, export_state(whole))
    for entry in fold.entries[len(fold.entries) // 2 :]:
        resumed.apply(entry)
    assert resumed.digest() == fold.fold.digest()

