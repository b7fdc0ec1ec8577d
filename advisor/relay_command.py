"""`kvadvisor relay`: our stream for routers that listen to engines."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Annotated, Literal

import typer

from advisor.process import stopped_by_signals
from advisor.relay import outlet, publisher_of, relay
from event_plane.connect import open_subscriber
from event_plane.credentials_file import load_credentials
from event_plane.dialects.words import Words
from event_plane.playing import Player
from event_plane.transport import parse_url


def relay_stream(
    source: Annotated[str, typer.Option("--source", help="URL of our stream.")],
    to: Annotated[str, typer.Option("--to", help="URL to publish on: zmq+… as vllm, nats://… as dynamo.")],
    style: Annotated[Literal["vllm", "dynamo"], typer.Option("--as", help="Whose messages to publish.")],
    json: Annotated[bool, typer.Option("--json", help="Dynamo: JSON instead of MessagePack.")] = False,
    source_resend_url: Annotated[
        str | None, typer.Option("--source-resend-url", help="ZeroMQ: where to ask for resends (default: next port).")
    ] = None,
    resend_url: Annotated[
        str | None, typer.Option("--resend-url", help="ZeroMQ: where to serve resends (default: the next port).")
    ] = None,
    source_credentials: Annotated[
        Path | None, typer.Option("--source-credentials", help="TOML with the keys of a source in docs/settings.md.")
    ] = None,
    credentials: Annotated[Path | None, typer.Option("--credentials", help="The same, to publish with.")] = None,
    seconds: Annotated[float, typer.Option("--seconds", min=0.0, help="End after so long; 0 runs until Ctrl-C.")] = 0.0,
) -> None:
    """Publish our stream as an engine's, with each block's true tier. A late subscriber gets what is still buffered."""
    opening, topic = outlet(to, resend_url, style, load_credentials(credentials))
    subscriber = open_subscriber(
        "source", source, source_resend_url, foreign=False, credentials=load_credentials(source_credentials)
    )
    words = Words(style, topic, publisher_of(parse_url(to)), json=json)
    with stopped_by_signals() as stopping, Player(opening, shared=True) as player:
        timer = threading.Timer(seconds, stopping.set)
        timer.daemon = True
        if seconds:
            timer.start()
        messages = relay(subscriber, player, words, stopping)
    print(f"{messages:,} messages relayed to {to}")
