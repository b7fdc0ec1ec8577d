"""Volumes as the API shows them, made from the folded state. The caller holds the fold's lock."""

from __future__ import annotations

from bisect import bisect_right
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress

from advisor.fold import Fold, VolumeState
from advisor.index import ArrayIndex, BlockRow, IndexFault
from advisor.moves import FREES_SOURCE, Move
from advisor.transfer_times import quantile_s
from advisor.views import VolumeView
from advisor.volume_views import DrainView, HeatBin, HeatView, SpeedView, WayView, WrittenView
from advisor.wording import duration_text

SAMPLE_BLOCKS = 4_096
PIECE_BLOCKS = 64
"""A sample is runs of so many blocks, begun at even distances over the index."""
AGES_S = (0.0, 1.0, 10.0, 100.0, 1_000.0, 10_000.0, 100_000.0, 1_000_000.0)
TOUCHES = (0.0, 1.0, 2.0, 4.0, 8.0, 16.0, 32.0, 64.0, 128.0)
"""Where bins begin; each ends where the next begins."""


def volume_view(fold: Fold, volume: VolumeState, ways: Ways, unreachable: str | None) -> VolumeView:
    """`unreachable`: why its agent is."""
    described = volume.as_planned()
    figures = fold.index.place_figures(volume.place)
    return VolumeView(
        id=volume.volume_id,
        kind=str(volume.descriptor.get("kind", "")),
        agent=volume.agent,
        tier=described.tier,
        speed_rank=described.speed_rank,
        blocks=figures.blocks,
        block_bytes=figures.block_bytes,
        capacity_blocks=described.capacity_blocks,
        fill=figures.blocks / described.capacity_blocks,
        high_watermark=described.high_watermark,
        low_watermark=described.low_watermark,
        reads=figures.reads,
        read_bytes_per_s=volume.rates.get("read"),
        write_bytes_per_s=volume.rates.get("write"),
        incoming=ways.waiting[volume.volume_id],
        outgoing=ways.moves_out[volume.volume_id],
        state=_state(fold, volume, unreachable),
        optional=volume.optional,
        draining=volume.drain is not None,
        paused=volume.volume_id in fold.paused,
    )


def _state(fold: Fold, volume: VolumeState, unreachable: str | None) -> str:
    if volume.away:
        return f"away: {volume.away}"
    if unreachable is not None:
        return f"agent unreachable: {unreachable}"
    if volume.volume_id in fold.paused:
        return "paused by an operator"
    drain = drain_view(fold, volume)
    if drain is None:
        return "healthy"
    if not drain.blocks_left:
        return "drained: it holds no block"
    left = "" if drain.left_s is None else f", about {duration_text(drain.left_s)}"
    obstacle = f"; {drain.obstacle}" if drain.obstacle else ""
    return f"being drained: {drain.blocks_left} blocks left{left}{obstacle}"


class Ways:
    """Open moves, counted by volume."""

    def __init__(self, moves: Iterable[Move]) -> None:
        self.waiting: Counter[str] = Counter()
        """Moves that need a slot there still."""
        self.bytes_in: Counter[str] = Counter()
        self.moves_out: Counter[str] = Counter()
        """Moves that free a block there."""
        self.bytes_out: Counter[str] = Counter()
        for move in moves:
            if move.occupies_target:
                self.waiting[move.target] += 1
                self.bytes_in[move.target] += move.block_bytes
            if move.kind in FREES_SOURCE:
                self.moves_out[move.source] += 1
                self.bytes_out[move.source] += move.block_bytes

    def into(self, volume: str) -> WayView:
        return WayView(moves=self.waiting[volume], block_bytes=self.bytes_in[volume])

    def out_of(self, volume: str) -> WayView:
        return WayView(moves=self.moves_out[volume], block_bytes=self.bytes_out[volume])


