"""What one block costs in a pool: allocate → commit → register → match → drop, for `kvadvisor bench core`.

Pools are full when they are measured, as an engine's are after its first minutes: every allocation evicts. Beside them,
in the same run, a pool of plain dictionaries does the same without states, guards, locks, priorities or callbacks.
"""

from __future__ import annotations

import random
import statistics
import time
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from typing import TypeVar

from event_plane.figures import Figure, at_most
from event_plane.schema import Namespace
from kvbm_core.config import ReuseName
from kvbm_core.identity import BlockIdentity
from kvbm_core.pool import BlockPool
from kvbm_core.reuse import reuse_order
from storage_agent.port import BlockKey

BLOCKS = 100_000
BLOCKS_LARGE = 1_000_000
MEASURED = 100_000
MEASURED_QUICK = 6_000
BATCH_BLOCKS = 64
"""Blocks of a request of a thousand tokens."""
CHAIN_BLOCKS = 8
"""Blocks from a root to a tail."""
GROWTH_MAX = 1.5
STEPS = ("allocate", "commit", "register", "match", "drop")
PAGE_TOKENS = 16
NAMESPACE = Namespace(tenant="bench", block_tokens=PAGE_TOKENS)

K = TypeVar("K")
StepTimes = dict[str, float]
"""Median ns of each step for one block."""
Cycle = Callable[[Sequence[BlockIdentity]], list[int]]
"""Takes some blocks through all steps; the clock's ns at the start and after each step."""


def pool_figures(quick: bool) -> list[Figure]:
    """About a minute; `quick` measures fewer blocks and two orders of reuse in 20 s. Takes 1.5 GB.

    Times are the thread's own, so that what else the machine does counts little; what is compared takes turns.
    """
    measured = MEASURED_QUICK if quick else MEASURED
    orders: tuple[ReuseName, ...] = ("lru", "lineage") if quick else ("lru", "fifo", "multi_lru", "lineage")
    openings: dict[str, Callable[[int], Cycle]] = {str(order): _batch_cycle(order) for order in orders}
    openings |= {"lru, each block by itself": _single_cycle, "plain dictionaries": _plain_cycle}
    times = _take_turns({name: _filled(opening, BLOCKS) for name, opening in openings.items()}, measured)
    plain = _total(times.pop("plain dictionaries"))
    size = f"pool of {BLOCKS:,}"
    figures = [Figure(f"{size}, lru, {step}", times["lru"][step], "ns a block") for step in STEPS]
    figures.append(Figure(f"{size}, plain dictionaries, all steps", plain, "ns a block"))
    for name, each in times.items():
        figures.append(Figure(f"{size}, {name}, all steps", _total(each), "ns a block"))
        figures.append(Figure(f"{size}, {name}, against plain dictionaries", _total(each) / plain, "×"))
    return figures + _growth(measured)


def _growth(measured: int) -> list[Figure]:
    """What a block costs in a pool of a million beside one of a hundred thousand."""
    openings = {"lru": _batch_cycle("lru"), "plain dictionaries": _plain_cycle}
    cycles = {
        (name, blocks): _filled(opening, blocks)
        for name, opening in openings.items()
        for blocks in (BLOCKS, BLOCKS_LARGE)
    }
    totals = {key: _total(each) for key, each in _take_turns(cycles, measured).items()}
    growths = {name: totals[name, BLOCKS_LARGE] / totals[name, BLOCKS] for name in openings}
    size = f"pool of {BLOCKS_LARGE:,}"
    return [
        *(Figure(f"{size}, {name}, all steps", totals[name, BLOCKS_LARGE], "ns a block") for name in openings),
        at_most(f"{size}, lru, against {BLOCKS:,}", growths["lru"], "×", GROWTH_MAX),
        Figure(f"{size}, plain dictionaries, against {BLOCKS:,}", growths["plain dictionaries"], "×"),
    ]


def identities(count: int, first: int = 0) -> list[BlockIdentity]:
    """Blocks in chains of `CHAIN_BLOCKS`, with hashes that are as random as real ones."""
    chance = random.Random(first)
    hashes = [chance.getrandbits(128) for _ in range(count)]
    return [
        BlockIdentity(
            key=BlockKey(NAMESPACE.namespace_id, 0, own),
            namespace=NAMESPACE,
            parent_hash=hashes[n - 1] if n % CHAIN_BLOCKS else 0,
            prefix_hash=hashes[n - n % CHAIN_BLOCKS],
            depth=n % CHAIN_BLOCKS,
            block_tokens=PAGE_TOKENS,
        )
        for n, own in enumerate(hashes)
    ]


def _total(times: StepTimes) -> float:
    return sum(times.values())


def _filled(open_cycle: Callable[[int], Cycle], blocks: int) -> Cycle:
    """The cycle of a pool whose blocks are all registered and inactive."""
    cycle = open_cycle(blocks)
    for at in range(0, blocks, BATCH_BLOCKS):
        cycle(identities(BATCH_BLOCKS, at))
    return cycle


