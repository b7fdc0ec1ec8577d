"""Which volumes to compact, and which chains to bring together there. Pure but for the table and buckets it is given.

A round goes over all chains of a volume once, a few hundred blocks a plan; the agent leaves alone what lies well. What
it came to is measured, and the next round waits until the figures are worse than it left them.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

from advisor.compactions import CompactionKind, CompactionTable, VolumeLayout
from advisor.index import ArrayIndex, BlockRow, Key
from advisor.policies.budgets import HORIZON_S, Bucket, endurance_bucket, pressed
from advisor.policies.limits import Limits
from advisor.policies.plan import Volume
from advisor.wording import bytes_text, duration_text
from storage_agent.port import Fragmentation

BLOCKS_MAX = 512
"""Of one compaction, and of one chain: ingest waits while they are looked up."""
LOOKED_AT_MAX = 512
"""Blocks that one plan looks at to find where chains begin."""
CHAIN_BLOCKS_LEAST = 64
"""A sample of fewer blocks says nothing."""
RECLAIMED_BYTES_LEAST = 1 << 20
OBJECTS_LEAST = 64
OBJECTS_TIMES = 4
"""So many times the objects that the blocks would fit in are worth a rewrite."""
WORSE_TIMES = 1.2
"""A round begins when figures are so many times what the last one left."""
REST_S_MAX = 86_400.0
READS_S_LEAST = 60.0
"""Reads a second are reckoned over so long at least, and smoothed over ten minutes."""
EXTENT_S = {3: 100e-6, 4: 10e-3}
"""What one more request costs a reader, by tier: an NVMe read, a request to a server."""
BURST_S = 60.0
_CHILDREN_MAX = 64


class CompactionProposal(NamedTuple):
    """A compaction before it has an id. `keys`: chain by chain, each root to leaf."""

    volume: str
    kind: CompactionKind
    keys: list[Key]
    reason: str
    before: Fragmentation


def plan_compactions(
    index: ArrayIndex,
    volumes: Sequence[Volume],
    table: CompactionTable,
    buckets: dict[str, Bucket],
    limits: Limits,
    now_us: int,
    out: frozenset[str],
) -> list[CompactionProposal]:
    """One at most: of the first volume, by name, that is worth it. Those `out` are paused, away or being drained."""
    for volume in sorted(volumes, key=lambda each: each.volume_id):
        layout = table.layouts.get(volume.volume_id)
        if layout is None or volume.volume_id in table.open:
            continue
        _note_reads(layout, index.place_figures(volume.place).reads, now_us)
        if layout.round_ended:
            _rest(layout, limits, now_us)
        layout.note = _why_not(volume, layout, buckets, limits, now_us, out)
        if layout.note:
            continue
        proposal = _reclaiming(volume, layout, limits) or _gathering(index, volume, layout, limits)
        if proposal is not None:
            return [proposal]
    return []


def charge(
    buckets: dict[str, Bucket], volume: Volume, limits: Limits, written_bytes: int, now_us: int
) -> None:
    """Pay for what a compaction wrote. It may be more than there is: then it is a debt."""
    if limits.compaction_bytes_per_s > 0:
        _bucket(buckets, volume, limits, now_us).level -= written_bytes
    if volume.endurance_bytes_per_day > 0:
        endurance_bucket(buckets, volume, now_us).level -= written_bytes


def _why_not(
    volume: Volume, layout: VolumeLayout, buckets: dict[str, Bucket], limits: Limits, now_us: int, out: frozenset[str]
) -> str:
    if not limits.compaction:
        return "compaction is switched off"
    if volume.volume_id in out:
        return "paused, away or being drained"
    if now_us < layout.rest_us:
        return f"rests for {duration_text((layout.rest_us - now_us) / 1e6)} more"
    if busy := pressed(volume, limits):
        return busy
    if limits.compaction_bytes_per_s > 0 and _bucket(buckets, volume, limits, now_us).level <= 0:
        return f"the budget of {bytes_text(limits.compaction_bytes_per_s)}/s is spent"
    if volume.endurance_bytes_per_day > 0 and endurance_bucket(buckets, volume, now_us).level <= 0:
        return f"{volume.volume_id} was written its {bytes_text(volume.endurance_bytes_per_day)} a day"
    return ""


def _reclaiming(volume: Volume, layout: VolumeLayout, limits: Limits) -> CompactionProposal | None:
    """No more is written than is given back: what is rewritten is at most half alive, or small."""
    figures, before = layout.figures, layout.reclaimed or Fragmentation()
    dead, objects = figures.reclaimable_bytes, figures.objects
    dead_least = max(RECLAIMED_BYTES_LEAST, limits.compaction_dead_share * figures.held_bytes)
    objects_most = max(OBJECTS_LEAST, OBJECTS_TIMES * figures.objects_least)
    if dead >= dead_least and dead > WORSE_TIMES * before.reclaimable_bytes:
        reason = f"{bytes_text(dead)} of {bytes_text(figures.held_bytes)} can be given back"
    elif objects >= objects_most and objects > WORSE_TIMES * before.objects:
        reason = f"{objects} objects hold what fits into {figures.objects_least}"
    else:
        return None
    return CompactionProposal(volume.volume_id, CompactionKind.RECLAIM, [], reason, figures)


def _gathering(
    index: ArrayIndex, volume: Volume, layout: VolumeLayout, limits: Limits
) -> CompactionProposal | None:
    figures = layout.figures
    if layout.cursor < 0:
        layout.note = _why_no_round(volume, layout, limits)
        if layout.note:
            return None
        layout.gained = 0
    keys, layout.cursor = _next_chains(index, volume.place, layout.cursor)
    if not keys:
        layout.settled, layout.round_ended = (figures, True) if layout.cursor < 0 else (layout.settled, False)
        layout.note = "no chain of the last look has two blocks here"
        return None
    reason = (
        f"{figures.chains} chains of {figures.chain_blocks / figures.chains:.0f} blocks lie in {figures.extents} "
        f"pieces, {figures.extents_least:.0f} would do"
    )
    return CompactionProposal(volume.volume_id, CompactionKind.GATHER, keys, reason, figures)


def _why_no_round(volume: Volume, layout: VolumeLayout, limits: Limits) -> str:
    figures, before = layout.figures, layout.settled
    if figures.chain_blocks < CHAIN_BLOCKS_LEAST:
        return "too few chains to tell"
    spread = spread_of(figures)
    if spread < limits.compaction_spread:
        return f"chains lie in {spread:.1f} times the pieces that they need"
    if before is not None and spread < WORSE_TIMES * spread_of(before):
        return f"chains lie no worse than the last round left them, in {spread:.1f} times the pieces that they need"
    return _loss(volume, layout, limits)


def _loss(volume: Volume, layout: VolumeLayout, limits: Limits) -> str:
    """Why a round costs more than it gains, in seconds; empty where it does not, or where that is not known."""
    figures = layout.figures
    hits = layout.reads_per_s * HORIZON_S
    if hits < 1:
        return "nobody reads it"
    if not (volume.rates_trusted and volume.read_bytes_per_s and limits.move_cost > 0):
        return ""
    avoidable = figures.extents - figures.extents_least
    gain_s = hits * avoidable / figures.chain_blocks * EXTENT_S[volume.tier]
    size = figures.live_bytes * avoidable / max(1, figures.extents)
    write_rate = volume.write_bytes_per_s or volume.read_bytes_per_s
    cost_s = limits.move_cost * (size / volume.read_bytes_per_s + size / write_rate)
    if gain_s >= cost_s:
        return ""
    return f"est. {hits:.2g} reads in 10 min save {duration_text(gain_s)}, the rewrite costs {duration_text(cost_s)}"


def spread_of(figures: Fragmentation) -> float:
    """Pieces that chains lie in, for each that they need; 1 where nothing is known."""
    return figures.extents / figures.extents_least if figures.extents_least > 0 else 1.0


def _rest(layout: VolumeLayout, limits: Limits, now_us: int) -> None:
    """A round ended: the next one waits, and longer each time while nothing is gained."""
    rest_s = limits.compaction_interval_s if layout.gained else 2 * max(layout.rest_s, limits.compaction_interval_s)
    layout.rest_s, layout.round_ended = min(REST_S_MAX, rest_s), False
    layout.rest_us = now_us + round(layout.rest_s * 1e6)


def _bucket(buckets: dict[str, Bucket], volume: Volume, limits: Limits, now_us: int) -> Bucket:
    burst = limits.compaction_bytes_per_s * BURST_S
    bucket = buckets.setdefault(f"{volume.volume_id} compaction", Bucket(burst, now_us))
    bucket.fill(limits.compaction_bytes_per_s, burst, now_us)
    return bucket


def _note_reads(layout: VolumeLayout, reads: int, now_us: int) -> None:
    seconds = (now_us - layout.since_us) / 1e6
    if layout.since_us == 0 or reads < layout.reads:
        layout.reads, layout.since_us = reads, now_us
    elif seconds >= READS_S_LEAST:
        rate = (reads - layout.reads) / seconds
        weight = 1.0 - math.exp(-seconds / HORIZON_S) if layout.reads_per_s else 1.0
        layout.reads_per_s += weight * (rate - layout.reads_per_s)
        layout.reads, layout.since_us = reads, now_us


# -- chains


def _next_chains(index: ArrayIndex, place: int, cursor: int) -> tuple[list[Key], int]:
    """Chains of two blocks and more that begin after row `cursor`, and where the next plan goes on; -1 at the end.

    A chain begins with a block whose parent is not there, or is followed by another of its children: the one that is
    used most. Long ones are cut every `BLOCKS_MAX` blocks.
    """
    keys: list[Key] = []
    with index.lock:
        chains = _Chains(index, place)
        page, after = index.page(cursor, LOOKED_AT_MAX, place=place)
        for block in page:
            chain = chains.beginning_with(block)
            if keys and len(keys) + len(chain) > BLOCKS_MAX:
                return keys, cursor
            cursor = block.row
            keys += chain
    return keys, -1 if after is None else cursor


class _Chains:
    """The chains of a place, during one plan."""

    def __init__(self, index: ArrayIndex, place: int) -> None:
        self._index = index
        self._place = place
        self._next: dict[int, int] = {}

    def beginning_with(self, first: BlockRow) -> list[Key]:
        """None where no chain of two blocks begins there."""
        follows = first.parent >= 0 and self._next_of(first.parent) == first.row
        if follows and first.depth % BLOCKS_MAX and self._index.is_placed(first.parent, self._place):
            return []
        keys, block = [first.key], first
        while len(keys) < BLOCKS_MAX and (row := self._next_of(block.row)) >= 0:
            block = self._index.block(row)
            if block.depth % BLOCKS_MAX == 0:
                break
            keys.append(block.key)
        return keys if len(keys) > 1 else []

    def _next_of(self, row: int) -> int:
        """The child that follows a block: of those here the one used most, of such the oldest; -1 for none."""
        if row not in self._next:
            children, _ = self._index.children(row, _CHILDREN_MAX)
            here = [child for child in children if self._index.is_placed(child, self._place)]
            if len(here) > 1:
                here = [max(here, key=lambda child: (self._index.block(child).touches, -child))]
            self._next[row] = here[0] if here else -1
        return self._next[row]
