"""Which engine a sender is, told from its messages and not before they tell it."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import msgspec
import pytest

from event_plane.dialects.known import DIALECTS, HASHES_MAX, SENDERS_MAX, Detector, open_dialect
from event_plane.errors import DialectError
from event_plane.recording import message_of, read_capture
from event_plane.schema import Namespace
from event_plane.transport import Message
from tests.foreign_streams import (
    engine_payload,
    envelope,
    kvbm_payload,
    level_event,
    level_stored,
    removed,
    router_event,
    store_event,
    stored,
)

HIGH = 2**63
TOKENS = list(range(16))


def detect(*payloads: bytes) -> list[str | None]:
    """What a detector says of one sender's messages, one after the other."""
    detector = Detector()
    return [detector.detect(Message("source", b"topic", number, each)) for number, each in enumerate(payloads)]


@pytest.mark.parametrize(
    "event",
    [
        stored([HIGH]),
        stored([5, b"\x01" * 32]),
        removed([5], group_idx=0),
        stored([5], extra_keys=[None]),
        stored([5], locality="LOCAL"),
        stored([5], medium="CPU"),
        removed([5], medium="storage"),
        ["BlockStored", [HIGH], None, TOKENS, 16, None],
        ["BlockStored", [5], None, TOKENS, 16, None, "GPU", None, [None]],
        ["BlockStored", [5], None, TOKENS, 16, None, "GPU", None, None, 0],
        ["BlockStored", [5], None, TOKENS, 16, None, "GPU", None, None, None, "full_attention"],
        ["BlockRemoved", [5], "GPU", 0],
        ["BlockRemoved", [5], "FS"],
    ],
)
def test_what_only_vllm_writes_says_vllm(event: Any) -> None:
    assert detect(engine_payload(event)) == ["vllm"]


@pytest.mark.parametrize(
    "event",
    [
        stored([-5]),
        removed([-5], medium="GPU"),
        stored([5], medium="CPU_PINNED"),
        removed([5], medium="DISK"),
        stored([5], medium="EXTERNAL"),
        stored([5], cache_salt="s"),
        stored([5], token_ids=[[1, 2], [2, 3]]),
        ["BlockStored", [-5], None, TOKENS, 16, None],
        ["BlockStored", [5], None, [[1, 2], [2, 3]], 16, None],
        ["BlockRemoved", [5], "CPU_PINNED"],
    ],
)
def test_what_only_sglang_writes_says_sglang(event: Any) -> None:
    assert detect(engine_payload(event)) == ["sglang"]


@pytest.mark.parametrize(
    "event",
    [
        stored([5], session_id="s1", lora_name=None),
        removed([5], medium="GPU"),
        {"type": "AllBlocksCleared"},
        ["BlockStored", [5], None, TOKENS, 16, None, "GPU", None],
        ["BlockRemoved", [5]],
    ],
)
def test_what_both_write_tells_nothing_until_something_does(event: Any) -> None:
    silent, telling = engine_payload(event), engine_payload(stored([-5]))
    assert detect(silent, silent, telling) == [None, None, "sglang"]


def test_signed_hashes_of_vllm_0_9_are_told_by_the_absent_rank() -> None:
    assert detect(engine_payload(["BlockStored", [-5], None, TOKENS, 16, None], rank=None)) == ["vllm"]


def test_sender_that_shows_marks_of_both_is_never_told() -> None:
    both = engine_payload(stored([HIGH]), stored([-5]))
    assert detect(both, engine_payload(stored([-5])), engine_payload(stored([HIGH]))) == [None, None, None]


def test_many_hashes_without_a_negative_one_are_vllms() -> None:
    payload = engine_payload(stored(list(range(1, HASHES_MAX // 2 + 1))))
    assert detect(payload, payload) == [None, "vllm"]


@pytest.mark.parametrize(
    ("payload", "dialect"),
    [
        (envelope(router_event("cleared")), "dynamo"),
        (envelope(router_event("cleared"), json=True), "dynamo"),
        (b"\x01" + len(envelope()).to_bytes(4, "big") + envelope(), "dynamo"),
        (kvbm_payload({"Create": [b"1" * 16]}), "dynamo-kvbm"),
        (kvbm_payload("Shutdown"), "dynamo-kvbm"),
        (msgspec.json.encode(level_event(level_stored([(1, 0, 8)]))), "trtllm"),
        (msgspec.json.encode([level_event(level_stored([(1, 0, 8)]))]), "trtllm"),
        (engine_payload(store_event("stored", [5]), timestamp=1_795_970_465_812), "mooncake"),
    ],
)
def test_other_engines_are_told_by_the_form_of_one_message(payload: bytes, dialect: str) -> None:
    assert detect(payload) == [dialect]


@pytest.mark.parametrize(
    "payload", [b"", b"\xc1", b"{", b"[]", b"{}", engine_payload(), engine_payload(17), b"\x01\x00"]
)
def test_what_says_nothing_is_not_told(payload: bytes) -> None:
    assert detect(payload, payload) == [None, None]


def test_senders_are_told_apart_and_as_many_as_there_may_be_are_remembered() -> None:
    detector = Detector()
    half = engine_payload(stored(list(range(1, HASHES_MAX // 2 + 1))))
    for topic in range(SENDERS_MAX + 1):
        assert detector.detect(Message("s", b"%d" % topic, 0, half)) is None
    assert detector.detect(Message("s", b"0", 1, half)) is None
    assert detector.detect(Message("s", b"%d" % SENDERS_MAX, 1, half)) == "vllm"


@pytest.mark.parametrize(
    ("name", "dialect"),
    [("vllm033_int", "vllm"), ("vllm033_bytes", "vllm"), ("sglang0523", "sglang"), ("dynamo161_nats", "dynamo")],
)
def test_no_message_of_a_real_stream_is_taken_for_another_engines(shared_data: Path, name: str, dialect: str) -> None:
    said = set()
    for frames in read_capture(shared_data / "captures" / f"{name}.cap"):
        message = message_of(frames, "capture")
        assert message is not None
        said.add(Detector().detect(message))
    assert said - {None} == {dialect}


def test_random_hashes_of_sglang_are_told_within_a_few_blocks() -> None:
    numbers = random.Random(1)
    payloads = [engine_payload(removed([numbers.getrandbits(64) - 2**63], medium="GPU")) for _ in range(30)]
    assert set(detect(*payloads)) == {None, "sglang"}


def test_every_dialect_opens_by_its_name_and_makes_namespaces_of_it() -> None:
    for name in DIALECTS:
        assert open_dialect(name, namespace=Namespace()).name == name


def test_unknown_dialect_is_an_error_that_names_those_there_are() -> None:
    with pytest.raises(DialectError, match="no dialect 'lmcache': choose one of vllm, sglang, trtllm, dynamo"):
        open_dialect("lmcache", namespace=Namespace())
