"""The audit: what people did, and which settings came into force."""

from __future__ import annotations

from typing import Protocol

from advisor.views import View


class AuditView(View):
    position: int
    time_us: int
    actor: str
    """Empty where the service did it by itself, at its start."""
    action: str
    what: str
    """The volume, move, deletion, tenant or namespace that it is about; empty where it is about everything."""
    detail: str
    text: str
    """One sentence."""


class AuditPage(View):
    """Newest first. Shorter than asked for where what is looked through for one answer held no more."""

    entries: list[AuditView]
    next_before: int | None
    """Give it as `before` to look further back; None once the oldest kept entry was looked at."""
    complete: bool


class AdvisorAudit(Protocol):
    async def page(
        self, *, before: int | None = None, limit: int = 100, actor: str = "", action: str = ""
    ) -> AuditPage:
        """Operator and settings entries before a position, or the newest. Empty filters leave out none."""
