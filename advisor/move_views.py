"""Views of moves, made from the folded state. The caller holds its lock."""

from __future__ import annotations

import heapq
from collections.abc import Iterator

from advisor.fold import Fold
from advisor.index import Key
from advisor.moves import OPEN_STATES, Move
from advisor.views import DRY, OPEN, MovesView, MoveView, RefusalView

Place = tuple[int, int, str]
"""A move's place in the list: when it changed, when it was planned, its id."""


def moves_view(
    fold: Fold,
    limit: int,
    *,
    after: str | None = None,
    state: str | None = None,
    kind: str | None = None,
    volume: str | None = None,
    tenant: str | None = None,
) -> MovesView:
    """Open and kept finished moves that fit, the last to change first, and on the first page refusals. `volume`: of the
    source or the target.

    Raises `ValueError` for a cursor that is none.
    """
    before = None if after is None else _place_of(after)
    found = [
        (_place(move), shown, move)
        for move, shown in _shown(fold)
        if (before is None or _place(move) < before)
        and (state in (None, shown) or (state == OPEN and shown in OPEN_STATES))
        and kind in (None, str(move.kind))
        and (volume is None or volume in (move.source, move.target))
        and (tenant is None or tenant_of(fold, move.key) == tenant)
    ]
    newest = heapq.nlargest(limit, found, key=lambda each: each[0])
    views = [move_view(fold, move, shown) for _, shown, move in newest]
    return MovesView(
        moves=views,
        refusals=[] if before is not None else _refusals(fold, limit, volume, tenant),
        next_cursor=views[-1].cursor if len(views) < len(found) else None,
    )


def move_view(fold: Fold, move: Move, state: str) -> MoveView:
    return MoveView(
        id=move.move_id,
        kind=str(move.kind),
        state=state,
        hash=f"{move.key.sequence_hash:032x}",
        tenant=tenant_of(fold, move.key),
        source=move.source,
        target=move.target,
        block_bytes=move.block_bytes,
        reason=move.reason,
        planned_us=move.planned_us,
        changed_us=move.changed_us,
        note=move.note,
    )


def tenant_of(fold: Fold, key: Key) -> str:
    namespace = fold.namespaces.get(key.namespace_id)
    return namespace.tenant if namespace is not None else ""


def _shown(fold: Fold) -> Iterator[tuple[Move, str]]:
    for move in (*fold.moves.open.values(), *fold.moves.finished):
        yield move, str(move.state)
    for move in fold.moves.dry:
        yield move, DRY


def _refusals(fold: Fold, limit: int, volume: str | None, tenant: str | None) -> list[RefusalView]:
    fit = [
        refusal
        for refusal in reversed(fold.refusals)
        if volume in (None, refusal.volume) and (tenant is None or tenant_of(fold, refusal.key) == tenant)
    ]
    return [
        RefusalView(
            at_us=refusal.at_us,
            hash=f"{refusal.key.sequence_hash:032x}",
            tenant=tenant_of(fold, refusal.key),
            volume=refusal.volume,
            reason=refusal.reason,
        )
        for refusal in fit[:limit]
    ]


def _place(move: Move) -> Place:
    return move.changed_us, move.planned_us, move.move_id


def _place_of(cursor: str) -> Place:
    """See `MoveView.cursor`."""
    changed_us, _, rest = cursor.partition(".")
    planned_us, _, move_id = rest.partition(".")
    if not (cursor.isascii() and changed_us.isdecimal() and planned_us.isdecimal() and move_id):
        raise ValueError(f"cursor {cursor!r} is none of ours: use next_cursor of the page before")
    return int(changed_us), int(planned_us), move_id
