"""What log entries say of one block."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from advisor.block_history import STEPS_AN_ENTRY_MAX, DamagedEntry, Sought, Trail
from advisor.block_views import BlockStep
from advisor.entries import (
    DeletionStep,
    EntryKind,
    LogEntry,
    MoveStep,
    NewEntry,
    OperatorEntry,
    OutcomeBatch,
    Tick,
    control_entry,
    logged,
)
from advisor.index import Key
from advisor.moves import Move, MoveKind
from event_plane import wire
from event_plane.schema import (
    Batch,
    BatchKind,
    BatchTables,
    EventRecord,
    EventType,
    Namespace,
    RecordFlag,
    SnapshotRange,
    to_records,
)
from tests.examples import examples

OURS, THEIRS = Namespace(tenant="acme", model="m"), Namespace(tenant="other", model="m")
HASH = (7 << 64) | 9
ENGINE, AGENT = 11, 2**64 - 1


def record(kind: EventType, number: int = HASH, **more: Any) -> EventRecord:
    fields: dict[str, Any] = {"tier": 1, "namespace": OURS, "location": "gpu", "block_size": 512}
    return EventRecord(kind, **{**fields, "sequence_hash": number, **more})


def batch(
    *records: EventRecord, producer: int = ENGINE, epoch: int = 1, sequence: int = 1, kind: BatchKind = BatchKind.EVENTS
) -> NewEntry:
    tables = BatchTables()
    rows = to_records(list(records), tables, 0)
    snapshot = SnapshotRange(through=sequence) if kind is BatchKind.LOST else None
    made = Batch(
        producer, epoch, sequence, rows, kind=kind, namespaces=tuple(tables.namespaces),
        locations=tuple(tables.locations), snapshot=snapshot,
    )  # fmt: skip
    return NewEntry(EntryKind.BATCH, wire.encode(made), producer, epoch, sequence, source="vllm")


def told(*entries: NewEntry, **sought: Any) -> list[BlockStep]:
    """Steps of a log of `entries`, oldest first."""
    trail = Trail(Sought(HASH, **sought), lambda entry: f"sentence {entry.position}")
    for position in range(len(entries), 0, -1):
        trail.follow(logged(position, entries[position - 1], position * 10))
    return trail.steps()[::-1]


def brief(steps: list[BlockStep]) -> list[tuple[int | None, str, str, int]]:
    return [(step.position, step.kind, step.place, step.hits) for step in steps]


def test_records_of_the_block_are_told_and_no_others() -> None:
    steps = told(
        batch(record(EventType.STORE), record(EventType.STORE, 9), record(EventType.STORE, 7 << 64)),
        batch(record(EventType.ACCESS, hits=3), record(EventType.ACCESS, 9, hits=5), record(EventType.ACCESS, hits=2)),
        control_entry(Tick(1)),
        batch(record(EventType.REMOVE), record(EventType.STORE, tier=2, location="cpu", flags=RecordFlag.COPY)),
        producers={ENGINE: ("pod-3", 1)},
    )
    assert brief(steps) == [
        (1, "stored", "pod-3/gpu", 0), (2, "accessed", "pod-3/gpu", 5), (4, "removed", "pod-3/gpu", 0),
        (4, "stored", "pod-3/cpu", 0),
    ]  # fmt: skip
    assert [step.text for step in steps] == ["stored, 512 B", "used 5 times", "no longer there", "copied there, 512 B"]
    assert {(step.namespace_id, step.group, step.producer, step.epoch) for step in steps} == {
        (f"{OURS.namespace_id:016x}", 0, "pod-3", "1")
    }
    assert [step.time_us for step in steps] == [10, 20, 40, 40]


def test_namespaces_groups_and_tenants_are_kept_apart() -> None:
    entries = [
        batch(record(EventType.STORE), record(EventType.STORE, namespace=THEIRS), record(EventType.STORE, group=4)),
    ]
    assert len(told(*entries)) == 3
    assert {step.namespace_id for step in told(*entries, namespace_id=THEIRS.namespace_id)} == {
        f"{THEIRS.namespace_id:016x}"
    }
    assert [step.group for step in told(*entries, group=4)] == [4]
    (own,) = told(*entries, tenant="other")
    assert (own.namespace_id, own.position) == (f"{THEIRS.namespace_id:016x}", None)
    assert told(*entries, tenant="nobody") == []


def test_a_clear_is_told_of_a_producer_that_placed_it_and_of_no_other() -> None:
    everything: dict[str, Any] = {"namespace": None, "location": None, "tier": 0, "sequence_hash": 0}
    steps = told(
        batch(record(EventType.STORE)),
        batch(record(EventType.CLEAR, **everything), producer=99),
        batch(record(EventType.CLEAR, namespace=THEIRS, location=None, tier=1, sequence_hash=0), sequence=2),
        batch(record(EventType.CLEAR, **{**everything, "tier": 1}), sequence=3),
        batch(sequence=4, kind=BatchKind.LOST),
        batch(producer=99, sequence=4, kind=BatchKind.LOST),
        namespace_id=OURS.namespace_id,
    )
    assert [(step.position, step.kind) for step in steps] == [(1, "stored"), (4, "cleared"), (5, "forgotten")]
    assert steps[1].text == "everything that its producer had placed in G1 was cleared"
    clears = [batch(record(EventType.CLEAR, **everything), sequence=9)]
    assert told(*clears) == []
    assert [step.kind for step in told(*clears, placers=frozenset({ENGINE}))] == ["cleared"]


def test_a_place_of_a_life_that_is_over_and_a_snapshots_word_say_so() -> None:
    (ended,) = told(batch(record(EventType.STORE), epoch=1), producers={ENGINE: ("pod", 2)})
    assert ended.text == "stored, 512 B; that life of its producer is over, and what it placed was forgotten with it"
    (stands,) = told(batch(record(EventType.STORE, block_size=0), kind=BatchKind.SNAPSHOT_CHUNK))
    assert stands.text == "stands in a snapshot of its producer"


def test_a_move_is_told_from_its_plan_to_the_copy_that_it_made() -> None:
    move = Move("1-0", MoveKind.PROMOTE, Key(OURS.namespace_id, 0, HASH), "slow", "fast", 512, "2nd touch", 0, 0)
    on_fast: dict[str, Any] = {"location": "fast", "tier": 3, "flags": RecordFlag.COPY}
    steps = told(
        control_entry(Tick(5)),
        control_entry(MoveStep("begin", ["1-0", "1-1"])),
        batch(record(EventType.STORE, **on_fast), producer=AGENT, epoch=3, sequence=8),
        control_entry(MoveStep("verify", ["1-0"], outcome=OutcomeBatch(AGENT, 3, 8))),
        control_entry(MoveStep("abort", ["1-0"], "cancelled by ann")),
        control_entry(MoveStep("begin", ["1-7"])),
        moves={"1-0": move},
        volumes=frozenset({(AGENT, "fast")}),
    )
    assert [(step.kind, step.place, step.move, step.text) for step in steps] == [
        ("planned", "", "1-0", "promote slow → fast planned: 2nd touch"),
        ("moved", "", "1-0", "promote: begin"),
        ("stored", "fast", "1-0", "copied there, 512 B, when its move took verify"),
        ("moved", "", "1-0", "promote: verify"),
        ("moved", "", "1-0", "promote: abort, cancelled by ann"),
    ]


def test_a_copy_of_a_move_that_is_forgotten_says_which_step_it_was_and_where_it_was_planned() -> None:
    entries = [
        batch(record(EventType.STORE, flags=RecordFlag.COPY), sequence=8),
        control_entry(MoveStep("verify", ["1-0", "1-1"], outcome=OutcomeBatch(ENGINE, 1, 8))),
    ]
    for either_order in (entries, entries[::-1]):
        (step,) = told(*either_order)
        assert step.text.endswith("one of 2 moves planned at position 1 took verify")
    (step,) = told(*entries)
    assert (step.move, step.text) == ("", "copied there, 512 B, when one of 2 moves planned at position 1 took verify")
    (step,) = told(*entries, tenant="acme")
    assert step.text == "copied there, 512 B, when one of 2 moves took verify"


def test_deletions_that_cover_it_are_told() -> None:
    steps = told(
        control_entry(OperatorEntry("ann", "delete", deletion="d-1", tenant="acme")),
        control_entry(OperatorEntry("ann", "delete", deletion="d-2", tenant="other")),
        control_entry(DeletionStep("d-1", "fast", 1, asked=4)),
        control_entry(OperatorEntry("ann", "pause")),
        deletions=frozenset({"d-1"}),
    )
    assert [(step.kind, step.text) for step in steps] == [
        ("deletion", "its deletion was ordered: d-1"), ("deletion", "sentence 3"),
    ]  # fmt: skip


def test_a_batch_that_names_it_everywhere_tells_of_the_first_places() -> None:
    many = [record(EventType.STORE, location=f"place-{number}") for number in range(STEPS_AN_ENTRY_MAX + 9)]
    assert len(told(batch(*many))) == STEPS_AN_ENTRY_MAX


@pytest.mark.parametrize("kind", [EntryKind.BATCH, EntryKind.MOVE])
def test_a_damaged_entry_is_named(kind: EntryKind) -> None:
    trail = Trail(Sought(HASH), lambda _: "")
    with pytest.raises(DamagedEntry, match="entry 77 of the log is damaged"):
        trail.follow(LogEntry(77, kind, b"\xc1nonsense"))


RECORDS = st.builds(
    record,
    st.sampled_from([EventType.STORE, EventType.REMOVE, EventType.ACCESS]),
    st.sampled_from([HASH, 9, 7 << 64, HASH + 1]),
    location=st.sampled_from(["gpu", "cpu"]),
    namespace=st.sampled_from([OURS, THEIRS]),
    group=st.integers(0, 1),
    hits=st.integers(0, 3),
)


@settings(max_examples=examples(60), deadline=None)
@given(st.lists(st.lists(RECORDS, max_size=6), max_size=6), st.sampled_from([None, "acme"]), st.sampled_from([None, 1]))
def test_steps_equal_a_plain_look_through_all_records(
    batches: list[list[EventRecord]], tenant: str | None, group: int | None
) -> None:
    words = {EventType.STORE: "stored", EventType.REMOVE: "removed", EventType.ACCESS: "accessed"}
    expected: list[tuple[int, str, str, int]] = []
    for number, records in enumerate(batches, 1):
        uses: dict[tuple[EventType, str, str, int], int] = {}
        for each in records:
            assert each.namespace is not None
            if each.sequence_hash == HASH and tenant in (None, each.namespace.tenant) and group in (None, each.group):
                said = (each.event_type, each.location or "", each.namespace.tenant, each.group)
                uses[said] = uses.get(said, 0) + max(each.hits, 1)
        expected += [
            (number * 10, words[kind], f"vllm/{location}", hits if kind is EventType.ACCESS else 0)
            for (kind, location, _, _), hits in uses.items()
        ]
    entries = [batch(*records, sequence=number) for number, records in enumerate(batches)]
    found = [(step.time_us, step.kind, step.place, step.hits) for step in told(*entries, tenant=tenant, group=group)]
    assert sorted(found) == sorted(expected)
