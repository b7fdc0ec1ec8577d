"""Whatever comes in on the command socket is answered, and nothing of it makes the agent deaf or changes a block."""

from __future__ import annotations

import queue
import uuid
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from event_plane.schema import Namespace
from storage_agent.agent import StorageAgent
from storage_agent.command_desk import CommandDesk
from storage_agent.command_wire import (
    CommandReply,
    DeleteRequest,
    RefusedReply,
    Reply,
    StatReply,
    StatRequest,
    decode_reply,
    encode,
)
from storage_agent.data_desk import DataDesk
from storage_agent.descriptor import VolumeDescriptor
from storage_agent.port import BlockKey, PutBlock, Result
from storage_agent.registered_volumes import KeptVolumes, VolumeOrders
from tests.examples import examples

NAMESPACE = Namespace(tenant="t")
KEY = BlockKey(NAMESPACE.namespace_id, 0, 7 << 64 | 7)
NUMBERS = st.sampled_from(
    [0, 1, -1, 3, 255, 256, -5000, 2**16, 2**31, 2**32, 2**40, -(2**63), 2**63 - 1, 2**63, 2**64 - 1]
) | st.integers(-(2**63), 2**64 - 1)
KEYS = st.lists(st.tuples(NUMBERS, NUMBERS, NUMBERS, NUMBERS), max_size=2)
AXIS = st.tuples(st.text(max_size=3), NUMBERS)
LAYOUTS = st.none() | st.tuples(st.lists(AXIS, max_size=3), NUMBERS, st.sampled_from(["", "h"]), st.just("f"))
FACTS = st.tuples(
    st.tuples(st.just(NAMESPACE.namespace_id), NUMBERS, NUMBERS, NUMBERS),
    st.just({"tenant": "t"}),
    st.tuples(NUMBERS, NUMBERS),
    NUMBERS,
    NUMBERS,
    NUMBERS,
    st.none() | st.tuples(NUMBERS, NUMBERS, NUMBERS),
    LAYOUTS,
)
PLACES = st.tuples(st.tuples(NUMBERS, FACTS, NUMBERS, NUMBERS), NUMBERS)


def request(kind: str, **fields: st.SearchStrategy[object]) -> st.SearchStrategy[bytes]:
    made = st.fixed_dictionaries({"type": st.just(kind), **fields})
    return made.map(msgspec.msgpack.encode)


VOLUME = st.sampled_from(["slab", "nowhere", ""])
REQUESTS = st.one_of(
    st.binary(max_size=64),
    st.integers(1, 3000).map(lambda depth: b"\x82\xa4type\xa4stat\xa1x" + b"\x91" * depth * 100 + b"\xc0"),
    request("delete", command_id=st.text(max_size=3), volume=VOLUME, keys=KEYS, term=NUMBERS),
    request("move", command_id=st.text(max_size=3), keys=KEYS, source=VOLUME, target=VOLUME, keep=st.booleans()),
    request("locate", volume=VOLUME, keys=KEYS, count_reads=st.booleans()),
    request("holding", keys=KEYS, wanted=st.none() | st.tuples(NUMBERS, NUMBERS, LAYOUTS)),
    request("list", volume=VOLUME, first_slot=NUMBERS),
    request("verify", volume=VOLUME, keys=KEYS),
    request("lease", volume=VOLUME, shards=st.lists(st.tuples(FACTS, NUMBERS), max_size=2)),
    request("confirm", volume=VOLUME, leases=st.lists(NUMBERS, max_size=2)),
    request("commit", volume=VOLUME, shards=st.lists(st.tuples(NUMBERS, NUMBERS), max_size=2)),
    request("release", volume=VOLUME, leases=st.lists(NUMBERS, max_size=2)),
    request("borrow", volume=VOLUME, keys=KEYS, wanted=st.none() | st.tuples(NUMBERS, NUMBERS, LAYOUTS)),
    request("return", loan=NUMBERS),
    request("unregister", volume=st.sampled_from(["nowhere", ""]), drain_s=st.floats(), term=NUMBERS),
    request("resize", volume=st.sampled_from(["nowhere", ""]), capacity_blocks=NUMBERS),
    request(
        "register",
        descriptor=st.fixed_dictionaries(
            {
                "id": st.sampled_from(["slab", "extra", "", "../up"]),
                "kind": st.sampled_from(["slab", "object", "nothing"]),
                "path": st.sampled_from(["", "extra.slab", "/extra.slab", "/proc/self/fd/0"]) | st.text(max_size=3),
                "capacity_blocks": NUMBERS,
                "block_bytes_max": NUMBERS,
                "options": st.dictionaries(st.sampled_from(["endpoint", "x"]), st.text(max_size=3), max_size=1),
            }
        ),
        term=NUMBERS,
    ),
    request(
        "offer",
        volume=VOLUME,
        metadata=st.binary(max_size=40),
        mark=NUMBERS,
        places=st.lists(PLACES, max_size=2),
        read_back=st.booleans(),
    ),
)


