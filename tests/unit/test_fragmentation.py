"""How blocks lie: pieces of chains, stretches of free slots, and the figures of real volumes."""

from __future__ import annotations

import threading
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from event_plane.schema import Namespace
from storage_agent.agent import LAID_OUT_MAX, StorageAgent
from storage_agent.descriptor import OptionValue, VolumeDescriptor
from storage_agent.errors import CommandRefused, VolumeError
from storage_agent.fragmentation import FreeStretches, Stretch, count_extents, expected_breaks, sampled
from storage_agent.port import BlockKey, Fragmentation, Outcome, PutBlock, Result
from tests.examples import examples

NAMESPACE = Namespace(tenant="t")
SIZE = 6000


def key(number: int) -> BlockKey:
    return BlockKey(NAMESPACE.namespace_id, 0, number + 1)


def block(number: int, parent: int | None, size: int = SIZE) -> PutBlock:
    parent_hash = key(parent).sequence_hash if parent is not None else 0
    return PutBlock(key(number), NAMESPACE, memoryview(bytes([number % 251]) * size), parent_hash)


def chains_of(agent: StorageAgent, count: int, length: int, volume: str = "v") -> list[list[BlockKey]]:
    """Chains put turn by turn: each block of one lies beside blocks of the others."""
    for depth in range(length):
        blocks = [
            block(depth * count + chain, (depth - 1) * count + chain if depth else None) for chain in range(count)
        ]
        assert {outcome.result for outcome in agent.put(volume, blocks)} == {Result.STORED}
    return [[key(depth * count + chain) for depth in range(length)] for chain in range(count)]


def agent_with(
    folder: Path, kind: str, options: dict[str, OptionValue] | None = None, capacity: int = 64
) -> StorageAgent:
    agent = StorageAgent("a", publisher=None, allowed_roots=[folder], mend_interval_s=3600.0)
    agent.register_volume(described(folder, kind, options, capacity))
    return agent


def described(
    folder: Path, kind: str, options: dict[str, OptionValue] | None = None, capacity: int = 64
) -> VolumeDescriptor:
    return VolumeDescriptor(
        id="v", kind=kind, path=str(folder / "v"), capacity_blocks=capacity, block_bytes_max=SIZE, options=options or {}
    )


def figures_now(agent: StorageAgent) -> Fragmentation:
    """`stat` may answer with what it reckoned some seconds ago."""
    return agent.compact("", "v", [key(1 << 20)]).fragmentation


def contents(agent: StorageAgent, keys: list[BlockKey]) -> list[int]:
    """The byte that each block is made of."""
    buffers = [bytearray(SIZE) for _ in keys]
    outcomes = agent.get(keys, [memoryview(buffer) for buffer in buffers])
    assert {outcome.result for outcome in outcomes} == {Result.HIT}
    return [buffer[0] for buffer in buffers]


# -- pure


def test_extents_are_the_pieces_that_a_reader_asks_for() -> None:
    assert count_extents([]) == 0
    assert count_extents([Stretch(1, 0, 4), Stretch(1, 4, 6)]) == 1
    assert count_extents([Stretch(1, 0, 4), Stretch(1, 5, 6), Stretch(2, 6, 7)]) == 3
    assert count_extents([Stretch(1, 4, 6), Stretch(1, 0, 4)]) == 2, "backwards is another request"


def test_of_a_parents_children_one_can_follow_it() -> None:
    parents_of_all = np.array([7, 7, 7, 9], np.uint64)
    assert expected_breaks([7, 7, 7, 9], parents_of_all) == pytest.approx(2.0)
    assert expected_breaks([], parents_of_all) == 0.0


def test_a_sample_is_spread_over_all_and_the_same_each_time() -> None:
    assert sampled(5) == [0, 1, 2, 3, 4]
    numbers = sampled(100_000)
    assert numbers == sampled(100_000)
    assert len(numbers) > 60
    assert max(after - before for before, after in pairwise(numbers)) < 10_000


@settings(max_examples=examples(150), deadline=None)
@given(
    st.sets(st.integers(0, 60)), st.lists(st.tuples(st.integers(1, 12), st.integers(0, 4)), max_size=12)
)
def test_stretches_hand_out_each_free_slot_once_and_in_few_pieces(
    free: set[int], asked: list[tuple[int, int]]
) -> None:
    stretches, left = FreeStretches(np.array(sorted(free), np.intp)), set(free)
    for count, most in asked:
        longest = max((len(run) for run in _runs(left)), default=0)
        taken = stretches.take(count, most)
        if not taken:
            assert longest < count or most < 1, "one piece was there"
            continue
        assert len(taken) == len(set(taken)) == count
        assert set(taken) <= left
        assert len(_runs(set(taken))) <= most
        assert longest < count or len(_runs(set(taken))) == 1
        left -= set(taken)


def _runs(slots: set[int]) -> list[list[int]]:
    runs: list[list[int]] = []
    for slot in sorted(slots):
        if runs and runs[-1][-1] + 1 == slot:
            runs[-1].append(slot)
        else:
            runs.append([slot])
    return runs


# -- real volumes


