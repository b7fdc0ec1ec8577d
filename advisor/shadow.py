"""One policy that moves nothing: a planner over an index of its own. Pure.

A shadow holds blocks under the real ones' keys, and the planner plans over them as over the real index; its moves
happen at once, there. It learns of blocks that a client puts on a volume as they come, and of uses at each tick.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt

from advisor.index import INDEX_FULL, ArrayIndex, Key, PlaceKey
from advisor.moves import FREES_SOURCE, MoveKind, MoveTable
from advisor.policies.limits import Limits
from advisor.policies.plan import Plan, Volume
from advisor.policies.registry import eviction_of
from advisor.policies.state import PolicyState, SavedPolicies
from advisor.policies.tiering import plan_moves
from advisor.shadow_index import SavedIndex, ShadowIndex
from advisor.shadow_tally import SavedTally, Tally, tag_of
from advisor.shadow_touches import Touches, placed_on, records_of, saved_s_of
from advisor.turnstile import Turnstile
from event_plane.schema import EventType, Namespace, RecordFlag, Records

Array = npt.NDArray[Any]

BLOCKS_MAX = 1 << 20
FORGOTTEN_AT_ONCE = 4_096
"""Blocks of the slowest volume that make room for others, those used longest ago."""
COPIES = frozenset({MoveKind.PROMOTE, MoveKind.DEMOTE})

_PRODUCER = 0
"""Owner of every volume in a shadow's index."""


class ShadowTerms(msgspec.Struct, frozen=True):
    """A shadow as the settings have it: see `advisor.settings.ShadowSettings`."""

    name: str
    limits: Limits
    blocks_max: int = BLOCKS_MAX


class SavedShadow(msgspec.Struct, array_like=True):
    """`Shadow` in a checkpoint."""

    index: SavedIndex
    policies: SavedPolicies
    tally: SavedTally
    left_out: int = 0