class Desk:
    """An agent with one block on a slab, asked by bytes."""

    def __init__(self, folder: Path) -> None:
        self.agent = StorageAgent("asked", publisher=None, allowed_roots=[folder])
        self.agent.register_volume(
            VolumeDescriptor(id="slab", path=str(folder / "slab"), capacity_blocks=64, block_bytes_max=4096)
        )
        self.agent.put("slab", [PutBlock(KEY, NAMESPACE, memoryview(b"x" * 100))])
        self.data = DataDesk(self.agent)
        self.desk = CommandDesk(self.agent, self.data, VolumeOrders(self.agent, KeptVolumes("asked")), "asked")

    def ask(self, payload: bytes) -> Reply:
        answers: queue.Queue[bytes] = queue.Queue()
        self.desk.take(payload, answers.put)
        return decode_reply(answers.get(timeout=60))

    def close(self) -> None:
        self.data.close()
        self.desk.close()
        self.agent.close()


@pytest.fixture(scope="module")
def desk(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Desk]:
    made = Desk(tmp_path_factory.mktemp("hostile"))
    yield made
    made.close()


@settings(max_examples=examples(120), deadline=None)
@given(payload=REQUESTS)
def test_every_message_is_answered_and_the_block_stays(desk: Desk, payload: bytes) -> None:
    desk.ask(payload)
    assert isinstance(desk.ask(encode(StatRequest())), StatReply)
    buffer = bytearray(100)
    assert [outcome.result for outcome in desk.agent.get([KEY], [memoryview(buffer)])] == [Result.HIT]
    assert buffer == b"x" * 100


def test_every_row_of_commands_still_works_afterwards(desk: Desk) -> None:
    gone = (KEY.namespace_id, 0, 1, 1)
    for kind, fields in (
        ("delete", {"command_id": uuid.uuid4().hex, "volume": "slab", "keys": [gone]}),
        ("scrub", {"command_id": uuid.uuid4().hex, "volume": "slab"}),
        ("verify", {"volume": "slab", "keys": [gone]}),
        ("borrow", {"volume": "slab", "keys": [gone], "wanted": None}),
    ):
        reply = desk.ask(msgspec.msgpack.encode({"type": kind, **fields}))
        assert not isinstance(reply, RefusedReply), (kind, reply)
    assert isinstance(desk.ask(encode(DeleteRequest(uuid.uuid4().hex, "slab", []))), CommandReply)


def test_offered_numbers_that_cannot_be_are_refused_with_their_name(desk: Desk) -> None:
    facts = ((KEY.namespace_id, 0, 1, 1), {"tenant": "t"}, (0, 0), 0, 16, 100, None, None)
    offer = {"type": "offer", "volume": "slab", "metadata": b"m", "mark": 1, "read_back": False}
    reply = desk.ask(msgspec.msgpack.encode({**offer, "places": [((0, facts, 0, 0), -1)]}))
    assert isinstance(reply, RefusedReply)
    assert "`$.places[0][1]`" in reply.reason
