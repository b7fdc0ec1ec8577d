"""What each route asks of whoever calls it."""

from __future__ import annotations

from collections.abc import Awaitable, Callable

from fastapi import HTTPException, Request

from advisor.access.identity import Identity, Scope


def identity_of(request: Request) -> Identity | None:
    """Whom the door (`advisor.api.door`) let in; None: nobody that it knows, or no door."""
    identity: Identity | None = getattr(request.state, "identity", None)
    return identity


class Needs:
    """A dependency of every route: gives the `Identity`, or refuses with 401 or 403."""

    def __init__(self, scope: Scope, *, tenants: bool) -> None:
        self.scope = scope
        self.tenants = tenants

    async def __call__(self, request: Request) -> Identity:
        # It waits for nothing: as a plain function, FastAPI would send each request to a thread and back for it.
        identity = identity_of(request)
        if identity is None:
            raise HTTPException(401, "this needs a token: send Authorization: Bearer TOKEN, or log in at /login")
        if not identity.may(self.scope):
            raise HTTPException(403, f"{identity.name} has scope {identity.scope.word}, this needs {self.scope.word}")
        if identity.tenant and not self.tenants:
            raise HTTPException(403, f"{identity.name} sees tenant {identity.tenant} alone, this is of all tenants")
        return identity


def needs(scope: Scope, *, tenants: bool = False) -> Callable[[Request], Awaitable[Identity]]:
    """`Annotated[Identity, Depends(needs(Scope.READ))]`, or in a route's `dependencies`.

    `tenants`: the route serves one that sees a single tenant too, and shows it nothing of others (`Identity.tenant`).
    """
    return Needs(scope, tenants=tenants)
