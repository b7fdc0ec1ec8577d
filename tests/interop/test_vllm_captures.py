"""vLLM 0.33's own streams, read by the dialect and counted by the engine's rule: exactly the engine's own blocks."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path

import numpy as np
import pytest

from event_plane.dialects.vllm import VllmDialect
from event_plane.recording import capture_dialect, read_capture
from event_plane.schema import EventType, Namespace, RecordFlag, Records
from event_plane.wire import decode, encode

Key = tuple[int, int, int]
"""Tier, group, 128-bit hash."""


def records_of(capture: Path) -> Records:
    dialect = VllmDialect(namespace=Namespace(model="llama"))
    batches = []
    for topic, sequence, payload in read_capture(capture):
        assert topic == b"kv@127.0.0.1@llama"
        batch, skipped = dialect.decode(payload, producer=1, epoch=1, sequence=int.from_bytes(sequence, "big"))
        assert skipped == {}
        assert dialect.rank(payload) == 0
        batches.append(decode(encode(batch)).records)
    return np.concatenate(batches)


def live_keys(records: Records) -> set[Key]:
    """Count references; a Store whose parent is None and whose hashes are all live adds nothing."""
    live: Counter[Key] = Counter()
    starts = np.flatnonzero(records["flags"] & RecordFlag.FIRST)
    for event in np.split(records, starts[1:]):
        keys = [
            (int(record["tier"]), int(record["group"]),
             int(record["sequence_hash_hi"]) << 64 | int(record["sequence_hash_lo"]))
            for record in event
        ]  # fmt: skip
        match EventType(int(event[0]["event_type"])):
            case EventType.STORE:
                at_root = not (event[0]["parent_hash_lo"] or event[0]["parent_hash_hi"])
                if not (at_root and all(live[key] for key in keys)):
                    live.update(keys)
            case EventType.REMOVE:
                for key in keys:
                    live[key] = max(live[key] - 1, 0)
            case EventType.CLEAR:
                live.clear()
    return {key for key, count in live.items() if count}


def low(key: Key) -> int:
    return key[2] & 0xFFFF_FFFF_FFFF_FFFF


@pytest.mark.parametrize("name", ["vllm033_int", "vllm033_bytes"])
def test_live_blocks_equal_the_engines_own(shared_data: Path, name: str) -> None:
    capture = shared_data / "captures" / f"{name}.cap"
    assert capture_dialect(capture) == "vllm"
    oracle = json.loads(capture.with_suffix(".cap.oracle.json").read_text())
    if name == "vllm033_bytes":
        expected = {int.from_bytes(bytes.fromhex(digest)[-16:], "big") for digest in oracle}
    else:
        expected = set(oracle)
    live = live_keys(records_of(capture))
    assert len(live) == 239
    assert {key[2] for key in live} == expected


def test_integer_and_byte_hashes_agree_in_the_low_half(shared_data: Path) -> None:
    captures = shared_data / "captures"
    integers, digests = (live_keys(records_of(captures / f"vllm033_{mode}.cap")) for mode in ("int", "bytes"))
    assert {low(key) for key in integers} == {low(key) for key in digests}
