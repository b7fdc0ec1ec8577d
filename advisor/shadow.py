"""Shadow mode: other policies on the same stream, without moving anything, beside the live one. Pure.

A shadow holds blocks under the real ones' keys in an index of its own, and the planner plans over that as over the real
one; its moves happen at once, there. It learns of blocks that a client puts on a volume as they come, and of uses at
each tick. All policies are counted alike: at a tick, before its plans, each use since the last one is *found* where the
fastest volume then has the block.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt

from advisor.index import INDEX_FULL, ArrayIndex, PlaceKey
from advisor.index.layout import FIRST_HIGH
from advisor.moves import FREES_SOURCE, Move, MoveKind, MoveState, MoveTable
from advisor.policies.budgets import saved_s
from advisor.policies.heat_book import HeatBook
from advisor.policies.limits import Limits
from advisor.policies.plan import Plan, Volume
from advisor.policies.registry import eviction_of
from advisor.policies.rules.noting import placed_columns
from advisor.policies.state import PolicyState, SavedPolicies
from advisor.policies.tiering import plan_moves
from advisor.shadow_index import SavedIndex, ShadowIndex
from advisor.shadow_tally import LOW_64, SavedTally, Tally, tag_of, tags_of
from advisor.turnstile import Turnstile
from event_plane.schema import RECORD_DTYPE, EventType, Namespace, RecordFlag, Records

Array = npt.NDArray[Any]

LIVE = "live"
"""The name of the policy that moves."""
SHADOWS_MAX = 4
BLOCKS_MAX = 1 << 20
FORGOTTEN_AT_ONCE = 4_096
"""Blocks of the slowest volume that make room for others, those used longest ago."""
ANYWHERE = -1
COPIES = frozenset({MoveKind.PROMOTE, MoveKind.DEMOTE})

_PRODUCER = 0
"""Owner of every volume in a shadow's index."""


class ShadowTerms(msgspec.Struct, frozen=True):
    """A shadow as the settings have it: see `advisor.settings.ShadowSettings`."""

    name: str
    limits: Limits
    blocks_max: int = BLOCKS_MAX


class Terms(msgspec.Struct, frozen=True):
    """What a comparison is of. Another one begins anew."""

    policy_version: str
    live: Limits
    shadows: tuple[ShadowTerms, ...]


def terms_of(settings: Mapping[str, Any], policy_version: str, live: Limits) -> Terms | None:
    """Of the settings' `shadow`; None where there is no shadow."""
    shadows = tuple(
        ShadowTerms(str(each["name"]), msgspec.convert(each["policy"], Limits, strict=False), int(each["blocks_max"]))
        for each in settings.get("shadow", ())
    )
    return Terms(policy_version, live, shadows) if shadows else None


class Touches:
    """Blocks that were used since the last tick, a row each; `rows` are the index's. The caller holds its lock."""

    def __init__(
        self, index: ArrayIndex, volumes: Sequence[Volume], rows: Array, book: HeatBook, since_us: int
    ) -> None:
        blocks, placements = index.tables.blocks, index.tables.placements
        self.rows = rows
        self.tags = tags_of(index, rows)
        self.touches = blocks["touches"][rows].astype(np.int64)
        self.uses = _uses(blocks[rows], self.touches, book, book.of(index, rows), since_us)
        self.sizes = placements["block_bytes"][blocks["placed"][rows]].astype(np.int64)
        self.held = placed_on(index, rows, volumes)


