"""What the demo prints: the live status view and the summary at its end."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

from rich.console import Group, RenderableType
from rich.table import Table

from advisor.wording import bytes_text, duration_text

if TYPE_CHECKING:
    from advisor.demo import WatchedState

MOVES_READ = 100
MOVES_SHOWN = 5
TIERS = {1: "device", 2: "host", 3: "volumes", 4: "remote"}


def status_view(state: WatchedState) -> RenderableType:
    """Rates, blocks per tier, volumes and the last moves."""
    summary = state.summary
    if not summary:
        return "waiting for the advisor's first answer"
    tiers = ", ".join(f"{TIERS[t['tier']]} {t['blocks']:,}" for t in summary["tiers"] if t["blocks"])
    figures = Table.grid(padding=(0, 3))
    figures.add_row("events", f"{summary['events_per_s']:,.0f} /s", f"{summary['events_total']:,} in all")
    figures.add_row("queue lag", duration_text(summary["behind_s"]), f"{summary['queue_entries']:,} entries")
    figures.add_row("blocks", f"{summary['blocks']:,}", tiers)
    figures.add_row("reads from the fast volume", _percent(summary["fast_hit_ratio"]), "of reads from volumes")
    moves = f"{summary['moves_total']:,} done, {summary['moves_open']:,} open"
    figures.add_row("moves", moves, f"{bytes_text(summary['moved_bytes_total'])} copied")
    return Group(figures, _volumes(state), *_last_moves(state))


def _volumes(state: WatchedState) -> Table:
    table = Table(box=None, pad_edge=False)
    for column in ("volume", "fill", "blocks", "reads", "incoming", "state"):
        table.add_column(column, justify="left" if column in ("volume", "state") else "right")
    for v in state.volumes:
        figures = (f"{v['fill']:.0%}", f"{v['blocks']:,}", f"{v['reads']:,}", f"{v['incoming']:,}")
        table.add_row(v["id"], *figures, v["state"])
    return table


def _last_moves(state: WatchedState) -> list[str]:
    """Newest first, one line for those that say the same."""
    lines = Counter(
        f"{move['state']:>9}  {move['kind']} {move['source']} → {move['target'] or '–'}: {move['reason']}"
        for move in state.moves.get("moves", [])
    )
    return [line if count == 1 else f"{line} × {count}" for line, count in list(lines.items())[:MOVES_SHOWN]]


def summary_table(state: WatchedState) -> Table:
    """The demo as a whole, once it has ended."""
    table = Table(title="What happened", title_justify="left", show_header=False)
    report, summary = state.report, state.summary
    if report is not None:
        table.add_row("requests", f"{report.requests:,} with {report.tokens_prompt:,} prompt tokens")
        found = {"device": report.blocks_device, "host": report.blocks_host}
        found |= dict(sorted(report.blocks_volume.items()))
        found["recomputed"] = report.blocks_recomputed
        total = sum(found.values())
        for place, blocks in found.items():
            table.add_row(f"prompt blocks: {place}", f"{blocks:,} ({_percent(blocks / total if total else None)})")
        failed = sum(report.gets_failed.values())
        table.add_row("blocks read with wrong bytes", f"{report.wrong_blocks:,}")
        table.add_row("reads that failed otherwise", f"{failed:,}")
    if summary:
        seconds = max(report.elapsed_s if report is not None else summary["uptime_s"], 1e-9)
        rate = f"{summary['events_total'] / seconds:,.0f} /s"
        table.add_row("events logged and folded", f"{summary['events_total']:,} ({rate})")
        table.add_row("moves done", f"{summary['moves_total']:,}, {bytes_text(summary['moved_bytes_total'])} copied")
        table.add_row("reads from the fast volume", f"{_percent(summary['fast_hit_ratio'])} of reads from volumes")
    return table


def _percent(ratio: float | None) -> str:
    return "–" if ratio is None else f"{ratio:.1%}"
