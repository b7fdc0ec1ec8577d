"""Plans that wait for a person, one at a time, and what became of the last ones. Pure.

In approve mode a tick's plan is held here with its moves; `advisor.fold` opens them when a person approves.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

from advisor.errors import ActionRefused
from advisor.moves import Move
from advisor.policies.plan import Refusal
from advisor.state_diagram import state_diagram

ENDED_KEPT_MAX = 16
OPENED_KEPT_MAX = 1_000
"""Ids of opened moves that an ended plan keeps."""
NOT_DECIDED = "it was not decided in time"


class PlanState(StrEnum):
    WAITING = "waiting"
    APPROVED = "approved"
    REJECTED = "rejected"
    LAPSED = "lapsed"
    """Nobody decided in time."""
    WITHDRAWN = "withdrawn"
    """The settings changed, or a plan was applied in its place."""


class PlanTrigger(StrEnum):
    APPROVE = "approve"
    REJECT = "reject"
    LAPSE = "lapse"
    WITHDRAW = "withdraw"


TRANSITIONS: dict[PlanState, dict[PlanTrigger, PlanState]] = {
    PlanState.WAITING: {
        PlanTrigger.APPROVE: PlanState.APPROVED,
        PlanTrigger.REJECT: PlanState.REJECTED,
        PlanTrigger.LAPSE: PlanState.LAPSED,
        PlanTrigger.WITHDRAW: PlanState.WITHDRAWN,
    },
}
"""States without an entry are final."""


class IllegalPlanStep(ActionRefused):
    """A plan that does not wait, or not any more: says why. Nothing was changed."""


@dataclass(slots=True)
class HeldPlan:
    """`plan_id` is the log position that it was made at. `refused` counts the refusals of which a few are kept."""

    plan_id: str
    planned_us: int
    moves: list[Move]
    """Empty once it is decided."""
    refusals: list[Refusal]
    """Of the plan while it waits; afterwards of the moves that were left out."""
    refused: int
    state: PlanState = PlanState.WAITING
    actor: str = ""
    decided_us: int = 0
    decided_at: int = 0
    """Log position of what decided it."""
    opened: list[str] = field(default_factory=list)
    """Ids of the first moves that were opened."""
    opened_total: int = 0


class PlanDesk:
    """Mutated by the fold alone."""

    def __init__(self) -> None:
        self.waiting: HeldPlan | None = None
        self.ended: deque[HeldPlan] = deque(maxlen=ENDED_KEPT_MAX)

    @property
    def moves_waiting(self) -> int:
        return 0 if self.waiting is None else len(self.waiting.moves)

    def hold(self, plan: HeldPlan) -> None:
        """Raises `IllegalPlanStep` where one waits."""
        if self.waiting is not None:
            raise IllegalPlanStep(f"plan {self.waiting.plan_id} waits already: approve or reject it first")
        self.waiting = plan

    def get(self, plan_id: str) -> HeldPlan | None:
        known = [*self.ended, *([self.waiting] if self.waiting is not None else [])]
        return next((plan for plan in reversed(known) if plan.plan_id == plan_id), None)

    def approved_at(self, position: int) -> int:
        """Id of the plan that was approved at a log position; 0 where none was."""
        approved = (plan for plan in self.ended if plan.state is PlanState.APPROVED and plan.decided_at == position)
        return next((int(plan.plan_id) for plan in approved), 0)

    def require_waiting(self, plan_id: str, now_us: int, within_s: float) -> HeldPlan:
        """The plan that waits, if it is that one. Raises `IllegalPlanStep`."""
        plan = self.waiting
        if plan is None or plan.plan_id != plan_id:
            ended = self.get(plan_id)
            fate = "is not known" if ended is None else f"is {ended.state} already"
            waits = "none waits now" if plan is None else f"plan {plan.plan_id} waits now"
            raise IllegalPlanStep(f"plan {plan_id} {fate}: {waits}, see GET /api/v1/plan")
        if has_lapsed(plan, now_us, within_s):
            raise IllegalPlanStep(f"plan {plan_id} has lapsed, {NOT_DECIDED}: wait for the next one")
        return plan

    def lapse(self, now_us: int, position: int, within_s: float) -> None:
        """Drop what waits for longer."""
        if self.waiting is not None and has_lapsed(self.waiting, now_us, within_s):
            self.end(PlanTrigger.LAPSE, now_us, position)

    def end(self, trigger: PlanTrigger, now_us: int, position: int, actor: str = "") -> HeldPlan:
        """Decide on the plan that waits; it keeps its moves for the caller to open. Raises `IllegalPlanStep`."""
        plan = self.waiting
        state = None if plan is None else TRANSITIONS.get(plan.state, {}).get(trigger)
        if plan is None or state is None:
            raise IllegalPlanStep(f"no plan waits that could take {trigger}")
        plan.state, plan.actor, plan.decided_us, plan.decided_at = state, actor, now_us, position
        plan.refusals, plan.refused = [], 0
        self.ended.append(plan)
        self.waiting = None
        if trigger is not PlanTrigger.APPROVE:
            plan.moves = []
        return plan

    def opened(self, plan: HeldPlan, moves: Sequence[Move], refusals: Sequence[Refusal], refused: int) -> None:
        """Note which moves of an approved plan were opened, and which were left out."""
        plan.moves = []
        plan.opened, plan.opened_total = [move.move_id for move in moves[:OPENED_KEPT_MAX]], len(moves)
        plan.refusals, plan.refused = list(refusals), refused

    def described(self) -> list[Any]:
        """For a digest."""
        return [
            [p.plan_id, p.planned_us, p.state, p.actor, p.decided_us, p.decided_at, p.refused, p.opened, p.opened_total]
            + [[move.move_id, f"{move.key.sequence_hash:x}"] for move in p.moves]
            + [[f"{refusal.key.sequence_hash:x}", refusal.volume, refusal.reason] for refusal in p.refusals]
            for p in [*self.ended, *([self.waiting] if self.waiting is not None else [])]
        ]


def has_lapsed(plan: HeldPlan, now_us: int, within_s: float) -> bool:
    return now_us - plan.planned_us >= within_s * 1e6


def diagram() -> str:
    """For the documentation."""
    return state_diagram(PlanState.WAITING, TRANSITIONS)