def drain_view(fold: Fold, volume: VolumeState) -> DrainView | None:
    drain = volume.drain
    if drain is None:
        return None
    left = fold.index.place_figures(volume.place).blocks
    gone, elapsed_s = drain.blocks - left, (fold.now_us - drain.since_us) / 1e6
    obstacle = fold.held_back(volume) or drain.obstacle
    if fold.plans.waiting is not None:
        obstacle = obstacle or "a plan waits for a person: approve or reject it"
    return DrainView(
        since_us=drain.since_us,
        blocks_at_start=drain.blocks,
        blocks_left=left,
        left_s=0.0 if not left else left * elapsed_s / gone if gone > 0 else None,
        obstacle=obstacle if left else "",
    )


def speed_view(fold: Fold, volume: VolumeState, operation: str, times: Sequence[int]) -> SpeedView:
    """`times`: its transfers lately, by `storage_agent.transfers.TRANSFER_BOUNDS_S`."""
    figures = fold.index.place_figures(volume.place)
    now, mean_bytes = volume.rates.get(operation), figures.block_bytes / max(1, figures.blocks)
    return SpeedView(
        now_bytes_per_s=now,
        best_bytes_per_s=volume.peaks.get(operation),
        declared_bytes_per_s=float(volume.descriptor.get(f"{operation}_bytes_per_s", 0.0)) or None,
        block_s=mean_bytes / now if now and mean_bytes else None,
        transfers=sum(times),
        transfer_p50_s=quantile_s(times, 0.5),
        transfer_p99_s=quantile_s(times, 0.99),
    )


def written_view(fold: Fold, volume: VolumeState) -> WrittenView:
    written = volume.written.on(fold.now_us)
    return WrittenView(
        today_bytes=written.today,
        yesterday_bytes=written.yesterday,
        endurance_bytes_per_day=float(volume.descriptor.get("endurance_bytes_per_day", 0.0)),
    )


def sample_of(index: ArrayIndex, place: int) -> list[BlockRow]:
    """All blocks of a place, or `SAMPLE_BLOCKS` at most of them, each as it is when it is looked at.

    Takes the index's lock itself, for `PIECE_BLOCKS` at a time.
    """
    if index.place_figures(place).blocks <= SAMPLE_BLOCKS:
        rows = index.coldest(place, SAMPLE_BLOCKS)
        pieces = [rows[start : start + PIECE_BLOCKS] for start in range(0, len(rows), PIECE_BLOCKS)]
        return [block for piece in pieces for block in _still_there(index, piece, place)]
    totals = index.totals()
    step = (totals.blocks + totals.ghosts) // (SAMPLE_BLOCKS // PIECE_BLOCKS)
    found: dict[int, BlockRow] = {}
    for piece in range(SAMPLE_BLOCKS // PIECE_BLOCKS):
        blocks, _ = index.page(piece * step - 1, PIECE_BLOCKS, place=place)
        found.update((block.row, block) for block in blocks)
    return list(found.values())


def _still_there(index: ArrayIndex, rows: Iterable[int], place: int) -> Iterator[BlockRow]:
    with index.lock.shared():
        for row in rows:
            with suppress(IndexFault):  # it went since
                block = index.block(row)
                if block.placed_in(place) is not None:
                    yield block


def heat_view(blocks: Sequence[BlockRow], place: int, held: int, now_us: int) -> HeatView:
    """Of `blocks` of a place that holds `held`."""
    ages = [max(0, now_us - _last_use_us(block, place)) / 1e6 for block in blocks]
    return HeatView(
        sampled=len(blocks) < held,
        looked_at=len(blocks),
        by_age_s=_bins(AGES_S, ages),
        by_touches=_bins(TOUCHES, [block.touches for block in blocks]),
    )


def _last_use_us(block: BlockRow, place: int) -> int:
    placed = block.placed_in(place)
    return max(block.last_touch_us, 0 if placed is None else placed.last_use_us)


def _bins(begins: Sequence[float], values: Iterable[float]) -> list[HeatBin]:
    counts = Counter(bisect_right(begins, value) - 1 for value in values)
    ends = [*begins[1:], None]
    return [
        HeatBin(at_least=begin, below=end, blocks=counts[number])
        for number, (begin, end) in enumerate(zip(begins, ends, strict=True))
    ]
