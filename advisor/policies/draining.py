"""Draining: every block of a volume leaves it, coldest leaves first, and none is ever in no volume."""

from __future__ import annotations

from collections.abc import Iterable

from advisor.index import BlockRow
from advisor.moves import MoveKind
from advisor.policies.plan import Proposal, Volume
from advisor.policies.sight import NOWHERE, Sight
from advisor.wording import bytes_text

LOOKED_AT_MAX = 1_024
"""Blocks of a volume that one plan looks at: where so many of the coldest cannot leave, the others wait."""
ANCESTORS_MAX = 4_096
NO_ROOM = "no other volume that may hold it has room below its high watermark"


def drain(sight: Sight, volume: Volume) -> None:
    """Propose that blocks leave `volume`, one of `sight.drained`, within the limits of one past its high watermark."""
    left = sight.limits.demote_moves_max
    for looked_at, row in enumerate(sight.index.every_leaf_first(volume.place)):
        if left <= 0 or looked_at == LOOKED_AT_MAX:
            return
        for block in _with_ancestors(sight, sight.index.block(row), volume)[:left]:
            if block.row not in sight.plan.rows and sight.moves.of(block.key) is None:
                left -= _send_out(sight, block, volume)


def _with_ancestors(sight: Sight, block: BlockRow, volume: Volume) -> list[BlockRow]:
    """A block that leaves, and before it those above it that leave first: to a faster volume a child follows its
    parent."""
    chain = [block]
    ways = _ways(sight, block, volume) if sight.rank(block) == NOWHERE else []
    if not ways or ways[0].order > volume.order:
        return chain
    while chain[-1].parent >= 0 and len(chain) < ANCESTORS_MAX:
        parent = sight.index.block(chain[-1].parent)
        if parent.placed_in(volume.place) is None or sight.rank(parent) < NOWHERE:
            break
        chain.append(parent)
    return chain[::-1]


def _send_out(sight: Sight, block: BlockRow, volume: Volume) -> bool:
    """Propose that a block leaves: dropped where another volume holds it, else copied to one that has room."""
    placed = block.placed_in(volume.place)
    assert placed is not None
    size, why = placed.block_bytes, f"{volume.volume_id} is being drained"
    for other in _own_agent_first(sight.ordered, volume):
        if block.placed_in(other.place) is not None:
            if refusal := sight.purse.refusal(None, 0, promotion=False):
                return _refuse(sight, block, volume, refusal)
            reason = f"{why}, {other.volume_id} holds a copy"
            sight.send_out(Proposal(MoveKind.DROP, block, volume.volume_id, other.volume_id, size, reason), volume)
            return True
    obstacle = sight.kept_out(block)
    for other in [] if obstacle else _ways(sight, block, volume):
        obstacle = sight.purse.refusal(other, size, promotion=False)
        if not obstacle:
            reason = f"{why}, {other.volume_id} has room, {bytes_text(size)} to write"
            proposal = Proposal(MoveKind.DEMOTE, block, volume.volume_id, other.volume_id, size, reason)
            sight.send_out(proposal, volume, other)
            return True
    return _refuse(sight, block, volume, obstacle or NO_ROOM)


def _refuse(sight: Sight, block: BlockRow, volume: Volume, obstacle: str) -> bool:
    sight.plan.refuse(block, volume.volume_id, f"{volume.volume_id} is being drained, but {obstacle}")
    sight.plan.stuck[volume.volume_id] = obstacle
    return False


def _ways(sight: Sight, block: BlockRow, volume: Volume) -> list[Volume]:
    """Volumes that would take a block now, the best first: of the same agent; between its parent's and its children's;
    the nearest slower one, then the nearest faster one.

    One slot below the high watermark stays free, so that what comes here drives nothing out.
    """
    placed = block.placed_in(volume.place)
    size, tenant = 0 if placed is None else placed.block_bytes, sight.tenant(block)
    slower = [other for other in sight.ordered if other.order > volume.order]
    faster = [other for other in reversed(sight.ordered) if other.order < volume.order]
    fits = [
        other
        for other in _own_agent_first([*slower, *faster], volume)
        if sight.occupied[other.volume_id] + 1 < other.slots_high and not sight.barred(other, tenant, size)
    ]
    if len(fits) < 2:
        return fits
    slowest = sight.fastest_child(block)
    above = sight.rank(sight.index.block(block.parent)) if block.parent >= 0 else NOWHERE
    fastest = above if above < NOWHERE else 0
    ranks = {other.volume_id: rank for rank, other in enumerate(sight.ordered)}
    return sorted(
        fits,
        key=lambda other: (other.agent != volume.agent, not fastest <= ranks[other.volume_id] <= slowest),
    )


def _own_agent_first(volumes: Iterable[Volume], drained: Volume) -> list[Volume]:
    """An agent copies between its own volumes for certain."""
    return sorted(volumes, key=lambda other: other.agent != drained.agent)