def _take_turns(cycles: Mapping[K, Cycle], measured: int) -> dict[K, StepTimes]:
    """Take `measured` blocks that no pool has seen through each cycle, a batch of one pool after a batch of another."""
    spent: dict[K, dict[str, list[float]]] = {name: {step: [] for step in STEPS} for name in cycles}
    for at in range(BLOCKS_LARGE, BLOCKS_LARGE + measured, BATCH_BLOCKS):
        for name, cycle in cycles.items():
            marks = cycle(identities(BATCH_BLOCKS, at))
            for step, begun_ns, ended_ns in zip(STEPS, marks, marks[1:], strict=False):
                spent[name][step].append((ended_ns - begun_ns) / BATCH_BLOCKS)
    return {name: {step: statistics.median(each) for step, each in by_step.items()} for name, by_step in spent.items()}


def _open(blocks: int, reuse: ReuseName) -> BlockPool:
    return BlockPool(
        name="bench",
        blocks=blocks,
        page_tokens=PAGE_TOKENS,
        reuse=reuse_order(reuse, blocks),
        duplicates="reject",
        on_store=lambda identity, copied: None,
        on_remove=lambda identity: None,
    )


def _batch_cycle(reuse: ReuseName) -> Callable[[int], Cycle]:
    return lambda blocks: batch_cycle(_open(blocks, reuse))


def batch_cycle(pool: BlockPool) -> Cycle:
    """A batch's blocks take each step together. Tails are let go of first, as engines do."""
    clock = time.thread_time_ns

    def cycle(wanted: Sequence[BlockIdentity]) -> list[int]:
        keys = [identity.key for identity in wanted]
        marks = [clock()]
        places = pool.allocate(len(wanted)).blocks
        marks.append(clock())
        complete = pool.complete_many(places, wanted)
        marks.append(clock())
        held = pool.register_many(complete)
        marks.append(clock())
        matched = pool.match(keys)
        marks.append(clock())
        pool.release_many(held[::-1])
        pool.release_many(matched[::-1])
        del places, complete, held, matched
        marks.append(clock())
        return marks

    return cycle


def _single_cycle(blocks: int) -> Cycle:
    """Each block takes each step by itself; its tokens are counted, not written at once."""
    pool, clock = _open(blocks, "lru"), time.thread_time_ns

    def cycle(wanted: Sequence[BlockIdentity]) -> list[int]:
        marks = [clock()]
        places = [pool.allocate(1).blocks[0] for _ in wanted]
        marks.append(clock())
        for place in places:
            place.init_sequence()
            place.fill(PAGE_TOKENS)
        complete = [place.commit(identity) for place, identity in zip(places, wanted, strict=True)]
        marks.append(clock())
        held = [block.register() for block in complete]
        marks.append(clock())
        matched = [pool.match((identity.key,))[0] for identity in wanted]
        marks.append(clock())
        for block in (*reversed(held), *reversed(matched)):
            block.release()
        del places, complete, held, matched, block
        marks.append(clock())
        return marks

    return cycle


def _plain_cycle(blocks: int) -> Cycle:
    """The same with dictionaries and lists alone; a commit has nothing to do."""
    free = list(range(blocks))
    place_of: dict[BlockKey, int] = {}
    key_at: list[BlockKey | None] = [None] * blocks
    references = [0] * blocks
    idle: OrderedDict[int, None] = OrderedDict()
    clock = time.thread_time_ns

    def allocate(count: int) -> list[int]:
        for _ in range(count - len(free)):
            place, _ = idle.popitem(last=False)
            key = key_at[place]
            assert key is not None, "an idle block has a key"
            del place_of[key]
            free.append(place)
        return [free.pop() for _ in range(count)]

    def register(places: Sequence[int], keys: Sequence[BlockKey]) -> None:
        for place, key in zip(places, keys, strict=True):
            place_of[key] = place
            key_at[place] = key
            references[place] = 1

    def match(keys: Sequence[BlockKey]) -> list[int]:
        found = []
        for key in keys:
            place = place_of.get(key)
            if place is None:
                break
            if not references[place]:
                del idle[place]
            references[place] += 1
            found.append(place)
        return found

    def drop(places: Sequence[int]) -> None:
        for place in places:
            references[place] -= 1
            if not references[place]:
                idle[place] = None

    def cycle(wanted: Sequence[BlockIdentity]) -> list[int]:
        keys = [identity.key for identity in wanted]
        marks = [clock()]
        places = allocate(len(wanted))
        marks += [clock()] * 2
        register(places, keys)
        marks.append(clock())
        matched = match(keys)
        marks.append(clock())
        drop(places[::-1])
        drop(matched[::-1])
        marks.append(clock())
        return marks

    return cycle
