"""Load or recompute: for each prompt, how much of what is stored is worth loading (see `rules.reading`). Pure."""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from advisor.index import ArrayIndex, Key
from advisor.policies.plan import Volume
from advisor.policies.rules.noting import placed_columns
from advisor.wording import bytes_text, duration_text

LOW_64 = (1 << 64) - 1
NAMESPACES_MAX = 64


class BlockAdvice(NamedTuple):
    """Of one block of a prompt. `seconds`: to load it alone, or to compute it; None where a rate is not known."""

    load: bool
    volume: str
    """Where to load it from; empty where it is computed."""
    seconds: float | None
    reason: str


class LoadAdvice(NamedTuple):
    """`first_token_s`: loading as advised; `recompute_s`: computing everything. None where a rate is not known."""

    blocks: list[BlockAdvice]
    first_token_s: float | None
    recompute_s: float | None
    reason: str


class _Stored(NamedTuple):
    volume: Volume
    block_bytes: int


def advise_load(
    index: ArrayIndex,
    volumes: Sequence[Volume],
    namespace_id: int,
    group: int,
    hashes: Sequence[int],
    block_tokens: int,
    prefill_tokens_per_s: float,
) -> LoadAdvice:
    """What to load of a prompt's blocks, root first, each of `block_tokens`: the leading part that gives the soonest
    first token. All volumes are read at once. A rate of 0 is not known: then all that is stored is loaded.
    """
    ordered = sorted(volumes, key=lambda v: v.order)
    run = _run(index, ordered, namespace_id, group, hashes)
    compute_s = block_tokens / prefill_tokens_per_s if prefill_tokens_per_s > 0 else None
    count, loaded_s = _soonest(run, len(hashes), compute_s)
    total_s = None if compute_s is None else compute_s * len(hashes)
    first_s = None if compute_s is None or loaded_s is None else loaded_s + compute_s * (len(hashes) - count)
    blocks = [_of_block(stored, at < count, compute_s) for at, stored in enumerate(run)]
    blocks += [BlockAdvice(False, "", compute_s, _absent(at, len(run))) for at in range(len(run), len(hashes))]
    return LoadAdvice(blocks, first_s, total_s, _why(run, count, len(hashes), first_s, total_s, compute_s))


def namespace_of(
    index: ArrayIndex, volumes: Sequence[Volume], namespace_ids: Sequence[int], group: int, hashes: Sequence[int]
) -> int:
    """Of these namespaces the one with the most leading blocks on volumes, then anywhere; 0: none has the first block.

    Of those that have the first block the `NAMESPACES_MAX` with the longest match anywhere are looked at.
    """
    ordered = sorted(volumes, key=lambda v: v.order)
    with index.lock:
        found = index.match_many([(each, group, hashes[:1]) for each in namespace_ids])
        having = [each for each, count in zip(namespace_ids, found, strict=True) if count]
        longest = index.match_many([(each, group, hashes) for each in having])
        best = heapq.nlargest(NAMESPACES_MAX, zip(longest, having, strict=True))
        return max(((len(_run(index, ordered, n, group, hashes)), m, n) for m, n in best), default=(0, 0, 0))[2]


def _run(
    index: ArrayIndex, ordered: Sequence[Volume], namespace_id: int, group: int, hashes: Sequence[int]
) -> list[_Stored]:
    """The leading blocks that are on some volume, each on its fastest."""
    with index.lock:
        rows = _rows(index, namespace_id, group, hashes)
        tables = index.tables
        where = np.full(len(rows), -1, np.int64)
        block_bytes = np.zeros(len(rows), np.int64)
        for at, volume in reversed(list(enumerate(ordered))):
            uses, sizes = np.empty(len(rows), np.int64), np.empty(len(rows), np.int64)
            placed_columns(tables.blocks, tables.placements, rows, volume.place, uses, sizes)
            where[uses >= 0] = at
            block_bytes[uses >= 0] = sizes[uses >= 0]
    absent = np.flatnonzero(where < 0)
    end = int(absent[0]) if len(absent) else len(rows)
    found = zip(where[:end].tolist(), block_bytes[:end].tolist(), strict=True)
    return [_Stored(ordered[at], size) for at, size in found]


