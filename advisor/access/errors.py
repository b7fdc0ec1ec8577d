"""Errors of who comes in."""

from __future__ import annotations

from advisor.errors import AdvisorError


class AccessError(AdvisorError):
    """Base of this room's."""


class TokensError(AccessError):
    """The file of tokens cannot be used, or what was asked of it cannot be done."""


class OidcError(AccessError):
    """The issuer's tokens cannot be checked with these settings."""


class NotAdmitted(AccessError):
    """What was shown opens nothing. `reason` is for the log of the service, never for whoever showed it."""

    def __init__(self, reason: str) -> None:
        super().__init__("this token opens nothing: it is wrong, expired or revoked; ask for another")
        self.reason = reason
