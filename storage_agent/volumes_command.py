"""`kvadvisor volumes`: an agent's volumes for a person: list, look at, check, repair."""

from __future__ import annotations

import secrets
from collections import Counter
from contextlib import closing
from pathlib import Path
from typing import Annotated

import msgspec
import typer
from rich.table import Table

from event_plane.console import table_console
from storage_agent.agent import StorageAgent
from storage_agent.client import AgentClient
from storage_agent.config import AgentSettings, load_settings, scan_volumes, was_closed_in_order
from storage_agent.descriptor import VolumeDescriptor
from storage_agent.errors import AgentUnreachable, ConfigError, StorageAgentError, VolumeError
from storage_agent.kinds import prepare
from storage_agent.port import AgentStat, BlockKey, ScrubReport, VolumeStat

ASK_TIMEOUT_S = 5.0
EXAMPLES_MAX = 5

Config = Annotated[Path | None, typer.Option("--config", help="The agent's settings (TOML).")]
ConfigFile = Annotated[Path, typer.Option("--config", help="The settings (TOML) of an agent that does not run.")]
CommandUrl = Annotated[str, typer.Option(help="A running agent's command_url, instead of --config.")]
Names = Annotated[list[str] | None, typer.Argument(help="Which volumes; all where none is named.")]

app = typer.Typer(help="An agent's volumes: list, look at, check, repair.", no_args_is_help=True)


class VolumesAtFault(StorageAgentError):
    """A check found damage; the table above says where."""

    exit_status = 1


@app.command()
def ls(config: Config = None, command_url: CommandUrl = "") -> None:
    """List the volumes of an agent; of one that does not run, those of its settings."""
    settings = load_settings(config) if config is not None else None
    try:
        stat = _ask_stat(settings, command_url)
    except AgentUnreachable:
        if settings is None:
            raise
        _show(_table_of_settings(settings))
        return
    table = Table(title=f"Agent {stat.agent}", title_justify="left")
    for column in ("volume", "kind", "tier", "rank", "mode", "state"):
        table.add_column(column)
    for column in ("blocks", "free", "GB"):
        table.add_column(column, justify="right")
    for volume in (*stat.volumes, *stat.views):
        facts = volume.descriptor
        state = volume.degraded or ("serves, of another agent" if volume in stat.views else "serves")
        table.add_row(
            facts.id, facts.kind, f"G{facts.tier}", str(facts.speed_rank), volume.mode, state,
            f"{volume.blocks:,}", f"{volume.slots_free:,}", f"{volume.payload_bytes / 1e9:,.3f}",
        )  # fmt: skip
    _show(table, f"GPU-direct storage: {stat.gpu_direct or 'not said'}")


@app.command("stat")
def show_stat(
    volume: Annotated[str, typer.Argument(help="Which volume.")], config: Config = None, command_url: CommandUrl = ""
) -> None:
    """Show everything that a running agent says of one volume."""
    found = _volume_of(_ask_stat(load_settings(config) if config is not None else None, command_url), volume)
    facts = found.descriptor
    rows = {
        "kind": facts.kind,
        "path": facts.path or "–",
        "options": ", ".join(f"{name} = {value}" for name, value in sorted(facts.options.items())) or "–",
        "tier": f"G{facts.tier}",
        "speed rank": str(facts.speed_rank),
        "mode": found.mode,
        "state": found.degraded or "serves",
        "capacity, blocks": f"{facts.capacity_blocks:,}",
        "blocks": f"{found.blocks:,}",
        "slots free": f"{found.slots_free:,}",
        "slots under way or held back": f"{facts.capacity_blocks - found.blocks - found.slots_free:,}",
        "largest block, bytes": f"{facts.block_bytes_max:,}",
        "payload, bytes": f"{found.payload_bytes:,}",
        "watermarks": f"{facts.low_watermark:.0%} to {facts.high_watermark:.0%}",
        "read": _rate(found.read_bytes_total, found.read_seconds_total),
        "written": _rate(found.write_bytes_total, found.write_seconds_total),
        "corrupt, freed": f"{found.corrupt_total:,}",
    }
    for each in found.classes:
        used = f"{each.blocks:,} of {each.slots:,} slots, {each.slots_free:,} free, {each.payload_bytes:,} bytes"
        rows[f"blocks up to {each.block_bytes:,} bytes"] = used
    table = Table(title=f"Volume {volume}", title_justify="left", show_header=False)
    for name, value in rows.items():
        table.add_row(name, value)
    _show(table)


@app.command()
def scrub(
    volume: Annotated[str, typer.Argument(help="Which volume.")], config: Config = None, command_url: CommandUrl = ""
) -> None:
    """Have a running agent read and check every block of a volume; what is corrupt is freed."""
    settings = load_settings(config) if config is not None else None
    command_id = f"scrub-{secrets.token_hex(8)}"
    with _client(settings, command_url) as client:
        client.stat()  # an agent that is not there is not waited for
        while True:
            try:
                report = client.scrub(command_id, volume)
                break
            except AgentUnreachable:
                client.stat()  # it is still at it, or it is gone
    _show_reports({volume: report})


