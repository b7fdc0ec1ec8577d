from __future__ import annotations

from advisor.entries import EntryKind, LogEntry
from advisor.fold import Fold
from advisor.index import ArrayIndex, IndexSize
from event_plane import wire
from event_plane.schema import Batch, BatchTables, EventRecord, EventType, Namespace, to_records


def test_a_tenants_namespaces_are_summed_and_a_remove_is_taken_off() -> None:
    first, second, other = Namespace(tenant="a", model="x"), Namespace(tenant="a", model="y"), Namespace(tenant="b")
    events = [
        EventRecord(EventType.STORE, 3, number, namespace, "disk", block_size=10)
        for namespace, count in ((first, 3), (second, 2), (other, 4))
        for number in range(1, count + 1)
    ]
    events.append(EventRecord(EventType.REMOVE, 3, 2, second, "disk"))
    tables = BatchTables()
    records = to_records(events, tables, 0)
    batch = Batch(1, 1, 0, records, namespaces=tuple(tables.namespaces), locations=tuple(tables.locations))
    fold = Fold(ArrayIndex(IndexSize.for_blocks(64)))
    fold.apply(LogEntry(1, EntryKind.BATCH, wire.encode(batch)))
    assert fold.tenant_totals() == {"a": (4, 40), "b": (4, 40)}
