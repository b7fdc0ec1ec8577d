"""The page of the planner's settings, their changes, and the audit."""

from __future__ import annotations

from typing import Annotated

from fastapi import APIRouter, Depends, Query
from fastapi.responses import HTMLResponse
from pydantic import BaseModel, ConfigDict, Field

from advisor.access.identity import Identity, Scope
from advisor.api.access import needs
from advisor.api.feed import LiveFeed
from advisor.api.parts import AdminParts
from advisor.api.policies import etag_of_policies
from advisor.audit_views import AuditPage
from advisor.web.pages import Pages
from advisor.web.paging import address
from advisor.web.policy_fields import policy_fields

PATH = "/settings"

ENTRIES_SHOWN = 50


class SettingsPageQuery(BaseModel):
    """Of the audit."""

    model_config = ConfigDict(extra="forbid", str_strip_whitespace=True)

    actor: str = Field("", max_length=128)
    action: str = Field("", max_length=64)
    before: int = Field(0, ge=0, le=2**63 - 1)


def settings_routes(pages: Pages, parts: AdminParts, feed: LiveFeed) -> APIRouter:
    """`feed` is not used: the page shows the moment that it was asked for."""
    routes = APIRouter(include_in_schema=False, default_response_class=HTMLResponse)

    async def audit_of(query: SettingsPageQuery, who: Identity) -> AuditPage | None:
        if parts.audit is None or not who.may(Scope.ADMIN):
            return None
        return await parts.audit.page(
            before=query.before or None, limit=ENTRIES_SHOWN, actor=query.actor, action=query.action
        )

    @routes.get(PATH)
    async def settings(
        query: Annotated[SettingsPageQuery, Query()], who: Annotated[Identity, Depends(needs(Scope.READ))]
    ) -> HTMLResponse:
        policies = parts.reader.policies()
        audit = await audit_of(query, who)
        filters = query.model_dump(exclude={"before"})
        shown = pages.render(
            "settings.html", who, policies=policies, groups=policy_fields(policies), etag=etag_of_policies(policies),
            can_change=parts.policies is not None and who.may(Scope.ADMIN), query=query, audit=audit,
            has_config=parts.config is not None,
            first=address(PATH, filters) if query.before else "",
            next=address(PATH, {**filters, "before": audit.next_before}) if audit and audit.next_before else "",
        )  # fmt: skip
        return HTMLResponse(shown)

    return routes
