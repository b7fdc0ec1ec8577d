"""Errors of the admin API."""

from __future__ import annotations

from advisor.errors import AdvisorError


class ApiError(AdvisorError):
    """The admin API cannot be opened."""


class TooManyStreamsError(AdvisorError):
    """Every place for a live stream is taken."""
