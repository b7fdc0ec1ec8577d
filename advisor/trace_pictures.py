"""What a trace is like, whatever the policy: its course, how far apart reuses are, and what prompts share. Pure."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from advisor.caches.distances import stack_distances
from advisor.traces import Trace

COURSE_BINS = 72
ROWS_MAX = 12
"""Parts of the tree of prefixes below one another."""
PART_REQUESTS_MIN_SHARE = 1 / 400
"""Narrower ones are one part together."""

_TIME_EDGES_S = (1, 5, 15, 60, 300, 900, 3600, 14_400)
_TIME_NAMES = ("< 1 s", "< 5 s", "< 15 s", "< 1 min", "< 5 min", "< 15 min", "< 1 h", "< 4 h", "longer")

Ints = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Course:
    """By spans of time: when each begins, requests a second, and prompt tokens a second, seen before and new."""

    starts_s: list[float]
    requests_per_s: list[float]
    seen_tokens_per_s: list[float]
    new_tokens_per_s: list[float]


@dataclass(frozen=True, slots=True)
class Bars:
    """Shares of one whole, by name."""

    names: list[str]
    shares: list[float]


@dataclass(frozen=True, slots=True)
class Part:
    """Blocks that the same requests share, of the tree of prefixes. `left` and `width` are shares of the requests.

    `others` is how many narrower parts it stands for, 0: itself alone.
    """

    row: int
    left: float
    width: float
    requests: int
    first_block: int
    blocks: int
    others: int = 0


@dataclass(frozen=True, slots=True)
class TracePictures:
    """`distances`: of all block accesses, by how many different blocks were used since the last use of theirs."""

    course: Course
    distances: Bars
    waits: Bars
    """Of the reuses of blocks, by the time since the last use."""
    sharing: Bars
    """Of all block accesses, by how many requests use the block."""
    prefixes: list[Part]


def picture_trace(trace: Trace) -> TracePictures:
    requests = trace.as_requests()
    ids, ends = requests.ids, requests.ends
    arrivals_s = np.asarray(trace.timestamps_ms, np.float64) / 1000
    starts = np.concatenate(([0], ends[:-1])).astype(np.int64) if len(ends) else ends
    of_request = np.repeat(np.arange(len(ends)), ends - starts)
    return TracePictures(
        _course(trace, requests.ids, starts, arrivals_s, of_request),
        _distances(ids, requests.blocks),
        _waits(ids, arrivals_s[of_request], requests.blocks),
        _sharing(ids, requests.blocks),
        prefix_parts(ids, starts, ends, requests.blocks),
    )


def _course(trace: Trace, ids: Ints, starts: Ints, arrivals_s: Floats, of_request: Ints) -> Course:
    if not len(starts):
        return Course([], [], [], [])
    blocks = int(ids.max(initial=-1)) + 1
    first_use = np.full(blocks, len(ids), np.int64)
    np.minimum.at(first_use, ids, np.arange(len(ids)))
    seen_blocks = np.bincount(of_request, first_use[ids] < starts[of_request], len(starts))
    lengths = np.bincount(of_request, minlength=len(starts))
    tokens = np.asarray(trace.input_tokens, np.float64)
    seen = np.where(seen_blocks == lengths, tokens, seen_blocks * np.asarray(trace.block_tokens))
    begin_s, end_s = float(arrivals_s[0]), float(arrivals_s[-1])
    width_s = max((end_s - begin_s) / COURSE_BINS, 1e-3)
    bins = np.minimum(((arrivals_s - begin_s) / width_s).astype(np.int64), COURSE_BINS - 1)

    def rates(weights: Floats) -> list[float]:
        return [float(value) for value in np.bincount(bins, weights, COURSE_BINS) / width_s]

    return Course(
        [number * width_s for number in range(COURSE_BINS)],
        rates(np.ones(len(starts))),
        rates(seen),
        rates(tokens - seen),
    )


def _distances(ids: Ints, blocks: int) -> Bars:
    found = np.empty(len(ids), np.int64)
    stack_distances(ids, np.empty(blocks, np.int64), np.zeros(len(ids) + 1, np.int64), found)
    reused = found[found > 0]
    powers = np.ceil(np.log2(np.maximum(reused, 1))).astype(np.int64)
    most = int(powers.max(initial=0))
    counts = np.bincount(powers, minlength=most + 1)
    names = [f"≤ {1 << power:,}" for power in range(most + 1)]
    return _bars([*names, "never before"], [*counts.tolist(), len(ids) - len(reused)])


def _waits(ids: Ints, times_s: Floats, blocks: int) -> Bars:
    order = np.lexsort((np.arange(len(ids)), ids))
    sorted_ids, sorted_s = ids[order], times_s[order]
    again = sorted_ids[1:] == sorted_ids[:-1]
    waited_s = (sorted_s[1:] - sorted_s[:-1])[again]
    counts = np.bincount(np.searchsorted(_TIME_EDGES_S, waited_s, "right"), minlength=len(_TIME_NAMES))
    return _bars(list(_TIME_NAMES), counts.tolist())


def _sharing(ids: Ints, blocks: int) -> Bars:
    uses = np.bincount(ids, minlength=blocks)
    powers = np.ceil(np.log2(np.maximum(uses, 1))).astype(np.int64)
    most = int(powers.max(initial=0))
    counts = np.bincount(powers, uses, most + 1)
    names = ["1", *(str(1 << power) if power == 1 else f"{(1 << power - 1) + 1:,} – {1 << power:,}"
                    for power in range(1, most + 1))]  # fmt: skip
    return _bars(names, counts.tolist())


def _bars(names: list[str], counts: list[Any]) -> Bars:
    """Without the empty ones before the first and after the last."""
    total = sum(counts)
    full = [number for number, count in enumerate(counts) if count]
    kept = slice(full[0], full[-1] + 1) if full else slice(0)
    return Bars(names[kept], [float(count / total) for count in counts[kept]])


def prefix_parts(ids: Ints, starts: Ints, ends: Ints, blocks: int) -> list[Part]:
    """The tree of prefixes, widest first in each row; what one request alone uses is left out.

    A part ends where some of its requests part from the others.
    """
    least = max(2, int(len(ends) * PART_REQUESTS_MIN_SHARE))
    parts: list[Part] = []
    # Requests of a part lie together once their paths are sorted.
    paths = sorted(ids[first:end].tolist() for first, end in zip(starts, ends, strict=True))
    waiting = [(0, len(paths), 0, -1, 0.0)]
    while waiting:
        first, end, depth, row, left = waiting.pop()
        narrow = narrow_requests = 0
        children = _children(paths, first, end, depth)
        for child_first, child_end in sorted(children, key=lambda child: child[0] - child[1]):
            count = child_end - child_first
            if count < least:
                narrow += count > 1
                narrow_requests += count if count > 1 else 0
                continue
            blocks_along = _shared_blocks(paths[child_first], paths[child_end - 1], depth)
            parts.append(Part(row + 1, left, count / len(paths), count, depth, blocks_along))
            if row + 2 < ROWS_MAX:
                waiting.append((child_first, child_end, depth + blocks_along, row + 1, left))
            left += count / len(paths)
        if narrow:
            parts.append(Part(row + 1, left, narrow_requests / len(paths), narrow_requests, depth, 0, narrow))
    return parts


def _children(paths: list[list[int]], first: int, end: int, depth: int) -> list[tuple[int, int]]:
    """Of the paths `first` … `end`, which agree on `depth` blocks, those that go on with the same block."""
    found: list[tuple[int, int]] = []
    begun = first
    while begun < end and len(paths[begun]) <= depth:
        begun += 1
    at = begun
    while at < end:
        block = paths[at][depth]
        begun = at
        while at < end and paths[at][depth] == block:
            at += 1
        found.append((begun, at))
    return found


def _shared_blocks(one: list[int], other: list[int], depth: int) -> int:
    """Blocks from `depth` on that two paths share; of sorted paths, the first and the last share what all do."""
    shared = 0
    for a, b in zip(one[depth:], other[depth:], strict=False):
        if a != b:
            break
        shared += 1
    return shared
