"""What deletions do at a tick: which copies they free next, whom they ask, when they end. Pure.

A wave is taken in the order of depth, deepest first, then of the low half of the hash; a cursor says how far a sweep
is. So every block that was there when it began is passed once, leaves before their parents, and the sweep ends however
much is stored meanwhile behind it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from advisor.deletions import (
    Deletion,
    DeletionState,
    DeletionTable,
    DeletionTrigger,
    IllegalDeletion,
    Scope,
    Sweep,
)
from advisor.entries import OutcomeBatch
from advisor.index import ArrayIndex, BlockRow, Key
from advisor.index.layout import BLOCK_TOP, FREE
from advisor.moves import MoveKind, MoveState, MoveTable, Trigger
from advisor.policies.plan import NamedRow, Proposal
from advisor.policies.rules.noting import placed_columns
from event_plane.schema import Namespace

WAVE_KEYS_MAX = 16_384
"""Keys of one wave, but for those that share the last one's place in the order."""

Rows = npt.NDArray[np.int32]


@dataclass(frozen=True, slots=True)
class Standing:
    """A volume as a deletion needs it. `reason`: why nothing may be done there now; empty where something may."""

    volume: str
    place: int
    reason: str = ""


# -- which blocks


def rows_in(index: ArrayIndex, scope: Scope, namespaces: Mapping[int, Namespace]) -> Rows:
    """Rows of the placed blocks of a scope. The caller holds the index's lock."""
    if scope.prefix:
        tops = [row for key in roots_of(index, scope) if (row := index.row_of(key)) is not None]
        rows = [_subtree(index, row) for row in tops]
        found = np.concatenate(rows) if rows else np.zeros(0, np.int32)
        return found[index.tables.blocks["placed"][found] >= 0]
    wanted = {scope.namespace_id} if scope.namespace_id else namespaces_of(scope.tenant, namespaces)
    realms = index.tables.realms
    marked = np.isin(realms["namespace_id"], np.array(sorted(wanted), np.uint64)) & (realms["rows"] > 0)
    if not marked.any():
        return np.zeros(0, np.int32)
    blocks = index.tables.blocks[: int(index.tables.state[BLOCK_TOP])]
    return np.flatnonzero(marked[blocks["realm"]] & (blocks["placed"] >= 0) & (blocks["marks"] & FREE == 0)).astype(
        np.int32
    )


def namespaces_of(tenant: str, namespaces: Mapping[int, Namespace]) -> set[int]:
    return {each for each, namespace in namespaces.items() if namespace.tenant == tenant}


def roots_of(index: ArrayIndex, scope: Scope) -> list[Key]:
    """The block that a prefix names, in each group that its namespace has; in group 0 where it has none."""
    realms = index.tables.realms
    known = realms["group"][(realms["namespace_id"] == scope.namespace_id) & (realms["rows"] > 0)]
    return [Key(scope.namespace_id, group, scope.prefix) for group in sorted({0, *known.tolist()})]


def _subtree(index: ArrayIndex, top: int) -> Rows:
    """A block and all its descendants, level by level."""
    blocks = index.tables.blocks
    first, following = blocks["first_child"], blocks["next_sibling"]
    level = np.array([top], np.int32)
    levels = [level]
    while len(level):
        children = first[level]
        children = children[children >= 0]
        below = []
        while len(children):
            below.append(children)
            children = following[children]
            children = children[children >= 0]
        level = np.concatenate(below) if below else np.zeros(0, np.int32)
        levels.append(level)
    return np.concatenate(levels)


def held(index: ArrayIndex, rows: Rows, place: int) -> Rows:
    """Those that lie in a place."""
    return rows[sizes_in(index, rows, place) >= 0]


