"""What the admin view shows of replays and takes: typed pictures at one moment, and the port that answers."""

from __future__ import annotations

from collections.abc import Sequence
from enum import StrEnum
from pathlib import Path
from typing import Protocol

from advisor.replay_orders import ReplayOrder
from advisor.views import View


class ReplayState(StrEnum):
    QUEUED = "queued"
    RUNNING = "running"
    DONE = "done"
    FAILED = "failed"
    CANCELLED = "cancelled"


class ReplayView(View):
    id: str
    state: ReplayState
    order: ReplayOrder
    actor: str
    note: str
    """Why it failed, in the command's own words, or why there is no advice; empty where all is well."""
    requested_us: int
    started_us: int
    """0: not yet."""
    ended_us: int
    """0: not yet."""
    results: int
    """That there are by now."""
    results_wanted: int
    has_report: bool


class CacheResultView(View):
    """One policy at one capacity, in one tier."""

    policy: str
    capacity_blocks: int
    token_hit_ratio: float
    """Tokens of leading blocks that were present when their request came, over all prompt tokens."""
    run_blocks: int
    run_tokens: int
    seq_block_hits: int
    """Hits when each request's blocks are then used one by one."""


class TieringResultView(View):
    """One admission and eviction at one size of the fast tier, with one budget."""

    admission: str
    eviction: str
    fast_blocks: int
    budget: float | None
    """Moves for each different block; None: unlimited."""
    token_hit_ratio: float
    """Prompt tokens read from the fast tier over all prompt tokens."""
    best_hit_ratio: float
    """What one that knew the future would have read from it, moves unlimited."""
    moves: int
    moves_per_block: float
    bytes_moved: int
    precision: float
    """Share of the blocks moved that were read before they left."""
    ping_pong: float
    """Share of the moves that brought back what had left shortly before."""
    first_token_mean_s: float
    first_token_p99_s: float


class ReplayAdviceView(View):
    """What `kvadvisor advise` says of the recording."""

    words: list[str]
    capacity_blocks: int
    capacity_bytes: int
    admission: str
    token_hit_ratio: float


class ReplayDetailView(View):
    replay: ReplayView
    requests: int
    """That were replayed; 0: not known yet."""
    input_tokens: int
    caches: list[CacheResultView]
    tierings: list[TieringResultView]
    advice: ReplayAdviceView | None
    """None: there is none yet, or it was not asked for."""


class AdvisorReplays(Protocol):
    """Raises `advisor.errors.NothingSuch` and `ActionRefused`; `actor` is logged."""

    def start(self, actor: str, order: ReplayOrder) -> ReplayView: ...
    def list(self) -> Sequence[ReplayView]:
        """Newest first."""

    def get(self, replay_id: str) -> ReplayDetailView: ...
    def report(self, replay_id: str) -> Path:
        """A page of its own, with script and style in it."""

    def cancel(self, actor: str, replay_id: str) -> ReplayView: ...
    def delete(self, actor: str, replay_id: str) -> ReplayView:
        """What was deleted; ended before, where it was open."""
