"""What `kvadvisor replay` and `advise` wrote as JSON, as the admin view shows it. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from advisor.replay_views import CacheResultView, ReplayAdviceView, TieringResultView


def first_file(results: Mapping[str, Any]) -> dict[str, Any]:
    """The figures of the one file that was replayed; empty where there are none yet."""
    files = results.get("files") or [{}]
    first: dict[str, Any] = files[0]
    return first


def caches_of(read: Mapping[str, Any]) -> list[CacheResultView]:
    """In one tier."""
    input_tokens = read.get("input_tokens", 0)
    return [
        CacheResultView(**row, token_hit_ratio=row["run_tokens"] / input_tokens if input_tokens else 0.0)
        for row in read.get("results", [])
        if "policy" in row
    ]


def tierings_of(read: Mapping[str, Any]) -> list[TieringResultView]:
    """In two tiers."""
    same = (
        "admission", "eviction", "fast_blocks", "budget", "moves", "moves_per_block", "bytes_moved", "precision",
        "ping_pong",
    )  # fmt: skip
    return [
        TieringResultView(
            **{name: row[name] for name in same},
            token_hit_ratio=row["fhit"],
            best_hit_ratio=row["belady_fhit"],
            first_token_mean_s=row["first_token_s"]["mean"],
            first_token_p99_s=row["first_token_s"]["p99"],
        )
        for row in read.get("results", [])
        if "admission" in row
    ]


def advice_of(read: Mapping[str, Any]) -> ReplayAdviceView | None:
    """None where there is none."""
    if not read:
        return None
    chosen = read["chosen"]
    return ReplayAdviceView(
        words=[line for line in read["in_words"] if line],
        capacity_blocks=chosen["capacity_blocks"],
        capacity_bytes=chosen["capacity_bytes"],
        admission=chosen["admission"],
        token_hit_ratio=chosen["hit_ratio"],
    )
