"""The pages of volumes: all of them, and everything of one with what may be done to it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Annotated

from fastapi import APIRouter, Depends, Path, Query
from fastapi.responses import HTMLResponse
from pydantic import BaseModel, ConfigDict, Field

from advisor.access.identity import Identity, Scope
from advisor.api.access import needs
from advisor.api.actions import done
from advisor.api.feed import LiveFeed
from advisor.api.parts import AdminParts
from advisor.views import Check, VolumeView
from advisor.volume_views import HeatBin
from advisor.web import formats
from advisor.web.pages import Pages
from advisor.web.paging import page_of

PATH = "/volumes"

MOVES_SHOWN = 20

_AGENT = "agent "

Reader = Annotated[Identity, Depends(needs(Scope.READ))]


class VolumesPageQuery(BaseModel):
    model_config = ConfigDict(extra="forbid")

    skip: int = Field(0, ge=0, le=1_000_000)


@dataclass(frozen=True, slots=True)
class VolumeFigures:
    """Of all volumes. `away` counts those that cannot be used now."""

    total: int
    blocks: int
    block_bytes: int
    capacity_blocks: int
    waiting: int
    leaving: int
    away: int
    past_high: int

    @property
    def fill(self) -> float | None:
        return self.blocks / self.capacity_blocks if self.capacity_blocks else None


@dataclass(frozen=True, slots=True)
class HeatRow:
    """A bin of a histogram. `width`: of the longest one, 0 to 1."""

    label: str
    blocks: int
    share: float
    width: float


def volume_figures(volumes: Sequence[VolumeView]) -> VolumeFigures:
    return VolumeFigures(
        total=len(volumes),
        blocks=sum(volume.blocks for volume in volumes),
        block_bytes=sum(volume.block_bytes for volume in volumes),
        capacity_blocks=sum(volume.capacity_blocks for volume in volumes),
        waiting=sum(volume.incoming for volume in volumes),
        leaving=sum(volume.outgoing for volume in volumes),
        away=sum(volume.state.startswith(("away", "agent unreachable")) for volume in volumes),
        past_high=sum(volume.fill > volume.high_watermark for volume in volumes),
    )


def heat_rows(bins: Sequence[HeatBin], said: Callable[[HeatBin], str]) -> list[HeatRow]:
    """`said` names a bin."""
    total = sum(each.blocks for each in bins) or 1
    most = max((each.blocks for each in bins), default=0) or 1
    return [HeatRow(said(each), each.blocks, each.blocks / total, each.blocks / most) for each in bins]


def age_label(each: HeatBin) -> str:
    """`under 1.0 s`, `10 s to 100 s`, `11 d 13 h and more`."""
    if each.below is None:
        return f"{formats.seconds(each.at_least)} and more"
    ends = formats.seconds(each.below)
    return f"{formats.seconds(each.at_least)} to {ends}" if each.at_least else f"under {ends}"


def touches_label(each: HeatBin) -> str:
    """Whole numbers: `0`, `1`, `2 to 3`, `128 and more`."""
    first = round(each.at_least)
    if each.below is None:
        return f"{first} and more"
    last = round(each.below) - 1
    return str(first) if last <= first else f"{first} to {last}"


def agents_named(checks: Sequence[Check], volumes: Sequence[VolumeView]) -> list[str]:
    """Agents that a volume may be registered with."""
    told = {check.name.removeprefix(_AGENT) for check in checks if check.name.startswith(_AGENT)}
    return sorted(told | {volume.agent for volume in volumes})


def volumes_routes(pages: Pages, parts: AdminParts, feed: LiveFeed) -> APIRouter:
    """None where there is no `AdminParts.volumes`. `feed` is not used: the pages ask for themselves anew."""
    routes = APIRouter(include_in_schema=False, default_response_class=HTMLResponse)
    volumes = parts.volumes
    if volumes is None:
        return routes

    @routes.get(PATH)
    def all_volumes(query: Annotated[VolumesPageQuery, Query()], who: Reader) -> HTMLResponse:
        known = parts.reader.volumes()
        shown = pages.render(
            "volumes.html", who, figures=volume_figures(known), volumes=page_of(known, query.skip, PATH, {}),
            agents=agents_named(parts.reader.checks(), known),
        )  # fmt: skip
        return HTMLResponse(shown)

    @routes.get(PATH + "/{volume_id}")
    def one_volume(volume_id: Annotated[str, Path(max_length=64)], who: Reader) -> HTMLResponse:
        detail = done(lambda: volumes.get(volume_id))
        shown = pages.render(
            "volume.html", who, detail=detail, volume=detail.volume,
            by_age=heat_rows(detail.heat.by_age_s, age_label),
            by_touches=heat_rows(detail.heat.by_touches, touches_label),
            moves=parts.reader.moves(limit=MOVES_SHOWN, volume=volume_id, state="open").moves,
            can_pause=parts.actions is not None,
        )  # fmt: skip
        return HTMLResponse(shown)

    return routes
