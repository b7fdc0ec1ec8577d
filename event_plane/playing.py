"""Publishes a recording's messages as they were, and sends again what a subscriber missed."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from itertools import islice
from typing import Final

import numpy as np

from event_plane.errors import TransportError
from event_plane.jetstream_transport import JetStreamCarrier
from event_plane.played import Played
from event_plane.publishing import RESEND_END, Acknowledgement, Ask, Carrier, Reply
from event_plane.resend import AckWindow
from event_plane.schema import RECORD_DTYPE, Batch, BatchKind
from event_plane.subject_carrier import SubjectCarrier
from event_plane.wire import encode
from event_plane.zmq_transport import ZmqCarrier

BUFFER_MESSAGES: Final = 65_536
BUFFER_BYTES: Final = 256 * 1024 * 1024
"""What is kept to be sent again, of each carrier."""
WINDOW_MESSAGES: Final = 512
"""Unacknowledged messages past which the player waits, once a subscriber acknowledges."""
WINDOW_WAIT_S: Final = 5.0
_RESENT_AT_ONCE: Final = 64
_TURN_S: Final = 0.05
_HEARTBEAT_S: Final = 0.5
_STORED_EVERY: Final = 512
_STORE_WAIT_S: Final = 30.0

OpenCarrier = Callable[[Played], Carrier]


@dataclass(slots=True)
class _Resend:
    """`place` is that of the next message to look at, in the order of playing."""

    place: int
    from_sequence: int


class _Lane:
    """One carrier: what went by it, and who asked for some of it again."""

    def __init__(self, carrier: Carrier) -> None:
        self.carrier = carrier
        self.last = -1
        """Place of the last message, in the order of playing; the window counts in places."""
        self.window = AckWindow(WINDOW_MESSAGES)
        self.was_heard = False
        self.busy = False
        """Whether the last turn had something to do."""
        self._kept: deque[Played] = deque()
        self._kept_bytes = 0
        self._places: dict[tuple[int | None, int, int], int] = {}
        self._resends: dict[bytes, _Resend] = {}

    @property
    def has_subscriber(self) -> bool:
        match self.carrier:
            case ZmqCarrier():
                # An ask may overtake the subscription, and what is published between the two is lost.
                return self.carrier.has_subscribers
            case JetStreamCarrier() | SubjectCarrier():
                # The stream takes it for whoever comes; nobody hears who listens to a foreign subject.
                return True
        return self.was_heard

    @property
    def is_acknowledged(self) -> bool:
        return self.window.acknowledged == self.last

    def send(self, played: Played) -> None:
        bytes_max = self.carrier.payload_bytes_max
        if len(played.payload) > bytes_max:
            raise TransportError(
                f"message {played.sequence} has {len(played.payload)} bytes, more than the {bytes_max} that are carried"
                " there: raise the server's max_payload, or play elsewhere"
            )
        self.last += 1
        self._kept.append(played)
        self._kept_bytes += len(played.payload)
        self._places[played.producer, played.epoch, played.sequence] = self.last
        while len(self._kept) > 1 and (len(self._kept) > BUFFER_MESSAGES or self._kept_bytes > BUFFER_BYTES):
            gone = self._kept.popleft()
            self._kept_bytes -= len(gone.payload)
            self._places.pop((gone.producer, gone.epoch, gone.sequence), None)
        self._set_topic(played)
        if played.is_heartbeat:
            self.carrier.send_heartbeat(played.sequence, played.payload)
        else:
            self.carrier.send(played.sequence, played.payload)
        if isinstance(self.carrier, JetStreamCarrier) and self.last % _STORED_EVERY == _STORED_EVERY - 1:
            self._wait_stored(self.carrier, played.sequence)

    def turn(self, timeout_s: float) -> None:
        """Take requests, waiting for one at most `timeout_s`, and go on with resends."""
        requests = self.carrier.wait(0.0 if self._resends else timeout_s)
        self.busy = bool(requests or self._resends)
        for request in requests:
            self.was_heard = True
            match request:
                case Ask(peer, from_sequence):
                    self._resends[peer] = _Resend(self.last + 1 - len(self._kept), from_sequence)
                case Acknowledgement(peer, producer, epoch, sequence):
                    place = self._places.get((producer, epoch, sequence))
                    if place is not None:
                        self.window.acknowledge(peer, place)
        blocked = False
        for peer, resend in list(self._resends.items()):
            reply = self._resend_some(peer, resend)
            blocked |= reply is Reply.FULL
            if reply is Reply.GONE:
                del self._resends[peer]
        if blocked:
            time.sleep(0.01)

    def close(self) -> None:
        if isinstance(self.carrier, JetStreamCarrier) and self._kept:
            self._wait_stored(self.carrier, self._kept[-1].sequence)
        self.carrier.close()

    def _resend_some(self, peer: bytes, resend: _Resend) -> Reply:
        """`GONE` when it has ended, or its asker is gone."""
        first = self.last + 1 - len(self._kept)
        start = max(resend.place - first, 0)
        for played in islice(self._kept, start, start + _RESENT_AT_ONCE):
            if played.sequence >= resend.from_sequence and not played.is_heartbeat:
                self._set_topic(played)
                reply = self.carrier.resend(peer, played.sequence, played.payload)
                if reply is not Reply.SENT:
                    return reply
            resend.place = max(resend.place, first) + 1
        if resend.place <= self.last:
            return Reply.SENT
        ended = self.carrier.resend(peer, RESEND_END, b"")
        return Reply.GONE if ended is Reply.SENT else ended

    def _set_topic(self, played: Played) -> None:
        if played.topic and isinstance(self.carrier, ZmqCarrier | SubjectCarrier):
            self.carrier.topic = played.topic

    def _wait_stored(self, carrier: JetStreamCarrier, sequence: int) -> None:
        if not carrier.wait_stored(sequence, _STORE_WAIT_S):
            raise TransportError(f"the stream has not taken batch {sequence} for {_STORE_WAIT_S:.0f} s: see to it")


class Player:
    """Publishes messages in order. Not thread-safe; use it as a context manager.

    Where a carrier is one producer's (NATS, JetStream) each life of each producer gets one, else all share one.
    """

    def __init__(self, open_carrier: OpenCarrier, *, shared: bool) -> None:
        """`shared`: one carrier takes everything. Carriers are opened when first needed, and raise then."""
        self.messages = 0
        self._open = open_carrier
        self._shared = shared
        self._lanes: dict[int | None, _Lane] = {}
        self._epochs: dict[int | None, int] = {}
        self._last: dict[int, tuple[int, int]] = {}

    def __enter__(self) -> Player:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def wait_subscriber(self, first: Played, timeout_s: float) -> bool:
        """Wait until somebody subscribes to what carries `first`. False where nobody does in time."""
        lane = self._lane(first)
        deadline = time.monotonic() + timeout_s
        while not lane.has_subscriber and time.monotonic() < deadline:
            lane.turn(_TURN_S)
        return lane.has_subscriber

    def send(self, played: Played) -> None:
        """Publish one message. Waits while a subscriber that acknowledges is too far behind, at most for long."""
        lane = self._lane(played)
        lane.turn(0.0)
        deadline = time.monotonic() + WINDOW_WAIT_S
        while lane.window.is_full(lane.last):
            lane.turn(_TURN_S)
            if time.monotonic() > deadline:
                lane.window.forget_stragglers(lane.last)
        lane.send(played)
        self.messages += 1
        if played.producer is not None and not played.is_heartbeat:
            self._last[played.producer] = (played.epoch, played.sequence)

    def serve(self, timeout_s: float) -> bool:
        """Answer requests for at most `timeout_s`; whether there were any."""
        deadline = time.monotonic() + timeout_s
        busy = False
        while True:
            for lane in self._lanes.values():
                lane.turn(min(_TURN_S, max(deadline - time.monotonic(), 0.0)) / len(self._lanes))
                busy |= lane.busy
            if not self._lanes:
                time.sleep(timeout_s)
            if time.monotonic() >= deadline:
                return busy

    def finish(self, linger_s: float) -> None:
        """Say what came last, and serve who missed it until everybody has it or nobody asked for `linger_s`."""
        quiet_since_s = time.monotonic()
        heartbeat_due_s = 0.0
        while time.monotonic() - quiet_since_s < linger_s:
            if time.monotonic() >= heartbeat_due_s:
                heartbeat_due_s = time.monotonic() + _HEARTBEAT_S
                self._send_heartbeats()
            if self.serve(_TURN_S):
                quiet_since_s = time.monotonic()
            elif all(lane.is_acknowledged for lane in self._lanes.values()):
                return

    def _send_heartbeats(self) -> None:
        for producer, (epoch, sequence) in self._last.items():
            batch = Batch(producer, epoch, sequence, np.empty(0, RECORD_DTYPE), BatchKind.HEARTBEAT)
            lane = self._lanes[None if self._shared else producer]
            lane.carrier.send_heartbeat(sequence, encode(batch))

    def close(self) -> None:
        """Idempotent."""
        while self._lanes:
            self._lanes.popitem()[1].close()

    def _lane(self, played: Played) -> _Lane:
        key = None if self._shared else played.producer
        lane = self._lanes.get(key)
        if lane is not None and (self._shared or self._epochs[key] == played.epoch):
            return lane
        if lane is not None:
            # A producer's next life takes the place of the one before.
            del self._lanes[key]
            lane.close()
        lane = self._lanes[key] = _Lane(self._open(played))
        self._epochs[key] = played.epoch
        return lane
