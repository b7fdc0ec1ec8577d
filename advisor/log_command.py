"""Look at a service's event log: figures, checks, a cut, copies for other programs, backups."""

from __future__ import annotations

from contextlib import closing
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

from advisor import checkpoint
from advisor.entries import EntryKind, EventLog, LogEntry, LogStat
from advisor.errors import AdvisorError
from advisor.log_backup import back_up
from advisor.log_backup import restore as restore_backup
from advisor.log_check import check_log
from advisor.log_export import export_json_lines, export_parquet
from advisor.open_log import log_place, open_log, settings_at
from advisor.retention import entries_allowed
from advisor.settings import AdvisorSettings
from advisor.wording import bytes_text, duration_text
from event_plane import wire

SAMPLE_ENTRIES = 1_024
DAY_S = 86_400

app = typer.Typer(add_completion=False, no_args_is_help=True, help=__doc__)

Place = Annotated[Path, typer.Argument(help="The service's directory, or its settings file (TOML).")]


class LogFault(AdvisorError):
    """A log with something wrong in it; the lines say what."""

    exit_status = 1


class PruneError(AdvisorError):
    """A cut that is not made."""


@app.command()
def stat(place: Place) -> None:
    """Positions, bytes, bytes an event, and what retention keeps at the present rate. A service may run."""
    settings = settings_at(place)
    with closing(open_log(settings, read_only=True)) as log:
        figures = log.stat()
        sample = _newest(log, figures)
    table = Table(show_header=False)
    for name, value in _rows(settings, figures, sample):
        table.add_row(name, value)
    Console(markup=False).print(table)


@app.command()
def verify(place: Place) -> None:
    """Read every entry and checkpoint: all there, all whole. A service may run."""
    settings = settings_at(place)
    with closing(open_log(settings, read_only=True)) as log:
        findings = check_log(log, log_place(settings), settings.checkpoints_path)
    kinds = ", ".join(f"{count:,} {kind}" for kind, count in sorted(findings.entries.items())) or "none"
    typer.echo(f"positions {findings.first_position}–{findings.last_position}: {kinds}; {findings.events:,} events")
    typer.echo(f"checkpoints: {', '.join(map(str, findings.checkpoints)) or 'none'}")
    if findings.faults:
        raise LogFault("\n".join(findings.faults))
    typer.echo("all whole")


@app.command()
def prune(
    place: Place,
    through: Annotated[int | None, typer.Option(min=1, help="The last position to drop.")] = None,
    keep_bytes: Annotated[int | None, typer.Option(min=1, help="Drop the oldest entries beyond so many bytes.")] = None,
) -> None:
    """Drop the oldest entries of a stopped service's log, never past its second-newest good checkpoint."""
    if (through is None) == (keep_bytes is None):
        raise PruneError("how much is to go? give either --through POSITION or --keep-bytes BYTES")
    settings = settings_at(place)
    with closing(open_log(settings)) as log:
        before = log.stat()
        if through is None:
            allowed = entries_allowed(before, keep_bytes or 0, 0)
            through = before.last_position - allowed if allowed is not None else 0
        _require_checkpoint(settings.checkpoints_path, through)
        while log.prune(through):
            pass
        after = log.stat()
    dropped = after.first_position - before.first_position
    typer.echo(
        f"{dropped:,} entries dropped, {bytes_text(max(0, before.stored_bytes - after.stored_bytes))} freed;"
        f" the log begins at position {after.first_position}"
    )


@app.command()
def export(
    place: Place,
    out: Annotated[Path, typer.Option(help="FILE.jsonl for every entry, FILE.parquet for a recording of its batches.")],
    from_position: Annotated[int, typer.Option("--from", min=1, help="First position.")] = 1,
    to_position: Annotated[int | None, typer.Option("--to", min=1, help="Last position.")] = None,
) -> None:
    """Write entries to a file for other programs. A service may run."""
    settings = settings_at(place)
    with closing(open_log(settings, read_only=True)) as log:
        export_to = export_parquet if out.suffix == ".parquet" else export_json_lines
        count = export_to(log, log_place(settings), out, from_position, to_position)
    typer.echo(f"{count:,} {'batches' if out.suffix == '.parquet' else 'entries'} in {out}")


