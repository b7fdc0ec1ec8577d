"""What the admin view stands on: everything it reads and does comes through these."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from advisor.access.doorkeeper import NOBODY, Doorkeeper
from advisor.api.measuring import Observe
from advisor.deletion_views import AdvisorDeletions
from advisor.tracing import Span, no_span
from advisor.views import AdvisorActions, AdvisorReader


@dataclass(frozen=True, slots=True)
class AdminParts:
    """Protocols over a running service, or over a test's plain values. Without one of the optional ones its routes are
    not there, and its pages are not in the navigation."""

    reader: AdvisorReader
    metrics: Callable[[], bytes]
    """Prometheus' text."""
    doorkeeper: Doorkeeper = NOBODY
    """The default lets nobody in."""
    answers_file: Path | None = None
    """Where answers to writes with an Idempotency-Key are kept; None: for as long as this process."""
    observe: Observe = lambda _route, _method, _status, _seconds: None
    span: Span = no_span
    actions: AdvisorActions | None = None
    deletions: AdvisorDeletions | None = None
