"""Plans that a person looks at, approves, rejects or has made now, and moves tried again: routes of the REST API."""

from __future__ import annotations

from typing import Annotated

from fastapi import APIRouter, Depends, Path

from advisor.access.identity import Scope
from advisor.api.access import needs
from advisor.api.actions import NoOrder, Planner, done
from advisor.api.problems import documented
from advisor.plan_views import AdvisorPlans, PlanDecisionView, PlanView
from advisor.views import MoveView

PlanId = Annotated[str, Path(max_length=20, description="`pending.id` of `GET /api/v1/plan`.")]


def plan_routes(plans: AdvisorPlans) -> APIRouter:
    """`/api/v1/plan`, and `/api/v1/moves/{move_id}/retry`."""
    routes = APIRouter(prefix="/api/v1", tags=["plan"])

    @routes.get("/plan", summary="The plan that would be made now, and the one that waits; nothing is changed",
                responses=documented(422), dependencies=[Depends(needs(Scope.READ))])
    def plan() -> PlanView:
        return plans.plan()

    @routes.post("/plan/apply", summary="Plan now and carry it out, in a dry run too", responses=documented(409, 422))
    def apply(_: NoOrder, who: Planner) -> PlanDecisionView:
        """The plan that waits, if one does, is withdrawn."""
        return done(lambda: plans.apply(who.name))

    @routes.post(
        "/plan/{plan_id}/approve", summary="Carry out the plan that waits", responses=documented(404, 409, 422)
    )
    def approve(plan_id: PlanId, _: NoOrder, who: Planner) -> PlanDecisionView:
        """What is not possible any more is left out; `refusals` say why."""
        return done(lambda: plans.approve(who.name, plan_id))

    @routes.post(
        "/plan/{plan_id}/reject", summary="Drop the plan that waits", responses=documented(404, 409, 422)
    )
    def reject(plan_id: PlanId, _: NoOrder, who: Planner) -> PlanDecisionView:
        return done(lambda: plans.reject(who.name, plan_id))

    @routes.post("/moves/{move_id}/retry", summary="Try an aborted move again", responses=documented(404, 409, 422))
    def retry(move_id: Annotated[str, Path(max_length=64)], _: NoOrder, who: Planner) -> MoveView:
        """Answers with the fresh move."""
        return done(lambda: plans.retry(who.name, move_id))

    return routes
