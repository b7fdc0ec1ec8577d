"""What the admin view shows of plans, and has done with them."""

from __future__ import annotations

from typing import Protocol

from advisor.views import MoveView, RefusalView, View


class PlannedView(View):
    """A move that would be planned now, or that waits for a person."""

    kind: str
    hash: str
    tenant: str
    source: str
    target: str
    block_bytes: int
    reason: str


class PendingPlanView(View):
    """A plan that waits for a person (`policy.approve`). No other is made meanwhile."""

    id: str
    planned_us: int
    lapses_us: int
    """Not decided by then, it is dropped and the next tick plans anew."""
    moves: list[PlannedView]
    """The first 1,000."""
    moves_total: int
    refusals: list[RefusalView]
    """The first few."""
    refused: int


class PlanView(View):
    """The plan that a tick would make now. Nothing was changed by asking."""

    now_us: int
    paused: bool
    """All planning is paused: no tick makes it until it is resumed."""
    dry_run: bool
    moves: list[PlannedView]
    """The first 1,000."""
    moves_total: int
    refusals: list[RefusalView]
    """The first few."""
    refused: int
    approve: bool
    """Plans wait for a person."""
    pending: PendingPlanView | None
    """The one that waits now."""


class PlanDecisionView(View):
    """What became of a plan."""

    id: str
    state: str
    """`approved` or `rejected`."""
    actor: str
    decided_us: int
    moves: list[str]
    """Ids of the moves that were opened: the first 1,000."""
    moves_opened: int
    refusals: list[RefusalView]
    """Moves that were left out, and why: the first few."""
    left_out: int


class AdvisorPlans(Protocol):
    """What a person may have done with plans and moves. Thread-safe; each is logged with its `actor`.

    Raises `advisor.errors.NothingSuch` where there is no such move, `ActionRefused` where it cannot be done.
    """

    def plan(self) -> PlanView: ...
    def pending(self) -> PendingPlanView | None:
        """The plan that waits; costs no planning."""
    def apply(self, actor: str) -> PlanDecisionView:
        """Plan now and carry it out, in a dry run too, and instead of the plan that waits."""
    def approve(self, actor: str, plan_id: str) -> PlanDecisionView:
        """Open the moves of the plan that waits. What is not possible any more is left out."""
    def reject(self, actor: str, plan_id: str) -> PlanDecisionView:
        """Drop the plan that waits; the next tick plans anew."""
    def retry(self, actor: str, move_id: str) -> MoveView:
        """Open a move of the same block, source and target as an aborted one."""
