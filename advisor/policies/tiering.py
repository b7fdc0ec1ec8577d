"""The plan: what to promote, demote, drop and delete, with reasons.

Admission by frequency (a block is promoted from its k-th touch, best first), eviction by the chosen order with leaves
first, so that the head of a chain never leaves a volume before its tail. Pure: it reads the index, volumes, open moves
and limits that it is given, and changes nothing.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import msgspec

from advisor.index import ArrayIndex, BlockRow, Key
from advisor.moves import FREES_SOURCE, MoveKind, MoveTable
from advisor.wording import bytes_text, duration_text, ordinal

POLICY_VERSION = "tiering-1"
"""Changes whenever the same state could give another plan."""

REFUSALS_PER_PLAN_MAX = 16


class Limits(msgspec.Struct, frozen=True, kw_only=True):
    """The planner's part of the settings. Counts are blocks per plan, sizes bytes."""

    eviction: str = "lru"
    promote_touches: int = 2
    promote_moves_max: int = 64
    demote_moves_max: int = 64
    moves_open_max: int = 256
    moves_bytes_max: int = 1 << 30


@dataclass(frozen=True, slots=True)
class Volume:
    """A registered volume as the planner sees it. Rates in bytes/s, None before the first measurement."""

    volume_id: str
    agent: str
    place: int
    tier: int
    speed_rank: int
    capacity_blocks: int
    high_watermark: float
    low_watermark: float
    read_bytes_per_s: float | None = None


@dataclass(frozen=True, slots=True)
class Proposal:
    """A move before it has an id."""

    kind: MoveKind
    block: BlockRow
    source: str
    target: str
    block_bytes: int
    reason: str


@dataclass(frozen=True, slots=True)
class Refusal:
    """A block that could have moved and does not, and why."""

    key: Key
    volume: str
    reason: str


@dataclass(slots=True)
class Plan:
    proposals: list[Proposal] = field(default_factory=list)
    refusals: list[Refusal] = field(default_factory=list)
    refused: int = 0
    """All refusals; `refusals` keeps the first few."""
    rows: set[int] = field(default_factory=set)
    """Those of `proposals`: a block has one move at a time."""

    def propose(self, proposal: Proposal) -> None:
        assert proposal.block.row not in self.rows
        self.proposals.append(proposal)
        self.rows.add(proposal.block.row)

    def refuse(self, block: BlockRow, volume: str, reason: str) -> None:
        self.refused += 1
        if len(self.refusals) < REFUSALS_PER_PLAN_MAX:
            self.refusals.append(Refusal(block.key, volume, reason))


def plan_moves(
    index: ArrayIndex,
    volumes: Sequence[Volume],
    moves: MoveTable,
    touched: Iterable[int],
    limits: Limits,
    now_us: int,
    paused: frozenset[str] = frozenset(),
) -> Plan:
    """Plan over `volumes`. `touched`: rows of blocks used since the last plan, in order. Paused volumes stay out."""
    plan = Plan()
    ordered = sorted((v for v in volumes if v.volume_id not in paused), key=lambda v: (v.speed_rank, v.volume_id))
    if not ordered:
        return plan
    budget = _Budget(limits, len(moves.open))
    occupied = _occupied(index, ordered, moves)
    for faster, volume in enumerate(ordered):
        _relieve(plan, index, volume, ordered[faster + 1 :], moves, limits, budget, occupied, now_us)
    if len(ordered) > 1:
        _promote(plan, index, ordered, moves, touched, limits, budget, occupied, now_us)
    return plan


class _Budget:
    """What one plan may still spend."""

    def __init__(self, limits: Limits, open_moves: int) -> None:
        self.moves = max(0, limits.moves_open_max - open_moves)
        self.bytes = limits.moves_bytes_max

    def spend(self, copied_bytes: int) -> bool:
        if self.moves < 1 or copied_bytes > self.bytes:
            return False
        self.moves -= 1
        self.bytes -= copied_bytes
        return True


def _occupied(index: ArrayIndex, volumes: Sequence[Volume], moves: MoveTable) -> Counter[str]:
    """Slots in use or promised on each volume, less those that open moves will free."""
    occupied = Counter({v.volume_id: index.place_figures(v.place).blocks for v in volumes})
    places = {v.volume_id: v.place for v in volumes}
    for move in moves.open.values():
        block = index.get(move.key)
        here = set() if block is None else {placed.place for placed in block.placements}
        if move.occupies_target and move.target in places and places[move.target] not in here:
            occupied[move.target] += 1
        if move.kind in FREES_SOURCE and move.source in places and places[move.source] in here:
            occupied[move.source] -= 1
    return occupied


def _slots_high(volume: Volume) -> int:
    return int(volume.high_watermark * volume.capacity_blocks)


