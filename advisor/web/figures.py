"""What the overview shows, worked out from a picture: six figures, their sparklines, moves and refusals in one list."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise

from advisor.api.picture import Picture
from advisor.views import MovesView, MoveView, OriginView, RefusalView, Sample, Summary, VolumeView
from advisor.web import formats

SPARK_WIDTH = 96
SPARK_HEIGHT = 26
_SPARK_MARGIN = 2

REFUSALS_SHOWN_MAX = 4
NOT_TOLD = "not told by this engine"

SETTLED_STATES = frozenset({"kept", "freed"})


@dataclass(frozen=True, slots=True)
class Figure:
    """`exact` is the hover. `spark` is the `points` of an SVG polyline, empty where there are not two samples."""

    label: str
    value: str
    note: str
    exact: str
    spark: str


@dataclass(frozen=True, slots=True)
class Activity:
    """One line of the list: blocks that one plan moved the same way, in one state, or refused for one volume.

    `hash`, `at_us` and `reason` are the newest block's. `block_bytes` is their sum, None for refusals.
    """

    id: str
    at_us: int
    kind: str
    state: str
    hash: str
    blocks: int
    tenants: list[str]
    source: str
    target: str
    block_bytes: int | None
    reason: str
    other_reasons: list[str]
    note: str

    @property
    def tone(self) -> str:
        """`settled`, `stopped` or `open`: what the state's tag looks like."""
        if self.state in SETTLED_STATES:
            return "settled"
        return "stopped" if self.state in {"aborted", "refused", "dry"} else "open"


def spark_points(values: Sequence[float | None]) -> str:
    """Points of a polyline in a `SPARK_WIDTH` by `SPARK_HEIGHT` box; seconds without a value are left out."""
    known = [(index, value) for index, value in enumerate(values) if value is not None]
    if len(known) < 2:
        return ""
    low = min(value for _, value in known)
    span = max(value for _, value in known) - low
    drawn_height = SPARK_HEIGHT - 2 * _SPARK_MARGIN
    last = len(values) - 1

    def y(value: float) -> float:
        share = (value - low) / span if span else 0.5
        return SPARK_HEIGHT - _SPARK_MARGIN - share * drawn_height

    return " ".join(f"{index / last * SPARK_WIDTH:.1f},{y(value):.1f}" for index, value in known)


def origin_total(origin: OriginView) -> int:
    return origin.recomputed + origin.g1 + origin.g2 + origin.g3 + origin.g4


def reused_share(origin: OriginView) -> float | None:
    """Prompt blocks found in any tier over all prompt blocks; None before the first."""
    total = origin_total(origin)
    return (total - origin.recomputed) / total if total else None


def not_told(summary: Summary) -> bool:
    """Blocks were placed and no prompt block was counted: their engines do not tell what they found."""
    return summary.blocks > 0 and not origin_total(summary.origin)


def _reused_each_second(samples: Sequence[Sample]) -> list[float | None]:
    shares: list[float | None] = []
    for before, after in pairwise(samples):
        total = origin_total(after.origin) - origin_total(before.origin)
        recomputed = after.origin.recomputed - before.origin.recomputed
        shares.append((total - recomputed) / total if total > 0 else None)
    return shares


@dataclass(frozen=True, slots=True)
class Savings:
    """`seconds` that readers saved against reading all from the slowest volume; None where no rate is known."""

    seconds: float | None
    says: str


def savings(picture: Picture) -> Savings:
    """As the comparison counted them, read by read; without one, from the volumes' reads at their rates of now."""
    if picture.comparison.policies:
        counted = picture.comparison.policies[0].since_start.saved_s
        if counted is not None:
            return Savings(counted, f"{counted:,.3f} s, est. at each read from the volumes' rates, since the start")
    timed = [volume for volume in picture.volumes if volume.read_bytes_per_s and volume.blocks]
    if len(timed) < 2:
        return Savings(None, "est. once two volumes were read from and moves have measured their speed")
    slowest = max(timed, key=lambda volume: volume.speed_rank)
    saved = sum(volume.reads * (read_s(volume, slowest) - read_s(volume, volume)) for volume in timed)
    return Savings(saved, f"{saved:,.3f} s, est. from the blocks read and today's rates, against {slowest.id} alone")


def read_s(volume: VolumeView, at: VolumeView) -> float:
    """Seconds to read one of a volume's blocks at the measured speed of another, or its own: transfer alone."""
    assert at.read_bytes_per_s
    return volume.block_bytes / volume.blocks / at.read_bytes_per_s


@dataclass(frozen=True, slots=True)
class TierShare:
    """A tier's blocks. `waiting`: on their way into it, not readable there yet. `left`, `width`: of one bar, 0 to 1."""

    tier: int
    label: str
    blocks: int
    block_bytes: int
    waiting: int
    found: int
    """Prompt blocks found there since the start."""
    left: float
    width: float


TIER_LABELS = {1: "device", 2: "host", 3: "local disk", 4: "remote"}


