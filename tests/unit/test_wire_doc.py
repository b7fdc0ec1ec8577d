"""docs/wire-format.md says what the code does: its tables and its example are read here."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from event_plane.schema import RECORD_DTYPE, Batch, EventType, Namespace, producer_id
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


@pytest.fixture(scope="module")
def example(page: str) -> bytes:
    dump = section(page, "Example").split("```hex\n", 1)[1].split("```", 1)[0]
    return b"".join(bytes.fromhex(line.split("  ", 1)[1]) for line in dump.splitlines())


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


def test_example_is_canonical(example: bytes) -> None:
    assert encode(decode(example)) == example
