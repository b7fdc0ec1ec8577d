"""The fuzzer's targets over a small corpus, mutated in a way that repeats; `make fuzz` goes on for as long as asked."""

from __future__ import annotations

import random
import struct
import tracemalloc
from pathlib import Path

import numpy as np
import pytest

from advisor.entries import SettingsEntry, encode_control
from advisor.segment_files import BlockBytes, SegmentDamaged, read_groups
from event_plane import nats_requests, wire
from event_plane.schema import RECORD_DTYPE, Batch
from tests.fuzz.mutations import segment_frames, segment_head, with_crc
from tests.fuzz.seeds import segments
from tests.fuzz.targets import TARGETS

MUTATIONS = 400
MEMORY_BYTES_MAX = 80 * 1024 * 1024
"""More than the largest frame that a capture may hold: it is read in one piece."""
SETTINGS_ENTRY = encode_control(SettingsEntry({"any": None}, "1"))


@pytest.mark.parametrize("name", TARGETS)
def test_mutated_input_is_read_within_limits_or_refused_by_the_one_error(name: str) -> None:
    target = TARGETS[name]
    drawn = random.Random(name)
    corpus = target.seeds()
    for seed in corpus:
        target.check(seed)
    for _ in range(MUTATIONS):
        mutated = drawn.choice(corpus)
        for _ in range(drawn.randint(1, 3)):
            mutated = target.mutate(mutated, drawn)
        target.check(mutated)


def lying_batch() -> bytes:
    """A header that says 64 MiB of records, with none."""
    head = bytearray(wire.encode(Batch(1, 2, 3, np.empty(0, RECORD_DTYPE))))
    struct.pack_into("<IHH", head, 48, 65_536, 1_024, 64)
    return with_crc(bytes(head))


LIES = {
    "wire": [lying_batch()],
    "vllm": [
        b"\x93\xc0\xdd\xff\xff\xff\xff",
        b"\x93\xc0\x91\x92\xabBlockStored\xdd\xff\xff\xff\xff",
        b"\xc6\xff\xff\xff\xff",
    ],
    "capture": [struct.pack("<II", 1, 60 * 1024 * 1024) + b"x", struct.pack("<I", 16) + b"\xff" * 64],
    "trace": [b'{"timestamp": 1, "hash_ids": [' + b"1," * 1_000],
    "control": [b"\x82\xa4type\xa4move\xa8move_ids\xdd\xff\xff\xff\xff"],
}


@pytest.mark.parametrize("name", LIES)
def test_length_that_lies_is_refused_before_memory_is_taken_for_it(name: str) -> None:
    for raw in LIES[name]:
        tracemalloc.start()
        try:
            TARGETS[name].check(raw)
            assert tracemalloc.get_traced_memory()[1] < MEMORY_BYTES_MAX
        finally:
            tracemalloc.stop()


@pytest.mark.parametrize("name", ["vllm", "control", "dynamo"])
def test_values_nested_past_the_recursion_limit_are_the_one_error(name: str) -> None:
    deep = b"\x91" * 5_000 + b"\xc0"
    for raw in (deep, b"\x92" + b"\xc0" + deep, SETTINGS_ENTRY.replace(b"\xc0", deep)):
        TARGETS[name].check(raw)


@pytest.mark.parametrize("name", [b"\xff\xfe", b"cut"], ids=["no text", "longer than what follows"])
def test_source_of_a_segments_frame_that_cannot_be_read_is_damage_that_is_named(name: bytes) -> None:
    *_, ((_, position, first), body) = segment_frames(segments()[0])
    damaged = bytearray(body[:48] + name)
    struct.pack_into("<H", damaged, 2, 2 if name != b"cut" else 4)
    raw = segment_head(len(damaged), position, first, bytes(damaged)) + damaged
    with pytest.raises(SegmentDamaged, match="its source's name"):
        list(read_groups(Path("log"), BlockBytes(raw), position))


@pytest.mark.parametrize("sequence", ["-1", str(1 << 64), "x"])
def test_headers_on_nats_that_hold_no_u64_name_no_batch(sequence: str) -> None:
    headers = {"Kv-Producer": "1", "Kv-Epoch": "2", "Kv-Sequence": sequence}
    assert nats_requests.read_headers(headers | {"Kv-Sequence": "3"}) == (1, 2, 3)
    assert nats_requests.read_headers(headers) is None