def tier_shares(picture: Picture) -> list[TierShare]:
    """Tiers stacked beside one another by blocks, fastest first; each block counts once for each tier it is in."""
    total = sum(tier.blocks for tier in picture.summary.tiers) or 1
    found = picture.summary.origin
    shares: list[TierShare] = []
    left = 0.0
    for tier in sorted(picture.summary.tiers, key=lambda each: each.tier):
        width = tier.blocks / total
        waiting = sum(volume.incoming for volume in picture.volumes if volume.tier == tier.tier)
        hits = {1: found.g1, 2: found.g2, 3: found.g3, 4: found.g4}.get(tier.tier, 0)
        label = TIER_LABELS.get(tier.tier, "")
        shares.append(TierShare(tier.tier, label, tier.blocks, tier.block_bytes, waiting, hits, left, width))
        left += width
    return shares


def six_figures(picture: Picture) -> list[Figure]:
    summary, samples = picture.summary, picture.samples

    def spark(of: Callable[[Sample], float | None]) -> str:
        return spark_points([of(sample) for sample in samples])

    reused = reused_share(summary.origin)
    prompt_blocks = origin_total(summary.origin)
    saved = savings(picture)
    saved_how = "est., by faster reads" if (saved.seconds or 0.0) >= 0 else "est.: the fast volume reads slower"
    return [
        Figure(
            "Ingest", formats.rate(summary.events_per_s), "events/s",
            f"{summary.events_per_s:,.1f} events/s now; {formats.exactly(summary.events_total, 'events')} so far",
            spark(lambda sample: sample.events_per_s),
        ),
        Figure(
            "Behind by", formats.seconds(summary.behind_s), f"{formats.count(summary.queue_entries)} queued",
            f"the oldest entry not yet applied is {summary.behind_s:.3f} s old; "
            f"{formats.exact(summary.queue_entries)} entries wait",
            spark(lambda sample: sample.behind_s),
        ),
        Figure(
            "Blocks", formats.count(summary.blocks), formats.told_size(summary.block_bytes, summary.blocks),
            f"{formats.exactly(summary.blocks, 'blocks')}, {formats.exactly(summary.block_bytes, 'bytes')} told of",
            spark(lambda sample: sample.blocks),
        ),
        Figure("Readers saved", formats.gain(saved.seconds), saved_how, saved.says, ""),
        Figure(
            "Moved", formats.size(summary.moved_bytes_total), formats.counted(summary.moves_total, "moves"),
            f"{formats.exactly(summary.moved_bytes_total, 'bytes')} in "
            f"{formats.exactly(summary.moves_total, 'moves')}, {formats.exact(summary.moves_open)} open",
            spark(lambda sample: sample.moves_per_s),
        ),
        Figure(
            "Prompt state reused", formats.percent(reused), NOT_TOLD if not_told(summary) else "of prompt blocks",
            "no prompt block was counted yet: an engine must say which blocks it found, as vLLM does not"
            if reused is None else
            f"{formats.exact(prompt_blocks - summary.origin.recomputed)} of "
            f"{formats.exactly(prompt_blocks, 'prompt blocks')}",
            spark_points(_reused_each_second(samples)),
        ),
    ]


def activities(moves: MovesView, limit: int) -> list[Activity]:
    """Moves by their last change and refusals by their time, newest first, like ones of one plan on one line.

    Few lines of refusals: every tick may refuse something, and what moved is to be seen beside it.
    """
    moved: dict[tuple[object, ...], list[MoveView]] = {}
    for move in moves.moves:
        plan = (move.planned_us, move.kind, move.state, move.source, move.target, move.note)
        moved.setdefault(plan, []).append(move)
    refused: dict[tuple[int, str], list[RefusalView]] = {}
    for refusal in moves.refusals:
        refused.setdefault((refusal.at_us, refusal.volume), []).append(refusal)
    refusals = sorted((_refused_line(group) for group in refused.values()), key=_at_us, reverse=True)
    lines = [_moved_line(group) for group in moved.values()] + refusals[:REFUSALS_SHOWN_MAX]
    return sorted(lines, key=_at_us, reverse=True)[:limit]


def _at_us(line: Activity) -> int:
    return line.at_us


def _moved_line(group: Sequence[MoveView]) -> Activity:
    newest = max(group, key=lambda move: move.changed_us)
    return Activity(
        id=f"move-{newest.id}", at_us=newest.changed_us, kind=newest.kind, state=newest.state, hash=newest.hash,
        blocks=len(group), tenants=_distinct(move.tenant for move in group), source=newest.source,
        target=newest.target, block_bytes=sum(move.block_bytes for move in group), reason=newest.reason,
        other_reasons=_distinct(move.reason for move in group if move.reason != newest.reason), note=newest.note,
    )


def _refused_line(group: Sequence[RefusalView]) -> Activity:
    first = group[0]
    return Activity(
        id=f"refusal-{first.at_us}-{first.hash}", at_us=first.at_us, kind="", state="refused", hash=first.hash,
        blocks=len(group), tenants=_distinct(refusal.tenant for refusal in group), source="", target=first.volume,
        block_bytes=None, reason=first.reason,
        other_reasons=_distinct(refusal.reason for refusal in group if refusal.reason != first.reason), note="",
    )


def _distinct(texts: Iterable[str]) -> list[str]:
    return sorted(set(texts))
