"""The audit of a running service, read from its log."""

from __future__ import annotations

import time

from advisor.audit_views import AuditPage, AuditView
from advisor.entries import EntryKind, LogEntry, OperatorEntry, SettingsEntry, decode_control
from advisor.log_desk import LogDesk
from advisor.reader import event_view

AUDIT_S = 0.4
"""A page looks through the log for so long."""
IN_FORCE = "settings-in-force"
"""The action of a settings entry, which follows a person's change, or the service's start."""


class ServiceAudit:
    """`advisor.audit_views.AdvisorAudit` over a running service."""

    def __init__(self, log: LogDesk) -> None:
        """`log` is its caller's to close."""
        self._log = log

    async def page(
        self, *, before: int | None = None, limit: int = 100, actor: str = "", action: str = ""
    ) -> AuditPage:
        found: list[AuditView] = []
        is_complete = False
        until_s = time.monotonic() + AUDIT_S
        while len(found) < limit and not is_complete and time.monotonic() < until_s:
            stretch = await self._log.queries.before(before, (EntryKind.OPERATOR, EntryKind.SETTINGS))
            before, is_complete = stretch.reached, stretch.is_complete
            shown = (audit_view(entry) for entry in stretch.entries)
            found += [view for view in shown if actor in ("", view.actor) and action in ("", view.action)]
        if len(found) > limit:
            found, is_complete = found[:limit], False
            before = found[-1].position
        return AuditPage(entries=found, next_before=None if is_complete else before, complete=is_complete)


def audit_view(entry: LogEntry) -> AuditView:
    """An operator's or a settings entry."""
    control = decode_control(entry.payload)
    actor, action, what, detail = "", IN_FORCE, "", ""
    if isinstance(control, OperatorEntry):
        actor, action, what, detail = control.actor, control.action, _what(control), control.detail
    elif isinstance(control, SettingsEntry):
        detail = f"term {control.term}, policies {control.policy_version}"
    return AuditView(
        position=entry.position,
        time_us=entry.recorded_us,
        actor=actor,
        action=action,
        what=what,
        detail=detail,
        text=event_view(entry).text,
    )


def _what(entry: OperatorEntry) -> str:
    namespace = f"namespace {entry.namespace_id:016x}" if entry.namespace_id else ""
    prefix = f"prefix {entry.prefix}" if entry.prefix else ""
    tenant = f"tenant {entry.tenant}" if entry.tenant else ""
    named = (entry.volume, entry.move, entry.deletion, tenant, namespace, prefix)
    return ", ".join(each for each in named if each)