def sizes_in(index: ArrayIndex, rows: Rows, place: int) -> npt.NDArray[np.int64]:
    """Bytes of blocks in a place; -1 of those that are not there, or of no row."""
    known = rows[rows >= 0]
    uses, sizes = np.empty(len(known), np.int64), np.empty(len(known), np.int64)
    placed_columns(index.tables.blocks, index.tables.placements, known, place, uses, sizes)
    found = np.full(len(rows), -1, np.int64)
    found[rows >= 0] = np.where(uses >= 0, sizes, -1)
    return found


def wave_of(
    index: ArrayIndex, rows: Rows, cursor: tuple[int, int] | None, at_most: int = WAVE_KEYS_MAX
) -> tuple[list[Key], tuple[int, int] | None]:
    """The next keys after a cursor, and the cursor after them."""
    blocks = index.tables.blocks
    depths, lows = blocks["depth"][rows].astype(np.int64), blocks["hash_lo"][rows]
    if cursor is not None:
        ahead = (depths < cursor[0]) | ((depths == cursor[0]) & (lows > np.uint64(cursor[1])))
        rows, depths, lows = rows[ahead], depths[ahead], lows[ahead]
    if len(rows) > at_most:
        enough = depths >= np.partition(depths, len(rows) - at_most)[len(rows) - at_most]
        rows, depths, lows = rows[enough], depths[enough], lows[enough]
    if not len(rows):
        return [], cursor
    order = np.lexsort((lows, -depths))
    last = order[min(at_most, len(order)) - 1]
    end = (int(depths[last]), int(lows[last]))
    count = min(at_most, len(order))
    while count < len(order) and (int(depths[order[count]]), int(lows[order[count]])) == end:
        count += 1
    chosen = blocks[rows[order[:count]]]
    realms = index.tables.realms[chosen["realm"]]
    columns = (realms["namespace_id"], realms["group"], chosen["hash_hi"], chosen["hash_lo"])
    keys = [Key(name, group, hi << 64 | lo) for name, group, hi, lo in zip(*(c.tolist() for c in columns), strict=True)]
    return keys, end


class KeptOut:
    """Whose blocks no move may bring anywhere: of refused tenants, and of what is being deleted."""

    def __init__(self, table: DeletionTable, index: ArrayIndex, namespaces: Mapping[int, Namespace]) -> None:
        self._parents = index.tables.blocks["parent"]
        self._tenants = frozenset(table.refused)
        self._namespaces = namespaces
        scopes = {d.scope: d for d in table.open.values() if d.scope.namespace_id}
        self._whole = {scope.namespace_id: d for scope, d in scopes.items() if not scope.prefix}
        self._cut = {scope.namespace_id for scope in scopes if scope.prefix}
        self._tops: dict[int, Deletion] = {}
        for scope, deletion in scopes.items():
            if scope.prefix:
                rows = [index.row_of(key) for key in roots_of(index, scope)]
                self._tops.update((row, deletion) for row in rows if row is not None)

    def __bool__(self) -> bool:
        return bool(self._tenants or self._whole or self._tops)

    def __call__(self, block: BlockRow) -> str:
        """Why a block is not moved; empty where it may be."""
        namespace = self._namespaces.get(block.key.namespace_id)
        if namespace is not None and namespace.tenant in self._tenants:
            return f"tenant {namespace.tenant} was deleted and is refused until it is enabled again"
        deletion = self._whole.get(block.key.namespace_id)
        row = block.row if block.key.namespace_id in self._cut else -1
        while deletion is None and row >= 0:
            deletion = self._tops.get(row)
            row = int(self._parents[row])
        return f"it is being deleted, by {deletion.deletion_id}" if deletion is not None else ""


# -- what to do at a tick


