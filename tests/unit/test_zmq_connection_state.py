"""What is said of a ZeroMQ connection after each thing that can happen to it."""

from __future__ import annotations

import pytest
from zmq import Event

from event_plane.transport import Connection, parse_url
from event_plane.zmq_connection import ConnectionState

UP, DOWN, RETRIED = Event.HANDSHAKE_SUCCEEDED, Event.DISCONNECTED, Event.CONNECT_RETRIED
REFUSED, MISMATCH, BROKEN_OFF = (
    Event.HANDSHAKE_FAILED_AUTH, Event.HANDSHAKE_FAILED_PROTOCOL, Event.HANDSHAKE_FAILED_NO_DETAIL,
)  # fmt: skip


def after(*events: int) -> tuple[ConnectionState, list[bool]]:
    state = ConnectionState(parse_url("zmq+tcp://127.0.0.1:5557"))
    return state, [state.take(event) for event in events]


def test_nothing_is_known_before_the_first_event() -> None:
    assert after()[0].connection(0) == Connection(None, "", 0, 0)


def test_first_connection_mends_nothing() -> None:
    state, mended = after(RETRIED, RETRIED, UP)
    assert mended == [False, False, False]
    assert state.connection(3) == Connection(True, "", 0, 3)


@pytest.mark.parametrize("lost", [[DOWN], [DOWN, RETRIED, RETRIED], [REFUSED, DOWN], [BROKEN_OFF, DOWN, RETRIED]])
def test_loss_and_refusal_are_mended_once(lost: list[int]) -> None:
    state, mended = after(UP, *lost, UP, UP)
    assert mended == [*[False] * (len(lost) + 1), True, False]
    assert state.connection(0) == Connection(True, "", 1, 0)


@pytest.mark.parametrize(
    ("events", "said"),
    [
        ([RETRIED], "zmq+tcp://127.0.0.1:5557 does not answer"),
        ([UP, DOWN], "the connection to zmq+tcp://127.0.0.1:5557 was lost"),
        ([UP, DOWN, RETRIED], "does not answer"),
        ([REFUSED, DOWN], "refuses our CURVE key"),
        ([MISMATCH, DOWN], "give both ends theirs, or neither"),
        ([BROKEN_OFF, DOWN, RETRIED], "check that curve_server_key_file is its public key"),
    ],
)
def test_problem_is_the_cause_and_not_what_follows_from_it(events: list[int], said: str) -> None:
    state, _ = after(*events)
    assert state.connection(0).connected is False
    assert said in state.connection(0).problem


def test_libzmq_gives_up_where_keys_are_refused_or_missing() -> None:
    assert [after(event)[0].given_up for event in (REFUSED, MISMATCH, BROKEN_OFF, DOWN)] == [True, True, False, False]
    assert not after(REFUSED, UP)[0].given_up