def _uses(blocks: Array, touches: Array, book: HeatBook, slots: Array, since_us: int) -> Array:
    """How often since the last tick: what the live planner has noted less; without a note all of a block that was first
    used since then, and once otherwise.
    """
    first_ms = (blocks["marks"].astype(np.int64) & FIRST_HIGH) << 32 | blocks["first_touch"].astype(np.int64)
    noted = np.where(slots >= 0, book.notes["touches"][slots].astype(np.int64), touches - 1)
    noted = np.where((noted > touches) | (first_ms >= since_us // 1000), 0, noted)
    uses: Array = np.maximum(touches - noted, 1)
    return uses


def placed_on(index: ArrayIndex, rows: Array, volumes: Sequence[Volume]) -> Array:
    """Which volume holds which block: bool (volumes, rows)."""
    held = np.zeros((len(volumes), len(rows)), np.bool_)
    uses, sizes = np.empty(len(rows), np.int64), np.empty(len(rows), np.int64)
    for rank, volume in enumerate(volumes):
        placed_columns(index.tables.blocks, index.tables.placements, rows, volume.place, uses, sizes)
        held[rank] = uses >= 0
    return held


def records_of(index: ArrayIndex, rows: Array) -> tuple[Records, list[int]]:
    """Blocks as events without type and place, and the namespaces that they name."""
    blocks, realms = index.tables.blocks, index.tables.realms
    found = blocks[rows]
    numbers, place = np.unique(found["realm"], return_inverse=True)
    namespaces, named = np.unique(realms["namespace_id"][numbers], return_inverse=True)
    records = np.zeros(len(rows), RECORD_DTYPE)
    records["namespace"] = named[place]
    records["group"] = realms["group"][numbers][place]
    for name in ("depth", "block_tokens"):
        records[name] = found[name]
    records["sequence_hash_lo"], records["sequence_hash_hi"] = found["hash_lo"], found["hash_hi"]
    below = found["parent"] >= 0
    parents = blocks[found["parent"][below]]
    records["parent_hash_lo"][below], records["parent_hash_hi"][below] = parents["hash_lo"], parents["hash_hi"]
    records["block_size"] = index.tables.placements["block_bytes"][found["placed"]]
    return records, namespaces.tolist()


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
        known = self._held(live, touches.rows, ANYWHERE)
        if not known.all():
            self._adopt(live, live_volumes, touches.rows[~known], since_us)
        held = np.array([self._held(live, touches.rows, volume.place) for volume in self.volumes])
        used = self._use(live, touches, held, known, since_us)
        self.tally.used(touches.tags, touches.uses, touches.sizes, held[0], saved_s_of(self.volumes, touches, held))
        plan = plan_moves(
            self.index, self.volumes, MoveTable(), used, self.limits, now_us, paused,
            state=self.state, namespaces=namespaces,
        )  # fmt: skip
        self._carry_out(plan, now_us)
        self.tally.mark(now_us)
        return plan

    def _held(self, live: ArrayIndex, rows: Array, place: int) -> Array:
        """Whether this shadow has the live index's blocks in `place`: bool."""
        blocks, realms = live.tables.blocks[rows], live.tables.realms
        numbers, at = np.unique(blocks["realm"], return_inverse=True)
        mine = [self.index.realm_of(int(realms[n].namespace_id), int(realms[n].group)) for n in numbers]
        hashes = np.stack([blocks["hash_lo"], blocks["hash_hi"]], axis=1)
        return self.index.held(hashes, np.array(mine, np.int64)[at], place)

    def _adopt(self, live: ArrayIndex, volumes: Sequence[Volume], rows: Array, now_us: int) -> None:
        """Take in blocks, and ancestors of theirs, where the live volumes hold them."""
        parents_of = live.tables.blocks["parent"]
        wanted = lacking = rows
        while len(lacking):
            parents = np.unique(parents_of[lacking])
            parents = parents[parents >= 0]
            parents = parents[live.tables.blocks["placed"][parents] >= 0]
            lacking = np.setdiff1d(parents[~self._held(live, parents, ANYWHERE)], wanted)
            wanted = np.concatenate([wanted, lacking])
        wanted = wanted[np.argsort(live.tables.blocks["depth"][wanted], kind="stable")]
        on = placed_on(live, wanted, volumes)
        wanted, on = wanted[on.any(axis=0)], on[:, on.any(axis=0)]
        stores, namespace_ids = records_of(live, wanted)
        self._store(stores, namespace_ids, on, now_us)
        # What was used before is history, not a use since the last tick.
        touches = live.tables.blocks["touches"][wanted]
        older = np.flatnonzero((touches > 0) & ~np.isin(wanted, rows))
        held = np.array([self._held(live, wanted, volume.place) for volume in self.volumes])
        self._access(stores, namespace_ids, held, touches, older, now_us)
        self.index.touched_since_drain()

    def _use(self, live: ArrayIndex, touches: Touches, held: Array, known: Array, now_us: int) -> list[int]:
        """Use blocks where they are fastest here. Returns their rows here."""
        records, namespace_ids = records_of(live, touches.rows)
        hits = np.where(known, touches.uses, touches.touches)
        self._access(records, namespace_ids, held, hits, np.flatnonzero(held.any(axis=0)), now_us)
        return self.index.touched_since_drain()

    def _access(
        self, records: Records, namespace_ids: Sequence[int], held: Array, hits: Array, which: Array, now_us: int
    ) -> None:
        records = records.copy()
        records["event_type"] = EventType.ACCESS
        records["hits"] = np.minimum(hits, (1 << 32) - 1)
        self._apply(records[which], namespace_ids, held.argmax(axis=0)[which], now_us)

    def _store(self, stores: Records, namespace_ids: Sequence[int], on: Array, now_us: int) -> None:
        """Blocks came to volumes, `on` bool (volumes, blocks). What does not fit goes to the slowest."""
        self._make_room(len(stores))
        for rank, volume in enumerate(self.volumes[:-1]):
            room = max(0, volume.capacity_blocks - self.index.place_figures(volume.place).blocks)
            over = np.flatnonzero(on[rank])[room:]
            on[rank, over], on[-1, over] = False, True
        ranks, at = np.nonzero(on)
        records = stores[at].copy()
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


def saved_s_of(volumes: Sequence[Volume], touches: Touches, held: Array) -> float | None:
    """Seconds that readers saved against reading from the slowest volume; None where a rate is not known."""
    fastest, total_s = held.argmax(axis=0), 0.0
    for rank, volume in enumerate(volumes[:-1]):
        here = held.any(axis=0) & (fastest == rank)
        gain_s = saved_s(int((touches.uses * touches.sizes)[here].sum()), volumes[-1], volume)
        if gain_s is None:
            return None
        total_s += gain_s
    return total_s


class SavedComparison(msgspec.Struct, array_like=True):
    """`Comparison` in a checkpoint."""

    terms: Terms
    began_us: int
    note: str
    ranks: dict[str, int]
    live: SavedTally
    shadows: list[SavedShadow]


class Comparison:
    """The live policy and its shadows on one stream. Owned by the fold, changed by its entries alone."""

    def __init__(self, terms: Terms, lock: Turnstile, note: str = "") -> None:
        self.terms = terms
        self.note = note
        """Why it began anew; empty where it is the first."""
        self.began_us = 0
        """At its first tick; 0 before."""
        self.live = Tally()
        self.shadows = [Shadow(each, lock) for each in terms.shadows]
        self._ranks: dict[str, int] = {}
        """Of volumes as of the last tick, the fastest 0."""

    @classmethod
    def restored(cls, saved: SavedComparison, lock: Turnstile) -> Comparison:
        """From `saved`. Raises `ValueError` for bytes that are none."""
        comparison = cls(msgspec.structs.replace(saved.terms, shadows=()), lock, saved.note)
        comparison.terms = saved.terms
        comparison.began_us, comparison._ranks = saved.began_us, dict(saved.ranks)
        comparison.live = Tally(saved.live)
        comparison.shadows = [
            Shadow(terms, lock, each) for terms, each in zip(saved.terms.shadows, saved.shadows, strict=True)
        ]
        return comparison

    def saved(self) -> SavedComparison:
        shadows = [shadow.saved() for shadow in self.shadows]
        return SavedComparison(self.terms, self.began_us, self.note, self._ranks, self.live.saved(), shadows)

    def put(
        self,
        volumes: Sequence[Volume],
        owned: Collection[str],
        namespace_ids: Sequence[int],
        locations: Sequence[str],
        records: Records,
        moves: MoveTable,
        now_us: int,
    ) -> None:
        """Events of the agent that owns the volumes `owned`: a Store there is a client's put, but for what moves make.

        `volumes` are all that are registered, fastest first.
        """
        ranks = {volume.volume_id: rank for rank, volume in enumerate(volumes)}
        rank_of = np.array([ranks[name] if name in owned else -1 for name in locations], np.int64)
        stores = records[(records["event_type"] == EventType.STORE) & (records["storage_location"] < len(locations))]
        targets = rank_of[stores["storage_location"]]
        arriving = {
            (ranks.get(move.target, -1), move.key.sequence_hash & LOW_64)
            for move in [*moves.open.values(), *moves.finished]
            if move.kind in COPIES
        }
        pairs = zip(targets.tolist(), stores["sequence_hash_lo"].tolist(), strict=True)
        puts = np.array([rank >= 0 and (rank, low) not in arriving for rank, low in pairs], np.bool_)
        if not puts.any():
            return
        for shadow in self.shadows:
            shadow.settle(volumes)
            shadow.put(stores[puts], namespace_ids, targets[puts], now_us)

    def moved(self, move: Move, now_us: int) -> None:
        """A live move ended."""
        if move.state is not MoveState.ABORTED:
            count_move(
                self.live, move.kind, move.source, move.target, tag_of(move.key), move.block_bytes, now_us, self._ranks
            )

    def tick(
        self,
        index: ArrayIndex,
        volumes: Sequence[Volume],
        touched: Sequence[int],
        book: HeatBook,
        since_us: int,
        now_us: int,
        paused: frozenset[str],
        namespaces: Mapping[int, Namespace],
    ) -> None:
        """Count and plan, before the live plan. `touched`: rows used since `since_us`, the tick before, in order.

        `volumes` are all that are registered, fastest first.
        """
        self.began_us = self.began_us or now_us
        self._ranks = {volume.volume_id: rank for rank, volume in enumerate(volumes)}
        if volumes:
            with index.lock:
                touches = Touches(index, volumes, np.array(touched, np.int32), book, since_us)
                saving_s = saved_s_of(volumes, touches, touches.held)
                self.live.used(touches.tags, touches.uses, touches.sizes, touches.held[0], saving_s)
                for shadow in self.shadows:
                    shadow.settle(volumes)
                    shadow.tick(index, volumes, touches, since_us, now_us, paused, namespaces)
        self.live.mark(now_us)

    def described(self) -> list[Any]:
        """For a digest: all but the shadows' indexes."""
        rows: list[Any] = [msgspec.to_builtins(self.terms), self.began_us, self.note, sorted(self._ranks.items())]
        rows.append(msgspec.to_builtins(self.live.saved()))
        for shadow in self.shadows:
            rows.append([shadow.name, shadow.left_out, msgspec.to_builtins(shadow.tally.saved())])
            rows += shadow.state.described(shadow.index)
        return rows