class DeletionTick:
    """One tick's work on all open deletions. The caller holds the index's lock."""

    def __init__(
        self,
        table: DeletionTable,
        index: ArrayIndex,
        moves: MoveTable,
        namespaces: Mapping[int, Namespace],
        standings: Sequence[Standing],
        cursors: Mapping[int, tuple[int, int]],
        *,
        now_us: int,
        moves_max: int,
    ) -> None:
        """`cursors`: by producer the epoch and sequence that are folded. `moves_max`: most open moves of deletions.

        Volumes share those evenly, so that a slow one holds up no other.
        """
        self._table = table
        self._index = index
        self._moves = moves
        self._namespaces = namespaces
        self._standings = {each.volume: each for each in standings}
        self._cursors = cursors
        self._now_us = now_us
        share = max(1, moves_max // max(1, len(standings))) if moves_max else 0
        opened = Counter(move.source for move in moves.open.values() if move.deletion)
        self._room = {volume: share - opened[volume] for volume in self._standings}
        self._looks = dict.fromkeys(self._standings, 2 * share)
        """Keys that are looked at in this tick."""
        self._taken: set[Key] = set()
        self._rows: dict[str, Rows] = {}
        self._proposals: list[Proposal] = []

    def work(self, again_id: str) -> list[Proposal]:
        """Deletes to carry out now, leaves first. `again_id` begins the ids of deletions that are opened here."""
        self._take_up_suspects(again_id)
        for deletion in list(self._table.open.values()):
            for volume in self._standings:
                deletion.sweeps.setdefault(volume, Sweep(volume))
            for sweep in deletion.sweeps.values():
                self._sweep(deletion, sweep)
            self._settle(deletion)
        return self._proposals

    def _take_up_suspects(self, again_id: str) -> None:
        """Blocks of refused tenants that came to a volume are deleted again."""
        suspects = sorted(self._table.suspects)
        self._table.suspects.clear()
        for number, tenant in enumerate(suspects):
            scope = Scope(tenant=tenant)
            if self._table.open_of(scope) is not None:
                continue
            rows = rows_in(self._index, scope, self._namespaces)
            if not any(len(held(self._index, rows, each.place)) for each in self._standings.values()):
                continue
            try:
                self._table.order(f"{again_id}-{number}", scope, "advisor", self._now_us, is_again=True)
            except IllegalDeletion:
                self._table.suspects.add(tenant)  # as many are open as may be: at a later tick

    def _sweep(self, deletion: Deletion, sweep: Sweep) -> None:
        standing = self._standings.get(sweep.volume)
        if standing is None:
            sweep.reason = f"{sweep.volume} is not registered: register it again, or abandon the deletion"
            return
        sweep.reason = standing.reason
        if sweep.reason or sweep.is_clear:
            return
        if sweep.answer is not None:
            if self._is_folded(sweep, sweep.answer):
                self._pass_on(deletion, sweep, standing)
        elif not sweep.keys and not sweep.is_asking:
            self._take_wave(deletion, sweep, standing)
        self._free(deletion, sweep, standing)
        if not sweep.pending and not sweep.is_asking and not sweep.is_clear:
            sweep.ask()

    def _is_folded(self, sweep: Sweep, answer: OutcomeBatch) -> bool:
        """Whether all that the agent had told when it answered is folded. Of another life of it, it is asked again."""
        if answer.sequence < 0:
            return True
        epoch, sequence = self._cursors.get(answer.producer, (answer.epoch, -1))
        if epoch != answer.epoch:
            sweep.ask()
        return epoch == answer.epoch and sequence >= answer.sequence

    def _pass_on(self, deletion: Deletion, sweep: Sweep, standing: Standing) -> None:
        """The wave is proven gone: the next one. After the last, a tenant's sweep looks behind itself too."""
        if self._take_wave(deletion, sweep, standing):
            return
        if deletion.scope.tenant:
            sweep.cursor = None
        if not self._take_wave(deletion, sweep, standing):
            sweep.is_clear = True

    def _take_wave(self, deletion: Deletion, sweep: Sweep, standing: Standing) -> bool:
        """Whether there is anything; where there is not, the agent is asked whether it is there at all."""
        rows = self._rows.get(deletion.deletion_id)
        if rows is None:
            rows = self._rows[deletion.deletion_id] = rows_in(self._index, deletion.scope, self._namespaces)
        keys, cursor = wave_of(self._index, held(self._index, rows, standing.place), sweep.cursor)
        if not keys and deletion.scope.prefix and not sweep.wave:
            keys = roots_of(self._index, deletion.scope)
        sweep.next_wave(keys, cursor)
        return bool(keys)

    def _free(self, deletion: Deletion, sweep: Sweep, standing: Standing) -> None:
        """Propose deletes of what is there still. Others' moves are ended, or awaited where bytes are on their way."""
        keys = self._next_to_free(deletion, sweep)
        rows = [self._index.row_of(key) for key in keys]
        sizes = sizes_in(self._index, np.array([-1 if row is None else row for row in rows], np.int32), standing.place)
        reason = f"deletion {deletion.deletion_id} of {deletion.scope}"
        for key, row, size in zip(keys, rows, sizes.tolist(), strict=True):
            if row is None or size < 0:
                del sweep.pending[key]
                continue
            self._taken.add(key)
            self._room[sweep.volume] -= 1
            block = NamedRow(row, key)
            self._proposals.append(
                Proposal(MoveKind.DELETE, block, sweep.volume, "", size, reason, deletion.deletion_id)
            )

    def _next_to_free(self, deletion: Deletion, sweep: Sweep) -> list[Key]:
        """Pending keys that no move carries, as many as may be freed now; what was looked at goes to the end."""
        keys: list[Key] = []
        for _ in range(len(sweep.pending)):
            if self._looks[sweep.volume] <= 0 or len(keys) >= self._room[sweep.volume]:
                break
            self._looks[sweep.volume] -= 1
            key, _ = sweep.pending.popitem(last=False)
            sweep.pending[key] = None
            move = self._moves.of(key)
            if move is not None and not move.deletion and move.state is MoveState.PLANNED:
                why = f"its block is deleted, by {deletion.deletion_id}"
                self._moves.step(move.move_id, Trigger.ABORT, self._now_us, why)
                move = None
            if move is None and key not in self._taken:
                keys.append(key)
        return keys

    # -- as a whole

    def _settle(self, deletion: Deletion) -> None:
        """Bring the deletion to the state that its sweeps are in."""
        unclear = [sweep for sweep in deletion.sweeps.values() if not sweep.is_clear]
        deletion.note = "" if deletion.sweeps else "no volume is registered: it goes on when one is"
        if deletion.sweeps and not unclear:
            self._finish(deletion)
            return
        if all(sweep.reason or sweep.note for sweep in unclear):
            wanted, trigger = DeletionState.WAITING, DeletionTrigger.WAIT
        elif any(sweep.pending for sweep in unclear):
            wanted, trigger = DeletionState.DELETING, DeletionTrigger.BEGIN
        else:
            wanted, trigger = DeletionState.PROVING, DeletionTrigger.PROVE
        if deletion.state is not wanted:
            deletion.step(trigger, self._now_us)

    def _finish(self, deletion: Deletion) -> None:
        rows = rows_in(self._index, deletion.scope, self._namespaces)
        there = {each.volume: held(self._index, rows, each.place) for each in self._standings.values()}
        left = {volume: len(found) for volume, found in there.items()}
        if deletion.scope.tenant and any(left.values()):
            for volume in [volume for volume, count in left.items() if count]:
                deletion.sweeps[volume].begin_anew()
            return
        deletion.left_blocks = sum(left.values())
        deletion.engine_blocks = len(rows) - len(np.unique(np.concatenate(list(there.values()))))
        if deletion.scope.tenant and not namespaces_of(deletion.scope.tenant, self._namespaces):
            deletion.note = "no namespace of this tenant is known"
        if deletion.state is not DeletionState.PROVING:
            deletion.step(DeletionTrigger.PROVE, self._now_us)
        self._table.end(deletion, DeletionTrigger.FINISH, self._now_us)
