"""Our stream said again as an engine's: heard through the gate as the service hears it, published as foreign bytes."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Final

from advisor.entries import NewEntry
from advisor.foreign import OURS, SourceFacts
from advisor.hearing import hearing
from advisor.intake import Intake
from advisor.pipeline import now_us
from event_plane.connect import open_carrier
from event_plane.credentials import NO_CREDENTIALS, Credentials
from event_plane.dialects.outgoing import Style
from event_plane.dialects.words import Words
from event_plane.errors import TransportError
from event_plane.playing import OpenCarrier, Player
from event_plane.schema import producer_id
from event_plane.subject_carrier import SubjectCarrier
from event_plane.transport import PlaneUrl, Subscriber, parse_url
from event_plane.zmq_transport import TOPIC

SCHEMES: Final[dict[Style, tuple[str, ...]]] = {"vllm": ("zmq+tcp", "zmq+ipc"), "dynamo": ("nats",)}
"""What carries each style's messages, as its engines publish them."""
_TURN_S: Final = 0.02


class _Unlogged:
    """Takes what the log thread would log: a relay keeps nothing."""

    def __init__(self) -> None:
        self._position = 0

    def last_position(self) -> int:
        return self._position

    def append(self, entries: Sequence[NewEntry], recorded_us: int) -> int:
        first = self._position + 1
        self._position += len(entries)
        return first


def relay(subscriber: Subscriber, player: Player, words: Words, stopping: threading.Event) -> int:
    """Say again what `subscriber` hears until `stopping` is set; returns how many messages that were.

    Closes the subscriber. Raises what ended the hearing, and `TransportError` where the player cannot publish.
    """
    # Opens what carries the messages, so that a place that cannot be used is told at once.
    player.wait_subscriber(words.nothing(), 0.0)
    intake = Intake([SourceFacts(subscriber.source, OURS)])
    with hearing(subscriber, intake, _Unlogged(), stopping) as heard:
        while not stopping.is_set():
            batches = heard(0.0)
            for batch in batches:
                for played in words.say(batch, now_us()):
                    player.send(played)
            if not batches:
                player.serve(_TURN_S)
    return player.messages


def outlet(
    to: str, resend_url: str | None, style: Style, credentials: Credentials = NO_CREDENTIALS
) -> tuple[OpenCarrier, bytes]:
    """How to open what carries `style`'s messages to `to`, and their topic. Raises `TransportError`."""
    place = parse_url(to)
    if place.scheme not in SCHEMES[style]:
        forms = " or ".join(f"{scheme}://" for scheme in SCHEMES[style])
        raise TransportError(f"cannot relay as {style} to {place}: its routers listen to {forms}")
    if place.scheme == "nats":
        return lambda _: SubjectCarrier(place, credentials), place.path.encode()
    return lambda _: open_carrier(to, resend_url, producer=0, epoch=0, credentials=credentials), TOPIC


def publisher_of(place: PlaneUrl) -> int:
    """The id that a relay to `place` publishes under, the same at each start."""
    return producer_id(f"relay/{place}")
