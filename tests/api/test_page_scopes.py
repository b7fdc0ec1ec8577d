"""Pages leave out what whoever looks at them may not do, and for one tenant what is of all."""

from __future__ import annotations

import re
from functools import cache

import pytest
from as_tenant import entering
from direct import Direct
from sample_reader import SampleReader

from advisor.access.identity import Scope

PLANNERS = {
    "POST /api/v1/plan/40/approve", "POST /api/v1/plan/40/reject", "POST /api/v1/plan/apply",
}
OPERATORS = {
    "POST /api/v1/moves/cancel",
    "POST /api/v1/pause", "POST /api/v1/compactions/80-compaction-0/cancel", "POST /api/v1/volumes/nvme-a/pause",
    "POST /api/v1/volumes/nvme-a/drain", "POST /api/v1/volumes/nvme-a/scrub", "PATCH /api/v1/volumes/nvme-a",
}
ADMINS = {"POST /api/v1/volumes", "DELETE /api/v1/volumes/nvme-a", "POST /api/v1/deletions/d-2/abandon"}
PAGES = ("/volumes", "/volumes/nvme-a", "/moves", "/moves/plan")


@cache
def looking(scope: Scope, tenant: str = "") -> Direct:
    return Direct(SampleReader(), **entering(scope, tenant))


def writes(scope: Scope) -> set[str]:
    texts = (looking(scope).get(page).text for page in PAGES)
    found = {sent for text in texts for sent in re.findall(r'data-send="([^"]+)"', text)}
    return {sent for sent in found if not re.search("/moves/[^/]+/(cancel|retry)$", sent)}


def test_buttons_are_those_of_the_scope() -> None:
    assert writes(Scope.READ) == set()
    assert writes(Scope.PLAN) == PLANNERS
    assert writes(Scope.OPERATE) == PLANNERS | OPERATORS
    assert writes(Scope.ADMIN) == PLANNERS | OPERATORS | ADMINS


def test_open_moves_are_cancelled_and_aborted_ones_retried_by_planners() -> None:
    text = looking(Scope.PLAN).get("/moves").text
    assert len(re.findall(r"/moves/[^/\"]+/cancel", text)) == 42
    assert len(re.findall(r"/moves/[^/\"]+/retry", text)) == 1


def test_who_is_logged_in_is_said_with_a_way_out() -> None:
    text = looking(Scope.PLAN).get("/moves").text
    assert "ann · plan" in text
    assert 'action="/logout"' in text
    assert "/logout" not in Direct(SampleReader()).get("/moves").text


def test_one_tenant_alone_is_led_to_its_blocks_and_sees_no_other_pages() -> None:
    client = looking(Scope.ADMIN, "agents")
    answer = client.get("/")
    assert (answer.status_code, answer.headers["location"]) == (303, "/blocks")
    listed = re.findall(r'<a href="([^"]+)"', client.get("/blocks").text.partition("</nav>")[0].partition("<nav")[2])
    assert listed == ["/prefixes", "/blocks"]


@pytest.mark.parametrize("page", ["/volumes", "/volumes/nvme-a", "/moves", "/moves/plan", "/producers", "/live"])
def test_pages_of_all_tenants_are_refused_to_one(page: str) -> None:
    assert looking(Scope.ADMIN, "agents").get(page).status_code == 403
