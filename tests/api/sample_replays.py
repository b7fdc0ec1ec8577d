"""`AdvisorReplays` over plain values: one in each state."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from advisor.errors import ActionRefused, NothingSuch
from advisor.replay_orders import ReplayOrder
from advisor.replay_views import (
    CacheResultView,
    ReplayAdviceView,
    ReplayDetailView,
    ReplayState,
    ReplayView,
    TieringResultView,
)

STARTED_US = 1_764_500_700_000_000
ORDER = ReplayOrder(recording="evening", policies=["lru", "s3-fifo"], capacities=[11_375, 45_500])
TWO_TIERS = ReplayOrder(recording="evening", fast_blocks=[11_375], admissions=["auto", "touch-2"], budgets=[0.1])
CACHES = [
    CacheResultView(
        policy=policy, capacity_blocks=capacity, token_hit_ratio=ratio, run_blocks=round(ratio * 1_000_000),
        run_tokens=round(ratio * 16_600_000), seq_block_hits=round(ratio * 1_010_000),
    )
    for policy, capacity, ratio in (
        ("lru", 11_375, 0.31), ("lru", 45_500, 0.48), ("s3-fifo", 11_375, 0.36), ("s3-fifo", 45_500, 0.51),
    )
]  # fmt: skip
TIERINGS = [
    TieringResultView(
        admission=admission, eviction="value", fast_blocks=11_375, budget=0.1, token_hit_ratio=ratio,
        best_hit_ratio=0.55, moves=18_200, moves_per_block=0.1, bytes_moved=38_200_000_000, precision=0.8,
        ping_pong=0.01, first_token_mean_s=0.42, first_token_p99_s=1.9,
    )
    for admission, ratio in (("auto", 0.41), ("touch-2", 0.37))
]  # fmt: skip
ADVICE = ReplayAdviceView(
    words=[
        'Keep 95.4 GB (45,500 blocks) on the fast volume, with policy.admission = "auto" (the default).',
        "It would have served 47.9 %; a policy that knew the future 56.1 %.",
    ],
    capacity_blocks=45_500, capacity_bytes=95_420_416_000, admission="auto", token_hit_ratio=0.479,
)  # fmt: skip


def replay(number: int, state: ReplayState, order: ReplayOrder = ORDER, **others: object) -> ReplayView:
    ended = state not in (ReplayState.QUEUED, ReplayState.RUNNING)
    return ReplayView(
        id=f"r-{number:012x}", state=state, order=order, actor="ann", note="", requested_us=STARTED_US + number,
        started_us=0 if state is ReplayState.QUEUED else STARTED_US + 10_000_000,
        ended_us=STARTED_US + 42_000_000 if ended else 0, results=order.runs if ended else 1,
        results_wanted=order.runs, has_report=state is ReplayState.DONE,
    ).model_copy(update=others)  # fmt: skip


class SampleReplays:
    def __init__(self, folder: Path | None = None) -> None:
        """`folder`: where `report.html` is."""
        self.views = [
            replay(5, ReplayState.QUEUED, results=0),
            replay(4, ReplayState.RUNNING),
            replay(3, ReplayState.DONE, TWO_TIERS),
            replay(2, ReplayState.FAILED, note="evening, row group 3 (positions 9 to 12) is damaged: restore a copy"),
            replay(1, ReplayState.DONE),
        ]
        self.folder = folder
        self.asked: list[tuple[str, str, str]] = []

    def start(self, actor: str, order: ReplayOrder) -> ReplayView:
        if order.recording == "nowhere":
            raise NothingSuch("there is no recording 'nowhere': GET /api/v1/recordings lists them")
        self.asked.append(("replay", actor, order.recording))
        self.views.insert(0, replay(len(self.views) + 1, ReplayState.QUEUED, order, actor=actor, results=0))
        return self.views[0]

    def list(self) -> Sequence[ReplayView]:
        return self.views

    def _find(self, replay_id: str) -> ReplayView:
        for view in self.views:
            if view.id == replay_id:
                return view
        raise NothingSuch(f"there is no replay {replay_id!r}: GET /api/v1/replays lists them")

    def get(self, replay_id: str) -> ReplayDetailView:
        view = self._find(replay_id)
        is_done = view.state is ReplayState.DONE
        return ReplayDetailView(
            replay=view, requests=21_400, input_tokens=16_600_000,
            caches=[] if view.order.fast_blocks else CACHES[: view.results],
            tierings=TIERINGS[: view.results] if view.order.fast_blocks else [], advice=ADVICE if is_done else None,
        )  # fmt: skip

    def report(self, replay_id: str) -> Path:
        if self._find(replay_id).state is not ReplayState.DONE or self.folder is None:
            raise NothingSuch(f"replay {replay_id!r} has no report: it is still to come")
        return self.folder / "report.html"

    def cancel(self, actor: str, replay_id: str) -> ReplayView:
        view = self._find(replay_id)
        if view.state not in (ReplayState.QUEUED, ReplayState.RUNNING):
            raise ActionRefused(f"replay {replay_id} is {view.state}: there is nothing to cancel")
        self.asked.append(("cancel", actor, replay_id))
        cancelled = view.model_copy(update={"state": ReplayState.CANCELLED})
        self.views[self.views.index(view)] = cancelled
        return cancelled

    def delete(self, actor: str, replay_id: str) -> ReplayView:
        gone = self._find(replay_id)
        self.asked.append(("delete", actor, replay_id))
        self.views.remove(gone)
        return gone
