"""`AdvisorPlans` over plain values: plan 40 waits, of two moves, and move 7-2 was aborted."""

from __future__ import annotations

from advisor.errors import ActionRefused, NothingSuch
from advisor.plan_views import PendingPlanView, PlanDecisionView, PlannedView, PlanView
from advisor.views import MoveView, RefusalView


def _planned(number: int, kind: str, source: str, target: str, reason: str) -> PlannedView:
    return PlannedView(
        kind=kind, hash=f"{number:032x}", tenant="agents", source=source, target=target, block_bytes=4_096,
        reason=reason,
    )  # fmt: skip


def _refused(number: int, volume: str, reason: str) -> RefusalView:
    return RefusalView(at_us=5, hash=f"{number:032x}", tenant="agents", volume=volume, reason=reason)


class SamplePlans:
    def __init__(self) -> None:
        self.asked: list[tuple[str, str, str]] = []
        self.is_paused = False
        self.waiting: PendingPlanView | None = PendingPlanView(
            id="40",
            planned_us=5_000_000,
            lapses_us=605_000_000,
            moves=[
                _planned(2, "promote", "lustre-01", "nvme-a", "2nd touch in 8 s, est. 2.1 ms saved a hit, 4.1 kB"),
                _planned(3, "drop", "nvme-a", "lustre-01", "untouched 40 min, nvme-a reached its high watermark"),
            ],
            moves_total=2,
            refusals=[_refused(4, "nvme-a", "nvme-a is full of blocks that are used more")],
            refused=3,
        )

    def plan(self) -> PlanView:
        return PlanView(
            now_us=5, paused=self.is_paused, dry_run=False,
            moves=[_planned(1, "promote", "lustre-01", "nvme-a", "3rd touch in 40 s")], moves_total=1,
            refusals=[], refused=0, approve=True, pending=self.waiting,
        )  # fmt: skip

    def pending(self) -> PendingPlanView | None:
        return self.waiting

    def apply(self, actor: str) -> PlanDecisionView:
        self._require_unpaused()
        return self._decided("apply", actor, "41", ["41-0"])

    def approve(self, actor: str, plan_id: str) -> PlanDecisionView:
        self._require_unpaused()
        self._require_waiting(plan_id)
        return self._decided("approve", actor, plan_id, ["40-0"], [_refused(3, "lustre-01", "drop: it holds no copy")])

    def reject(self, actor: str, plan_id: str) -> PlanDecisionView:
        self._require_waiting(plan_id)
        return self._decided("reject", actor, plan_id, [])

    def retry(self, actor: str, move_id: str) -> MoveView:
        if move_id not in ("7-0", "7-2"):
            raise NothingSuch(f"move {move_id!r} is not open, and not kept: GET /api/v1/moves lists those that are")
        if move_id == "7-0":
            raise ActionRefused("move 7-0 is copying: only an aborted one is retried")
        self.asked.append(("retry", actor, move_id))
        return MoveView(
            id="42-0", kind="promote", state="planned", hash=f"{2:032x}", tenant="agents", source="lustre-01",
            target="nvme-a", block_bytes=4_096, reason=f"retried by {actor}; 3rd touch in 40 s", planned_us=5,
            changed_us=5, note="",
        )  # fmt: skip

    def _require_unpaused(self) -> None:
        if self.is_paused:
            raise ActionRefused("all moves are paused by an operator: POST /api/v1/resume first")

    def _require_waiting(self, plan_id: str) -> None:
        if self.waiting is None or plan_id != self.waiting.id:
            raise ActionRefused(f"plan {plan_id} is not known: none waits now, see GET /api/v1/plan")

    def _decided(
        self, action: str, actor: str, plan_id: str, moves: list[str], refusals: list[RefusalView] | None = None
    ) -> PlanDecisionView:
        self.asked.append((action, actor, plan_id))
        self.waiting = None
        return PlanDecisionView(
            id=plan_id, state="rejected" if action == "reject" else "approved", actor=actor, decided_us=6, moves=moves,
            moves_opened=len(moves), refusals=refusals or [], left_out=len(refusals or []),
        )  # fmt: skip
