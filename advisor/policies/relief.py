"""Making room: a volume past its high watermark comes down to its low one, and what has expired leaves."""

from __future__ import annotations

from advisor.index import BlockRow
from advisor.moves import FREES_SOURCE, MoveKind
from advisor.policies.plan import Proposal, Volume
from advisor.policies.rows import NO_ROWS, Rows
from advisor.policies.sight import NOWHERE, Sight
from advisor.wording import bytes_text, duration_text


def relieve(sight: Sight, volume: Volume) -> None:
    """Bring a volume that has reached its high watermark down to its low one, coldest leaves first."""
    if sight.occupied[volume.volume_id] < volume.slots_high:
        return
    surplus = min(sight.occupied[volume.volume_id] - volume.slots_low, sight.limits.demote_moves_max)
    why = f"{volume.volume_id} reached its high watermark of {volume.high_watermark:.0%}"
    leavers = Leavers(sight, volume)
    while surplus > 0 and (block := leavers.next()) is not None:
        # Where last copies are spared, each that would have gone is told of.
        surplus -= leavers.send_down(block, why) or _spares(sight, volume)


def _spares(sight: Sight, volume: Volume) -> bool:
    return bool(sight.spared) and volume is sight.ordered[-1]


def expire(sight: Sight, volume: Volume) -> None:
    """Take out what was not used for the volume's retention."""
    if volume.retention_s <= 0:
        return
    left = sight.limits.demote_moves_max
    why = f"{volume.volume_id} keeps unused blocks for {duration_text(volume.retention_s)}"
    leavers = Leavers(sight, volume, by_age=True)
    while left > 0 and (block := leavers.next()) is not None:
        if sight.now_us - _last_use_us(block, volume) < volume.retention_s * 1e6:
            leavers.stays(block)
            return
        left -= leavers.send_down(block, why) or _spares(sight, volume)


def _last_use_us(block: BlockRow, volume: Volume) -> int:
    placed = block.placed_in(volume.place)
    return max(block.last_touch_us, placed.last_use_us if placed is not None else 0)


class Leavers:
    """Blocks of a volume that may leave, first to go first. What stays keeps its ancestors there."""

    def __init__(
        self, sight: Sight, volume: Volume, pinned: Rows = NO_ROWS, by_age: bool = False
    ) -> None:
        self._sight = sight
        self._volume = volume
        self._pinned = pinned
        self._rows = sight.index.every_leaf_first(volume.place) if by_age else sight.leaving(volume)
        self._held: set[int] = set()
        self._peeked: BlockRow | None = None
        self.keeps = False
        """The one that leaves first stays for now: the last block that was to come is worth less."""

    def peek(self) -> BlockRow | None:
        """The next one, which stays the next one as long as nothing comes to rely on it."""
        self._peeked = self.next()
        return self._peeked

    def next(self) -> BlockRow | None:
        sight = self._sight
        if self._peeked is not None:
            block, self._peeked = self._peeked, None
            if block.row not in sight.needed:
                return block
            self.stays(block)
        for row in self._rows:
            block = sight.index.block(row)
            if self._leaves_already(block):
                continue
            moving = row in sight.plan.rows or sight.moves.of(block.key) is not None
            if moving or row in self._held or row in self._pinned or row in sight.needed:
                self.stays(block)
                continue
            return block
        return None

    def stays(self, block: BlockRow) -> None:
        self._held.add(block.parent)

    def _leaves_already(self, block: BlockRow) -> bool:
        volume, move = self._volume.volume_id, self._sight.moves.of(block.key)
        if move is not None:
            return move.kind in FREES_SOURCE and move.source == volume
        return block.row in self._sight.plan.rows and any(
            p.block.row == block.row and p.kind in FREES_SOURCE and p.source == volume
            for p in self._sight.plan.proposals
        )

    def send_down(self, block: BlockRow, why: str) -> bool:
        """Propose that a block leaves, if there is a way; it stays where there is none."""
        proposal, target = way_down(self._sight, block, self._volume, why)
        if proposal is None:
            self.stays(block)
            return False
        self._sight.propose(proposal, self._volume, target)
        return True


def way_down(
    sight: Sight, block: BlockRow, volume: Volume, why: str
) -> tuple[Proposal | None, Volume | None]:
    """How a block leaves a volume: dropped where a slower one holds it, copied there, or deleted from the last."""
    slower = sight.ordered[sight.ordered.index(volume) + 1 :]
    placed = block.placed_in(volume.place)
    size = 0 if placed is None else placed.block_bytes
    unused_s = max(0, sight.now_us - block.last_touch_us) / 1e6
    idle = f"untouched {duration_text(unused_s)}" if block.touches else "never used"
    lowest, left = sight.fastest_child(block), sight.rank(block, volume)
    obstacle = "no slower volume has room"
    for rank, other in enumerate(slower, len(sight.ordered) - len(slower)):
        if min(rank, left) > lowest:
            continue  # its children would be on a faster volume than it
        if block.placed_in(other.place) is not None:
            if refusal := sight.purse.refusal(None, 0, promotion=False):
                obstacle = refusal
                continue
            reason = f"{idle}, {why}, {other.volume_id} holds a copy"
            return Proposal(MoveKind.DROP, block, volume.volume_id, other.volume_id, size, reason), other
        refusal = (
            sight.kept_out(block)
            or sight.barred(other, sight.tenant(block), size)
            or sight.purse.refusal(other, size, promotion=False)
        )
        if not refusal and sight.occupied[other.volume_id] < other.slots_high:
            reason = f"{idle}, {why}, no slower copy yet, {bytes_text(size)} to write"
            return Proposal(MoveKind.DEMOTE, block, volume.volume_id, other.volume_id, size, reason), other
        obstacle = refusal or obstacle
    if slower:
        sight.plan.refuse(block, volume.volume_id, f"{why}, but {obstacle}")
        return None, None
    if any(sight.index.is_volume(each.place) for each in block.placements if each.place != volume.place):
        return None, None
    if lowest < NOWHERE and lowest < len(sight.ordered) - 1:
        return None, None
    if sight.purse.refusal(None, 0, promotion=False):
        return None, None
    reason = f"{idle}, {why}, no slower volume"
    if sight.spared:
        sight.plan.refuse(block, volume.volume_id, f"{reason}, but {sight.spared}")
        return None, None
    return Proposal(MoveKind.DELETE, block, volume.volume_id, "", size, reason), None