@pytest.mark.parametrize(
    ("kind", "options"), [("slab", {}), ("directory", {"segment_bytes": 1 << 20}), ("faulty", {"inner": "slab"})]
)
def test_chains_that_were_put_turn_by_turn_are_brought_together(
    tmp_path: Path, kind: str, options: dict[str, OptionValue]
) -> None:
    with agent_with(tmp_path, kind, options) as agent:
        chains = chains_of(agent, count=4, length=6)
        before = figures_now(agent)
        assert before.extents / before.extents_least > 3
        report = agent.compact("c1", "v", [each for chain in chains for each in chain])
        assert (report.extents_before, report.extents_after) == (24, 4)
        assert (report.moved_blocks, report.moved_bytes) == (24, 24 * SIZE)
        after = report.fragmentation
        assert after.extents == after.chains
        assert after.extents_least == pytest.approx(after.chains)
        assert contents(agent, [each for chain in chains for each in chain]) == [
            depth * 4 + chain for chain in range(4) for depth in range(6)
        ]
        assert agent.compact("c1", "v", chains[0]) == report, "asked again, it answers as before"
        assert agent.compact("c2", "v", chains[0]).moved_blocks == 0
    with agent_with(tmp_path, kind, options) as agent:
        assert agent.stat().volumes[0].blocks == 24
        assert agent.scrub("", "v").good == 24
        again = agent.compact("c3", "v", [each for chain in chains for each in chain])
        assert (again.extents_before, again.moved_blocks) == (4, 0), "it lasts"


def test_where_free_slots_are_scattered_a_slab_takes_fewer_pieces_or_leaves_a_chain(tmp_path: Path) -> None:
    with agent_with(tmp_path, "slab", capacity=12) as agent:
        chains = chains_of(agent, count=2, length=6)
        assert agent.compact("", "v", chains[0]).moved_blocks == 0, "there is no free slot at all"
        agent.delete("", "v", chains[1][:1] + chains[1][2:])
        assert agent.compact("", "v", chains[0]).moved_blocks == 0, "5 pieces for 6, and a free slot too few"
        agent.delete("", "v", chains[0][-1:])
        report = agent.compact("", "v", chains[0])
        assert report.extents_after < report.extents_before == 5
        assert contents(agent, chains[0][:-1]) == [0, 2, 4, 6, 8]
        stat = agent.stat().volumes[0]
        assert (stat.blocks, stat.slots_free) == (6, 6)


def test_a_reader_finds_every_block_while_chains_are_laid_out(tmp_path: Path) -> None:
    with agent_with(tmp_path, "directory", {"segment_bytes": 1 << 20}, 256) as agent:
        chains = chains_of(agent, count=8, length=16)
        ended = threading.Event()
        misses: list[Outcome] = []

        def read() -> None:
            while not ended.is_set():
                for chain in chains:
                    outcomes = agent.get(chain, [memoryview(bytearray(SIZE)) for _ in chain])
                    misses.extend(outcome for outcome in outcomes if outcome.result is not Result.HIT)

        reader = threading.Thread(target=read)
        reader.start()
        for chain in chains:
            assert agent.compact("", "v", chain).moved_blocks == 16
        ended.set()
        reader.join()
        assert misses == []


def test_a_copy_that_is_not_what_was_written_is_not_served(tmp_path: Path) -> None:
    options: dict[str, OptionValue] = {"inner": "slab", "flipped": 0.5, "seed": 3}
    with agent_with(tmp_path, "slab") as agent:
        chains = chains_of(agent, count=4, length=6)
        agent.unregister_volume("v")
        agent.register_volume(described(tmp_path, "faulty", options))
        report = agent.compact("", "v", [each for chain in chains for each in chain])
        assert 0 < report.moved_blocks < 24, "some copies were spoilt"
        assert sorted(contents(agent, [each for chain in chains for each in chain])) == list(range(24))
        stat = agent.stat().volumes[0]
        assert stat.blocks + stat.slots_free == 64


def test_a_slab_of_classes_says_what_small_blocks_in_large_slots_waste(tmp_path: Path) -> None:
    classes: list[OptionValue] = [{"block_bytes": 1000, "blocks": 2}, {"block_bytes": SIZE, "blocks": 4}]
    with agent_with(tmp_path, "slab", {"classes": classes}, 6) as agent:
        agent.put("v", [block(n, None, 900) for n in range(5)])
        assert agent.compact("", "v").fragmentation.reclaimable_bytes == 0, "no small slot is free"
        agent.delete("", "v", [key(0), key(1)])
        agent.unregister_volume("v")
        agent.register_volume(described(tmp_path, "slab", {"classes": classes}, 6))
        assert agent.stat().volumes[0].fragmentation.reclaimable_bytes == 2 * (SIZE - 1000)
        report = agent.compact("", "v")
        assert (report.freed_bytes, report.fragmentation.reclaimable_bytes) == (2 * (SIZE - 1000), 0)


def test_what_cannot_be_laid_out_is_refused_with_the_remedy(tmp_path: Path) -> None:
    with agent_with(tmp_path, "slab") as agent:
        with pytest.raises(CommandRefused, match=f"{LAID_OUT_MAX + 1} blocks .* ask in parts"):
            agent.compact("", "v", [key(n) for n in range(LAID_OUT_MAX + 1)])
        with pytest.raises(VolumeError, match="'tape'"):
            agent.compact("", "tape", [key(0)])
        assert agent.compact("", "v", [key(0)]).moved_blocks == 0, "what is not there is left alone"