@app.command()
def verify(config: ConfigFile, volumes: Names = None) -> None:
    """Read every slot as it lies on the volumes, without an agent and without changing anything."""
    settings = load_settings(config)
    chosen = msgspec.structs.replace(settings, volumes=_chosen(settings, volumes))
    table = Table(title="Volumes as they lie", title_justify="left")
    table.add_column("volume")
    for column in ("slots", "live", "free", "torn", "doubled"):
        table.add_column(column, justify="right")
    table.add_column("closed in order")
    examples: list[str] = []
    at_fault: list[str] = []
    for descriptor, reports in scan_volumes(chosen):
        in_order = was_closed_in_order(descriptor, settings)
        states: Counter[str] = Counter()
        keys: Counter[BlockKey] = Counter()
        for report in reports:
            states[report.state] += 1
            if report.state == "live" and report.key is not None:
                keys[report.key] += 1
            if report.reason:
                examples.append(f"{descriptor.id}: {report.reason}")
                del examples[EXAMPLES_MAX:]
        doubled = sum(count - 1 for count in keys.values())
        # Where the last owner was cut short, its next opening frees what is torn and doubled.
        if in_order and (states["torn"] or doubled):
            at_fault.append(descriptor.id)
        table.add_row(
            descriptor.id, *(f"{number:,}" for number in (
                states.total(), states["live"], states["free"], states["torn"], doubled
            )), "yes" if in_order else "no",
        )  # fmt: skip
    _show(table, *examples)
    if at_fault:
        raise VolumesAtFault(
            f"{', '.join(at_fault)}: slots are torn or doubled though the last owner closed in order; the device lost "
            "or changed bytes: check it, then run `kvadvisor volumes fsck`"
        )


@app.command()
def fsck(config: ConfigFile, volumes: Names = None) -> None:
    """Open the volumes of an agent that does not run, free what is torn, read every block, free what is corrupt."""
    settings = load_settings(config)
    reports: dict[str, ScrubReport] = {}
    with closing(
        StorageAgent(
            settings.name, publisher=None, allowed_roots=settings.allowed_roots, endpoints=settings.endpoints
        )
    ) as agent:
        for descriptor in _chosen(settings, volumes):
            _require_there(descriptor, settings)
            agent.register_volume(descriptor)
            reports[descriptor.id] = agent.scrub("", descriptor.id)
            agent.unregister_volume(descriptor.id)
    _show_reports(reports)


def _require_there(descriptor: VolumeDescriptor, settings: AgentSettings) -> None:
    """Opening makes a volume that is not there. Raises `VolumeError` where it would."""
    if descriptor.path and not Path(descriptor.path).exists():
        raise VolumeError(f"volume {descriptor.id!r}: {descriptor.path} is not there; nothing to check")
    kind, opening = prepare(descriptor, settings.allowed_roots, settings.endpoints)
    if kind.inspect is not None:
        kind.inspect(opening).close()


def _show_reports(reports: dict[str, ScrubReport]) -> None:
    """Raises `VolumesAtFault` where a block was corrupt or could not be read."""
    table = Table(title="Blocks read and checked", title_justify="left")
    table.add_column("volume")
    for column in ("good", "corrupt, freed", "not readable", "GB read"):
        table.add_column(column, justify="right")
    for name, report in reports.items():
        figures = (report.good, report.corrupt, report.failed)
        table.add_row(name, *(f"{figure:,}" for figure in figures), f"{report.payload_bytes / 1e9:,.3f}")
    _show(table)
    bad = [name for name, report in reports.items() if report.corrupt or report.failed]
    if bad:
        raise VolumesAtFault(f"{', '.join(bad)}: blocks were lost; check the device")


def _table_of_settings(settings: AgentSettings) -> Table:
    table = Table(title=f"Agent {settings.name} does not answer at {settings.command_url}", title_justify="left")
    for column in ("volume", "kind", "tier", "rank", "state"):
        table.add_column(column)
    table.add_column("capacity, blocks", justify="right")
    for each in settings.volumes:
        try:
            state = "closed in order" if was_closed_in_order(each, settings) else "open, or its owner was cut short"
        except VolumeError as error:
            state = str(error)
        table.add_row(each.id, each.kind, f"G{each.tier}", str(each.speed_rank), state, f"{each.capacity_blocks:,}")
    return table


def _ask_stat(settings: AgentSettings | None, command_url: str) -> AgentStat:
    with _client(settings, command_url) as client:
        return client.stat()


def _client(settings: AgentSettings | None, command_url: str) -> AgentClient:
    if settings is not None:
        return AgentClient(command_url or settings.command_url, ASK_TIMEOUT_S, settings.credentials)
    if not command_url:
        raise ConfigError("which agent? Give --config FILE or --command-url URL")
    return AgentClient(command_url, ASK_TIMEOUT_S)


def _volume_of(stat: AgentStat, name: str) -> VolumeStat:
    volumes = [*stat.volumes, *stat.views]
    for volume in volumes:
        if volume.descriptor.id == name:
            return volume
    known = ", ".join(sorted(volume.descriptor.id for volume in volumes))
    raise ConfigError(f"agent {stat.agent} has no volume {name!r}; it has {known or 'none'}")


def _chosen(settings: AgentSettings, names: list[str] | None) -> list[VolumeDescriptor]:
    known = {volume.id: volume for volume in settings.volumes}
    for name in names or []:
        if name not in known:
            raise ConfigError(f"the settings have no volume {name!r}; they have {', '.join(sorted(known)) or 'none'}")
    return [volume for volume in settings.volumes if not names or volume.id in names]


def _rate(total_bytes: int, seconds: float) -> str:
    if not seconds:
        return "nothing yet"
    return f"{total_bytes / 1e9:,.3f} GB in {seconds:,.1f} s, {total_bytes / seconds / 1e9:,.2f} GB/s"


def _show(table: Table, *lines: str) -> None:
    console = table_console()
    console.print(table)
    for line in lines:
        console.print(line, soft_wrap=True)
