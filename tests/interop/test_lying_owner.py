"""An owner of a remote volume that answers what was not asked: blocks fail with the reason, and nothing else does."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from event_plane.schema import Namespace
from storage_agent.block_header import BlockHeader
from storage_agent.block_wire import header_to_wire, key_to_wire, outcome_of_block_to_wire
from storage_agent.command_desk import Answer
from storage_agent.command_wire import (
    CommandReply,
    DeleteRequest,
    Reply,
    StatReply,
    StatRequest,
    decode_request,
    encode,
)
from storage_agent.command_zmq import ZmqCommandListener
from storage_agent.data_wire import (
    LOCATED_MAX,
    BorrowReply,
    BorrowRequest,
    DoneReply,
    LentWire,
    ListRequest,
    LocateReply,
    LocateRequest,
    OfferRequest,
    OutcomesReply,
    PlaceWire,
)
from storage_agent.descriptor import VolumeDescriptor
from storage_agent.endpoints import Endpoint
from storage_agent.kinds import prepare
from storage_agent.port import AgentStat, BlockKey, Outcome, PutBlock, Result, VolumeStat
from storage_agent.volume import Volume

NAMESPACE = Namespace(tenant="t")
FACTS = {"capacity_blocks": 8, "block_bytes_max": 4096}


def key(number: int) -> BlockKey:
    return BlockKey(NAMESPACE.namespace_id, 0, number)


def header(number: int) -> BlockHeader:
    return BlockHeader(number, key(number), NAMESPACE, 0, 0, 16, 100, 5, 6)


class Liar:
    """Answers `answers` by the kind of request, and gives true figures of a volume."""

    def __init__(self) -> None:
        self.answers: dict[type, Reply] = {}
        self.listener = ZmqCommandListener("tcp://127.0.0.1:*", self.take, "liar")

    def take(self, payload: bytes, answer: Answer) -> None:
        request = decode_request(payload)
        reply: Reply = self.answers.get(type(request), DoneReply())
        if isinstance(request, StatRequest):
            facts = VolumeDescriptor(id="far", path="there", **FACTS)  # type: ignore[arg-type]
            reply = StatReply(AgentStat("liar", 1, 1, [VolumeStat(facts, 0, 0, 8, "O_DIRECT")]))
        answer(encode(reply))


@pytest.fixture(scope="module")
def liar() -> Iterator[Liar]:
    made = Liar()
    yield made
    made.listener.close()


@pytest.fixture(scope="module")
def volume(liar: Liar) -> Iterator[Volume]:
    descriptor = VolumeDescriptor(
        id="far", kind="remote", options={"endpoint": "peer", "timeout_s": 60.0}, **FACTS  # type: ignore[arg-type]
    )  # fmt: skip
    kind, opening = prepare(descriptor, [], {"peer": Endpoint(url=liar.listener.url)})
    made = kind.open(opening)
    yield made
    made.close()


def lent(number: int) -> LentWire:
    found = Outcome(key(number), Result.HIT, "far", 100)
    return LentWire(outcome_of_block_to_wire(found), PlaceWire(header_to_wire(header(number)), 4096))


@pytest.mark.parametrize(
    ("found", "said"),
    [
        ([], "about 0 blocks where 2 were asked about"),
        ([lent(1), lent(2), lent(3)], "about 3 blocks where 2"),
        ([lent(3), lent(2)], "asked about BlockKey"),
    ],
)
def test_a_get_takes_no_other_blocks_for_those_it_asked_for(
    liar: Liar, volume: Volume, found: list[LentWire], said: str
) -> None:
    liar.answers[BorrowRequest] = BorrowReply(7, b"metadata", 1, found)
    reads = volume.read([key(1), key(2)], lambda number, header, payload: pytest.fail("it was served"))
    assert [read.outcome.result for read in reads] == [Result.FAILED] * 2
    assert said in reads[0].outcome.reason


def test_a_put_and_a_delete_that_are_not_answered_in_full_have_failed(liar: Liar, volume: Volume) -> None:
    blocks = [PutBlock(key(number), NAMESPACE, memoryview(b"x" * 100)) for number in (1, 2)]
    stored = outcome_of_block_to_wire(Outcome(key(1), Result.STORED, "far", 100))
    liar.answers[OfferRequest] = OutcomesReply([stored])
    assert [outcome.result for outcome in volume.put(blocks)] == [Result.FAILED] * 2
    liar.answers[DeleteRequest] = CommandReply("c", [stored], 1, 1, 1, 0.0)
    assert [outcome.result for outcome in volume.delete([key(1), key(2)])] == [Result.FAILED] * 2


def test_a_list_without_end_and_a_header_of_another_block_are_not_believed(liar: Liar, volume: Volume) -> None:
    again = header_to_wire(header(3))
    liar.answers[ListRequest] = LocateReply([again] * LOCATED_MAX, 8)
    assert volume.live_headers() == []
    liar.answers[LocateRequest] = LocateReply([again], 8)
    assert volume.live_header(key(1)) is None
    assert volume.live_header(key(3)) == header(3)
    assert again.facts.key == key_to_wire(key(3))
