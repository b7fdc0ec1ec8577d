"""What is refused of events in columns, before any of them is published."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from event_plane.batching import Columns, check_columns, check_event, check_snapshot
from event_plane.schema import (
    EXTENSION_BYTES_MAX,
    LOCATION_ALL,
    NAMESPACE_ALL,
    RECORD_DTYPE,
    EventRecord,
    EventType,
    Namespace,
)

TABLES = (Namespace(), Namespace(model="m")), ("gpu:0",)


def records(**fields: Any) -> Any:
    made = np.zeros(3, RECORD_DTYPE)
    made["event_type"] = EventType.STORE
    for field, value in fields.items():
        made[field][1] = value
    return made


def test_indexes_within_their_tables_and_those_that_mean_all_are_taken() -> None:
    check_columns(Columns(records(namespace=1), *TABLES))
    everywhere = records(namespace=NAMESPACE_ALL, storage_location=LOCATION_ALL, event_type=EventType.CLEAR)
    check_columns(Columns(everywhere, *TABLES))
    check_columns(Columns(np.empty(0, RECORD_DTYPE), (), ()))


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"namespace": 2}, "namespace 2: its table has 2 entries"),
        ({"storage_location": 1}, "storage_location 1: its table has 1 entries"),
        ({"event_type": 0}, "event_type 0: use 1 to 4"),
        ({"event_type": 9}, "event_type 9: use 1 to 4"),
        ({"extra": 5}, "extra 5: columns carry none"),
    ],
)
def test_record_that_points_nowhere_is_named(fields: dict[str, int], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        check_columns(Columns(records(**fields), *TABLES))


@pytest.mark.parametrize(
    ("columns", "said"),
    [
        (Columns(np.zeros(3, "u8"), *TABLES), r"shape \(3,\) and dtype uint64"),
        (Columns(np.zeros((2, 2), RECORD_DTYPE), *TABLES), r"shape \(2, 2\)"),
        (Columns(records(), (Namespace(model="x" * EXTENSION_BYTES_MAX),), ("gpu:0",)), "tables bring 4194"),
        (Columns(records(), (), tuple(map(str, range(LOCATION_ALL + 1)))), "location table has 65536 entries"),
    ],
)
def test_columns_of_another_shape_or_too_large_tables_are_named(columns: Columns, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        check_columns(columns)


def test_event_that_fits_no_message_of_the_transport_is_named() -> None:
    event = EventRecord(EventType.STORE, 1, 5, Namespace(), "gpu:0", extra={"note": "x" * 2_000})
    check_event(event)
    with pytest.raises(ValueError, match=r"brings 2\d+ bytes: a batch's extension has 6\d+"):
        check_event(event, payload_bytes_max=1_024)


def test_snapshot_that_holds_no_store_is_named() -> None:
    with pytest.raises(ValueError, match="event of type 3: a snapshot is Stores alone"):
        check_snapshot([EventRecord(EventType.ACCESS, 1, 5, Namespace(), "gpu:0")])
