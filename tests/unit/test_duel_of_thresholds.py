"""The duel leads to the threshold that finds the most, and goes on from a checkpoint."""

from __future__ import annotations

import random

from advisor.policies.duelling import SAMPLE, Duel

FAST_BLOCKS = 64 * SAMPLE
"""A shadow has 64 blocks."""


def run(duel: Duel, accesses: list[int], seen: dict[int, int]) -> None:
    for block in accesses:
        seen[block] = seen.get(block, 0) + 1
        tag = (block * SAMPLE) << 40 | block
        duel.touch([tag], [seen[block]], 1, FAST_BLOCKS)


def loop(blocks: int, rounds: int) -> list[int]:
    return list(range(1, blocks + 1)) * rounds


def test_second_touch_leads_at_the_start() -> None:
    assert Duel().threshold == 2


def test_first_touch_leads_where_every_block_comes_back_once() -> None:
    duel = Duel()
    run(duel, [block for start in range(0, 3_000, 40) for block in [*range(start, start + 40)] * 2], {})
    assert duel.threshold == 1


def test_third_touch_leads_where_blocks_used_twice_never_come_back() -> None:
    duel, chance = Duel(), random.Random(1)
    accesses: list[int] = []
    for at in range(800):
        # The second use comes when the block has long gone from every shadow.
        accesses += [*range(10_000 + 6 * at, 10_006 + 6 * at), *range(10_000 + 6 * (at - 100), 10_006 + 6 * (at - 100))]
        accesses += chance.sample(range(1, 60), 4)
    run(duel, accesses, {})
    assert duel.threshold == 3


def test_duel_goes_on_from_what_was_saved() -> None:
    accesses = loop(90, 12)
    whole, first, seen = Duel(), Duel(), dict[int, int]()
    run(whole, accesses, {})
    run(first, accesses[:500], seen)
    second = Duel()
    second.restore(first.saved())
    run(second, accesses[500:], seen)
    assert second.described() == whole.described()


def test_only_a_sample_is_taken() -> None:
    duel = Duel()
    duel.touch([5 << 40 | 1, SAMPLE << 40 | 2], [2, 2], 0, FAST_BLOCKS)
    assert [len(shadow) for shadow in duel.saved().shadows] == [1, 1, 0]