@app.command()
def backup(
    place: Place,
    folder: Annotated[Path, typer.Argument(help="An empty folder, or one to be made.")],
) -> None:
    """Copy log and newest checkpoint, whole at one position. A service may run."""
    made = back_up(settings_at(place), folder)
    held = f"with the checkpoint of position {made.checkpoint}" if made.checkpoint else "without a checkpoint"
    typer.echo(f"positions {made.first_position}–{made.position} in {folder}, {held}")


@app.command()
def restore(
    folder: Annotated[Path, typer.Argument(help="What `log backup` made.")],
    directory: Annotated[Path, typer.Argument(help="An empty directory for the service.")],
) -> None:
    """Make a service's directory of a backup, and check it."""
    made = restore_backup(folder, directory)
    kind = " and log.kind = \"segments\"" if made.kind == "segments" else ""
    told = f"positions {made.first_position}–{made.position} restored"
    typer.echo(f"{told}: start a service with directory = \"{directory}\"{kind}")


def _require_checkpoint(folder: Path, through: int) -> None:
    good = [
        position
        for position in checkpoint.positions(folder)
        if not checkpoint.fault_of(checkpoint.checkpoint_path(folder, position))
    ]
    floor = good[1] if len(good) > 1 else 0
    if through > floor:
        raise PruneError(
            f"position {through} is past {floor}, the second-newest good checkpoint in {folder}: what is dropped past"
            f" it could not be folded again; give --through {floor} or less"
            if floor
            else f"{folder} holds {len(good)} good checkpoints: two must be there before anything is dropped; run"
            " the service for a while, it makes one every checkpoint_interval_s and one when it stops"
        )


def _newest(log: EventLog, figures: LogStat) -> list[LogEntry]:
    first = max(figures.first_position, figures.last_position - SAMPLE_ENTRIES + 1)
    return list(log.read(first, figures.last_position))


def _rows(settings: AdvisorSettings, figures: LogStat, sample: list[LogEntry]) -> list[tuple[str, str]]:
    entries = figures.last_position - figures.first_position + 1
    rows = [
        ("log", str(log_place(settings))),
        ("positions", f"{figures.first_position:,} – {figures.last_position:,}"),
        ("bytes", bytes_text(figures.stored_bytes)),
        ("checkpoints", ", ".join(f"{each:,}" for each in checkpoint.positions(settings.checkpoints_path)) or "none"),
    ]
    events = sum(len(wire.decode(entry.payload).records) for entry in sample if entry.kind is EntryKind.BATCH)
    seconds = (sample[-1].recorded_us - sample[0].recorded_us) / 1_000_000 if sample else 0.0
    if events:
        event_bytes = figures.stored_bytes / entries / (events / len(sample))
        rows.append(("an event (newest entries)", bytes_text(event_bytes)))
    if seconds > 0:
        day_bytes = figures.stored_bytes / entries * len(sample) / seconds * DAY_S
        rows.append(("a day at the present rate", f"{events / seconds * DAY_S:,.0f} events, {bytes_text(day_bytes)}"))
        rows.append(("retention keeps", _retention_text(settings, day_bytes)))
    return rows


def _retention_text(settings: AdvisorSettings, day_bytes: float) -> str:
    limits = []
    if settings.log.retention_bytes:
        kept = duration_text(settings.log.retention_bytes / day_bytes * DAY_S)
        limits.append(f"{bytes_text(settings.log.retention_bytes)}, {kept} at that rate")
    if settings.log.retention_age_s:
        limits.append(duration_text(settings.log.retention_age_s))
    return "; ".join(limits) or "everything"
