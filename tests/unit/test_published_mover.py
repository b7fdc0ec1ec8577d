"""Published plans against an array that is late, silent, rude or doubled, and against drawn messages."""

from __future__ import annotations

import contextlib
import json
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import zmq
from hypothesis import given
from hypothesis import strategies as st

from advisor.movers.carriers import MoverUnusable
from advisor.movers.messages import (
    BadAnswer,
    BlockResult,
    EventBatch,
    PublishedBlock,
    PublishedCommand,
    PublishedOutcome,
    PublishedRefusal,
    PublishedVolumes,
    decode_answer,
    outcome_of,
    stat_of,
)
from advisor.movers.port import DeadlinePassed, MoveBlock, MoveCommand, Phase
from advisor.movers.published import PublishedMover
from advisor.moves import MoveKind
from storage_agent.errors import AgentUnreachable, CommandRefused
from storage_agent.port import BlockKey, CommandOutcome, Result
from tests.ports import free_ports

VOLUMES = [{"id": "fast", "kind": "array", "capacity_blocks": 8, "block_bytes_max": 4096}]


def command(number: int = 0, phase: Phase = Phase.COPY, blocks: int = 2) -> MoveCommand:
    keys = [BlockKey(7, 0, (number << 8) + each + 1) for each in range(blocks)]
    return MoveCommand(
        f"copy-{number}", 3, MoveKind.PROMOTE, phase, "slow", "fast", tuple(MoveBlock(k, 4096, "hot") for k in keys)
    )


class Array:
    """A stranger's end: sends what it is told, and shows what it got."""

    def __init__(self, url: str) -> None:
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.DEALER)
        self._socket.linger = 0
        self._socket.connect(url)
        self.say({"type": "volumes", "producer": f"{9:016x}", "volumes": VOLUMES})

    def say(self, message: object) -> None:
        self._socket.send(message if isinstance(message, bytes) else json.dumps(message).encode())

    def got(self) -> dict[str, Any]:
        assert self._socket.poll(60_000), "nothing came"
        message: dict[str, Any] = json.loads(self._socket.recv())
        return message

    def answer(self, asked: dict[str, Any], *results: str) -> None:
        self.say({
            "type": "outcome", "command_id": asked["command_id"], "results": [{"result": each} for each in results],
        })  # fmt: skip

    def close(self) -> None:
        self._context.destroy(linger=0)


@pytest.fixture
def asking() -> Iterator[Callable[[Callable[[], CommandOutcome]], Future[CommandOutcome]]]:
    with ThreadPoolExecutor(4) as pool:
        yield pool.submit


@pytest.fixture
def mover() -> Iterator[PublishedMover]:
    opened = PublishedMover("array", "tcp://127.0.0.1:*", deadline_s=30.0)
    yield opened
    opened.close()


@pytest.fixture
def array(mover: PublishedMover) -> Iterator[Array]:
    opened = Array(mover.url)
    yield opened
    opened.close()


def eventually(holds: Callable[[], bool]) -> None:
    waiting = threading.Event()
    for _ in range(6_000):
        if holds():
            return
        waiting.wait(0.01)
    raise AssertionError("not within 60 s")


Asking = Callable[[Callable[[], CommandOutcome]], Future[CommandOutcome]]


def test_a_command_says_all_that_an_array_needs_and_its_outcome_comes_back(
    mover: PublishedMover, array: Array, asking: Asking
) -> None:
    outcome = asking(lambda: mover.carry_out(command()))
    asked = array.got()
    assert {key: asked[key] for key in ("type", "version", "command_id", "term", "kind", "phase")} == {
        "type": "command", "version": 1, "command_id": "copy-0", "term": 3, "kind": "promote", "phase": "copy",
    }  # fmt: skip
    assert (asked["source"], asked["target"]) == ("slow", "fast")
    assert asked["blocks"][0] == {
        "hash": f"{1:032x}", "namespace_id": f"{7:016x}", "group": 0, "block_bytes": 4096, "reason": "hot",
    }  # fmt: skip
    array.say({
        "type": "outcome", "command_id": "copy-0", "seconds": 0.5,
        "results": [{"result": "copied"}, {"result": "full", "reason": "no room"}],
        "events": {"producer": f"{9:016x}", "epoch": f"{2:016x}", "sequence": 41},
    })  # fmt: skip
    done = outcome.result(60)
    assert [(each.result, each.reason) for each in done.outcomes] == [(Result.COPIED, ""), (Result.FULL, "no room")]
    assert (done.producer, done.epoch, done.sequence, done.seconds) == (9, 2, 41, 0.5)


def test_garbage_another_ones_answers_and_doubles_change_nothing(
    mover: PublishedMover, array: Array, asking: Asking
) -> None:
    first = asking(lambda: mover.carry_out(command(1)))
    asked = array.got()
    short = {"type": "outcome", "command_id": "copy-1", "results": [{"result": "copied"}]}
    odd = {"type": "outcome", "command_id": "copy-1", "results": [{"result": "teleported"}] * 2}
    garbage = [b"", b"\xff\xfe", b"[1", b"null", {"type": "boast"}, short, odd, b"[" * 100_000]
    for message in garbage:
        array.say(message)
    array.answer({"command_id": "never-asked"}, "copied", "copied")
    eventually(lambda: mover.ignored == {"garbage": len(garbage), "late": 1})
    assert not first.done()
    array.answer(asked, "copied", "present")
    array.answer(asked, "failed", "failed")
    assert [each.result for each in first.result(60).outcomes] == [Result.COPIED, Result.PRESENT]
    eventually(lambda: mover.ignored["late"] == 2)
    assert mover.stat().volumes[0].descriptor.id == "fast"


