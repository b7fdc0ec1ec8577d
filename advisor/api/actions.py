"""What a person may have the service do: routes of the REST API, and their bodies."""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated, TypeVar

from fastapi import APIRouter, HTTPException, Path
from pydantic import BaseModel, ConfigDict, Field

from advisor.api.problems import documented
from advisor.errors import ActionRefused, NothingSuch
from advisor.views import AdvisorActions, CancelView, PauseView, PlanView

Answer = TypeVar("Answer")

Actor = Annotated[str, Field(min_length=1, max_length=128, description="Who asks; it is logged.")]

UNNAMED = "operator"


class CancelOrder(BaseModel):
    model_config = ConfigDict(extra="forbid")

    actor: Actor = UNNAMED


class PauseOrder(BaseModel):
    model_config = ConfigDict(extra="forbid")

    volume: str = Field("", max_length=64, description="A volume's id; left out, everything.")
    actor: Actor = UNNAMED


def action_routes(actions: AdvisorActions) -> APIRouter:
    """Everything under `/api/v1` that changes something about moves, and the plan that would be made now."""
    routes = APIRouter(prefix="/api/v1", tags=["actions"])

    @routes.get("/plan", summary="The plan that would be made now; nothing is changed", responses=documented(422))
    def plan() -> PlanView:
        return actions.plan()

    @routes.post("/pause", summary="Plan and begin no moves, on one volume or on all", responses=documented(404, 422))
    def pause(order: PauseOrder) -> PauseView:
        return done(lambda: actions.pause(order.actor, order.volume))

    @routes.post("/resume", summary="Take back a pause", responses=documented(404, 422))
    def resume(order: PauseOrder) -> PauseView:
        return done(lambda: actions.resume(order.actor, order.volume))

    @routes.post("/moves/cancel", summary="Cancel all open moves and compactions", responses=documented(422))
    def cancel_all(order: CancelOrder) -> CancelView:
        return done(lambda: actions.cancel_all(order.actor))

    @routes.post("/moves/{move_id}/cancel", summary="Cancel one open move", responses=documented(404, 409, 422))
    def cancel(move_id: Annotated[str, Path(max_length=64)], order: CancelOrder) -> CancelView:
        return done(lambda: actions.cancel(order.actor, move_id))

    @routes.post(
        "/compactions/{compaction_id}/cancel", summary="Cancel an open compaction", responses=documented(404, 422)
    )
    def cancel_compaction(compaction_id: Annotated[str, Path(max_length=64)], order: CancelOrder) -> CancelView:
        return done(lambda: actions.cancel_compaction(order.actor, compaction_id))

    return routes


def done(act: Callable[[], Answer]) -> Answer:
    """What `act` answers; a refusal as the problem that says why."""
    try:
        return act()
    except NothingSuch as error:
        raise HTTPException(404, str(error)) from error
    except ActionRefused as error:
        raise HTTPException(409, str(error)) from error
