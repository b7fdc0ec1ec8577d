"""The doorkeeper of a running service, as its settings say."""

from __future__ import annotations

import contextlib

import structlog

from advisor.access.doorkeeper import Doorkeeper, Issuer
from advisor.access.errors import OidcError
from advisor.access.identity import LOCAL, Identity
from advisor.access.token_file import TokenFile
from advisor.api_settings import OidcSettings
from advisor.entries import OperatorEntry
from advisor.errors import AdvisorError
from advisor.service import AdvisorService
from advisor.settings import AdvisorSettings

_log = structlog.get_logger()


def require_door(settings: AdvisorSettings) -> None:
    """Before a service starts. Raises `TokensError` for a file of tokens that cannot be used, `OidcError` without
    PyJWT."""
    tokens = TokenFile(settings.directory).book()
    _issuer(settings.api.oidc)
    if settings.api.login == "required" and not len(tokens) and not settings.api.oidc.issuer:
        _log.warning("nobody can log in: make a token with kvadvisor token create")


def open_door(service: AdvisorService) -> Doorkeeper:
    """Of a running service. Raises as `require_door`."""
    api = service.settings.api

    def note(who: Identity, action: str, detail: str) -> None:
        # A service that is stopping takes no more entries; who logs out meanwhile is out all the same.
        with contextlib.suppress(AdvisorError):
            service.submit(OperatorEntry(who.name, action, detail=detail))

    return Doorkeeper(
        anonymous=LOCAL if api.login == "none" else None,
        tokens=TokenFile(service.settings.directory),
        issuer=_issuer(api.oidc),
        note=note,
        count=lambda by: service.metrics.refused_attempts.add(1.0, by),
    )


def _issuer(settings: OidcSettings) -> Issuer | None:
    if not settings.issuer:
        return None
    try:
        from advisor.access.oidc import OidcVerifier
    except ImportError as error:
        raise OidcError(
            f"api.oidc names an issuer, whose tokens take PyJWT to check ({error}): pip install 'kvadvisor[oidc]'"
        ) from error
    return OidcVerifier(settings)
