"""docs/wire-format.md says what the code does: its tables and its example are read here."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from event_plane import nats_requests
from event_plane.batching import SNAPSHOT_CHUNK_RECORDS_MAX, Batcher, FlushRule
from event_plane.schema import (
    RECORD_DTYPE,
    Batch,
    BatchKind,
    EventRecord,
    EventType,
    Namespace,
    SnapshotRange,
    producer_id,
)
from event_plane.wire import CRC_OFFSET, HEADER, decode, encode

PAGE = Path(__file__).resolve().parents[2] / "docs" / "wire-format.md"
FIRST, SECOND = 0x00112233445566778899AABBCCDDEEFF, 0x0123456789ABCDEF0F1E2D3C4B5A6978


@pytest.fixture(scope="module")
def page() -> str:
    return PAGE.read_text(encoding="utf-8")


def section(page: str, title: str) -> str:
    return page.split(f"## {title}", 1)[1].split("\n## ", 1)[0]


def documented_fields(page: str, title: str) -> list[tuple[int, str, str]]:
    """Offset, field and type of each row of a section's table."""
    rows = re.findall(r"^\| (\d+) \| (\w+) \| (\w[\w ]*) \|", section(page, title), re.MULTILINE)
    return [(int(offset), field, kind) for offset, field, kind in rows]


def dumped(page: str, title: str) -> bytes:
    """The bytes of a section's example; each line's offset is checked."""
    dump = section(page, title).split("```hex\n", 1)[1].split("```", 1)[0]
    lines = [line.split("  ", 1) for line in dump.splitlines()]
    assert [int(offset, 16) for offset, _ in lines] == list(range(0, 16 * len(lines), 16))
    return b"".join(bytes.fromhex(line) for _, line in lines)


@pytest.fixture(scope="module")
def example(page: str) -> bytes:
    return dumped(page, "Example: events")


def test_record_table_is_the_record(page: str) -> None:
    fields = RECORD_DTYPE.fields
    assert fields is not None
    kinds = {"u1": "u8", "<u2": "u16", "<u4": "u32", "<u8": "u64"}
    expected = [
        (place[1], name, f"{place[0].itemsize} bytes" if place[0].shape else kinds[place[0].str.replace("|", "")])
        for name, place in fields.items()
    ]
    assert documented_fields(page, "Record, 100 bytes") == expected


def test_header_table_is_the_header(page: str) -> None:
    sizes = {"4 bytes": "4s", "u8": "B", "u16": "H", "u32": "I", "u64": "Q"}
    fields = documented_fields(page, "Header, 64 bytes")
    assert "<" + "".join(sizes[kind] for _, _, kind in fields) == HEADER.format
    at = 0
    for offset, _, kind in fields:
        assert offset == at
        at += {"4s": 4, "B": 1, "H": 2, "I": 4, "Q": 8}[sizes[kind]]
    assert at == HEADER.size
    assert fields[-1] == (CRC_OFFSET, "crc", "u32")


def test_example_decodes_to_what_the_page_says(example: bytes) -> None:
    batch: Batch = decode(example)
    assert (batch.producer, batch.epoch, batch.sequence) == (producer_id("engine-0"), 0x5EED, 3)
    assert batch.first_event_sequence == 10
    assert batch.namespaces == (Namespace(tenant="acme", model="llama-3", block_tokens=16),)
    assert batch.locations == ("gpu:0",)
    hashes = {
        name: [int(row[f"{name}_hi"]) << 64 | int(row[f"{name}_lo"]) for row in batch.records]
        for name in ("sequence_hash", "parent_hash", "prefix_hash")
    }
    assert hashes == {"sequence_hash": [FIRST, SECOND], "parent_hash": [0, FIRST], "prefix_hash": [FIRST, FIRST]}
    assert batch.records["event_type"].tolist() == [EventType.STORE] * 2
    assert batch.records["tier"].tolist() == [1, 1]
    assert batch.records["depth"].tolist() == [0, 1]
    assert batch.records["block_size"].tolist() == [16_384] * 2
    assert batch.records["event_sequence"].tolist() == [10, 11]


def test_kinds_are_the_codes(page: str) -> None:
    rows = re.findall(r"^\| (\d) \| ([a-z ]+) \|", section(page, "Kinds"), re.MULTILINE)
    named = {int(number): name.replace(" ", "_").upper() for number, name in rows}
    assert named == {kind.value: kind.name for kind in BatchKind}
    assert f"at most {SNAPSHOT_CHUNK_RECORDS_MAX:,}" in section(page, "Kinds")


def test_snapshot_begin_decodes_to_what_the_page_says(page: str) -> None:
    batch = decode(dumped(page, "Example: a snapshot's beginning"))
    assert (batch.producer, batch.epoch, batch.sequence) == (producer_id("engine-0"), 0x5EED, 40)
    assert (batch.kind, batch.snapshot) == (BatchKind.SNAPSHOT_BEGIN, SnapshotRange(as_of=39))
    assert (batch.first_event_sequence, len(batch.records)) == (512, 0)


def test_heartbeat_decodes_to_what_the_page_says(page: str) -> None:
    batch = decode(dumped(page, "Example: a heartbeat"))
    assert (batch.kind, batch.sequence, batch.snapshot) == (BatchKind.HEARTBEAT, 42, None)
    assert (batch.first_event_sequence, len(batch.records)) == (514, 0)


def test_lost_decodes_to_what_the_page_says(page: str) -> None:
    batch = decode(dumped(page, "Example: lost"))
    assert (batch.kind, batch.sequence, batch.snapshot) == (BatchKind.LOST, 43, SnapshotRange(through=43))
    assert batch.extra == ({"reason": "queue full"},)


@pytest.mark.parametrize("title", ["events", "a snapshot's beginning", "a heartbeat", "lost"])
def test_example_is_canonical(page: str, title: str) -> None:
    example = dumped(page, f"Example: {title}")
    assert encode(decode(example)) == example


def test_headers_and_requests_on_nats_are_the_codes(page: str) -> None:
    rows = re.findall(r"^\| ([\w-]+) \|", section(page, "Over NATS"), re.MULTILINE)
    headers = ["header", *nats_requests.batch_headers(1, 2, 3), nats_requests.REQUEST_HEADER]
    assert rows == [*headers, nats_requests.REQUEST_HEADER, *nats_requests.RequestKind]


def test_batcher_makes_the_examples(page: str) -> None:
    """Numbers and ranges of the kinds without records are those that a publisher gives them."""
    batcher = Batcher(FlushRule(512, 1_000_000), producer=producer_id("engine-0"), epoch=0x5EED)
    for _ in range(40):
        batcher.add([EventRecord(EventType.CLEAR, tier=0)], 0)
        batcher.flush(0)
    begin, end = batcher.snapshot([], 0)
    (lost,) = batcher.lost("queue full", 0)
    heartbeat = batcher.heartbeat(0)
    assert heartbeat is not None
    assert [(b.kind, b.sequence, b.snapshot) for b in (begin, end, lost, heartbeat)] == [
        (BatchKind.SNAPSHOT_BEGIN, 40, SnapshotRange(as_of=39)),
        (BatchKind.SNAPSHOT_END, 41, SnapshotRange(as_of=39)),
        (BatchKind.LOST, 42, SnapshotRange(through=42)),
        (BatchKind.HEARTBEAT, 42, None),
    ]
    assert lost.extra == decode(dumped(page, "Example: lost")).extra