def test_an_unanswered_command_is_sent_again_under_its_id(
    mover: PublishedMover, array: Array, asking: Asking, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("advisor.movers.published.ASK_AGAIN_S", 0.05)
    silent = asking(lambda: mover.carry_out(command(2)))
    times = [array.got(), array.got()]
    assert times[0] == times[1]
    array.answer(times[0], "copied", "copied")
    assert [each.result for each in silent.result(60).outcomes] == [Result.COPIED] * 2


def test_a_command_that_is_not_answered_by_its_deadline_fails_and_its_late_answer_changes_nothing() -> None:
    mover = PublishedMover("array", "tcp://127.0.0.1:*", deadline_s=0.1)
    array = Array(mover.url)
    try:
        eventually(lambda: mover._stat is not None)
        with pytest.raises(DeadlinePassed, match=r"array did not answer copy-2 within 0\.1 s"):
            mover.carry_out(command(2))
        array.answer(array.got(), "copied", "copied")
        eventually(lambda: mover.ignored["late"] == 1)
    finally:
        array.close()
        mover.close()


def test_a_refusal_says_why_and_a_stop_ends_what_waits(mover: PublishedMover, array: Array, asking: Asking) -> None:
    refused = asking(lambda: mover.carry_out(command(3)))
    array.say({"type": "refusal", "command_id": array.got()["command_id"], "reason": "in service until noon"})
    with pytest.raises(CommandRefused, match="in service until noon"):
        refused.result(60)
    waiting = asking(lambda: mover.carry_out(command(4)))
    array.got()
    mover.close()
    with pytest.raises(AgentUnreachable, match="the service is stopping"):
        waiting.result(60)


def test_commands_go_to_whoever_said_its_volumes_last(mover: PublishedMover, array: Array, asking: Asking) -> None:
    eventually(lambda: mover._stat is not None)
    again = Array(mover.url)  # the array's next life
    try:
        said = asking(lambda: mover.carry_out(command(5)))
        again.answer(again.got(), "copied", "copied")
        assert said.result(60).outcomes[0].result is Result.COPIED
    finally:
        again.close()


def test_before_any_array_comes_it_is_unreachable_and_says_where_it_is_waited_for(mover: PublishedMover) -> None:
    with pytest.raises(AgentUnreachable, match=rf"no array has connected to {mover.url}"):
        mover.stat()


@pytest.mark.parametrize(
    ("url", "words"),
    [
        ("tcp://0.0.0.0:5600", "is not on this host: use tcp://127.0.0.1:PORT"),
        ("nats://127.0.0.1:4222/kv.*.plans", "wildcards"),
    ],
)
def test_a_place_that_plans_cannot_go_to_is_refused_with_the_remedy(url: str, words: str) -> None:
    with pytest.raises(MoverUnusable, match=words):
        PublishedMover("array", url)


def test_a_port_in_use_is_refused_by_name() -> None:
    port, _ = free_ports(2)
    first = PublishedMover("array", f"tcp://127.0.0.1:{port}")
    try:
        with pytest.raises(MoverUnusable, match=rf"tcp://127.0.0.1:{port}' of agent other cannot be bound"):
            PublishedMover("other", f"tcp://127.0.0.1:{port}")
    finally:
        first.close()


@pytest.mark.parametrize(
    ("volume", "words"),
    [
        ({**VOLUMES[0], "capacity_blocks": 0}, "capacity_blocks is 0"),
        ({**VOLUMES[0], "id": "NO"}, "an id is 1 to 64"),
        ({"id": "fast"}, "missing required field"),
        ({**VOLUMES[0], "path": "/etc"}, "takes no path"),
    ],
)
def test_a_volume_that_cannot_be_is_refused_whole_and_named(volume: dict[str, Any], words: str) -> None:
    with pytest.raises(BadAnswer, match=words):
        stat_of("array", PublishedVolumes("0" * 16, [volume]))


JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-5, 1 << 70) | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=6,
)
FIELDS = st.fixed_dictionaries(
    {"type": st.sampled_from(["outcome", "volumes", "refusal", "command"])},
    optional={
        "command_id": st.just("copy-0") | JSON,
        "results": st.lists(st.fixed_dictionaries({"result": st.sampled_from([*map(str, Result)]) | JSON})) | JSON,
        "events": st.fixed_dictionaries({"producer": st.just("0" * 16), "epoch": st.text(), "sequence": JSON}) | JSON,
        "volumes": st.lists(st.just(VOLUMES[0]) | JSON, max_size=3),
        "producer": st.just("f" * 16) | JSON,
        "reason": JSON,
    },
)


@given(FIELDS | JSON)
def test_any_message_is_an_answer_that_fits_or_is_refused(message: object) -> None:
    with contextlib.suppress(BadAnswer):
        answer = decode_answer(json.dumps(message).encode())
        if isinstance(answer, PublishedOutcome):
            assert len(outcome_of(answer, command()).outcomes) == 2
        elif isinstance(answer, PublishedVolumes):
            assert stat_of("array", answer).producer >= 0


def test_every_field_of_the_messages_is_documented() -> None:
    page = (Path(__file__).parents[2] / "docs" / "moves.md").read_text().split("### Published plans")[1].split("## ")[0]
    for message in (
        PublishedCommand, PublishedBlock, PublishedOutcome, BlockResult, EventBatch, PublishedRefusal, PublishedVolumes,
    ):  # fmt: skip
        for field in message.__struct_fields__:
            assert f"`{field}`" in page, (message.__name__, field)
