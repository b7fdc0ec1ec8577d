"""`kvadvisor inspect`: what a recorded stream holds, as tables, JSON and a page."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import msgspec
import typer
from rich import box
from rich.console import Console
from rich.table import Table

from advisor.outputs import require_writable, write_json, write_text
from advisor.recorded import Reading, is_log, read_recorded
from advisor.recorded_requests import requests_of
from advisor.traces import RequestFacts
from advisor.web import formats
from advisor.web.stream_page import render_stream
from event_plane.recording import detect_format
from event_plane.stream_report import Report, StreamReport


def inspect(
    file: Annotated[
        Path, typer.Argument(help="A capture (.cap), a recording (.parquet), or an advisor's log (its folder, log.db).")
    ],
    json_out: Annotated[Path | None, typer.Option("--json", help="Write all figures here.")] = None,
    html_out: Annotated[Path | None, typer.Option("--html", help="Write them here as a page of its own.")] = None,
    requests: Annotated[
        bool,
        typer.Option(
            "--requests",
            help="Also put together the requests behind the events, in memory, and count their blocks. Takes a trace of"
            " requests (.jsonl, .jsonl.gz) too.",
        ),
    ] = False,
) -> None:
    """Show what a recorded stream holds: producers, epochs, gaps, rates and the mix of events."""
    for out in (json_out, html_out):
        if out is not None:
            require_writable(out)
    reading, stream = Reading(), StreamReport()
    holds_events = not (requests and _is_trace(file))
    if holds_events:
        for recorded in read_recorded(file, reading):
            stream.add(recorded)
    report = stream.report()
    facts = requests_of(file)[0].facts() if requests else None
    console = Console(markup=False, highlight=False)
    if holds_events:
        _print(console, report, reading)
    if facts is not None:
        console.print(_requests_told(facts), soft_wrap=True)
    if json_out is not None:
        read = {"path": str(file), "duplicates_dropped": reading.duplicates, "refused": dict(reading.refused)}
        behind: Mapping[str, object] = {} if facts is None else {"requests": asdict(facts)}
        write_json(json_out, read | msgspec.to_builtins(report) | behind)
    if html_out is not None:
        write_text(html_out, render_stream(report, file.name))


def _is_trace(file: Path) -> bool:
    return not is_log(file) and detect_format(file) == "trace"


def _requests_told(facts: RequestFacts) -> str:
    return (
        f"{facts.requests:,} requests of {facts.input_tokens:,} tokens in {formats.seconds(facts.span_s)}:"
        f" {facts.accesses:,} uses of {facts.blocks:,} different blocks"
    )


def _print(console: Console, report: Report, reading: Reading) -> None:
    rate = formats.rate(report.events / report.span_s) if report.span_s else formats.NOTHING
    begun = formats.timestamp(report.first_us) or "times unknown"
    console.print(
        f"{report.events:,} events in {report.batches:,} batches, {formats.size(report.wire_bytes)} on the wire;"
        f" {formats.seconds(report.span_s)} from {begun}, {rate} events/s",
        soft_wrap=True,
    )
    console.print(_producers(report))
    if report.producers_untold:
        console.print(f"and at least {report.producers_untold:,} more producers")
    mix = _table("type", *(tier for tier in ("G1", "G2", "G3", "G4", "all")), "events")
    for name, by_tier in report.types.items():
        figures = [by_tier.get(tier, 0) for tier in ("G1", "G2", "G3", "G4", "all")]
        mix.add_row(name, *(f"{figure:,}" for figure in figures), f"{sum(by_tier.values()):,}")
    console.print(mix)
    for head, counts in (("location", report.locations), ("namespace", report.namespaces), ("kind", report.kinds)):
        table = _table(head, "batches" if head == "kind" else "events")
        for name, number in counts.items():
            table.add_row(name, f"{number:,}")
        console.print(table)
    for reason, number in reading.refused.items():
        console.print(f"not used: {number:,} × {reason}", soft_wrap=True)
    if reading.duplicates:
        console.print(f"received twice: {reading.duplicates:,} messages")


def _producers(report: Report) -> Table:
    """What is rare has a column only where there is some of it, so that names keep their room."""
    rare = [
        figure
        for figure in ("duplicates", "snapshots")
        if any(getattr(epoch, figure) for producer in report.producers for epoch in producer.epochs)
    ]
    figures = ("batches", "events", "gaps", "missing", *rare)
    table = _table("producer", "epoch", "sequences", *figures)
    for producer in report.producers:
        name = producer.name or f"{producer.producer:016x}"
        for epoch in producer.epochs:
            sequences = f"{epoch.first_sequence}–{epoch.last_sequence}"
            counts = (f"{getattr(epoch, figure):,}" for figure in figures)
            table.add_row(name, f"{epoch.epoch:x}", sequences, *counts)
            name = ""
        if producer.epochs_untold:
            table.add_row("", f"and {producer.epochs_untold:,} more")
    return table


def _table(head: str, *figures: str) -> Table:
    """A name that is longer than its column goes on below it: a pipe and a narrow window lose nothing of it."""
    table = Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0), show_edge=False)
    table.add_column(head, overflow="fold")
    for figure in figures:
        table.add_column(figure, justify="right", no_wrap=True)
    return table
