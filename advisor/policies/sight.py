"""What a plan works on: the folded state as it was, and what the plan has decided so far."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence

import numpy as np

from advisor.index import ArrayIndex, BlockRow
from advisor.moves import FREES_SOURCE, MoveKind, MoveTable
from advisor.policies.budgets import Purse, pressed
from advisor.policies.eviction import EVICTIONS, Eviction, in_order
from advisor.policies.limits import Limits, Quota
from advisor.policies.plan import Plan, Proposal, Volume
from advisor.policies.rules.noting import placed_columns
from advisor.policies.rules.score import HALF_LIFE_S
from advisor.policies.state import PolicyState
from advisor.wording import bytes_text
from event_plane.schema import Namespace

NOWHERE = 1 << 30
"""The rank of a block that is on no volume."""


def mean_bytes(index: ArrayIndex, volumes: Sequence[Volume]) -> float:
    """Of a block on any of these volumes; 0 where there is none."""
    figures = [index.place_figures(volume.place) for volume in volumes]
    return sum(each.block_bytes for each in figures) / max(1, sum(each.blocks for each in figures))


class Sight:
    """One plan in the making. The caller holds the index's lock."""

    def __init__(
        self,
        index: ArrayIndex,
        ordered: Sequence[Volume],
        moves: MoveTable,
        limits: Limits,
        now_us: int,
        state: PolicyState,
        namespaces: Mapping[int, Namespace],
        eviction: Eviction,
        purse: Purse,
        kept_out: Callable[[BlockRow], str],
        drained: Sequence[Volume] = (),
        spared: str = "",
    ) -> None:
        self.index = index
        self.ordered = ordered
        """Volumes, fastest first, without those that are drained."""
        self.drained = drained
        self.moves = moves
        self.limits = limits
        self.now_us = now_us
        self.state = state
        self.purse = purse
        self.kept_out = kept_out
        """Why a block is brought nowhere; empty where it may be."""
        self.spared = spared
        """Why no last copy is deleted for want of room or for its age; empty where one may be."""
        self.plan = Plan()
        self._eviction = eviction
        self._namespaces = namespaces
        self._ranks = {volume.place: rank for rank, volume in enumerate(ordered)}
        self._held_by: dict[tuple[str, str], list[int]] = {}
        """By tenant and volume: blocks and bytes, of those with a quota."""
        self._counted: set[str] = set()
        self._leaving: dict[str, list[int]] = {}
        self.needed: set[int] = set()
        """Rows of parents that a proposal relies on."""
        self.rises: dict[int, int] = {}
        """By row: the rank that a proposed copy brings."""
        self.left: dict[int, int] = {}
        """By row: the place that a proposal takes it out of."""
        self.occupied = self._occupied()

    @property
    def now_s(self) -> float:
        return self.now_us / 1e6

    def tenant(self, block: BlockRow) -> str:
        namespace = self._namespaces.get(block.key.namespace_id)
        return namespace.tenant if namespace is not None else ""

    def eviction_of(self, volume: Volume) -> Eviction:
        """The chosen one, or by last use where that one knows only the fastest volume."""
        if self._eviction.by_entry and volume is not self.ordered[0]:
            return EVICTIONS["lru-leaf"]
        return self._eviction

    def leaving(self, volume: Volume) -> Iterator[int]:
        """Rows in the order in which they leave, as it was when this plan first asked."""
        if volume.volume_id not in self._leaving:
            ageing = self.state.ageing_of(volume.volume_id)
            eviction = self.eviction_of(volume)
            rows = in_order(self.index, volume.place, eviction, self.state.book, ageing, volume.capacity_blocks)
            if not isinstance(rows, list):
                return iter(rows)
            self._leaving[volume.volume_id] = rows
        return iter(self._leaving[volume.volume_id])

    def heat(self, score: float) -> float:
        """Touches that have not faded yet."""
        return float(2.0 ** min(60.0, score - self.now_s / HALF_LIFE_S)) if score > -1e8 else 0.0

    # -- where blocks are

    def rank(self, block: BlockRow, without: Volume | None = None) -> int:
        """Of the fastest volume that holds it, as the plan leaves it; `NOWHERE` of none."""
        left = self.left.get(block.row)
        ranks = [
            rank
            for placed in block.placements
            if (rank := self._ranks.get(placed.place)) is not None
            and (without is None or placed.place != without.place)
            and placed.place != left
        ]
        if (risen := self.rises.get(block.row)) is not None:
            ranks.append(risen)
        return min(ranks, default=NOWHERE)

    def fastest_child(self, block: BlockRow) -> int:
        """The best rank among the block's children."""
        children, _ = self.index.children(block.row, 1 << 12)
        return min((self.rank(self.index.block(child)) for child in children), default=NOWHERE)

    def _occupied(self) -> Counter[str]:
        """Slots in use or promised on each volume, less those that open moves will free."""
        known = (*self.ordered, *self.drained)
        occupied = Counter({v.volume_id: self.index.place_figures(v.place).blocks for v in known})
        places = {v.volume_id: v.place for v in known}
        for move in self.moves.open.values():
            block = self.index.get(move.key)
            here = set() if block is None else {placed.place for placed in block.placements}
            if move.occupies_target and move.target in places and places[move.target] not in here:
                occupied[move.target] += 1
            if move.kind in FREES_SOURCE and move.source in places and places[move.source] in here:
                occupied[move.source] -= 1
        return occupied

    # -- whose blocks may be where

    def barred(self, volume: Volume, tenant: str, size: int) -> str:
        """Why no block of a tenant may be brought to a volume now; empty where one may."""
        if not volume.admits(tenant):
            return f"{volume.volume_id} is not for tenant {tenant or 'unknown'}"
        if why := pressed(volume, self.limits):
            return why
        for quota in self.limits.quotas:
            if quota.tenant == tenant and quota.volume == volume.volume_id:
                blocks, held_bytes = self._held(quota, volume)
                if quota.blocks and blocks >= quota.blocks:
                    return f"{tenant} holds its {quota.blocks} blocks on {volume.volume_id}"
                if quota.block_bytes and held_bytes + size > quota.block_bytes:
                    return f"{tenant} holds its {bytes_text(quota.block_bytes)} on {volume.volume_id}"
        return ""

    def _held(self, quota: Quota, volume: Volume) -> list[int]:
        if volume.volume_id not in self._counted:
            self._counted.add(volume.volume_id)
            self._count(volume)
        return self._held_by.setdefault((quota.tenant, quota.volume), [0, 0])

    def _count(self, volume: Volume) -> None:
        """What tenants hold on a volume: reads all of it."""
        count = self.index.place_figures(volume.place).blocks
        rows = np.array(self.index.coldest(volume.place, count), np.int32)
        tables = self.index.tables
        uses, sizes = np.empty(len(rows), np.int64), np.empty(len(rows), np.int64)
        placed_columns(tables.blocks, tables.placements, rows, volume.place, uses, sizes)
        realms = tables.blocks["realm"][rows]
        for realm in np.unique(realms).tolist():
            namespace = self._namespaces.get(int(tables.realms[realm].namespace_id))
            held = self._held_by.setdefault((namespace.tenant if namespace else "", volume.volume_id), [0, 0])
            mine = realms == realm
            held[0] += int(mine.sum())
            held[1] += int(sizes[mine].sum())
        for move in self.moves.open.values():
            namespace = self._namespaces.get(move.key.namespace_id)
            if move.occupies_target and move.target == volume.volume_id and namespace is not None:
                held = self._held_by.setdefault((namespace.tenant, volume.volume_id), [0, 0])
                held[0] += 1
                held[1] += move.block_bytes

    # -- deciding

    def take_order(self, proposal: Proposal) -> None:
        """Take a delete that a person ordered into the plan: no budget is asked. Its volume is one that is planned for.
        """
        source = next(each for each in (*self.ordered, *self.drained) if each.volume_id == proposal.source)
        self.plan.propose(proposal)
        self.occupied[source.volume_id] -= 1
        self.left[proposal.block.row] = source.place

    def send_out(self, proposal: Proposal, source: Volume, target: Volume | None = None) -> None:
        """Take a move out of a drained volume into the plan. It must be affordable.

        What policies remember stays as it is: the block leaves for no fault of its own, and may come back at once.
        """
        self._take(proposal, target)
        self.occupied[source.volume_id] -= 1
        self.left[proposal.block.row] = source.place

    def reopen(self, proposal: Proposal, source: Volume, target: Volume | None) -> None:
        """Take a move into the plan that was paid for when it was first planned."""
        self.purse.moves -= 1
        self._count_in(proposal, target)
        if proposal.kind in FREES_SOURCE:
            self.occupied[source.volume_id] -= 1
            self.left[proposal.block.row] = source.place

    def _take(self, proposal: Proposal, target: Volume | None) -> None:
        """Pay for a move and count it in, but for what it takes out of its source."""
        copies = proposal.kind in (MoveKind.PROMOTE, MoveKind.DEMOTE)
        promotion = proposal.kind is MoveKind.PROMOTE
        self.purse.spend(target, proposal.block_bytes if copies else 0, promotion=promotion)
        self._count_in(proposal, target)

    def _count_in(self, proposal: Proposal, target: Volume | None) -> None:
        block = proposal.block
        assert isinstance(block, BlockRow)
        self.plan.propose(proposal)
        if proposal.kind in (MoveKind.PROMOTE, MoveKind.DEMOTE) and target is not None:
            self.occupied[target.volume_id] += 1
            self.rises[block.row] = self._ranks[target.place]
            held = self._held_by.get((self.tenant(block), target.volume_id))
            if held is not None:
                held[0] += 1
                held[1] += proposal.block_bytes

    def propose(self, proposal: Proposal, source: Volume, target: Volume | None) -> None:
        """Take a move into the plan, and all that follows from it. It must be affordable."""
        block, kind = proposal.block, proposal.kind
        assert isinstance(block, BlockRow)
        self._take(proposal, target)
        slot = self.state.book.slot(self.index, block.row)
        if kind is MoveKind.PROMOTE:
            assert target is not None
            self.needed.add(block.parent)
            self.state.promoted += target is self.ordered[0]
            self._enter(slot, target)
        else:
            self.occupied[source.volume_id] -= 1
            self.left[block.row] = source.place
            self._leave(slot, source)

    def _enter(self, slot: int, target: Volume) -> None:
        if slot < 0:
            return
        book, ageing = self.state.book, self.state.ageing_of(target.volume_id)
        note = book.notes[slot]
        turn = book.next_turn()
        self.eviction_of(target).enter(book, slot, ageing, target.slots_high)
        note.entered_turn, note.out_turn, note.turn = turn, 0, turn
        note.seen_touches = note.touches
        book.make_key(slot, self.eviction_of(target).rule, ageing.inflation)

    def _leave(self, slot: int, source: Volume) -> None:
        if slot < 0:
            return
        book = self.state.book
        note = book.notes[slot]
        self.eviction_of(source).leave(book, slot, self.state.ageing_of(source.volume_id), source.slots_high)
        note.dropped_s, note.dropped_turn = self.now_s, book.turn
        note.dropped_heat = self.heat(float(note.score))
        if source is self.ordered[0]:
            note.entered_turn = 0