class Shadow:
    """One policy that moves nothing. Mutated by the comparison that owns it."""

    def __init__(self, terms: ShadowTerms, lock: Turnstile, saved: SavedShadow | None = None) -> None:
        self.name, self.limits = terms.name, terms.limits
        self.state = PolicyState()
        self.left_out = 0
        """Blocks for which there was no room: they are not counted as found."""
        self.volumes: list[Volume] = []
        """As the planner sees them here, fastest first."""
        if saved is None:
            self.index = ShadowIndex(terms.blocks_max, lock=lock)
            self.tally = Tally()
        else:
            self.index = ShadowIndex.restored(saved.index, terms.blocks_max, lock)
            self.state.restore(saved.policies)
            self.tally = Tally(saved.tally)
            self.left_out = saved.left_out

    def saved(self) -> SavedShadow:
        return SavedShadow(self.index.saved(), self.state.saved(), self.tally.saved(), self.left_out)

    def memory_bytes(self) -> int:
        """Of its blocks and notes."""
        return self.index.memory_bytes() + self.state.book.notes.nbytes

    # -- volumes

    def settle(self, volumes: Sequence[Volume]) -> None:
        """Have the registered volumes, fastest first, and no others."""
        index, order = self.index, eviction_of(self.limits).index_order
        self.volumes = []
        for volume in volumes:
            place = index.place(PlaceKey(_PRODUCER, volume.tier, volume.volume_id))
            index.set_volume(place, True)
            if index.order(place) != order:
                index.set_order(place, order)
            self.volumes.append(replace(volume, place=place))
        places = {volume.place for volume in self.volumes}
        for place in range(len(index.places)):
            if place not in places and index.is_volume(place):
                index.clear([place])
                index.set_volume(place, False)

    # -- what happens

    def put(self, stores: Records, namespace_ids: Sequence[int], targets: Array, now_us: int) -> None:
        """A client put blocks on volumes, `targets` by rank."""
        on = np.zeros((len(self.volumes), len(stores)), np.bool_)
        on[targets, np.arange(len(stores))] = True
        self._store(stores, namespace_ids, on, now_us)

    def forget(self, key: Key) -> None:
        """A block was deleted because a person wanted it."""
        block = self.index.get(key)
        if block is not None:
            for placed in block.placements:
                self.index.remove(block.row, placed.place)

    def bar(self, tenants: frozenset[str], namespaces: Mapping[int, Namespace]) -> None:
        """Forget all blocks of tenants that are refused."""
        for namespace_id, figures in self.index.totals().by_namespace.items():
            namespace = namespaces.get(namespace_id)
            if figures.blocks and namespace is not None and namespace.tenant in tenants:
                self.index.clear(range(len(self.index.places)), namespace_id)

    def tick(
        self,
        live: ArrayIndex,
        live_volumes: Sequence[Volume],
        touches: Touches,
        since_us: int,
        now_us: int,
        paused: frozenset[str],
        namespaces: Mapping[int, Namespace],
    ) -> Plan:
        """Take in the uses, count what was found, plan, and carry the plan out."""
        held = self._held(live, touches.rows)
        known = np.logical_or.reduce(held)
        if not known.all():
            self._adopt(live, live_volumes, touches.rows[~known], since_us)
            held = self._held(live, touches.rows)
        used = self._use(touches, held, known, since_us)
        self.tally.used(touches.tags, touches.uses, touches.sizes, held[0], saved_s_of(self.volumes, touches, held))
        plan = plan_moves(
            self.index, self.volumes, MoveTable(), used, self.limits, now_us, paused,
            state=self.state, namespaces=namespaces,
        )  # fmt: skip
        self._carry_out(plan, now_us)
        self.tally.mark(now_us)
        return plan

    def _held(self, live: ArrayIndex, rows: Array) -> Array:
        """Which volume holds which of the live index's blocks here: bool (volumes, rows)."""
        blocks, realms = live.tables.blocks[rows], live.tables.realms
        numbers, at = np.unique(blocks["realm"], return_inverse=True)
        mine = [self.index.realm_of(int(realms[n].namespace_id), int(realms[n].group)) for n in numbers]
        hashes = np.stack([blocks["hash_lo"], blocks["hash_hi"]], axis=1)
        realms_here = np.array(mine, np.int64)[at]
        return np.array([self.index.held(hashes, realms_here, volume.place) for volume in self.volumes])

    def _adopt(self, live: ArrayIndex, volumes: Sequence[Volume], rows: Array, now_us: int) -> None:
        """Take in blocks, and ancestors of theirs, where the live volumes hold them."""
        parents_of = live.tables.blocks["parent"]
        wanted = lacking = rows
        while len(lacking):
            parents = np.unique(parents_of[lacking])
            parents = parents[parents >= 0]
            parents = parents[live.tables.blocks["placed"][parents] >= 0]
            lacking = np.setdiff1d(parents[~self._held(live, parents).any(axis=0)], wanted)
            wanted = np.concatenate([wanted, lacking])
        wanted = wanted[np.argsort(live.tables.blocks["depth"][wanted], kind="stable")]
        on = placed_on(live, wanted, volumes)
        wanted, on = wanted[on.any(axis=0)], on[:, on.any(axis=0)]
        stores, namespace_ids = records_of(live, wanted)
        self._store(stores, namespace_ids, on, now_us)
        # What was used before is history, not a use since the last tick.
        touches = live.tables.blocks["touches"][wanted]
        older = np.flatnonzero((touches > 0) & ~np.isin(wanted, rows))
        self._access(stores, namespace_ids, self._held(live, wanted), touches, older, now_us)
        self.index.touched_since_drain()

    def _use(self, touches: Touches, held: Array, known: Array, now_us: int) -> Array:
        """Use blocks where they are fastest here. Returns their rows here."""
        hits = np.where(known, touches.uses, touches.touches)
        here = np.flatnonzero(held.any(axis=0))
        self._access(touches.records, touches.namespace_ids, held, hits, here, now_us)
        return self.index.touched_since_drain()

    def _access(
        self, records: Records, namespace_ids: Sequence[int], held: Array, hits: Array, which: Array, now_us: int
    ) -> None:
        records = records[which]
        records["event_type"] = EventType.ACCESS
        records["hits"] = np.minimum(hits, (1 << 32) - 1)[which]
        self._apply(records, namespace_ids, held.argmax(axis=0)[which], now_us)

    def _store(self, stores: Records, namespace_ids: Sequence[int], on: Array, now_us: int) -> None:
        """Blocks came to volumes, `on` bool (volumes, blocks). What does not fit goes to the slowest."""
        self._make_room(len(stores))
        for rank, volume in enumerate(self.volumes[:-1]):
            room = max(0, volume.capacity_blocks - self.index.place_figures(volume.place).blocks)
            over = np.flatnonzero(on[rank])[room:]
            on[rank, over], on[-1, over] = False, True
        ranks, at = np.nonzero(on)
        records = stores[at]
        records["event_type"], records["flags"] = EventType.STORE, RecordFlag.COPY
        self._apply(records, namespace_ids, ranks, now_us)

    def _apply(self, records: Records, namespace_ids: Sequence[int], ranks: Array, now_us: int) -> None:
        records["storage_location"] = ranks
        records["tier"] = np.array([volume.tier for volume in self.volumes])[ranks]
        locations = [volume.volume_id for volume in self.volumes]
        applied = self.index.apply(
            records, producer=_PRODUCER, namespace_ids=namespace_ids, locations=locations, now_us=now_us
        )
        self.left_out += applied.skipped.get(INDEX_FULL, 0)

    def _make_room(self, blocks: int) -> None:
        """Forget blocks that only the slowest volume has, as far as so many more need it."""
        if min(self.index.room()) >= 2 * blocks:
            return
        slowest, leaving = self.volumes[-1].place, []
        for row in self.index.every_leaf_first(slowest):
            if len(self.index.block(row).placements) == 1:
                leaving.append(row)
            if len(leaving) >= max(2 * blocks, FORGOTTEN_AT_ONCE):
                break
        for row in leaving:
            self.index.remove(row, slowest)

    def _carry_out(self, plan: Plan, now_us: int) -> None:
        ranks = {volume.volume_id: rank for rank, volume in enumerate(self.volumes)}
        copies = [p for p in plan.proposals if p.kind in COPIES]
        if copies:
            stores, namespace_ids = records_of(self.index, np.array([p.block.row for p in copies], np.int32))
            stores["event_type"], stores["flags"] = EventType.STORE, RecordFlag.COPY
            self._apply(stores, namespace_ids, np.array([ranks[p.target] for p in copies]), now_us)
        for p in plan.proposals:
            if p.kind in FREES_SOURCE:
                self.index.remove(p.block.row, self.volumes[ranks[p.source]].place)
            count_move(self.tally, p.kind, p.source, p.target, tag_of(p.block.key), p.block_bytes, now_us, ranks)


def count_move(
    tally: Tally, kind: MoveKind, source: str, target: str, tag: int, block_bytes: int, now_us: int,
    ranks: Mapping[str, int],
) -> None:  # fmt: skip
    """One move that was carried out, between volumes of `ranks`."""
    tally.moved(block_bytes if kind in COPIES else 0)
    if kind is MoveKind.PROMOTE and ranks.get(target) == 0:
        tally.came(tag, now_us)
    if kind in FREES_SOURCE and ranks.get(source) == 0:
        tally.left(tag, now_us)
