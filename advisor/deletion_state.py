"""Deletions as a checkpoint and the digest hold them. Pure."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable

import msgspec
import numpy as np

from advisor.deletions import Deletion, DeletionState, DeletionTable, RefusedTenant, Scope, Sweep
from advisor.entries import OutcomeBatch
from advisor.index import ArrayIndex, Key

_LOW_64 = (1 << 64) - 1


class SavedSweep(msgspec.Struct, array_like=True):
    """`keys` and `pending` are packed as `ArrayIndex.KEY_DTYPE`."""

    volume: str
    wave: int
    keys: bytes
    pending: bytes
    cursor: tuple[int, int] | None
    is_asking: bool
    answer: OutcomeBatch | None
    is_clear: bool
    blocks: int
    block_bytes: int
    asked: int
    found: int
    reason: str
    note: str


class SavedDeletion(msgspec.Struct, array_like=True):
    """`prefix` is 16 bytes, little-endian: MessagePack has no integers of 128 bits."""

    deletion_id: str
    tenant: str
    namespace_id: int
    prefix: bytes
    actor: str
    requested_us: int
    changed_us: int
    state: DeletionState
    is_again: bool
    note: str
    sweeps: list[SavedSweep]
    engine_blocks: int
    left_blocks: int


class SavedRefusal(msgspec.Struct, array_like=True):
    tenant: str
    since_us: int
    actor: str
    returned_blocks: int


class SavedDeletions(msgspec.Struct, array_like=True):
    open: list[SavedDeletion] = []
    finished: list[SavedDeletion] = []
    refused: list[SavedRefusal] = []
    suspects: list[str] = []
    deleted_blocks: int = 0
    deleted_bytes: int = 0


def save_deletions(table: DeletionTable) -> SavedDeletions:
    return SavedDeletions(
        [_from_deletion(each) for each in table.open.values()],
        [_from_deletion(each) for each in table.finished],
        [SavedRefusal(r.tenant, r.since_us, r.actor, r.returned_blocks) for r in table.refused.values()],
        sorted(table.suspects),
        table.deleted_blocks,
        table.deleted_bytes,
    )


def restore_deletions(table: DeletionTable, saved: SavedDeletions) -> None:
    """Fill an empty table. Raises `ValueError` for keys that cannot be read."""
    table.open.update((each.deletion_id, _to_deletion(each)) for each in saved.open)
    table.finished.extend(_to_deletion(each) for each in saved.finished)
    table.refused = {r.tenant: RefusedTenant(r.tenant, r.since_us, r.actor, r.returned_blocks) for r in saved.refused}
    table.suspects = set(saved.suspects)
    table.deleted_blocks, table.deleted_bytes = saved.deleted_blocks, saved.deleted_bytes


def _from_deletion(deletion: Deletion) -> SavedDeletion:
    d, scope = deletion, deletion.scope
    return SavedDeletion(
        d.deletion_id, scope.tenant, scope.namespace_id, scope.prefix.to_bytes(16, "little"), d.actor, d.requested_us,
        d.changed_us, d.state, d.is_again, d.note, [_from_sweep(sweep) for sweep in d.sweeps.values()],
        d.engine_blocks, d.left_blocks,
    )  # fmt: skip


def _to_deletion(saved: SavedDeletion) -> Deletion:
    scope = Scope(saved.tenant, saved.namespace_id, int.from_bytes(saved.prefix, "little"))
    sweeps = {sweep.volume: _to_sweep(sweep) for sweep in saved.sweeps}
    return Deletion(
        saved.deletion_id, scope, saved.actor, saved.requested_us, saved.changed_us, saved.state, saved.is_again,
        saved.note, sweeps, saved.engine_blocks, saved.left_blocks,
    )  # fmt: skip


def _from_sweep(sweep: Sweep) -> SavedSweep:
    s = sweep
    return SavedSweep(
        s.volume, s.wave, _pack(s.keys), _pack(s.pending), s.cursor, s.is_asking, s.answer, s.is_clear, s.blocks,
        s.block_bytes, s.asked, s.found, s.reason, s.note,
    )  # fmt: skip


def _to_sweep(saved: SavedSweep) -> Sweep:
    s = saved
    return Sweep(
        s.volume, s.wave, _unpack(s.keys), OrderedDict.fromkeys(_unpack(s.pending)), s.cursor, s.is_asking, s.answer,
        s.is_clear, s.blocks, s.block_bytes, s.asked, s.found, s.reason, s.note,
    )  # fmt: skip


def _pack(keys: Iterable[Key]) -> bytes:
    rows = [(key.namespace_id, key.sequence_hash & _LOW_64, key.sequence_hash >> 64, key.group) for key in keys]
    return np.array(rows, ArrayIndex.KEY_DTYPE).tobytes()


def _unpack(keys: bytes) -> list[Key]:
    rows = np.frombuffer(keys, ArrayIndex.KEY_DTYPE).tolist()
    return [Key(name, group, high << 64 | low) for name, low, high, group in rows]
