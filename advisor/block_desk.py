"""One block's facts and history from a running service."""

from __future__ import annotations

import asyncio
import time

from advisor.block_history import DamagedEntry, Sought, Trail
from advisor.block_views import BlockDetail, HistoryPage
from advisor.deletions import Scope
from advisor.entries import LogEntry
from advisor.errors import LogError
from advisor.fold import Fold
from advisor.index import BlockRow, IndexFault, Key
from advisor.log_desk import LogDesk
from advisor.log_queries import LogQueries
from advisor.reader import block_view, event_view, namespaces_of
from advisor.service import AdvisorService

HISTORY_S = 0.2
"""A page of history looks through the log for so long."""
HELD_STEPS_A_STEP = 10
"""A page ends, too, once so many times its limit of steps are held that may not concern the block."""
READERS_MAX = 2
"""Histories that are read at a time; others wait, so that the log's disk is the writer's first."""
CHILDREN_SHOWN = 100
ANCESTORS_MAX = 16_384
"""A chain that is longer is taken to have no deleted prefix before that."""


class ServiceBlocks:
    """`advisor.block_views.AdvisorBlocks` over a running service."""

    def __init__(self, service: AdvisorService, log: LogDesk) -> None:
        """`log` is its caller's to close."""
        self._service = service
        self._log = log
        self._turns = asyncio.Semaphore(READERS_MAX)

    def named(
        self, sequence_hash: int, *, namespace_id: int | None = None, tenant: str | None = None
    ) -> list[BlockDetail]:
        index = self._service.fold.index
        found = self._rows(sequence_hash, namespace_id, tenant)
        with self._service.lock.shared():
            # Looked up anew: a row that was freed meanwhile may be another tenant's block by now.
            fresh = [index.again(block) for block in found]
            shown = [_detail(self._service.fold, block) for block in fresh if block is not None]
        # A move's id begins with its position, which counts what all write.
        return shown if tenant is None else [detail.model_copy(update={"open_move": ""}) for detail in shown]

    def _rows(self, sequence_hash: int, namespace_id: int | None, tenant: str | None) -> list[BlockRow]:
        with self._service.lock.shared():
            fold = self._service.fold
            namespaces = namespaces_of(fold, tenant, namespace_id)
        return fold.index.named(sequence_hash, namespaces)

    async def history(
        self,
        sequence_hash: int,
        *,
        namespace_id: int | None = None,
        group: int | None = None,
        tenant: str | None = None,
        before: str | None = None,
        limit: int = 100,
    ) -> HistoryPage:
        position = _parse_before(before)
        async with self._turns:
            sought = await asyncio.to_thread(self._sought, sequence_hash, namespace_id, group, tenant)
            trail = Trail(sought, lambda entry: event_view(entry).text)
            return await _look_back(self._log.queries, trail, position, limit)

    def _sought(self, sequence_hash: int, namespace_id: int | None, group: int | None, tenant: str | None) -> Sought:
        found = self._rows(sequence_hash, namespace_id, tenant)
        with self._service.lock.shared():
            fold = self._service.fold
            allowed = namespaces_of(fold, tenant, namespace_id)
            moves = {
                move.move_id: move
                for move in (*fold.moves.open.values(), *fold.moves.finished)
                if move.key.sequence_hash == sequence_hash
                and group in (None, move.key.group)
                and (allowed is None or move.key.namespace_id in allowed)
            }
            keys = {block.key for block in found} | {move.key for move in moves.values()}
            tenants = {each: fold.namespaces[each].tenant for each, *_ in keys if each in fold.namespaces}
            deletions = [*fold.deletions.open.values(), *fold.deletions.finished]
            volumes = frozenset((volume.producer, volume.volume_id) for volume in fold.volumes.values())
            producers = {each: (state.name, state.epoch) for each, state in fold.producers.items()}
            places = [fold.index.places[placed.place] for block in found for placed in block.placements]
        covering = {
            each.deletion_id
            for each in deletions
            if any(_covers(fold, each.scope, key, tenants.get(key.namespace_id, "")) for key in keys)
        }
        return Sought(
            sequence_hash,
            namespace_id=namespace_id,
            group=group,
            tenant=tenant,
            moves=moves,
            deletions=frozenset(covering),
            volumes=volumes,
            producers=producers,
            placers=frozenset(place.producer for place in places),
        )


async def _look_back(queries: LogQueries, trail: Trail, before: int | None, limit: int) -> HistoryPage:
    until_s = time.monotonic() + HISTORY_S
    looked_back_us = 0
    is_complete = False
    while not is_complete and time.monotonic() < until_s and len(trail.steps()) < limit:
        stretch = await queries.before(before)
        last = await asyncio.to_thread(_follow, trail, stretch.entries, limit)
        if last is not None:
            looked_back_us = last.recorded_us
        if last is not None and last is not stretch.entries[-1]:
            before = last.position
            break
        before, is_complete = stretch.reached, stretch.is_complete
        if len(trail) >= HELD_STEPS_A_STEP * limit:
            break
    return HistoryPage(
        steps=trail.steps(),
        next_before=None if is_complete else str(before),
        complete=is_complete,
        looked_back_us=looked_back_us,
    )


def _follow(trail: Trail, entries: list[LogEntry], limit: int) -> LogEntry | None:
    """Follow entries until there are `limit` steps; returns the last one that was followed."""
    last = None
    for entry in entries:
        try:
            trail.follow(entry)
        except DamagedEntry as error:
            raise LogError(f"{error}: restore a copy of the log, or start with another directory") from error
        last = entry
        if len(trail) >= limit and len(trail.steps()) >= limit:
            break
    return last


def _parse_before(before: str | None) -> int | None:
    if before is None:
        return None
    if not (before.isascii() and before.isdecimal() and 0 < int(before[:20]) < 1 << 63):
        raise ValueError("it is no cursor of ours: use next_before of the page before, or a log position")
    return int(before)


def _detail(fold: Fold, block: BlockRow) -> BlockDetail:
    """The caller holds the lock."""
    namespace = fold.namespaces.get(block.key.namespace_id)
    move = fold.moves.of(block.key)
    rows, children = fold.index.children(block.row, CHILDREN_SHOWN)
    return BlockDetail(
        block=block_view(fold, block, children),
        revision="" if namespace is None else namespace.revision,
        adapter="" if namespace is None else namespace.adapter,
        kv_dtype="" if namespace is None else namespace.kv_dtype,
        hash_scheme="" if namespace is None else namespace.hash_scheme,
        first_touch_us=block.first_touch_us,
        children=[f"{fold.index.block(row).key.sequence_hash:032x}" for row in rows],
        open_move="" if move is None else move.move_id,
    )


def _covers(fold: Fold, scope: Scope, key: Key, tenant: str) -> bool:
    """Whether a deletion of `scope` takes this block of `tenant`."""
    if scope.tenant:
        return scope.tenant == tenant
    if scope.namespace_id != key.namespace_id:
        return False
    return not scope.prefix or _descends(fold, key, scope.prefix)


def _descends(fold: Fold, key: Key, ancestor: int) -> bool:
    """Whether a block is `ancestor` or follows it. The lock is taken a block at a time."""
    if key.sequence_hash == ancestor:
        return True
    row = fold.index.row_of(key)
    for _ in range(ANCESTORS_MAX):
        if row is None or row < 0:
            return False
        try:
            block = fold.index.block(row)
        except IndexFault:
            return False  # the chain changed under us
        if block.key.sequence_hash == ancestor:
            return True
        row = block.parent
    return False
