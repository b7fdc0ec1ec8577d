"""What the admin view stands on: everything it reads and does comes through these."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from advisor.access.doorkeeper import NOBODY, Doorkeeper
from advisor.api.measuring import Observe
from advisor.api_settings import ApiSettings
from advisor.audit_views import AdvisorAudit
from advisor.block_views import AdvisorBlocks
from advisor.deletion_views import AdvisorDeletions
from advisor.plan_views import AdvisorPlans
from advisor.policy_views import AdvisorPolicies
from advisor.prefix_views import AdvisorPrefixes
from advisor.recording_views import AdvisorRecordings
from advisor.replay_views import AdvisorReplays
from advisor.tracing import Span, no_span
from advisor.usage_views import AdvisorUsage
from advisor.views import AdvisorActions, AdvisorReader
from advisor.volume_views import AdvisorVolumes


@dataclass(frozen=True, slots=True)
class AdminParts:
    """Protocols over a running service, or over a test's plain values. Without one of the optional ones its routes are
    not there, and its pages are not in the navigation."""

    reader: AdvisorReader
    metrics: Callable[[], bytes]
    """Prometheus' text."""
    doorkeeper: Doorkeeper = NOBODY
    """The default lets nobody in."""
    api: ApiSettings = field(default_factory=ApiSettings)
    """Where and under which names it is served."""
    config: Callable[[], dict[str, Any]] | None = None
    """The settings in force, as JSON types; their secrets are taken out before anybody sees them."""
    answers_file: Path | None = None
    """Where answers to writes with an Idempotency-Key are kept; None: for as long as this process."""
    observe: Observe = lambda _route, _method, _status, _seconds: None
    span: Span = no_span
    close: Callable[[], Awaitable[None]] | None = None
    """Called on the event loop when the app ends: what the parts hold open on it is closed."""
    actions: AdvisorActions | None = None
    plans: AdvisorPlans | None = None
    policies: AdvisorPolicies | None = None
    deletions: AdvisorDeletions | None = None
    prefixes: AdvisorPrefixes | None = None
    volumes: AdvisorVolumes | None = None
    usage: AdvisorUsage | None = None
    blocks: AdvisorBlocks | None = None
    audit: AdvisorAudit | None = None
    recordings: AdvisorRecordings | None = None
    replays: AdvisorReplays | None = None
