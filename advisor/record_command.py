"""`kvadvisor record`: a live stream into a file."""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import Annotated

import typer

from advisor.errors import CommandError
from advisor.foreign import AUTO, OURS, SourceFacts
from advisor.process import stopped_by_signals
from advisor.recorder import Limits, record_batches, record_messages
from event_plane.connect import open_subscriber
from event_plane.credentials_file import load_credentials
from event_plane.dialects.known import DIALECTS
from event_plane.parquet import ParquetRecorder
from event_plane.recording import CaptureRecorder
from event_plane.schema import Namespace
from event_plane.transport import parse_url


def record(
    source: Annotated[str, typer.Option("--source", help="URL of the stream.")],
    out: Annotated[
        Path, typer.Option("--out", help="FILE.parquet: decoded events; FILE.cap: the messages as they come.")
    ],
    resend_url: Annotated[
        str | None, typer.Option("--resend-url", help="ZeroMQ: where resends are asked for (default: the next port).")
    ] = None,
    dialect: Annotated[
        str, typer.Option("--dialect", help=f"Of {', '.join((AUTO, OURS, *DIALECTS))}; for .parquet.")
    ] = AUTO,
    topic: Annotated[str, typer.Option("--topic", help="Prefix of the topics wanted.")] = "",
    tenant: Annotated[str, typer.Option("--tenant", help="Whose a foreign stream is; for .parquet.")] = "default",
    model: Annotated[str, typer.Option("--model", help="The model of a foreign stream; for .parquet.")] = "",
    name: Annotated[str, typer.Option("--name", help="Name of the source in the recording.")] = "source",
    seconds: Annotated[float | None, typer.Option("--seconds", min=0, help="End after so long.")] = None,
    events: Annotated[
        int | None, typer.Option("--events", min=1, help="End once there are so many; of .cap: so many messages.")
    ] = None,
    credentials: Annotated[
        Path | None, typer.Option("--credentials", help="TOML with the keys of a source in docs/settings.md.")
    ] = None,
) -> None:
    """Record a live stream of KV events until Ctrl-C: as Parquet, or as its raw messages."""
    if dialect not in (AUTO, OURS, *DIALECTS):
        raise CommandError(f"dialect {dialect!r} is not known: choose one of {', '.join((AUTO, OURS, *DIALECTS))}")
    if out.suffix not in (".parquet", ".cap"):
        raise CommandError(f"{out} is no recording's name: end it in .parquet or .cap")
    place = parse_url(source)
    allowed = load_credentials(credentials)
    facts = SourceFacts(name, dialect, Namespace(tenant=tenant, model=model))
    begun_s = time.monotonic()
    with stopped_by_signals() as stopping, _opened(out) as recorder:
        subscriber = open_subscriber(name, source, resend_url, topic=topic.encode(), credentials=allowed)
        limits = Limits(events, seconds, stopping)
        if isinstance(recorder, ParquetRecorder):
            refused = record_batches(subscriber, facts, recorder, limits, _say)
            said = f"{recorder.events:,} events in {recorder.batches:,} batches"
        else:
            numbered = place.scheme not in ("nats", "jetstream")
            record_messages(subscriber, recorder, limits, _say, numbered=numbered)
            refused = {}
    if isinstance(recorder, CaptureRecorder):
        said = f"{recorder.messages:,} messages"
    print(f"{out}: {said} in {time.monotonic() - begun_s:.1f} s")
    for reason, number in refused.items():
        print(f"not used: {number:,} × {reason}")


def _say(problem: str) -> None:
    print(f"kvadvisor: {problem}", file=sys.stderr, flush=True)


def _opened(out: Path) -> ParquetRecorder | CaptureRecorder:
    return ParquetRecorder(out) if out.suffix == ".parquet" else CaptureRecorder(out)
