"""What is fuzzed: each target takes any bytes and passes; it raises where the property is broken.

The property is the same everywhere: a valid result within the limits, or the one documented error. Memory is bounded by
the runner (`tests/fuzz/run.py`), and by `test_fuzz_seeds.py` for lengths that lie.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Final

import msgspec

from advisor.entries import decode_control, encode_control
from advisor.segment_files import BlockBytes, SegmentDamaged, read_groups
from event_plane import nats_requests, wire
from event_plane.dialects.known import DIALECTS, Detector, open_dialect
from event_plane.errors import DialectError, RecordingError, WireError
from event_plane.parquet import read_parquet
from event_plane.recording import capture_dialect, detect_format, read_capture, read_trace
from event_plane.schema import RECORD_COUNT_MAX, Batch
from event_plane.transport import Message
from tests.fuzz import seeds
from tests.fuzz.mutations import (
    Mutate,
    mutate_batch,
    mutate_bytes,
    mutate_either,
    mutate_frames,
    mutate_json,
    mutate_messagepack,
    mutate_segment,
)


@dataclass(frozen=True)
class Target:
    """`check` raises where the property is broken; `seeds` are valid inputs; `mutate` keeps most of their structure."""

    check: Callable[[bytes], None]
    seeds: Callable[[], list[bytes]]
    mutate: Mutate


def check_wire(raw: bytes) -> None:
    """What decodes can be encoded again, to the same batch."""
    try:
        batch = wire.decode(raw)
    except WireError:
        return
    _check_batch(batch)


def check_dialect(name: str, raw: bytes) -> None:
    """A foreign message is read into a batch that our own format can carry."""
    dialect = open_dialect(name, namespace=seeds.NAMESPACE)
    message = Message("fuzzed", b"kv-events", 3, raw)
    Detector().detect(message)
    try:
        sequence = dialect.origin(message).sequence
        batch, skipped = dialect.decode(raw, producer=1, epoch=2, sequence=sequence)
    except DialectError as error:
        assert "\n" not in str(error)  # noqa: PT017 -- it goes into one line of a log
        return
    assert (batch.producer, batch.epoch, batch.sequence) == (1, 2, sequence)
    assert all(count > 0 and len(reason) < 100 for reason, count in skipped.items())
    _check_batch(batch)


def check_nats(raw: bytes) -> None:
    """Headers and body of a message on NATS: a JSON map of headers, whose key `body` is the body."""
    try:
        headers = msgspec.json.decode(raw, type=dict[str, str])
    except (msgspec.MsgspecError, ValueError, RecursionError):
        return
    body = headers.pop("body", "").encode("latin-1", "replace")
    identity = nats_requests.read_headers(headers)
    assert identity is None or all(0 <= number < 1 << 64 for number in identity)
    nats_requests.read_request(headers.get(nats_requests.REQUEST_HEADER, ""), body, "_INBOX.1")
    nats_requests.read_who_reply(body)


def check_capture(raw: bytes) -> None:
    with _as_file(raw) as path:
        try:
            if detect_format(path) == "capture":
                capture_dialect(path)
                for frames in read_capture(path):
                    assert sum(map(len, frames)) <= len(raw)
        except RecordingError as error:
            assert str(path) in str(error)  # noqa: PT017


def check_parquet(raw: bytes) -> None:
    with _as_file(raw) as path:
        try:
            for recorded in read_parquet(path):
                _check_batch(recorded.batch)
        except RecordingError as error:
            assert str(path) in str(error)  # noqa: PT017


def check_trace(raw: bytes) -> None:
    with _as_file(raw) as path:
        try:
            for request in read_trace(path):
                assert request.input_tokens >= 0
        except RecordingError as error:
            assert str(path) in str(error)  # noqa: PT017


def check_segment(raw: bytes) -> None:
    """A file of a segment log."""
    try:
        entries = [entry for group in read_groups(Path("fuzzed"), BlockBytes(raw), 1) for entry in group.entries]
    except SegmentDamaged:
        return
    assert sum(len(entry.payload) for entry in entries) <= len(raw)


def check_control(raw: bytes) -> None:
    """An entry of the log that is no batch."""
    try:
        control = decode_control(raw)
    except msgspec.DecodeError:
        return
    assert encode_control(decode_control(encode_control(control))) == encode_control(control)


def _check_batch(batch: Batch) -> None:
    assert len(batch.records) <= RECORD_COUNT_MAX
    encoded = wire.encode(batch)
    assert wire.encode(wire.decode(encoded)) == encoded
    assert all(0 <= each < 1 << 64 for each in batch.namespace_ids)


@contextmanager
def _as_file(raw: bytes) -> Iterator[Path]:
    """`raw` as a file in memory."""
    descriptor = os.memfd_create("fuzzed")
    try:
        os.write(descriptor, raw)
        yield Path(f"/proc/self/fd/{descriptor}")
    finally:
        os.close(descriptor)


_DIALECT_SEEDS: Final[dict[str, Callable[[], list[bytes]]]] = {
    "vllm": seeds.vllm,
    "sglang": seeds.sglang,
    "trtllm": seeds.trtllm,
    "dynamo": seeds.dynamo,
    "dynamo-kvbm": seeds.dynamo_kvbm,
    "mooncake": seeds.mooncake,
}

TARGETS: Final[dict[str, Target]] = {
    "wire": Target(check_wire, seeds.our_batches, mutate_batch),
    **{name: Target(partial(check_dialect, name), _DIALECT_SEEDS[name], mutate_either) for name in DIALECTS},
    "nats": Target(check_nats, seeds.nats, mutate_json),
    "capture": Target(check_capture, seeds.capture, mutate_frames),
    "parquet": Target(check_parquet, seeds.parquet, mutate_bytes),
    "trace": Target(check_trace, seeds.trace, mutate_bytes),
    "segment": Target(check_segment, seeds.segments, mutate_segment),
    "control": Target(check_control, seeds.controls, mutate_messagepack),
}
