"""What the admin view stands on: everything it reads and does comes through these."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from advisor.deletion_views import AdvisorDeletions
from advisor.views import AdvisorActions, AdvisorReader


@dataclass(frozen=True, slots=True)
class AdminParts:
    """Protocols over a running service, or over a test's plain values. Without one of the optional ones its routes are
    not there, and its pages are not in the navigation."""

    reader: AdvisorReader
    metrics: Callable[[], bytes]
    """Prometheus' text."""
    actions: AdvisorActions | None = None
    deletions: AdvisorDeletions | None = None
