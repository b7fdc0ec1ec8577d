"""`kvadvisor advise`: how much fast storage a recorded workload needs, and what to let onto it."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer
from rich import box
from rich.console import Console
from rich.table import Table

from advisor.advice import DEFAULT_ADMISSION, STEPS_MAX, Advice, AdviceError, Choice, Sizing, advise_on
from advisor.outputs import require_writable, write_json
from advisor.progress import progress_of
from advisor.recorded_requests import requests_of
from advisor.tiers import Costs
from advisor.web import formats


def advise(
    file: Annotated[
        Path,
        typer.Argument(
            help="A trace of requests (.jsonl, .jsonl.gz), a capture (.cap), a recording (.parquet), an advisor's log."
        ),
    ],
    target_hit_ratio: Annotated[
        float | None,
        typer.Option(
            "--target-hit-ratio", min=0, max=1, help="Share of the prompt tokens to be read from the fast volume."
        ),
    ] = None,
    capacity_bytes: Annotated[
        float | None, typer.Option("--capacity-bytes", min=1, help="The fast volume there is, or could be.")
    ] = None,
    block_bytes: Annotated[
        int | None,
        typer.Option(
            "--block-bytes",
            min=1,
            help=f"Of a whole block (default: what the recording says, else {Costs.token_bytes:,} a token).",
        ),
    ] = None,
    write_bytes_per_s: Annotated[
        float | None, typer.Option("--write-bytes-per-s", min=0, help="What may be written to it (default: any).")
    ] = None,
    fast_gb_s: Annotated[float, typer.Option("--fast-gb-s", min=1e-6, help="Its reads.")] = 6.0,
    slow_gb_s: Annotated[float, typer.Option("--slow-gb-s", min=1e-6, help="The reads of where the rest is.")] = 1.0,
    prefill_tokens_s: Annotated[
        float, typer.Option("--prefill-tokens-s", min=1e-3, help="How fast the engine computes.")
    ] = 10_000.0,
    json_out: Annotated[Path | None, typer.Option("--json", help="Write all figures here.")] = None,
) -> None:
    """Advise on the capacity and the policy of a fast volume, by a replay of what was recorded."""
    if target_hit_ratio is not None and capacity_bytes is not None:
        raise AdviceError("--target-hit-ratio and --capacity-bytes are two questions: ask one of them")
    if json_out is not None:
        require_writable(json_out)
    trace, refused = requests_of(file)
    block_tokens = max(trace.block_tokens, default=0) or 1
    size_bytes = block_bytes or trace.block_bytes or Costs.token_bytes * block_tokens
    if capacity_bytes is not None and capacity_bytes < size_bytes:
        raise AdviceError(f"{capacity_bytes:g} bytes hold no block of {size_bytes:,}: give more, or --block-bytes")
    costs = Costs(max(1, size_bytes // block_tokens), fast_gb_s * 1e9, slow_gb_s * 1e9, prefill_tokens_s)
    with progress_of(file.name, STEPS_MAX) as advance:
        sizing = Sizing(trace, costs, size_bytes, write_bytes_per_s, advance)
        capacity = None if capacity_bytes is None else int(capacity_bytes // size_bytes)
        advice = advise_on(sizing, target=target_hit_ratio, capacity_blocks=capacity)
    console = Console(markup=False, highlight=False)
    words = in_words(advice, file.name, costs)
    for line in words:
        console.print(line, soft_wrap=True)
    console.print(_curve(advice))
    console.print(_admissions(advice))
    for reason, count in refused.items():
        console.print(f"not used: {count:,} × {reason}", soft_wrap=True)
    if json_out is not None:
        write_json(json_out, {"path": str(file), "refused": refused, "in_words": words} | advice.as_json())


def in_words(advice: Advice, name: str, costs: Costs) -> list[str]:
    """The advice in a few sentences."""
    facts, chosen = advice.workload, advice.chosen
    setting = f'policy.admission = "{chosen.admission}"'
    default = " (the default)" if chosen.admission == DEFAULT_ADMISSION else ""
    aim = ""
    if advice.target is not None:
        aim = f" to serve {formats.percent(advice.target)} of the prompt tokens"
    return [
        f"{name}: {facts.requests:,} requests in {formats.seconds(facts.span_s)}, {facts.input_tokens:,} prompt tokens;"
        f" {facts.blocks:,} different blocks of {formats.size(facts.block_bytes)},"
        f" {formats.size(facts.blocks * facts.block_bytes)} in all.",
        f"{formats.percent(facts.seen_before)} of the prompt tokens had been seen before: no cache can serve more.",
        "",
        f"Keep {formats.size(chosen.capacity_bytes)} ({chosen.capacity_blocks:,} blocks) on the fast volume{aim},"
        f" with {setting}{default}.",
        f"It would have served {formats.percent(chosen.hit_ratio)}; a policy that knew the future"
        f" {formats.percent(chosen.bound)}.",
        f"Written to it: {formats.size(chosen.written_bytes_per_day)} a day,"
        f" {chosen.moves_per_block:.2f} times each different block.",
        f"First token: {chosen.first_token_s:.2f} s on average, {facts.first_token_s_without:.2f} s where everything"
        f" is computed, at {costs.fast_bytes_per_s / 1e9:g} and {costs.slow_bytes_per_s / 1e9:g} GB/s and"
        f" {costs.prefill_tokens_per_s:,.0f} tokens/s.",
        *_what_writes_less(advice),
        *_what_more_brings(advice),
        "",
    ]


def _what_writes_less(advice: Advice) -> list[str]:
    """The admission that serves most of those that write less than half as much."""
    half = advice.chosen.written_bytes_per_day / 2
    sparing = [choice for choice in advice.at_capacity if choice.written_bytes_per_day < half]
    if not sparing:
        return []
    other = max(sparing, key=lambda choice: choice.hit_ratio)
    return [
        f'If that wears it out: "{other.admission}" would serve {formats.percent(other.hit_ratio)} and write'
        f" {formats.size(other.written_bytes_per_day)} a day; --write-bytes-per-s holds any policy to a rate."
    ]


def _what_more_brings(advice: Advice) -> list[str]:
    """What the curve's next larger and next smaller capacity would do."""
    chosen = advice.chosen
    larger = [c for c in advice.curve if c.capacity_blocks > chosen.capacity_blocks * 1.1]
    smaller = [c for c in advice.curve if c.capacity_blocks < chosen.capacity_blocks * 0.9]
    told = [
        f"{formats.size(choice.capacity_bytes)} would serve {formats.percent(choice.hit_ratio)}"
        for choice in (*smaller[-1:], *larger[:1])
    ]
    return [f"{', '.join(told)}."] if told else []


def _curve(advice: Advice) -> Table:
    table = _table("capacity", "blocks", "served", "at best", "written a day", "first token", "admission")
    for choice in advice.curve:
        table.add_row(formats.size(choice.capacity_bytes), f"{choice.capacity_blocks:,}", *_figures(choice))
    return table


def _admissions(advice: Advice) -> Table:
    table = _table("at that capacity", "served", "at best", "written a day", "first token", "admission")
    for choice in advice.at_capacity:
        mark = "advised" if choice == advice.chosen else ""
        table.add_row(mark, *_figures(choice))
    return table


def _figures(choice: Choice) -> Sequence[str]:
    return (
        formats.percent(choice.hit_ratio),
        formats.percent(choice.bound),
        formats.size(choice.written_bytes_per_day),
        f"{choice.first_token_s:.2f} s",
        choice.admission,
    )


def _table(*heads: str) -> Table:
    table = Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0), show_edge=False)
    for head in heads:
        table.add_column(head, justify="left" if head in ("admission", "at that capacity") else "right", no_wrap=True)
    return table
