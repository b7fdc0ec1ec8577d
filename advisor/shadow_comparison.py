"""Shadow mode: other policies on the same stream, without moving anything, beside the live one. Pure.

All are counted alike: at a tick, before its plans, each use since the last one is *found* where the fastest volume then
has the block.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from itertools import takewhile
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt

from advisor.index import ArrayIndex
from advisor.moves import Move, MoveState, MoveTable
from advisor.policies.heat_book import HeatBook
from advisor.policies.limits import Limits
from advisor.policies.plan import Volume
from advisor.shadow import COPIES, SavedShadow, Shadow, ShadowTerms, count_move
from advisor.shadow_tally import LOW_64, SavedTally, Tally, tag_of
from advisor.shadow_touches import Touches, saved_s_of
from advisor.turnstile import Turnstile
from event_plane.schema import EventType, Namespace, Records

Array = npt.NDArray[Any]

LIVE = "live"
"""The name of the policy that moves."""
SHADOWS_MAX = 4
ARRIVING_US = 60_000_000
"""An agent's Store may be folded so long after the end of the move that made it."""


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


class SavedComparison(msgspec.Struct, array_like=True):
    """`Comparison` in a checkpoint."""

    terms: Terms
    began_us: int
    note: str
    ranks: dict[str, int]
    live: SavedTally
    shadows: list[SavedShadow]


def _arriving(moves: MoveTable, now_us: int) -> dict[int, set[str]]:
    """By the low half of a block's hash: volumes to which moves bring it, or brought it a moment ago."""
    arriving: dict[int, set[str]] = {}
    lately = takewhile(lambda move: now_us - move.changed_us <= ARRIVING_US, reversed(moves.finished))
    for move in (*moves.open.values(), *lately):
        if move.kind in COPIES:
            arriving.setdefault(move.key.sequence_hash & LOW_64, set()).add(move.target)
    return arriving


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
        stores = records[(records["event_type"] == EventType.STORE) & (records["storage_location"] < len(locations))]
        if not len(stores):
            return
        ranks = {volume.volume_id: rank for rank, volume in enumerate(volumes)}
        rank_of = np.array([ranks[name] if name in owned else -1 for name in locations], np.int64)
        targets = rank_of[stores["storage_location"]]
        puts = targets >= 0
        arriving = _arriving(moves, now_us)
        for at in np.flatnonzero(puts & np.isin(stores["sequence_hash_lo"], list(arriving))).tolist():
            puts[at] = volumes[targets[at]].volume_id not in arriving[int(stores["sequence_hash_lo"][at])]
        if not puts.any():
            return
        for shadow in self.shadows:
            shadow.settle(volumes)
            shadow.put(stores[puts], namespace_ids, targets[puts], now_us)

    def moved(self, move: Move, now_us: int) -> None:
        """A live move ended. What a person had deleted is no policy's doing, and gone for all."""
        if move.deletion:
            for shadow in self.shadows:
                shadow.forget(move.key)
        elif move.state is not MoveState.ABORTED:
            count_move(
                self.live, move.kind, move.source, move.target, tag_of(move.key), move.block_bytes, now_us, self._ranks
            )

    def tick(
        self,
        index: ArrayIndex,
        volumes: Sequence[Volume],
        touched: Array,
        book: HeatBook,
        since_us: int,
        now_us: int,
        paused: frozenset[str],
        namespaces: Mapping[int, Namespace],
        refused: frozenset[str] = frozenset(),
    ) -> None:
        """Count and plan, before the live plan. `touched`: rows used since `since_us`, the tick before, in order.

        `volumes` are all that are registered, fastest first; `refused` are tenants whose blocks were deleted.
        """
        self.began_us = self.began_us or now_us
        self._ranks = {volume.volume_id: rank for rank, volume in enumerate(volumes)}
        if volumes:
            with index.lock:
                touches = Touches(index, volumes, touched, book, since_us)
                saving_s = saved_s_of(volumes, touches, touches.held)
                self.live.used(touches.tags, touches.uses, touches.sizes, touches.held[0], saving_s)
                for shadow in self.shadows:
                    shadow.settle(volumes)
                    if refused:
                        shadow.bar(refused, namespaces)
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
