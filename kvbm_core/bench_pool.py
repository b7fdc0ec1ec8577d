"""What one block costs in a pool: allocate → commit → register → match → drop, for `kvadvisor bench core`.

Pools are full when they are measured, as an engine's are after its first minutes: every allocation evicts. Beside them,
in the same run, a pool of plain dictionaries does the same without states, guards, locks, priorities or callbacks.
"""

from __future__ import annotations

import hashlib
import statistics
import time
from collections import OrderedDict
from collections.abc import Callable, Sequence

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
MEASURED_QUICK = 20_000
BATCH_BLOCKS = 64
"""Blocks of a request of a thousand tokens."""
CHAIN_BLOCKS = 8
"""Blocks from a root to a tail."""
GROWTH_MAX = 1.5
STEPS = ("allocate", "commit", "register", "match", "drop")
PAGE_TOKENS = 16
NAMESPACE = Namespace(tenant="bench", block_tokens=PAGE_TOKENS)

StepTimes = dict[str, float]
"""Median ns of each step for one block."""
Cycle = Callable[[Sequence[BlockIdentity]], list[int]]
"""Takes some blocks through all steps, and returns the ns at its start and after each step."""


def pool_figures(quick: bool) -> list[Figure]:
    """About a minute, most of it filling a pool of a million blocks; `quick` measures fewer blocks, in the same pools.

    A pool of a million blocks with its identities takes 1 GB.
    """
    measured = MEASURED_QUICK if quick else MEASURED
    plain = _times(_plain_cycle, BLOCKS, measured)
    ours = _times(_batch_cycle("lru"), BLOCKS, measured)
    figures = [
        *(Figure(f"pool of {BLOCKS:,}, {step}", ours[step], "ns a block") for step in STEPS),
        *_totals(f"pool of {BLOCKS:,}, lru", ours, plain),
        *_totals(f"pool of {BLOCKS:,}, lru, each block by itself", _times(_single_cycle, BLOCKS, measured), plain),
    ]
    others: tuple[ReuseName, ...] = ("fifo", "multi_lru", "lineage")
    for name in others:
        figures += _totals(f"pool of {BLOCKS:,}, {name}", _times(_batch_cycle(name), BLOCKS, measured), plain)
    large = _times(_batch_cycle("lru"), BLOCKS_LARGE, measured)
    figures += _totals(f"pool of {BLOCKS_LARGE:,}, lru", large, _times(_plain_cycle, BLOCKS_LARGE, measured))
    growth = _total(large) / _total(ours)
    figures.append(at_most(f"pool of {BLOCKS_LARGE:,} against {BLOCKS:,}, lru", growth, "×", GROWTH_MAX))
    return figures


def identities(count: int, first: int = 0) -> list[BlockIdentity]:
    """Blocks in chains of `CHAIN_BLOCKS`, with hashes that are as random as real ones."""
    hashes = [
        int.from_bytes(hashlib.blake2b(n.to_bytes(8, "little"), digest_size=16).digest(), "little")
        for n in range(first, first + count)
    ]
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


def _totals(name: str, times: StepTimes, plain: StepTimes) -> list[Figure]:
    return [
        Figure(f"{name}, all steps", _total(times), "ns a block"),
        Figure(f"{name}, against plain dictionaries", _total(times) / _total(plain), "×"),
    ]


def _total(times: StepTimes) -> float:
    return sum(times.values())


def _times(open_cycle: Callable[[int], Cycle], blocks: int, measured: int) -> StepTimes:
    """Fill a pool of `blocks` once, then measure `measured` more."""
    cycle = open_cycle(blocks)
    for at in range(0, blocks, BATCH_BLOCKS):
        cycle(identities(BATCH_BLOCKS, at))
    spent: dict[str, list[float]] = {step: [] for step in STEPS}
    for at in range(blocks, blocks + measured, BATCH_BLOCKS):
        marks = cycle(identities(BATCH_BLOCKS, at))
        for step, begun_ns, ended_ns in zip(STEPS, marks, marks[1:], strict=False):
            spent[step].append((ended_ns - begun_ns) / BATCH_BLOCKS)
    return {step: statistics.median(each) for step, each in spent.items()}


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
    """A batch's blocks take each step together. Tails are let go of first, as engines do."""

    def open_cycle(blocks: int) -> Cycle:
        pool, clock = _open(blocks, reuse), time.perf_counter_ns

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

    return open_cycle


def _single_cycle(blocks: int) -> Cycle:
    """Each block takes each step by itself; its tokens are counted, not written at once."""
    pool, clock = _open(blocks, "lru"), time.perf_counter_ns

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
    clock = time.perf_counter_ns

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
