"""`kvadvisor play`: a recording published again, as it was, on any transport."""

from __future__ import annotations

import itertools
import time
from pathlib import Path
from typing import Annotated

import typer

from advisor.recorded import Reading, is_log, read_recorded
from event_plane.connect import open_carrier
from event_plane.credentials import Credentials
from event_plane.credentials_file import load_credentials
from event_plane.errors import RecordingError, TransportError
from event_plane.pacing import Pace
from event_plane.played import Played, as_played, read_played
from event_plane.playing import OpenCarrier, Player
from event_plane.publishing import Carrier
from event_plane.subject_carrier import SubjectCarrier
from event_plane.transport import parse_url


def play(
    file: Annotated[Path, typer.Argument(help="A recording (.parquet), a capture (.cap), or an advisor's log.")],
    to: Annotated[str, typer.Option("--to", help="URL to publish on: zmq+tcp://, zmq+ipc://, nats://, jetstream://.")],
    resend_url: Annotated[
        str | None, typer.Option("--resend-url", help="ZeroMQ: where resends are served (default: the next port).")
    ] = None,
    speed: Annotated[
        float | None, typer.Option("--speed", help="Times as fast as recorded (default: as fast as it can).")
    ] = None,
    wait_subscriber: Annotated[
        float, typer.Option("--wait-subscriber", help="Seconds to wait for the first subscriber; 0 begins at once.")
    ] = 30.0,
    linger: Annotated[
        float, typer.Option("--linger", help="Seconds of quiet at the end, in which what was missed is sent again.")
    ] = 2.0,
    credentials: Annotated[
        Path | None, typer.Option("--credentials", help="TOML with the keys of a source in docs/settings.md.")
    ] = None,
) -> None:
    """Publish a recorded stream again, with its own numbers, at full speed or as it was recorded."""
    try:
        pace = Pace(speed)
    except ValueError as error:
        raise TransportError(str(error)) from error
    messages = as_played(read_recorded(file, Reading())) if is_log(file) else read_played(file)
    first = next(messages, None)
    if first is None:
        raise RecordingError(f"{file} holds no messages: nothing to play")
    opening, shared = _opening(to, resend_url, load_credentials(credentials), first)
    begun_s = time.monotonic()
    with Player(opening, shared=shared) as player:
        if wait_subscriber and not player.wait_subscriber(first, wait_subscriber):
            raise TransportError(
                f"nobody subscribed to {to} in {wait_subscriber:g} s: start the subscriber, or give --wait-subscriber 0"
            )
        for played in itertools.chain((first,), messages):
            while wait_s := pace.wait_s(played.at_us, time.monotonic()):
                player.serve(min(wait_s, 1.0))
            player.send(played)
        player.finish(linger)
        print(f"{player.messages:,} messages in {time.monotonic() - begun_s:.1f} s")


def _opening(
    url: str, resend_url: str | None, credentials: Credentials, first: Played
) -> tuple[OpenCarrier, bool]:
    """How to open what carries a message, and whether all share one."""
    place = parse_url(url)
    if first.producer is None and place.scheme == "jetstream":
        raise TransportError(f"{place} keeps our own batches alone: record the engine as .parquet and play that")
    if first.producer is None and place.scheme == "nats":
        return lambda _: SubjectCarrier(place, credentials), True

    def opening(played: Played) -> Carrier:
        return open_carrier(
            url, resend_url, producer=played.producer or 0, epoch=played.epoch, credentials=credentials
        )

    return opening, place.scheme not in ("nats", "jetstream")
