"""Policies: what is in force, changes of it, and how the shadows compare. Routes of the REST API."""

from __future__ import annotations

from typing import Annotated

from fastapi import APIRouter, Depends, Header, Response

from advisor.access.identity import Identity, Scope
from advisor.api.access import needs
from advisor.api.actions import done
from advisor.api.etags import etag_of, names_etag
from advisor.api.problems import documented
from advisor.policy_views import AdvisorPolicies, PolicyPatch
from advisor.views import AdvisorReader, ComparisonView, PoliciesView

Admin = Annotated[Identity, Depends(needs(Scope.ADMIN))]


def policy_routes(reader: AdvisorReader) -> APIRouter:
    """`/api/v1/policies`: nothing is changed by asking."""
    routes = APIRouter(prefix="/api/v1/policies", tags=["policies"], dependencies=[Depends(needs(Scope.READ))])

    @routes.get("", summary="The policy in force, and those there are", response_model=PoliciesView)
    def policies() -> Response:
        """Its `ETag` is what `If-Match` of a change names."""
        return _answer(reader.policies())

    @routes.get("/shadow", summary="The live policy beside its shadows")
    def shadow() -> ComparisonView:
        """Without a shadow in the settings, `policies` is empty."""
        return reader.comparison()

    return routes


def policy_change_routes(policies: AdvisorPolicies) -> APIRouter:
    """Changes of `/api/v1/policies`."""
    routes = APIRouter(prefix="/api/v1/policies", tags=["policies"])

    @routes.patch(
        "", summary="Change the policy while it runs", response_model=PoliciesView, responses=documented(409, 412, 422)
    )
    def change(
        patch: PolicyPatch,
        who: Admin,
        if_match: Annotated[
            str | None, Header(max_length=512, description="Change it only where it has this ETag still.")
        ] = None,
    ) -> Response:
        """A JSON merge patch: fields that are left out stay, null goes back to the file's. It outlives a restart."""

        def accepts(view: PoliciesView) -> bool:
            return if_match is None or names_etag(if_match, etag_of_policies(view))

        return _answer(done(lambda: policies.change(who.name, patch, accepts)))

    @routes.delete("/changes", summary="Go back to the file's policy", response_model=PoliciesView,
                   responses=documented(409))
    def go_back(who: Admin) -> Response:
        return _answer(done(lambda: policies.go_back(who.name)))

    return routes


def etag_of_policies(view: PoliciesView) -> str:
    """What `If-Match` of a change may name."""
    return etag_of(_body(view))


def _body(view: PoliciesView) -> bytes:
    return view.model_dump_json().encode()


def _answer(view: PoliciesView) -> Response:
    """The bytes that its ETag is of."""
    body = _body(view)
    return Response(body, media_type="application/json", headers={"ETag": etag_of(body)})
