"""Captures and traces: what they are, what they say, and where they are damaged."""

from __future__ import annotations

import gzip
import json
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from event_plane.errors import RecordingError
from event_plane.recording import (
    FRAME_BYTES_MAX,
    LINE_BYTES_MAX,
    TraceRequest,
    capture_dialect,
    detect_format,
    read_capture,
    read_trace,
)
from event_plane.schema import RECORD_DTYPE, Batch
from event_plane.wire import encode
from tests.examples import examples

MESSAGES = [[b"topic", bytes(8), b"payload"], [b"", b"", b""], [b"subject", b"x" * 3000]]
LINE = {"timestamp": 27482, "input_length": 6955, "output_length": 52, "hash_ids": [46, 47, 2353]}


def capture_bytes(messages: list[list[bytes]]) -> bytes:
    packed = b""
    for frames in messages:
        packed += struct.pack("<I", len(frames))
        packed += b"".join(struct.pack("<I", len(frame)) + frame for frame in frames)
    return packed


@pytest.fixture(params=[bytes, gzip.compress], ids=["plain", "gzip"])
def written(request: pytest.FixtureRequest, tmp_path: Path) -> Callable[[bytes], Path]:
    """Writes a recording, plain or packed, under a name that says nothing."""

    def written(content: bytes) -> Path:
        path = tmp_path / "recording"
        path.write_bytes(request.param(content))
        return path

    return written


Written = Callable[[bytes], Path]


def vllm_message(sequence: int, *events: Any) -> list[bytes]:
    return [b"kv", sequence.to_bytes(8, "big"), msgspec.msgpack.encode([1.0, list(events), 0])]


def test_capture_is_told_from_content_and_read_frame_by_frame(written: Written) -> None:
    path = written(capture_bytes(MESSAGES))
    assert detect_format(path) == "capture"
    assert list(read_capture(path)) == MESSAGES


def test_trace_is_told_from_content_and_read_line_by_line(written: Written) -> None:
    path = written(b"\n".join(json.dumps(LINE | {"timestamp": at}).encode() for at in (0, 1.5)) + b"\n\n")
    assert detect_format(path) == "trace"
    assert list(read_trace(path)) == [
        TraceRequest(timestamp_ms=at, input_tokens=6955, output_tokens=52, block_ids=[46, 47, 2353])
        for at in (0.0, 1.5)
    ]


@pytest.mark.parametrize("content", [b"", b"\x00" * 32, b"abc", b"[1, 2, 3]"])
def test_content_that_is_neither_is_one_clear_error(written: Written, content: bytes) -> None:
    with pytest.raises(RecordingError, match=r"give a capture \(\.cap\), a recording \(\.parquet\) or a trace"):
        detect_format(written(content))


@pytest.mark.parametrize("read", [detect_format, capture_dialect, lambda path: list(read_trace(path))])
def test_absent_file_is_one_clear_error(tmp_path: Path, read: Callable[[Path], object]) -> None:
    with pytest.raises(RecordingError, match=r"absent\.cap cannot be read \(No such file"):
        read(tmp_path / "absent.cap")


def test_folder_is_one_clear_error(tmp_path: Path) -> None:
    with pytest.raises(RecordingError, match=r"cannot be read \(Is a directory\): check the path"):
        detect_format(tmp_path)


def test_cut_capture_gives_its_whole_messages_and_then_names_the_byte(written: Written) -> None:
    whole = capture_bytes(MESSAGES[:2])
    path = written(capture_bytes(MESSAGES)[:-1])
    messages = read_capture(path)
    assert [next(messages), next(messages)] == MESSAGES[:2]
    with pytest.raises(RecordingError) as damaged:
        next(messages)
    assert str(path) in str(damaged.value)
    assert "says a frame of 3000 bytes, 2999 follow at byte" in str(damaged.value)
    assert f"head -c {len(whole)}" in str(damaged.value)


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (struct.pack("<I", 17), "says 17 frames, more than 16 at byte 0"),
        (struct.pack("<I", 0), "says a message without frames at byte 0"),
        (struct.pack("<II", 1, FRAME_BYTES_MAX + 1), f"says a frame of {FRAME_BYTES_MAX + 1} bytes, more than"),
        (b"\x01\x00", "ends in the middle of a message at byte 0"),
        (struct.pack("<I", 2) + struct.pack("<I", 1) + b"x", "ends in the middle of a message at byte 9"),
    ],
)
def test_damaged_capture_names_what_and_where(written: Written, content: bytes, said: str) -> None:
    with pytest.raises(RecordingError, match=said):
        list(read_capture(written(content)))


@settings(max_examples=examples(100), deadline=None)
@given(cut=st.integers(0, len(capture_bytes(MESSAGES))))
def test_capture_cut_anywhere_gives_whole_messages_or_the_error(
    cut: int, tmp_path_factory: pytest.TempPathFactory
) -> None:
    ends = [len(capture_bytes(MESSAGES[:count])) for count in range(4)]
    path = tmp_path_factory.getbasetemp() / "cut.cap"
    path.write_bytes(capture_bytes(MESSAGES)[:cut])
    received: list[list[bytes]] = []
    try:
        received.extend(read_capture(path))
    except RecordingError:
        assert cut not in ends
    else:
        assert cut in ends
    assert received == MESSAGES[: sum(end <= cut for end in ends) - 1]


