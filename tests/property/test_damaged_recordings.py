"""Whatever is cut from or flipped in a recording, its replay ends well or with one sentence that names the file."""

from __future__ import annotations

import struct
from pathlib import Path
from tempfile import TemporaryDirectory

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from advisor.errors import AdvisorError
from advisor.replay import replay_recording, replay_trace
from advisor.traces import load_trace
from event_plane.errors import EventPlaneError
from event_plane.recording import detect_format
from tests.examples import examples


def capture_bytes(messages: int) -> bytes:
    """Messages of a vLLM that stores a block each."""
    packed = b""
    for sequence in range(messages):
        event = {
            "type": "BlockStored", "block_hashes": [sequence + 1], "parent_block_hash": None,
            "token_ids": list(range(16)), "block_size": 16, "medium": "GPU",
        }  # fmt: skip
        frames = [b"kv-events", sequence.to_bytes(8, "big"), msgspec.msgpack.encode([1.0, [event], 0])]
        packed += struct.pack("<I", len(frames)) + b"".join(struct.pack("<I", len(f)) + f for f in frames)
    return packed


def trace_bytes(requests: int) -> bytes:
    same = {"input_length": 512 * 3, "output_length": 5}
    lines = [same | {"timestamp": 10 * n, "hash_ids": [1, 2, n]} for n in range(requests)]
    return b"".join(msgspec.json.encode(line) + b"\n" for line in lines)


CAPTURE, TRACE = capture_bytes(6), trace_bytes(6)


def replay(path: Path) -> None:
    if detect_format(path) == "capture":
        replay_recording(path).fold.index.check()
    else:
        replay_trace(load_trace(path), "lru", 4).fold.index.check()


@pytest.mark.parametrize("whole", [CAPTURE, TRACE], ids=["capture", "trace"])
@settings(max_examples=examples(120), deadline=None)
@given(data=st.data())
def test_damaged_recording_ends_well_or_with_one_sentence(whole: bytes, data: st.DataObject) -> None:
    damaged = bytearray(whole)
    for at in data.draw(st.lists(st.integers(0, len(whole) - 1), max_size=4)):
        damaged[at] = data.draw(st.integers(0, 255))
    start = data.draw(st.integers(0, len(whole)))
    kept = data.draw(st.sampled_from([bytes(damaged), bytes(damaged[:start]), bytes(damaged[start:])]))
    with TemporaryDirectory() as folder:
        path = Path(folder) / "recording"
        path.write_bytes(kept)
        try:
            replay(path)
        except (AdvisorError, EventPlaneError) as error:
            assert str(path) in str(error)  # noqa: PT017
            assert "\n" not in str(error)  # noqa: PT017


@settings(max_examples=examples(100), deadline=None)
@given(st.binary(max_size=200))
def test_any_bytes_end_well_or_with_one_sentence(content: bytes) -> None:
    with TemporaryDirectory() as folder:
        path = Path(folder) / "recording"
        path.write_bytes(content)
        try:
            replay(path)
        except (AdvisorError, EventPlaneError) as error:
            assert str(path) in str(error)  # noqa: PT017


@pytest.mark.parametrize("keep", [range(1, 6), (0, 1, 4, 5)], ids=["attached late", "two lost"])
def test_batches_that_a_capture_lacks_are_counted_and_what_follows_is_read(tmp_path: Path, keep: range) -> None:
    size = len(CAPTURE) // 6
    path = tmp_path / "gap.cap"
    path.write_bytes(b"".join(CAPTURE[size * n : size * (n + 1)] for n in keep))
    replayed = replay_recording(path)
    assert replayed.messages == len(list(keep))
    assert replayed.refused == {"batch that the file lacks": 6 - len(list(keep))}
    (producer,) = replayed.fold.producers.values()
    assert producer.partial
    # What was placed before the gap is forgotten.
    assert len(replayed.fold.index) == (5 if 0 not in keep else 2)
