"""Volumes, one by one: routes of the REST API, and their bodies."""

from __future__ import annotations

from typing import Annotated, Any, Self

import msgspec
from fastapi import APIRouter, Depends, Path, Query
from pydantic import Field, WithJsonSchema, model_validator

from advisor.access.identity import Identity, Scope
from advisor.api.access import needs
from advisor.api.actions import NoOrder, Operator, Order, done
from advisor.api.problems import documented
from advisor.api.queries import Query as Parameters
from advisor.views import AdvisorActions, PauseView
from advisor.volume_views import AdvisorVolumes, ScrubView, UnregisteredView, VolumeDetail, descriptor_refused
from storage_agent.descriptor import CAPACITY_BLOCKS_MAX, VolumeDescriptor, descriptor_of
from storage_agent.errors import DescriptorError

Admin = Annotated[Identity, Depends(needs(Scope.ADMIN))]
VolumeId = Annotated[str, Path(max_length=64, description="A volume's id.")]


def _descriptor_schema() -> dict[str, Any]:
    """The descriptor's own fields, for OpenAPI."""
    (schema,), components = msgspec.json.schema_components([VolumeDescriptor], ref_template="{name}")
    described = components[schema["$ref"]]
    # An option of any JSON type: generators of clients want to be told that an array's items are anything too.
    kinds = described["properties"]["options"]["additionalProperties"]["anyOf"]
    described["properties"]["options"]["additionalProperties"]["anyOf"] = [
        {**kind, "items": {}} if kind["type"] == "array" else kind for kind in kinds
    ]
    return {**described, "additionalProperties": False}


Descriptor = Annotated[dict[str, Any], WithJsonSchema(_descriptor_schema())]

EXAMPLE: dict[str, Any] = {
    "id": "nvme-c", "kind": "slab", "path": "/srv/kv/nvme-c.slab", "capacity_blocks": 100_000,
    "block_bytes_max": 2_097_152, "speed_rank": 1,
}  # fmt: skip


class RegisterOrder(Order):
    agent: str = Field(min_length=1, max_length=128, description="Its name in the settings.", examples=["host-7"])
    descriptor: Descriptor = Field(
        examples=[EXAMPLE],
        description="As `[[volumes]]` of an agent's settings has it. Its path is absolute and lies in the agent's "
        "allowed roots; an object store is one that the agent's settings name, never a URL.",
    )


class VolumeChange(Order):
    """What is left out stays as it is."""

    capacity_blocks: int | None = Field(None, ge=1, le=CAPACITY_BLOCKS_MAX, description="Blocks that it may hold.")
    low_watermark: float | None = Field(
        None,
        gt=0,
        lt=1,
        description="Share of the capacity that a volume past its high watermark comes down to.",
        examples=[0.8],
    )
    high_watermark: float | None = Field(
        None, gt=0, le=1, description="From this share on, blocks leave.", examples=[0.92]
    )

    @model_validator(mode="after")
    def _makes_sense(self) -> Self:
        if self.capacity_blocks is None and self.low_watermark is None and self.high_watermark is None:
            raise ValueError("nothing is to be changed: give capacity_blocks, low_watermark or high_watermark")
        low, high = self.low_watermark, self.high_watermark
        if low is not None and high is not None and low >= high:
            raise ValueError(f"low_watermark {low:g} is not below high_watermark {high:g}: change one of them")
        return self


class UnregisterQuery(Parameters):
    force: bool = Field(False, description="Also where it holds blocks: no reader finds them any more.")


def volume_routes(volumes: AdvisorVolumes, actions: AdvisorActions | None) -> APIRouter:
    """`/api/v1/volumes` and what is under it, but for the list."""
    routes = APIRouter(prefix="/api/v1", tags=["volumes"])

    @routes.post("/volumes", summary="Register a volume with its agent", responses=documented(404, 409, 422))
    def register(order: RegisterOrder, who: Admin) -> VolumeDetail:
        """A descriptor that cannot be is refused with 422; 409 is of one that cannot be now, as its id is taken."""
        try:
            descriptor = descriptor_of(order.descriptor)
        except DescriptorError as error:
            raise descriptor_refused(str(error), error.fault) from error
        return done(lambda: volumes.register(who.name, order.agent, descriptor))

    @routes.get("/volumes/{volume_id}", summary="Everything of one volume", responses=documented(404, 422),
                dependencies=[Depends(needs(Scope.READ))])
    def one(volume_id: VolumeId) -> VolumeDetail:
        return done(lambda: volumes.get(volume_id))

    @routes.delete("/volumes/{volume_id}", summary="Unregister a volume; its file stays",
                   responses=documented(404, 409, 422))
    def unregister(volume_id: VolumeId, query: Annotated[UnregisterQuery, Query()], who: Admin) -> UnregisteredView:
        return done(lambda: volumes.unregister(who.name, volume_id, force=query.force))

    @routes.patch("/volumes/{volume_id}", summary="Change capacity or watermarks", responses=documented(404, 409, 422))
    def change(volume_id: VolumeId, order: VolumeChange, who: Operator) -> VolumeDetail:
        return done(
            lambda: volumes.change(
                who.name,
                volume_id,
                capacity_blocks=order.capacity_blocks,
                low_watermark=order.low_watermark,
                high_watermark=order.high_watermark,
            )
        )

    @routes.post("/volumes/{volume_id}/drain", summary="Have all blocks leave a volume", responses=documented(404, 422))
    def drain(volume_id: VolumeId, _: NoOrder, who: Operator) -> VolumeDetail:
        return done(lambda: volumes.drain(who.name, volume_id))

    @routes.post("/volumes/{volume_id}/undrain", summary="Let blocks stay and come again",
                 responses=documented(404, 409, 422))
    def undrain(volume_id: VolumeId, _: NoOrder, who: Operator) -> VolumeDetail:
        return done(lambda: volumes.undrain(who.name, volume_id))

    @routes.post("/volumes/{volume_id}/scrub", status_code=202, summary="Read and check every block of a volume",
                 responses=documented(404, 409, 422))
    def scrub(volume_id: VolumeId, _: NoOrder, who: Operator) -> ScrubView:
        """Answers when it is begun; the next route says how it went."""
        return done(lambda: volumes.scrub(who.name, volume_id))

    @routes.get("/volumes/{volume_id}/scrub", summary="How the last scrub of a volume went",
                responses=documented(404, 422), dependencies=[Depends(needs(Scope.READ))])
    def scrub_of(volume_id: VolumeId) -> ScrubView:
        return done(lambda: volumes.scrub_of(volume_id))

    if actions is not None:
        _pausing(routes, actions)
    return routes


def _pausing(routes: APIRouter, actions: AdvisorActions) -> None:
    @routes.post("/volumes/{volume_id}/pause", summary="Plan and begin no moves on a volume",
                 responses=documented(404, 422))
    def pause(volume_id: VolumeId, _: NoOrder, who: Operator) -> PauseView:
        return done(lambda: actions.pause(who.name, volume_id))

    @routes.post("/volumes/{volume_id}/resume", summary="Take back a volume's pause", responses=documented(404, 422))
    def resume(volume_id: VolumeId, _: NoOrder, who: Operator) -> PauseView:
        return done(lambda: actions.resume(who.name, volume_id))
