"""The page of recordings and replays: record or send one, run it through policies, compare, see what to choose."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Annotated, TypeVar

from fastapi import APIRouter, Depends, Query
from fastapi.responses import HTMLResponse
from pydantic import BaseModel, ConfigDict, Field

from advisor.access.identity import Identity, Scope
from advisor.advice import CURVE_SHARES
from advisor.api.access import needs
from advisor.api.feed import LiveFeed
from advisor.api.parts import AdminParts
from advisor.errors import NothingSuch
from advisor.recording_views import AdvisorRecordings, RecordingDetailView, RecordingView
from advisor.replay_orders import DEFAULT_POLICIES
from advisor.replay_steps import is_open
from advisor.replay_views import AdvisorReplays, ReplayDetailView
from advisor.web.pages import Pages
from advisor.web.paging import page_of

Found = TypeVar("Found")

PATH = "/replay"

POLICIES_SAID = {
    "lru": "used longest ago leaves first",
    "s3-fifo": "in order of arrival, with a small queue in front that what is used once does not pass",
    "sieve": "in order of arrival; what was used meanwhile stays for a round",
    "arc": "recent and frequent, weighed by what was missed",
    "2q": "used once leaves before used twice",
    "lfu": "fewest uses leave first",
    "gdsf": "uses since it came, large blocks less, with ageing",
    "length-aware": "fewest uses, then the deepest",
    "fifo": "in order of arrival",
    "lru-tail": "lru, each request from its leaf to its root",
    "lru-leaf": "lru, leaves of the tree alone",
    "gdsf-leaf": "gdsf, leaves alone",
    "arc-leaf": "arc, leaves alone",
    "s3-fifo-lcs": "s3-fifo with libCacheSim's start-up",
    "belady-leaf": "a bound: it knows the future, leaves alone",
    "min": "a bound: it knows the future",
}
"""Of one tier: who leaves. Those that are offered first are `FIRST_POLICIES`."""
FIRST_POLICIES = 5
ADMISSIONS_SAID = {
    "auto": "the best of six rules, learned as it goes; the default",
    "touch-2": "at the second use",
    "touch-3": "at the third use",
    "always": "at the first use",
    "ghost": "at the second use within as many uses as it holds blocks",
    "ranked": "best recent score first, for one of a lower score",
    "hazard": "when it is worth the price of a move",
    "duel": "first, second or third use, whichever finds most",
}
"""Of two: when a block comes to the fast one."""
DEFAULT_ADMISSIONS = ("auto", "touch-2")
DEFAULT_BUDGETS = (0.1, 0.5)
DEFAULT_CAPACITIES = (1_000, 10_000, 100_000)
"""Where the recording's blocks are not counted yet."""
_OFFERED_SHARES = CURVE_SHARES[2:6]


class ReplayQuery(BaseModel):
    model_config = ConfigDict(extra="forbid")

    recording: str = Field("", max_length=64)
    replay: str = Field("", max_length=64)
    skip: int = Field(0, ge=0, le=1_000_000)


@dataclass(frozen=True, slots=True)
class Chosen:
    """What the address names; None where it names nothing that is there."""

    recording: RecordingDetailView | None
    replay: ReplayDetailView | None


def capacities_for(recording: RecordingDetailView | None) -> list[int]:
    """Blocks to try, of the recording's different blocks; else round numbers."""
    blocks = 0 if recording is None or recording.figures is None else recording.figures.requests.blocks
    if not blocks:
        return list(DEFAULT_CAPACITIES)
    return sorted({max(1, round(blocks * share)) for share in _OFFERED_SHARES})


def first_readable(recordings: Sequence[RecordingView]) -> str:
    """The one to begin with: the newest that is whole; empty: there is none."""
    return next((each.name for each in recordings if each.state == "done"), "")


def chosen(query: ReplayQuery, recordings: AdvisorRecordings, replays: AdvisorReplays) -> Chosen:
    """A replay's own recording where none is named."""
    replay = _found(lambda: replays.get(query.replay)) if query.replay else None
    name = query.recording or (replay.replay.order.recording if replay else first_readable(recordings.list()))
    return Chosen(_found(lambda: recordings.get(name)) if name else None, replay)


def _found(look: Callable[[], Found]) -> Found | None:
    try:
        return look()
    except NothingSuch:
        return None


def replay_routes(pages: Pages, parts: AdminParts, feed: LiveFeed) -> APIRouter:
    """`feed` is not used: the page asks for itself anew. None without recordings and replays."""
    routes = APIRouter(include_in_schema=False, default_response_class=HTMLResponse)
    recordings, replays = parts.recordings, parts.replays
    if recordings is None or replays is None:
        return routes

    @routes.get(PATH)
    def replay(
        query: Annotated[ReplayQuery, Query()], who: Annotated[Identity, Depends(needs(Scope.READ))]
    ) -> HTMLResponse:
        picked = chosen(query, recordings, replays)
        known, run = recordings.list(), replays.list()
        shown = pages.render(
            "replays.html", who, query=query, recording=picked.recording, picked=picked.replay,
            recordings=page_of(known, query.skip, PATH, {"recording": query.recording, "replay": query.replay}),
            is_recording=any(each.state == "recording" for each in known),
            replays=run, is_running=any(is_open(each) for each in run), is_open=is_open,
            capacities=capacities_for(picked.recording), upload_bytes_max=recordings.upload_bytes_max,
            policies=POLICIES_SAID, first_policies=FIRST_POLICIES, default_policies=DEFAULT_POLICIES,
            admissions=ADMISSIONS_SAID, default_admissions=DEFAULT_ADMISSIONS, budgets=DEFAULT_BUDGETS,
        )  # fmt: skip
        return HTMLResponse(shown)

    return routes
