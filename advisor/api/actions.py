"""What a person may have the service do: routes of the REST API, and their bodies."""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated, TypeVar

from fastapi import APIRouter, Body, Depends, HTTPException, Path
from pydantic import BaseModel, ConfigDict, Field

from advisor.access.identity import Identity, Scope
from advisor.api.access import needs
from advisor.api.problems import documented
from advisor.errors import ActionRefused, FieldRefused, NothingSuch, Outdated
from advisor.views import AdvisorActions, CancelView, PauseView

Answer = TypeVar("Answer")

Planner = Annotated[Identity, Depends(needs(Scope.PLAN))]
Operator = Annotated[Identity, Depends(needs(Scope.OPERATE))]


class Order(BaseModel):
    """A body without fields: who asks is known by the door."""

    model_config = ConfigDict(extra="forbid")


NoOrder = Annotated[Order, Body(default_factory=Order)]
"""Nothing at all is a body without fields, too."""


class PauseOrder(Order):
    volume: str = Field("", max_length=64, description="A volume's id; left out, everything.")


def action_routes(actions: AdvisorActions) -> APIRouter:
    """Pauses and cancels."""
    routes = APIRouter(prefix="/api/v1", tags=["actions"])

    @routes.post("/pause", summary="Plan and begin no moves, on one volume or on all", responses=documented(404, 422))
    def pause(order: PauseOrder, who: Operator) -> PauseView:
        return done(lambda: actions.pause(who.name, order.volume))

    @routes.post("/resume", summary="Take back a pause", responses=documented(404, 422))
    def resume(order: PauseOrder, who: Operator) -> PauseView:
        return done(lambda: actions.resume(who.name, order.volume))

    @routes.post("/moves/cancel", summary="Cancel all open moves and compactions", responses=documented(422))
    def cancel_all(_: NoOrder, who: Operator) -> CancelView:
        return done(lambda: actions.cancel_all(who.name))

    @routes.post("/moves/{move_id}/cancel", summary="Cancel one open move", responses=documented(404, 409, 422))
    def cancel(move_id: Annotated[str, Path(max_length=64)], _: NoOrder, who: Planner) -> CancelView:
        return done(lambda: actions.cancel(who.name, move_id))

    @routes.post(
        "/compactions/{compaction_id}/cancel", summary="Cancel an open compaction", responses=documented(404, 422)
    )
    def cancel_compaction(compaction_id: Annotated[str, Path(max_length=64)], _: NoOrder, who: Operator) -> CancelView:
        return done(lambda: actions.cancel_compaction(who.name, compaction_id))

    return routes


def done(act: Callable[[], Answer]) -> Answer:
    """What `act` answers; a refusal as the problem that says why (of a field, `advisor.api.problems` does)."""
    try:
        return act()
    except FieldRefused:
        raise
    except NothingSuch as error:
        raise HTTPException(404, str(error)) from error
    except Outdated as error:
        raise HTTPException(412, str(error)) from error
    except ActionRefused as error:
        raise HTTPException(409, str(error)) from error