@pytest.mark.parametrize("line", [b"{", b'{"timestamp": 1}', b"[]", json.dumps(LINE | {"hash_ids": ["a"]}).encode(),
                                  json.dumps(LINE | {"timestamp": "82"}).encode(), b'{"a": "\xff"}'])  # fmt: skip
def test_unreadable_trace_line_is_named_after_the_good_ones(written: Written, line: bytes) -> None:
    requests = read_trace(written(json.dumps(LINE).encode() + b"\n" + line + b"\n"))
    assert next(requests).block_ids == [46, 47, 2353]
    with pytest.raises(RecordingError, match=r"line 2 is no request .*mend or remove that line"):
        next(requests)


def test_json_that_is_no_request_from_its_first_line_on_is_another_format(written: Written) -> None:
    for line in (b'{"a": 1}', json.dumps(LINE | {"timestamp": "82"}).encode()):
        with pytest.raises(RecordingError, match=r"holds JSON of another format .*give lines with"):
            list(read_trace(written(line + b"\n" + json.dumps(LINE).encode())))


@pytest.mark.parametrize("length", [-5, 10**20])
def test_length_of_no_prompt_is_named(written: Written, length: int) -> None:
    with pytest.raises(RecordingError, match=f"line 1 has input_length {length}"):
        list(read_trace(written(json.dumps(LINE | {"input_length": length}).encode())))


def test_line_without_end_does_not_fill_memory(written: Written) -> None:
    with pytest.raises(RecordingError, match=f"line 1 is longer than {LINE_BYTES_MAX} bytes"):
        list(read_trace(written(b"{" + b" " * (LINE_BYTES_MAX + 10))))


@pytest.mark.parametrize("kept", [0.3, 0.9])
def test_cut_gzip_is_named(tmp_path: Path, kept: float) -> None:
    packed = gzip.compress(b"\n".join(json.dumps(LINE | {"timestamp": at}).encode() for at in range(2000)))
    path = tmp_path / "cut.jsonl.gz"
    path.write_bytes(packed[: int(len(packed) * kept)])
    with pytest.raises(RecordingError, match=r"cut\.jsonl\.gz is a damaged gzip file"):
        list(read_trace(path))


def test_damaged_gzip_is_named(tmp_path: Path) -> None:
    packed = bytearray(gzip.compress(json.dumps(LINE).encode()))
    packed[-6] ^= 1
    path = tmp_path / "damaged.jsonl.gz"
    path.write_bytes(packed)
    with pytest.raises(RecordingError, match="is a damaged gzip file"):
        list(read_trace(path))


def test_vllm_capture_is_told_from_its_messages(written: Written) -> None:
    maps = {"type": "BlockStored", "block_hashes": [5], "medium": "GPU"}
    arrays = ["BlockRemoved", [b"\xff" * 32]]
    assert capture_dialect(written(capture_bytes([vllm_message(0, maps), vllm_message(1, arrays)]))) == "vllm"


def test_capture_of_our_own_batches_is_told_from_its_magic(written: Written) -> None:
    batch = encode(Batch(1, 2, 0, np.empty(0, RECORD_DTYPE)))
    assert capture_dialect(written(capture_bytes([[b"kv-events", bytes(8), batch]]))) == "kvadvisor"


@pytest.mark.parametrize(
    ("messages", "dialect"),
    [
        ([vllm_message(0, ["BlockStored", [-5], None, [], 16, None])], "sglang"),
        ([vllm_message(0, {"type": "BlockRemoved", "block_hashes": [5], "medium": "CPU_PINNED"})], "sglang"),
        ([[b"ns.kv-events", msgspec.msgpack.encode({"publisher_id": 1, "payload": b""})]], "dynamo"),
        ([[b"events", b'[{"event_id": 0, "data": {"type": "created"}}]']], "trtllm"),
    ],
)
def test_capture_of_each_engine_is_told_from_its_messages(
    written: Written, messages: list[list[bytes]], dialect: str
) -> None:
    assert capture_dialect(written(capture_bytes(messages))) == dialect


@pytest.mark.parametrize("frames", [[b"one frame"], [b"topic", b"short", b"payload"]])
def test_capture_of_no_known_engine_says_how_many_frames_it_has(written: Written, frames: list[bytes]) -> None:
    with pytest.raises(RecordingError, match=f"messages of {len(frames)} frames that no known engine sends"):
        capture_dialect(written(capture_bytes([frames])))


@pytest.mark.parametrize(
    ("name", "dialect"),
    [("vllm033_int", "vllm"), ("vllm033_bytes", "vllm"), ("sglang0523", "sglang"), ("dynamo161_nats", "dynamo")],
)
def test_real_captures_are_told_from_their_messages(shared_data: Path, name: str, dialect: str) -> None:
    assert capture_dialect(shared_data / "captures" / f"{name}.cap") == dialect


def test_real_trace_has_every_request_and_block(shared_data: Path) -> None:
    path = shared_data / "traces" / "mooncake_conversation_trace.jsonl.gz"
    assert detect_format(path) == "trace"
    requests = list(read_trace(path))
    assert len(requests) == 12_031
    assert sum(len(request.block_ids) for request in requests) == 288_500
    assert len({block for request in requests for block in request.block_ids}) == 182_790
    assert sum(request.input_tokens for request in requests) == 144_793_823
