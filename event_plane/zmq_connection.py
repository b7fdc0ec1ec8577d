"""How a ZeroMQ connection stands, from what libzmq's socket monitor tells of it."""

from __future__ import annotations

from typing import Final

import zmq
from zmq.utils.monitor import recv_monitor_message

from event_plane.transport import Connection, PlaneUrl

_UP: Final = zmq.Event.HANDSHAKE_SUCCEEDED

# What each says while no connection stands. `{place}` is where we connect to.
_PROBLEMS: Final[dict[int, str]] = {
    zmq.Event.DISCONNECTED: "the connection to {place} was lost: trying again",
    zmq.Event.CONNECT_RETRIED: "{place} does not answer: trying again; is its publisher running?",
    zmq.Event.HANDSHAKE_FAILED_AUTH: (
        "{place} refuses our CURVE key: put our public key into its curve_clients_folder and restart it"
    ),
    zmq.Event.HANDSHAKE_FAILED_PROTOCOL: (
        "{place} asks for CURVE keys and none are set here, or the other way round: give both ends theirs, or neither"
    ),
    zmq.Event.HANDSHAKE_FAILED_NO_DETAIL: (
        "{place} broke off while keys were exchanged: check that curve_server_key_file is its public key and that it"
        " uses CURVE"
    ),
}
_HANDSHAKES_FAILED: Final = frozenset(
    {
        zmq.Event.HANDSHAKE_FAILED_AUTH, zmq.Event.HANDSHAKE_FAILED_PROTOCOL, zmq.Event.HANDSHAKE_FAILED_NO_DETAIL,
    }
)  # fmt: skip
_GIVEN_UP: Final = frozenset({zmq.Event.HANDSHAKE_FAILED_AUTH, zmq.Event.HANDSHAKE_FAILED_PROTOCOL})
"""After these libzmq does not try again by itself."""
_WATCHED: Final = frozenset({_UP, *_PROBLEMS})


class ConnectionState:
    """What the events so far say. Pure."""

    def __init__(self, place: PlaneUrl) -> None:
        self._place = place
        self._connected: bool | None = None
        self._problem = ""
        self._keys_fail = False
        self._missed_some = False
        self._reconnects = 0
        self.given_up = False
        """libzmq tries no more: connect anew, with a socket of its own."""

    def take(self, event: int) -> bool:
        """Take in one event. True: a connection that was lost or refused stands now."""
        if event == _UP:
            mended, self._missed_some = self._missed_some, False
            self._reconnects += mended
            self._connected, self._problem, self._keys_fail, self.given_up = True, "", False, False
            return mended
        if event in _HANDSHAKES_FAILED:
            self._missed_some = True
            self._keys_fail = True
            self.given_up = event in _GIVEN_UP
        self._missed_some = self._missed_some or bool(self._connected)
        self._connected = False
        # What is wrong with the keys explains the losses and retries that follow from it.
        if event in _HANDSHAKES_FAILED or not self._keys_fail:
            self._problem = _PROBLEMS[event].format(place=self._place)
        return False

    def connection(self, dropped: int) -> Connection:
        """As `Subscriber.connection` gives it."""
        return Connection(self._connected, self._problem, self._reconnects, dropped)


class Monitor:
    """One socket's monitor. Opened before the socket connects, closed after the socket is."""

    def __init__(self, watched: zmq.Socket[bytes]) -> None:
        self.pollable = watched.get_monitor_socket(sum(_WATCHED))

    def events(self) -> list[int]:
        """What happened since the last call."""
        events: list[int] = []
        while self.pollable.poll(0):
            events.append(int(recv_monitor_message(self.pollable)["event"]))
        return [event for event in events if event in _WATCHED]

    def close(self) -> None:
        self.pollable.close()
