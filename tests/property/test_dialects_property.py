"""Every dialect, whatever an engine sends: both ways to read agree, and bad bytes are the one documented error."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from event_plane.dialects import sglang, vllm
from event_plane.dialects.known import DIALECTS, Detector, open_dialect
from event_plane.errors import DialectError
from event_plane.schema import RecordFlag
from event_plane.transport import Message
from event_plane.wire import decode, encode
from tests.examples import examples
from tests.foreign_streams import (
    CONFIGURED,
    engine_payload,
    envelope,
    kvbm_payload,
    level_event,
    level_stored,
    read,
    removed,
    router_event,
    router_removed,
    router_stored,
    store_event,
    stored,
)

U64 = st.integers(1, 2**64 - 1)
I64 = st.integers(-(2**63), 2**63 - 1).filter(bool)
SMALL = st.integers(1, 4)
DIGESTS = st.binary(min_size=16, max_size=32).filter(lambda raw: any(raw[-16:]))
HASHES = st.one_of(
    st.lists(SMALL, min_size=1, max_size=5),
    st.lists(U64, min_size=1, max_size=5),
    st.lists(I64, min_size=1, max_size=5),
    st.lists(DIGESTS, min_size=1, max_size=5),
    st.lists(U64 | I64 | DIGESTS, min_size=1, max_size=5),
)
INTEGERS = st.lists(SMALL | U64 | I64, min_size=1, max_size=5)
ANYTHING: st.SearchStrategy[Any] = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**63), 2**64 - 1) | st.floats() | st.text(max_size=5)
    | st.binary(max_size=20) | st.sampled_from(["stored", "removed", "cleared", "BlockStored", "GPU", "Create"]),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=6,
)  # fmt: skip
TEXTS = st.none() | st.text(max_size=4)


def block_events(media: Sequence[str], parents: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    """Of vLLM and SGLang, as maps."""
    place = {"medium": st.none() | st.sampled_from(media), "group_idx": st.none() | st.integers(0, 255)}
    told = {
        "locality": st.sampled_from([None, "LOCAL", "remote"]), "block_size": st.none() | st.integers(0, 65_535),
        "lora_id": st.none() | st.integers(0, 3), "lora_name": TEXTS, "cache_salt": TEXTS,
        "extra_keys": st.none() | st.lists(st.none() | st.lists(st.text(max_size=3), max_size=2), max_size=3),
        "token_ids": st.sampled_from([[], [1, 2], [[1, 2], [3, 4]]]),
    }  # fmt: skip
    return st.one_of(
        st.builds(
            lambda hashes, parent, fields: stored(hashes, parent, **fields),
            HASHES, st.none() | parents, st.fixed_dictionaries({}, optional=place | told),
        ),
        st.builds(lambda hashes, fields: removed(hashes, **fields), HASHES, st.fixed_dictionaries({}, optional=place)),
        st.just({"type": "AllBlocksCleared"}),
    )  # fmt: skip


def as_arrays(fields: dict[str, tuple[str, ...]]) -> Callable[[dict[str, Any]], list[Any]]:
    def turned(event: dict[str, Any]) -> list[Any]:
        return [event["type"], *(event.get(name) for name in fields.get(event["type"], ()))]

    return turned


SGLANG_FIELDS = {"BlockStored": sglang.FLAVOUR.stored, "BlockRemoved": sglang.FLAVOUR.removed}
VLLM_EVENTS = block_events(["GPU", "cpu", "STORAGE", "OBJ"], SMALL | U64 | I64 | DIGESTS)
SGLANG_EVENTS = block_events(["GPU", "CPU_PINNED", "disk", "EXTERNAL"], SMALL | I64)
ROUTER_EVENTS = st.builds(
    router_event,
    st.builds(router_stored, INTEGERS, st.none() | U64) | st.builds(router_removed, INTEGERS) | st.just("cleared"),
    worker=st.integers(0, 3),
    tier=st.sampled_from(["device", "host_pinned", "disk", "external", None]),
    rank=st.integers(0, 2) | st.none(),
)
LEVEL_EVENTS = st.builds(
    level_event,
    st.builds(
        level_stored,
        st.lists(st.tuples(SMALL | U64, st.integers(0, 1), st.integers(0, 3)), min_size=1, max_size=5),
        st.none() | U64,
    )
    | st.builds(lambda hashes: {"type": "removed", "block_hashes": hashes}, INTEGERS)
    | st.builds(
        lambda block, old, new: {
            "type": "updated", "block_hash": block, "cache_level": {"old_value": old, "new_value": new},
        },
        U64, st.integers(0, 1), st.integers(0, 1),
    )
    | st.just({"type": "created", "num_blocks_per_cache_level": [1]}),
    event_id=st.integers(0, 9),
)  # fmt: skip
STORE_EVENTS = st.builds(
    lambda kind, hashes, fields: store_event(kind, hashes, **fields),
    st.sampled_from(["stored", "removed"]),
    INTEGERS,
    st.fixed_dictionaries(
        {},
        optional={
            "medium": st.sampled_from([None, "cpu", "DISK"]), "group_id": st.sampled_from([None, 0, 3, 300, "draft"]),
            "backend_id": st.sampled_from([None, "b0", 1]), "base_block_idx": st.none() | st.integers(0, 9),
            "parent_hash": st.none() | U64, "object_key": TEXTS, "block_size": st.none() | st.integers(0, 65_535),
        },
    ),
)  # fmt: skip


class Stream(NamedTuple):
    dialect: str
    events: st.SearchStrategy[Any]
    payload: Callable[..., bytes]
    """Of several events."""


def json_list(*events: Any) -> bytes:
    return msgspec.json.encode(list(events))


STREAMS = {
    "vllm maps": Stream("vllm", VLLM_EVENTS, engine_payload),
    "vllm arrays": Stream("vllm", VLLM_EVENTS.map(as_arrays(vllm.FIELDS)), engine_payload),
    "sglang maps": Stream("sglang", SGLANG_EVENTS, engine_payload),
    "sglang arrays": Stream("sglang", SGLANG_EVENTS.map(as_arrays(SGLANG_FIELDS)), engine_payload),
    "trtllm": Stream("trtllm", LEVEL_EVENTS, json_list),
    "dynamo": Stream("dynamo", ROUTER_EVENTS, envelope),
    "dynamo as JSON": Stream("dynamo", ROUTER_EVENTS, functools.partial(envelope, json=True)),
    "mooncake": Stream("mooncake", STORE_EVENTS, engine_payload),
}


@pytest.mark.parametrize("name", STREAMS)
def test_an_unreadable_event_among_them_changes_nothing_of_the_others(name: str) -> None:
    """Without one a payload is read by typed decoders at one go, with one event by event."""
    stream = STREAMS[name]

    @settings(max_examples=examples(60), deadline=None)
    @given(st.lists(stream.events, max_size=6))
    def both_ways_agree(events: list[Any]) -> None:
        batch, skipped = read(stream.dialect, stream.payload(*events))
        tolerant, counted = read(stream.dialect, stream.payload(*events, 17))
        assert (skipped, counted) == ({}, {"no event": 1})
        assert batch.records.tobytes() == tolerant.records.tobytes()
        assert (batch.locations, batch.namespaces, batch.extra) == (
            tolerant.locations, tolerant.namespaces, tolerant.extra,
        )  # fmt: skip
        for record in batch.records[:1]:
            assert record["flags"] & RecordFlag.FIRST

    both_ways_agree()


@st.composite
def damaged(draw: st.DrawFn, events: st.SearchStrategy[Any]) -> Any:
    """An event one part of which, at any depth, is anything."""

    def broken(part: Any) -> Any:
        if isinstance(part, dict) and part and draw(st.booleans()):
            name = draw(st.sampled_from(sorted(part)))
            return part | {name: broken(part[name])}
        if isinstance(part, list) and part and draw(st.booleans()):
            at = draw(st.integers(0, len(part) - 1))
            return [*part[:at], broken(part[at]), *part[at + 1 :]]
        return draw(ANYTHING)

    return broken(draw(events))


def check(dialect: str, payload: bytes) -> None:
    opened = open_dialect(dialect, namespace=CONFIGURED)
    for reading in (
        lambda: opened.decode(payload, producer=1, epoch=2, sequence=3),
        lambda: opened.origin(Message("source", b"topic", 4, payload)),
        lambda: Detector().detect(Message("source", b"topic", 4, payload)),
    ):
        try:
            read_one = reading()
        except DialectError:
            continue
        if isinstance(read_one, tuple):
            batch, skipped = read_one
            assert decode(encode(batch)).records.tobytes() == batch.records.tobytes()
            assert all(count > 0 for count in skipped.values())


@pytest.mark.parametrize("name", STREAMS)
def test_damaged_events_give_a_batch_or_the_one_error(name: str) -> None:
    stream = STREAMS[name]

    @settings(max_examples=examples(60), deadline=None)
    @given(st.lists(damaged(stream.events), min_size=1, max_size=3))
    def one_or_the_other(events: list[Any]) -> None:
        try:
            payload = stream.payload(*events)
        except (TypeError, UnicodeEncodeError):
            return  # JSON cannot say it
        check(stream.dialect, payload)

    one_or_the_other()


@settings(max_examples=examples(100), deadline=None)
@given(st.sampled_from(sorted(DIALECTS)), st.binary(max_size=60) | ANYTHING.map(msgspec.msgpack.encode))
def test_any_bytes_give_a_batch_or_the_one_error(dialect: str, payload: bytes) -> None:
    check(dialect, payload)


@settings(max_examples=examples(60), deadline=None)
@given(damaged(st.just({"Create": [b"1" * 16], "Remove": [b"2" * 16]})) | st.just("Shutdown"))
def test_any_change_of_a_block_manager_gives_a_batch_or_the_one_error(change: Any) -> None:
    check("dynamo-kvbm", kvbm_payload(change))
