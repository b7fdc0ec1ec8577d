"""`kvadvisor simulate`: synthetic workloads as traces and recordings."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import msgspec
import typer

from advisor.outputs import require_writable
from advisor.simulation import PRESETS, Workload, WorkloadError, load_preset, load_workload
from advisor.simulation.workload import preset_text
from advisor.simulation.writing import SUFFIXES, Summary, write_simulation

DEFAULT_PRESET = "mixed"
DEFAULT_ENGINE_BLOCKS = 4_000


def simulate(
    out: Annotated[
        Path | None,
        typer.Argument(
            help="FILE.jsonl, FILE.jsonl.gz: a trace of requests; FILE.cap, FILE.parquet: the events of an engine that"
            " served them."
        ),
    ] = None,
    preset: Annotated[
        str | None, typer.Option("--preset", help=f"Of {', '.join(PRESETS)} (default: {DEFAULT_PRESET}).")
    ] = None,
    workload: Annotated[
        Path | None, typer.Option("--workload", help="TOML of your own; `--print` shows one to begin with.")
    ] = None,
    seed: Annotated[int, typer.Option("--seed", help="The same seed gives the same bytes.")] = 1,
    minutes: Annotated[float | None, typer.Option("--minutes", help="Instead of the workload's own.")] = None,
    engine_blocks: Annotated[
        int, typer.Option("--engine-blocks", min=1, help="Cache of the engine, for events.")
    ] = DEFAULT_ENGINE_BLOCKS,
    lost: Annotated[float | None, typer.Option("--lost", help="Share of messages lost, for events.")] = None,
    doubled: Annotated[float | None, typer.Option("--doubled", help="Share sent twice.")] = None,
    reordered: Annotated[float | None, typer.Option("--reordered", help="Share sent after the next one.")] = None,
    printed: Annotated[bool, typer.Option("--print", help="Print the preset's TOML and end.")] = False,
) -> None:
    """Simulate a workload: tenants, shared prefixes, chats, agents, questions, batch jobs, bursts, restarts, faults."""
    if preset is not None and workload is not None:
        raise WorkloadError("--preset and --workload are two workloads: give one of them")
    if printed:
        print(preset_text(preset or DEFAULT_PRESET), end="")
        return
    if out is None:
        raise WorkloadError(f"no file is named to write to: give one that ends in {', '.join(SUFFIXES)}, or --print")
    described = load_preset(preset or DEFAULT_PRESET) if workload is None else load_workload(workload)
    described = _changed(described, {"minutes": minutes}, {"lost": lost, "doubled": doubled, "reordered": reordered})
    require_writable(out)
    _print(out, write_simulation(out, described, seed, engine_blocks))


def _changed(workload: Workload, own: dict[str, float | None], faults: dict[str, float | None]) -> Workload:
    """With what is given of each. Raises `WorkloadError` for numbers out of range."""
    fields = msgspec.to_builtins(workload)
    fields |= {name: value for name, value in own.items() if value is not None}
    fields["faults"] |= {name: value for name, value in faults.items() if value is not None}
    try:
        return msgspec.convert(fields, Workload)
    except msgspec.ValidationError as error:
        given = ", ".join(f"--{name} {value}" for name, value in (own | faults).items() if value is not None)
        raise WorkloadError(f"{given} cannot be simulated ({error}): give a number in range") from error


def _print(out: Path, summary: Summary) -> None:
    reused = 1 - summary.blocks / summary.accesses if summary.accesses else 0.0
    print(
        f"{out}: {summary.requests:,} requests, {summary.accesses:,} block accesses of {summary.blocks:,} blocks"
        f" ({reused:.0%} seen before), {summary.input_tokens:,} input tokens"
    )
    print("  " + ", ".join(f"{name} {count:,}" for name, count in summary.by_tenant.most_common()))
    if summary.events:
        print(f"  {summary.events:,} events of an engine")
    for name, count in sorted(summary.faults.items()):
        print(f"  {name}: {count:,} messages")
    for reason, count in summary.refused.items():
        print(f"  not used: {count:,} × {reason}")
