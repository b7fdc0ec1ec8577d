"""Which compactions are planned, in which order chains go, how long a volume rests, and the state table."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from advisor.compactions import (
    ABORTED_REST_S,
    TRANSITIONS,
    Compaction,
    CompactionKind,
    CompactionState,
    CompactionTable,
    CompactionTrigger,
    IllegalCompactionStep,
    diagram,
    keys_to_save,
)
from advisor.entries import CompactionStep
from advisor.index import ArrayIndex, IndexSize, Key, PlaceKey
from advisor.policies.budgets import Bucket
from advisor.policies.compaction import BLOCKS_MAX, CompactionProposal, charge, plan_compactions, spread_of
from advisor.policies.limits import Limits
from advisor.policies.plan import Volume
from event_plane.schema import BatchTables, EventRecord, EventType, Namespace, RecordFlag, to_records
from storage_agent.port import Fragmentation

NAMESPACE = Namespace(tenant="acme")
SCATTERED = Fragmentation(
    held_bytes=1 << 30, live_bytes=1 << 30, objects=1, objects_least=1, chains=16, chain_blocks=128, extents=128,
    extents_least=16.0,
)  # fmt: skip
TIDY = msgspec.structs.replace(SCATTERED, extents=16)
S = 1_000_000


class Scene:
    """One volume over an index, with readers; a minute passes before the first plan."""

    def __init__(self, tier: int = 3, reads: int = 600, **volume: Any) -> None:
        self.index = ArrayIndex(IndexSize.for_blocks(20_000, 40_000))
        place = self.index.place(PlaceKey(1, tier, "v"))
        self.index.set_volume(place, True)
        self.volume = Volume("v", "agent", place, tier, 0, 100_000, 0.9, 0.8, **volume)
        self.table = CompactionTable()
        self.buckets: dict[str, Bucket] = {}
        self.now_us = S
        self.number = 0
        self.put(1, 2, 3)
        if reads:
            self._send([self._event(EventType.ACCESS, 1, 0, hits=reads)])

    def put(self, *chain: int, parent: int = 0) -> None:
        """Blocks, each the child of the one before, the first of `parent`."""
        self._send([
            self._event(EventType.STORE, h, before) for before, h in zip((parent, *chain), chain, strict=False)
        ])  # fmt: skip

    def use(self, h: int) -> None:
        self._send([self._event(EventType.ACCESS, h, 0, hits=3)])

    def _event(self, kind: EventType, h: int, parent: int, hits: int = 0) -> EventRecord:
        event = EventRecord(kind, self.volume.tier, h, NAMESPACE, "v", parent, block_size=4096, hits=hits)
        flags = RecordFlag.COPY if kind is EventType.STORE else 0
        return replace(event, flags=flags, depth=0xFFFF_FFFF if parent else 0)

    def _send(self, events: list[EventRecord]) -> None:
        tables = BatchTables()
        records = to_records(events, tables, 0)
        ids = [namespace.namespace_id for namespace in tables.namespaces]
        self.index.apply(records, producer=1, namespace_ids=ids, locations=list(tables.locations), now_us=self.now_us)

    def plan(self, figures: Fragmentation | None = None, after_s: float = 0, **limits: Any) -> list[CompactionProposal]:
        if figures is not None:
            self.table.learn("v", figures, self.now_us)
        if self.number == 0:  # reads are reckoned from the second plan on
            self.number = 1
            layout = self.table.layouts["v"]
            layout.since_us = self.now_us
            self.now_us += 61 * S
        self.now_us += round(after_s * S)
        out = frozenset(limits.pop("out", ()))
        return plan_compactions(
            self.index, [self.volume], self.table, self.buckets, Limits(**limits), self.now_us, out
        )

    def carry_out(self, proposal: CompactionProposal, after: Fragmentation, saved: int = 10) -> None:
        self.number += 1
        name = f"{self.number}"
        keys = keys_to_save(proposal.keys)
        self.table.add(
            Compaction(name, "v", proposal.kind, proposal.reason, 0, 0, proposal.before, keys, len(keys))
        )
        compaction = self.table.open["v"]
        self.step(name, "begin")
        for _ in range(compaction.commands):
            self.step(name, "advance", extents_before=saved, extents_after=0, fragmentation=after)
        self.step(name, "finish")

    def step(self, name: str, trigger: str, **more: Any) -> None:
        self.table.step(CompactionStep(name, trigger, **more), self.now_us)

    @property
    def note(self) -> str:
        return self.table.layouts["v"].note


def hashes(proposals: list[CompactionProposal]) -> list[int]:
    (proposal,) = proposals
    return [key.sequence_hash for key in proposal.keys]


def test_scattered_chains_are_gathered_root_to_leaf_with_a_reason() -> None:
    scene = Scene()
    scene.put(10, 11, 12)
    scene.put(20)
    (proposal,) = scene.plan(SCATTERED)
    assert (proposal.volume, proposal.kind) == ("v", CompactionKind.GATHER)
    assert proposal.reason == "16 chains of 8 blocks lie in 128 pieces, 16 would do"
    assert [key.sequence_hash for key in proposal.keys] == [1, 2, 3, 10, 11, 12], "a block alone is no chain"


def test_the_child_that_is_used_most_goes_on_its_parents_chain() -> None:
    scene = Scene()
    scene.put(10, 11)
    scene.put(12, 13, parent=11)
    scene.put(14, 15, parent=11)
    scene.use(14)
    assert hashes(scene.plan(SCATTERED)) == [1, 2, 3, 10, 11, 14, 15, 12, 13]


def test_long_chains_are_cut_and_a_round_goes_on_where_the_last_plan_ended() -> None:
    scene = Scene()
    scene.put(*range(10_000, 10_000 + BLOCKS_MAX + 3))
    scene.put(50, 51)
    first = scene.plan(SCATTERED)
    assert hashes(first) == [1, 2, 3]
    scene.carry_out(first[0], SCATTERED)
    second = scene.plan()
    assert hashes(second) == list(range(10_000, 10_000 + BLOCKS_MAX))
    scene.carry_out(second[0], SCATTERED)
    third = scene.plan()
    assert hashes(third) == [*range(10_000 + BLOCKS_MAX, 10_000 + BLOCKS_MAX + 3), 50, 51]
    scene.carry_out(third[0], TIDY)
    assert scene.plan() == []
    assert scene.note.startswith("rests for"), "the round is over"


@pytest.mark.parametrize(
    ("figures", "limits", "note"),
    [
        (TIDY, {}, "chains lie in 1.0 times the pieces that they need"),
        (SCATTERED, {"compaction": False}, "compaction is switched off"),
        (SCATTERED, {"compaction_spread": 9.0}, "chains lie in 8.0 times the pieces that they need"),
        (SCATTERED, {"out": ["v"]}, "paused, away or being drained"),
        (msgspec.structs.replace(SCATTERED, chain_blocks=32), {}, "too few chains to tell"),
    ],
)
def test_what_keeps_a_volume_from_it_is_said(figures: Fragmentation, limits: dict[str, Any], note: str) -> None:
    scene = Scene()
    assert scene.plan(figures, **limits) == []
    assert scene.note == note


def test_nothing_is_gathered_for_nobody_or_at_a_loss() -> None:
    scene = Scene(reads=0)
    assert scene.plan(SCATTERED) == []
    assert scene.note == "nobody reads it"
    known = {"read_bytes_per_s": 1e8, "write_bytes_per_s": 1e8, "rates_trusted": True}
    scene = Scene(reads=6, **known)
    assert scene.plan(SCATTERED) == []
    assert scene.note == "est. 59 reads in 10 min save 5.16 ms, the rewrite costs 1.88 s"
    assert scene.plan(move_cost=0.0) != [], "no rewrite is too dear then"
    assert Scene(tier=4, reads=600, **known).plan(SCATTERED) != [], "a request to a server costs more than a rewrite"


def test_a_strained_volume_and_a_spent_budget_wait() -> None:
    scene = Scene(strain=0.1, rates_trusted=True)
    assert scene.plan(SCATTERED) == []
    assert scene.note == "v is busy: it runs at 10% of its known rate"
    limits = Limits(compaction_bytes_per_s=10.0)
    scene = Scene()
    charge(scene.buckets, scene.volume, limits, 100_000, S)
    assert scene.plan(SCATTERED, compaction_bytes_per_s=10.0) == []
    assert scene.note == "the budget of 10 B/s is spent"
    scene = Scene(endurance_bytes_per_day=86_400.0)
    charge(scene.buckets, scene.volume, limits, 3_700, S)
    assert scene.plan(SCATTERED) == []
    assert scene.note == "v was written its 86.4 kB a day"
    assert scene.plan(after_s=40) != []


def test_the_next_round_waits_and_begins_only_when_the_figures_are_worse() -> None:
    scene = Scene()
    (first,) = scene.plan(SCATTERED)
    half = msgspec.structs.replace(SCATTERED, extents=64)
    scene.carry_out(first, half)
    assert scene.plan(after_s=599) == []
    assert scene.note == "rests for 10 min more"
    assert scene.plan(after_s=2) == []
    assert scene.plan(after_s=600) == []
    assert scene.note == "chains lie no worse than the last round left them, in 4.0 times the pieces that they need"
    scene.use(1)
    assert scene.plan(SCATTERED, after_s=61) != []


def test_rests_double_while_rounds_gain_nothing() -> None:
    scene = Scene()
    rests = []
    for times in range(1, 4):
        scene.use(1)
        figures = msgspec.structs.replace(SCATTERED, extents_least=16.0 / 1.3**times)
        (proposal,) = scene.plan(figures, after_s=61)
        scene.carry_out(proposal, scene.table.layouts["v"].figures, saved=0)
        scene.plan()
        rests.append(scene.table.layouts["v"].rest_s)
        scene.now_us = scene.table.layouts["v"].rest_us
    assert rests == [1200.0, 2400.0, 4800.0]


def test_what_is_dead_is_given_back_once_there_is_enough_of_it_and_not_twice() -> None:
    scene = Scene(reads=0)
    dead = msgspec.structs.replace(TIDY, reclaimable_bytes=300 << 20)
    (proposal,) = scene.plan(dead)
    assert (proposal.kind, proposal.keys) == (CompactionKind.RECLAIM, [])
    assert proposal.reason == "315 MB of 1.07 GB can be given back"
    scene.carry_out(proposal, dead)
    assert scene.plan() == [], "it did not help"
    assert len(scene.plan(msgspec.structs.replace(TIDY, reclaimable_bytes=400 << 20))) == 1
    (tiny,) = Scene().plan(msgspec.structs.replace(TIDY, objects=90, objects_least=4))
    assert tiny.reason == "90 objects hold what fits into 4"
    assert Scene().plan(msgspec.structs.replace(TIDY, reclaimable_bytes=100 << 20)) == []


def test_a_volume_rests_after_an_aborted_one() -> None:
    scene = Scene()
    (proposal,) = scene.plan(SCATTERED)
    scene.table.add(Compaction("7", "v", proposal.kind, "why", 0, 0, SCATTERED, keys_to_save(proposal.keys), 3))
    assert scene.plan() == [], "one at a time"
    scene.table.abort("cancelled by ann", scene.now_us, list(scene.table.open.values()))
    assert scene.table.finished[-1].note == "cancelled by ann"
    assert scene.plan(after_s=ABORTED_REST_S - 1) == []
    assert scene.note.startswith("rests")


def test_spread_of_figures_that_nobody_knows_is_one() -> None:
    assert spread_of(Fragmentation()) == 1.0
    assert spread_of(SCATTERED) == 8.0


# -- states


def compaction(blocks: int = 300) -> Compaction:
    keys = keys_to_save([Key(1, 0, 1 << 100 | n) for n in range(blocks)])
    return Compaction("c", "v", CompactionKind.GATHER, "why", 1, 1, SCATTERED, keys, blocks)


@given(st.lists(st.sampled_from(CompactionTrigger), max_size=8))
def test_any_triggers_follow_the_table_or_change_nothing(triggers: list[CompactionTrigger]) -> None:
    table = CompactionTable()
    table.add(compaction())
    state: CompactionState | None = CompactionState.PLANNED
    for trigger in triggers:
        target = TRANSITIONS.get(state, {}).get(trigger) if state is not None else None
        before = msgspec.msgpack.encode(table.saved())
        if target is None:
            with pytest.raises(IllegalCompactionStep, match="compaction c"):
                table.step(CompactionStep("c", str(trigger)), 9)
            assert msgspec.msgpack.encode(table.saved()) == before
        else:
            assert table.step(CompactionStep("c", str(trigger)), 9).state is target
            state = target if target in TRANSITIONS else None
        assert ("v" in table.open) is (state is not None)
        restored = CompactionTable()
        restored.restore(msgspec.convert(msgspec.to_builtins(table.saved()), type(table.saved())))
        assert restored == table, "a checkpoint keeps all of it"


def test_commands_take_the_keys_in_order_and_counts_add_up() -> None:
    table = CompactionTable()
    table.learn("v", SCATTERED, 1)
    assert (table.layouts["v"].figures, table.layouts["v"].told_us) == (SCATTERED, 1)
    table.add(compaction())
    one = table.open["v"]
    table.step(CompactionStep("c", "begin"), 2)
    asked = []
    while one.commands_done < one.commands:
        asked.append([key.sequence_hash - (1 << 100) for key in one.command_keys()])
        step = CompactionStep(
            "c", "advance", moved_blocks=5, moved_bytes=50, extents_before=9, extents_after=2, fragmentation=TIDY
        )
        table.step(step, 3)
    assert asked == [list(range(256)), list(range(256, 300))]
    table.step(CompactionStep("c", "finish"), 4)
    assert (one.moved_blocks, one.extents_before, one.extents_after, one.after) == (10, 18, 4, TIDY)
    assert (table.moved_bytes, table.counts[CompactionState.DONE], one.keys) == (100, 1, [])
    assert (table.layouts["v"].figures, table.layouts["v"].told_us) == (TIDY, 3)


def test_the_documented_diagram_is_the_table() -> None:
    page = Path(__file__).parents[2] / "docs" / "compaction.md"
    assert diagram() in page.read_text(), "regenerate docs/compaction.md from advisor.compactions.diagram()"
