"""The policies by name, and a replay of one of them at one capacity."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from advisor.caches import kernels_arc, kernels_flat, kernels_of_tree
from advisor.caches.counting import COUNTERS, Trace
from advisor.caches.requests import RequestTrace
from advisor.errors import AdvisorError

CAPACITY_BLOCKS_MAX = 2**31 - 1


class UnknownPolicy(AdvisorError):
    """A policy that there is not, or a capacity that it cannot have."""


@dataclass(frozen=True, slots=True)
class CacheFigures:
    """`run_*` sum the leading blocks present when a request arrives, cold start included.

    `seq_block_hits`: then each of its blocks is used in turn, and so many were present.
    """

    run_blocks: int
    run_tokens: int
    seq_block_hits: int


@dataclass(frozen=True, slots=True)
class Replayed:
    """`present`, by block: whether it is cached at the end. `run_tokens`: of each request, counted or not."""

    figures: CacheFigures
    present: npt.NDArray[np.bool_]
    run_tokens: npt.NDArray[np.int64]


@dataclass(slots=True)
class _Scratch:
    """What kernels work in. The capacity is that of the trace's blocks at most: more is the same."""

    trace: RequestTrace
    whole: Trace
    capacity: int
    present: npt.NDArray[np.bool_]
    out: npt.NDArray[np.int64]

    def by_block(self) -> npt.NDArray[np.int64]:
        return np.zeros(self.trace.blocks, np.int64)

    def nowhere(self) -> npt.NDArray[np.int64]:
        return np.full(self.trace.blocks, -1, np.int64)

    def heap(self) -> npt.NDArray[np.int64]:
        return np.empty(self.capacity + 1, np.int64)

    def lists(self, count: int = 1) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
        return (np.empty(self.trace.blocks + count, np.int64), np.empty(self.trace.blocks + count, np.int64))


def _by_age(*, touch: bool, from_leaf: bool = False) -> Callable[[_Scratch], None]:
    def run(s: _Scratch) -> None:
        kernels_flat.by_age(s.whole, s.capacity, s.present, *s.lists(), s.out, touch, from_leaf)

    return run


def _lfu(s: _Scratch) -> None:
    most = int(np.bincount(s.trace.ids).max(initial=0))
    kernels_flat.lfu(s.whole, s.capacity, s.present, *s.lists(most + 1), s.by_block(), s.out)


def _by_key(*, length_aware: bool) -> Callable[[_Scratch], None]:
    def run(s: _Scratch) -> None:
        kernels_flat.by_key(
            s.whole, s.capacity, s.present, s.by_block(), s.by_block(), s.heap(), s.nowhere(), s.out, length_aware
        )

    return run


def _two_queues(s: _Scratch) -> None:
    kernels_flat.two_queues(s.whole, s.capacity, s.present, *s.lists(4), s.by_block(), s.out)


def _sieve(s: _Scratch) -> None:
    seen = np.zeros(s.trace.blocks, np.bool_)
    kernels_flat.sieve(s.whole, s.capacity, s.present, *s.lists(), seen, s.out)


def _s3_fifo(*, start_up: bool) -> Callable[[_Scratch], None]:
    def run(s: _Scratch) -> None:
        kernels_flat.s3_fifo(
            s.whole, s.capacity, s.present, *s.lists(4), s.by_block(), s.by_block(), s.out, start_up
        )

    return run


def _arc(s: _Scratch) -> None:
    sizes = np.zeros(kernels_arc.LISTS, np.int64)
    kernels_arc.arc(s.whole, s.capacity, s.present, *s.lists(kernels_arc.LISTS), s.by_block(), sizes, s.out)


def _arc_leaf(s: _Scratch) -> None:
    kernels_arc.arc_of_leaves(
        s.whole,
        s.capacity,
        s.present,
        *s.lists(kernels_arc.LISTS),
        s.by_block(),
        np.zeros(kernels_arc.LISTS, np.int64),
        s.by_block(),
        s.by_block(),
        s.by_block(),
        s.heap(),
        s.nowhere(),
        s.heap(),
        s.nowhere(),
        s.out,
    )


def _of_leaves(rule: int) -> Callable[[_Scratch], None]:
    def run(s: _Scratch) -> None:
        kernels_of_tree.by_key_of_leaves(
            s.whole,
            s.capacity,
            s.present,
            s.by_block(),
            s.by_block(),
            s.by_block(),
            s.by_block(),
            s.heap(),
            s.nowhere(),
            s.trace.next_uses,
            rule,
            s.out,
        )

    return run


POLICIES: dict[str, Callable[[_Scratch], None]] = {
    "2q": _two_queues,
    "arc": _arc,
    "arc-leaf": _arc_leaf,
    "belady-leaf": _of_leaves(kernels_of_tree.BELADY_LEAF),
    "fifo": _by_age(touch=False),
    "gdsf": _by_key(length_aware=False),
    "gdsf-leaf": _of_leaves(kernels_of_tree.GDSF_LEAF),
    "length-aware": _by_key(length_aware=True),
    "lfu": _lfu,
    "lru": _by_age(touch=True),
    "lru-leaf": _of_leaves(kernels_of_tree.LRU_LEAF),
    "lru-tail": _by_age(touch=True, from_leaf=True),
    "min": _of_leaves(kernels_of_tree.MIN),
    "s3-fifo": _s3_fifo(start_up=False),
    "s3-fifo-lcs": _s3_fifo(start_up=True),
    "sieve": _sieve,
}
"""`belady-leaf` and `min` look ahead: bounds, not policies that anybody can run."""


def require_policy(policy: str, capacity_blocks: int) -> None:
    """Raises `UnknownPolicy`, naming what there is."""
    if policy not in POLICIES:
        raise UnknownPolicy(f"policy {policy!r} is not known: choose one of {', '.join(sorted(POLICIES))}")
    if not 1 <= capacity_blocks <= CAPACITY_BLOCKS_MAX:
        raise UnknownPolicy(f"capacity {capacity_blocks} is no number of blocks: give 1 to {CAPACITY_BLOCKS_MAX}")


def replay_cache(
    trace: RequestTrace, policy: str, capacity_blocks: int, *, counted_from: int = 0, whole_blocks: bool = False
) -> Replayed:
    """Run the whole trace. Requests before `counted_from` fill the cache and are not counted.

    `whole_blocks`: a request's last block counts as many tokens as the others. Raises `UnknownPolicy`.
    """
    require_policy(policy, capacity_blocks)
    whole = Trace(
        trace.ids,
        trace.ends,
        trace.input_tokens,
        trace.block_tokens,
        trace.depths,
        trace.parents,
        counted_from,
        whole_blocks,
        np.zeros(trace.requests, np.int64),
    )
    scratch = _Scratch(
        trace,
        whole,
        min(capacity_blocks, trace.blocks),
        np.zeros(trace.blocks, np.bool_),
        np.zeros(COUNTERS, np.int64),
    )
    if trace.blocks:
        POLICIES[policy](scratch)
    return Replayed(CacheFigures(*(int(count) for count in scratch.out)), scratch.present, whole.run_tokens)