def _relieve(
    plan: Plan,
    index: ArrayIndex,
    volume: Volume,
    slower: Sequence[Volume],
    moves: MoveTable,
    limits: Limits,
    budget: _Budget,
    occupied: Counter[str],
    now_us: int,
) -> None:
    """Bring a volume that has reached its high watermark down to its low one, coldest leaves first."""
    if occupied[volume.volume_id] < _slots_high(volume):
        return
    surplus = occupied[volume.volume_id] - int(volume.low_watermark * volume.capacity_blocks)
    surplus = min(surplus, limits.demote_moves_max)
    if surplus < 1:
        return
    pressed = f"{volume.volume_id} reached its high watermark of {volume.high_watermark:.0%}"
    held: set[int] = set()
    """Rows whose child stays: they stay too. A block comes after all its children."""
    for row in index.every_leaf_first(volume.place):
        if surplus < 1:
            break
        block = index.block(row)
        if row in held:
            held.add(block.parent)
            continue
        if row in plan.rows:
            held.add(block.parent)
            continue
        open_move = moves.of(block.key)
        if open_move is not None:
            if not (open_move.kind in FREES_SOURCE and open_move.source == volume.volume_id):
                held.add(block.parent)
            continue
        proposal = _way_down(plan, index, block, volume, slower, occupied, pressed, now_us)
        if proposal is None or not budget.spend(proposal.block_bytes if proposal.kind is MoveKind.DEMOTE else 0):
            held.add(block.parent)
            continue
        plan.propose(proposal)
        occupied[volume.volume_id] -= 1
        if proposal.kind is MoveKind.DEMOTE:
            occupied[proposal.target] += 1
        surplus -= 1


def _bytes_in(block: BlockRow, volume: Volume) -> int:
    placed = block.placed_in(volume.place)
    return 0 if placed is None else placed.block_bytes


def _way_down(
    plan: Plan,
    index: ArrayIndex,
    block: BlockRow,
    volume: Volume,
    slower: Sequence[Volume],
    occupied: Counter[str],
    pressed: str,
    now_us: int,
) -> Proposal | None:
    size = _bytes_in(block, volume)
    idle = f"untouched {duration_text(max(0, now_us - block.last_touch_us) / 1e6)}" if block.touches else "never used"
    for other in slower:
        if block.placed_in(other.place) is not None:
            reason = f"{idle}; {pressed}; {other.volume_id} holds a copy"
            return Proposal(MoveKind.DROP, block, volume.volume_id, other.volume_id, size, reason)
    for other in slower:
        if occupied[other.volume_id] < _slots_high(other):
            reason = f"{idle}; {pressed}; no slower copy yet, {bytes_text(size)} to write"
            return Proposal(MoveKind.DEMOTE, block, volume.volume_id, other.volume_id, size, reason)
    if slower:
        plan.refuse(block, volume.volume_id, f"{pressed}, but no slower volume has room")
        return None
    if any(index.is_volume(placed.place) for placed in block.placements if placed.place != volume.place):
        return None
    return Proposal(MoveKind.DELETE, block, volume.volume_id, "", size, f"{idle}; {pressed}; no slower volume")


def _promote(
    plan: Plan,
    index: ArrayIndex,
    ordered: Sequence[Volume],
    moves: MoveTable,
    touched: Iterable[int],
    limits: Limits,
    budget: _Budget,
    occupied: Counter[str],
    now_us: int,
) -> None:
    """Copy blocks used since the last plan to the fastest volume, most used first, parents before children."""
    fast = ordered[0]
    waiting: list[tuple[BlockRow, Volume]] = []
    for row in touched:
        block = index.block(row)
        if block.placed_in(fast.place) is not None or row in plan.rows or moves.of(block.key) is not None:
            continue
        source = next((v for v in ordered[1:] if block.placed_in(v.place) is not None), None)
        if source is None:
            continue
        if block.touches < limits.promote_touches:
            plan.refuse(block, fast.volume_id, f"{ordinal(block.touches)} touch of {limits.promote_touches} needed")
            continue
        waiting.append((block, source))
    waiting.sort(key=lambda pair: (-pair[0].touches, pair[0].depth, pair[0].key))
    promised: set[int] = set()
    for block, source in waiting:
        size = _bytes_in(block, source)
        if occupied[fast.volume_id] >= _slots_high(fast):
            plan.refuse(block, fast.volume_id, f"{fast.volume_id} has no room below its high watermark")
        elif block.parent >= 0 and block.parent not in promised and not index.is_placed(block.parent, fast.place):
            plan.refuse(block, fast.volume_id, f"its parent is not on {fast.volume_id}, so a read would stop before it")
        elif len(promised) >= limits.promote_moves_max:
            plan.refuse(block, fast.volume_id, f"this plan's {limits.promote_moves_max} promotions are spent")
        elif not budget.spend(size):
            plan.refuse(block, fast.volume_id, "the budget of open moves or bytes is spent")
        else:
            reason = _why_promote(block, source, fast, size, now_us)
            plan.propose(Proposal(MoveKind.PROMOTE, block, source.volume_id, fast.volume_id, size, reason))
            promised.add(block.row)
            occupied[fast.volume_id] += 1


def _why_promote(block: BlockRow, source: Volume, fast: Volume, size: int, now_us: int) -> str:
    reason = f"{ordinal(block.touches)} touch in {duration_text(max(0, now_us - block.first_touch_us) / 1e6)}"
    if source.read_bytes_per_s and fast.read_bytes_per_s:
        saved_s = size / source.read_bytes_per_s - size / fast.read_bytes_per_s
        if saved_s > 0:
            reason += f"; est. {duration_text(saved_s)} saved a hit"
    return f"{reason}; {bytes_text(size)}"
