"""What the demo prints, from what its two halves say."""

from __future__ import annotations

import io
from typing import Any

from rich.console import Console, RenderableType

from advisor.demo import WatchedState
from advisor.demo_config import EngineReport
from advisor.demo_view import MOVES_SHOWN, status_view, summary_table

SUMMARY = {
    "tiers": [{"tier": 1, "blocks": 40}, {"tier": 3, "blocks": 2}],
    "events_per_s": 1_200.0, "events_total": 9_000, "behind_s": 0.0, "queue_entries": 0, "blocks": 42,
    "fast_hit_ratio": None, "moves_total": 7, "moves_open": 0, "moved_bytes_total": 0,
}  # fmt: skip


def printed(view: RenderableType) -> list[str]:
    console = Console(width=200, file=io.StringIO())
    console.print(view)
    return console.file.getvalue().splitlines()  # type: ignore[attr-defined, no-any-return]


def move(reason: str, **changed: Any) -> dict[str, Any]:
    return {"state": "kept", "kind": "promote", "source": "slow", "target": "fast", "reason": reason} | changed


def test_moves_that_say_the_same_are_one_line_with_their_number() -> None:
    once = [move(f"{n}th touch") for n in range(4, 12)]
    state = WatchedState(
        summary=SUMMARY, moves={"moves": [*[move("2nd touch")] * 5, move("2nd touch", state="copying"), *once]}
    )
    lines = [line.strip() for line in printed(status_view(state)) if "→" in line]
    assert lines[:3] == [
        "kept  promote slow → fast: 2nd touch × 5",
        "copying  promote slow → fast: 2nd touch",
        "kept  promote slow → fast: 4th touch",
    ]
    assert len(lines) == MOVES_SHOWN


def test_places_of_prompt_blocks_keep_their_order_and_unused_reads_are_no_failed_ones() -> None:
    report = EngineReport(
        elapsed_s=2.0, blocks_device=5, blocks_host=3, blocks_volume={"slow": 1, "fast": 1}, blocks_recomputed=10,
        gets_failed={"corrupt": 2}, gets_unused={"behind_a_miss": 30},
    )  # fmt: skip
    rows = [line.strip("│ ").split("│") for line in printed(summary_table(WatchedState(report=report)))]
    cells = {row[0].strip(): row[1].strip() for row in rows if len(row) == 2}
    places = [name.removeprefix("prompt blocks: ") for name in cells if name.startswith("prompt blocks")]
    assert places == ["device", "host", "fast", "slow", "recomputed"]
    assert cells["prompt blocks: fast"] == "1 (5.0%)"
    assert cells["reads that failed otherwise"] == "2"