def _rows(index: ArrayIndex, namespace_id: int, group: int, hashes: Sequence[int]) -> npt.NDArray[np.int32]:
    """Rows of the leading blocks that are anywhere: the last one's and its ancestors', faster than one by one."""
    count = index.match(namespace_id, group, hashes)
    row = index.row_of(Key(namespace_id, group, hashes[count - 1])) if count else None
    if row is None:
        return np.empty(0, np.int32)
    rows = np.empty(count, np.int32)
    parents = index.tables.blocks["parent"]
    for at in range(count - 1, -1, -1):
        rows[at] = row
        row = int(parents[row]) if row >= 0 else -1
    blocks = index.tables.blocks[rows]
    low = np.array([each & LOW_64 for each in hashes[:count]], np.uint64)
    high = np.array([each >> 64 for each in hashes[:count]], np.uint64)
    if rows.min() < 0 or (blocks["hash_lo"] != low).any() or (blocks["hash_hi"] != high).any():
        found = [index.row_of(Key(namespace_id, group, each)) for each in hashes[:count]]
        return np.array([each for each in found if each is not None], np.int32)
    return rows


def _soonest(run: Sequence[_Stored], count: int, compute_s: float | None) -> tuple[int, float | None]:
    """How many leading blocks to load, and the seconds that it takes; all where a rate is not known."""
    if compute_s is None or any(not stored.volume.read_bytes_per_s for stored in run):
        return len(run), None
    busy_s: dict[str, float] = {}
    best, best_s, best_loaded_s = 0, compute_s * count, 0.0
    longest_s = 0.0
    for at, (volume, block_bytes) in enumerate(run, 1):
        assert volume.read_bytes_per_s is not None
        busy_s[volume.volume_id] = busy_s.get(volume.volume_id, 0.0) + block_bytes / volume.read_bytes_per_s
        longest_s = max(longest_s, busy_s[volume.volume_id])
        total_s = longest_s + compute_s * (count - at)
        if total_s <= best_s:
            best, best_s, best_loaded_s = at, total_s, longest_s
    return best, best_loaded_s


def _of_block(stored: _Stored, load: bool, compute_s: float | None) -> BlockAdvice:
    volume, block_bytes = stored
    rate = volume.read_bytes_per_s
    load_s = block_bytes / rate if rate else None
    what = f"{bytes_text(block_bytes)} on {volume.volume_id}"
    if load_s is not None:
        what += f", {duration_text(load_s)} to load"
    if compute_s is not None:
        what += f", {duration_text(compute_s)} to compute"
    return BlockAdvice(load, volume.volume_id if load else "", load_s if load else compute_s, what)


def _absent(at: int, run: int) -> str:
    return "on no volume" if at == run else "behind a block that is on no volume"


def _why(
    run: Sequence[_Stored],
    count: int,
    total: int,
    first_s: float | None,
    total_s: float | None,
    compute_s: float | None,
) -> str:
    if not run:
        return f"none of {total} blocks is on a volume, from the first on"
    if compute_s is None:
        return (
            f"load {count} of {total} blocks: how fast the engine computes is not known, give prefill_tokens_per_s or "
            "set policy.prefill_tokens_per_s"
        )
    if first_s is None or total_s is None:
        return f"load {count} of {total} blocks: a volume's read rate is not known yet, declare read_bytes_per_s"
    instead = f"first token in {duration_text(first_s)} instead of {duration_text(total_s)}"
    if count == 0:
        return f"compute all {total} blocks: loading any of the {len(run)} stored takes longer"
    return f"load {count} of {total} blocks, {len(run)} are stored: {instead}"
