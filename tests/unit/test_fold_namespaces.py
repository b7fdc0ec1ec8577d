"""Namespaces that the fold keeps: each life of a foreign engine brings one."""

from __future__ import annotations

import pytest

import advisor.fold
from advisor.entries import EntryKind, LogEntry
from advisor.fold import Fold
from advisor.index import ArrayIndex, IndexSize
from event_plane.schema import Batch, BatchTables, EventRecord, EventType, Namespace, to_records


def batch_of(epoch: int, *blocks: int) -> Batch:
    tables = BatchTables()
    namespace = Namespace(hash_root=str(epoch))
    tables.namespace(namespace)
    stores = [EventRecord(EventType.STORE, 1, block, namespace, "gpu") for block in blocks]
    return Batch(
        7, epoch, 0, to_records(stores, tables, 0),
        namespaces=tuple(tables.namespaces), locations=tuple(tables.locations),
    )  # fmt: skip


def test_namespaces_without_a_block_are_forgotten_past_a_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(advisor.fold, "NAMESPACES_KEPT_MAX", 4)
    fold = Fold(ArrayIndex(IndexSize.for_blocks(256, 1024)))
    for epoch in range(1, 20):
        fold.apply(LogEntry(epoch, EntryKind.BATCH, b""), batch_of(epoch, epoch))
        assert len(fold.namespaces) <= 5
        assert Namespace(hash_root=str(epoch)).namespace_id in fold.namespaces
