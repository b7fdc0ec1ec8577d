"""Plans of the running service: what the REST API shows of them, and has done with them."""

from __future__ import annotations

from collections.abc import Sequence

from advisor.entries import OperatorEntry
from advisor.errors import ActionRefused, NothingSuch
from advisor.fold import Fold
from advisor.index import Key
from advisor.move_views import move_view, tenant_of
from advisor.moves import IllegalMove, Move
from advisor.pipeline import now_us
from advisor.plan_desk import HeldPlan, has_lapsed
from advisor.plan_views import PendingPlanView, PlanDecisionView, PlannedView, PlanView
from advisor.policies.plan import Refusal
from advisor.service import AdvisorService
from advisor.views import MoveView, RefusalView

MOVES_SHOWN_MAX = 1_000


class ServicePlans:
    """`advisor.plan_views.AdvisorPlans` over a running service. An action is a log entry; it returns when that is
    applied."""

    def __init__(self, service: AdvisorService) -> None:
        self._service = service

    def plan(self) -> PlanView:
        """See `AdvisorPlans.plan`."""
        with self._service.lock:
            fold = self._service.fold
            plan = fold.preview(now_us())
            return PlanView(
                now_us=now_us(),
                paused="" in fold.paused,
                dry_run=fold.limits.dry_run,
                moves=[
                    _planned(fold, str(p.kind), p.block.key, p.source, p.target, p.block_bytes, p.reason)
                    for p in plan.proposals[:MOVES_SHOWN_MAX]
                ],
                moves_total=len(plan.proposals),
                refusals=_refusals(fold, plan.refusals, fold.now_us),
                refused=plan.refused,
                approve=fold.limits.approve,
                pending=_pending(fold),
            )

    def pending(self) -> PendingPlanView | None:
        """See `AdvisorPlans.pending`."""
        with self._service.lock:
            return _pending(self._service.fold)

    def apply(self, actor: str) -> PlanDecisionView:
        """See `AdvisorPlans.apply`."""
        with self._service.lock:
            self._service.fold.require_unpaused()
        return self._decide(OperatorEntry(actor, "apply"))

    def approve(self, actor: str, plan_id: str) -> PlanDecisionView:
        """See `AdvisorPlans.approve`."""
        with self._service.lock:
            self._service.fold.require_unpaused()
            self._require_waiting(plan_id)
        return self._decide(OperatorEntry(actor, "approve", move=plan_id))

    def reject(self, actor: str, plan_id: str) -> PlanDecisionView:
        """See `AdvisorPlans.reject`."""
        with self._service.lock:
            self._require_waiting(plan_id)
        return self._decide(OperatorEntry(actor, "reject", move=plan_id))

    def retry(self, actor: str, move_id: str) -> MoveView:
        """See `AdvisorPlans.retry`."""
        with self._service.lock:
            self._require_retriable(actor, move_id)
        position = self._service.submit(OperatorEntry(actor, "retry", move=move_id)).result()
        fresh_id = f"{position}-0"
        with self._service.lock:
            moves = self._service.fold.moves
            fresh = moves.open.get(fresh_id) or moves.last_ended(fresh_id)
            if fresh is None:
                self._require_retriable(actor, move_id)
                raise ActionRefused(f"move {move_id} was overtaken by another action: ask again")
            return move_view(self._service.fold, fresh, str(fresh.state))

    def _require_waiting(self, plan_id: str) -> None:
        fold = self._service.fold
        fold.plans.require_waiting(plan_id, fold.now_us, fold.limits.approve_within_s)

    def _require_retriable(self, actor: str, move_id: str) -> None:
        """Raises `NothingSuch` and `ActionRefused`."""
        fold = self._service.fold
        known = fold.moves.open.get(move_id) or fold.moves.last_ended(move_id)
        if known is None:
            raise NothingSuch(f"move {move_id!r} is not open, and not kept: GET /api/v1/moves lists those that are")
        fold.require_unpaused()
        try:
            fold.retried(move_id, actor, "")
        except IllegalMove as error:
            raise ActionRefused(f"{error}" if known.is_open is False else _open_still(known)) from error

    def _decide(self, entry: OperatorEntry) -> PlanDecisionView:
        position = self._service.submit(entry).result()
        plan_id = entry.move or str(position)
        with self._service.lock:
            fold = self._service.fold
            plan = fold.plans.get(plan_id)
            if plan is None or plan.decided_at != position:
                fold.require_unpaused()
                self._require_waiting(plan_id)
                raise ActionRefused(f"plan {plan_id} was overtaken by another action: see GET /api/v1/plan")
            return _decision(fold, plan)


def _open_still(move: Move) -> str:
    return f"move {move.move_id} is {move.state}: only an aborted one is retried"


def _pending(fold: Fold) -> PendingPlanView | None:
    plan, within_s = fold.plans.waiting, fold.limits.approve_within_s
    if plan is None or has_lapsed(plan, fold.now_us, within_s):
        return None
    return PendingPlanView(
        id=plan.plan_id,
        planned_us=plan.planned_us,
        lapses_us=plan.planned_us + int(within_s * 1e6),
        moves=[
            _planned(fold, str(m.kind), m.key, m.source, m.target, m.block_bytes, m.reason)
            for m in plan.moves[:MOVES_SHOWN_MAX]
        ],
        moves_total=len(plan.moves),
        refusals=_refusals(fold, plan.refusals, plan.planned_us),
        refused=plan.refused,
    )


def _decision(fold: Fold, plan: HeldPlan) -> PlanDecisionView:
    return PlanDecisionView(
        id=plan.plan_id,
        state=str(plan.state),
        actor=plan.actor,
        decided_us=plan.decided_us,
        moves=plan.opened,
        moves_opened=plan.opened_total,
        refusals=_refusals(fold, plan.refusals, plan.decided_us),
        left_out=plan.refused,
    )


def _planned(
    fold: Fold, kind: str, key: Key, source: str, target: str, block_bytes: int, reason: str
) -> PlannedView:
    return PlannedView(
        kind=kind,
        hash=f"{key.sequence_hash:032x}",
        tenant=tenant_of(fold, key),
        source=source,
        target=target,
        block_bytes=block_bytes,
        reason=reason,
    )


def _refusals(fold: Fold, refusals: Sequence[Refusal], at_us: int) -> list[RefusalView]:
    return [
        RefusalView(
            at_us=at_us,
            hash=f"{refusal.key.sequence_hash:032x}",
            tenant=tenant_of(fold, refusal.key),
            volume=refusal.volume,
            reason=refusal.reason,
        )
        for refusal in refusals
    ]
