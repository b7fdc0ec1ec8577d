"""An `AdvisorAudit` over plain values: what four people did in a morning."""

from __future__ import annotations

from sample_reader import NOW_US

from advisor.audit_views import AuditPage, AuditView

ENTRIES_A_LOOK = 20


def _entry(position: int, actor: str, action: str, what: str = "", detail: str = "") -> AuditView:
    text = f"{actor}: {action} {what}".rstrip() + (f", {detail}" if detail else "")
    return AuditView(
        position=position, time_us=NOW_US - (100_000 - position) * 1_000_000, actor=actor, action=action, what=what,
        detail=detail, text=text,
    )  # fmt: skip


class SampleAudit:
    def __init__(self) -> None:
        self.entries = [
            _entry(90_002, "", "settings-in-force", detail="term 4, policies tiering-5"),
            _entry(90_001, "ann", "settings", detail="admission auto → touch-2; moves_per_s 0 → 20"),
            _entry(80_000, "bob", "pause", "nvme-a"),
            _entry(70_000, "ann", "delete", "deletion-1, tenant misc"),
            *(_entry(60_000 - number, "carol", "resume", f"nvme-{number}") for number in range(40)),
            _entry(50_000, "<script>alert(1)</script>", "drain", "lustre-01"),
        ]

    async def page(
        self, *, before: int | None = None, limit: int = 100, actor: str = "", action: str = ""
    ) -> AuditPage:
        found = [
            entry for entry in self.entries
            if (before is None or entry.position < before)
            and actor in ("", entry.actor)
            and action in ("", entry.action)
        ]
        shown = found[: min(limit, ENTRIES_A_LOOK)]
        is_complete = len(shown) == len(found)
        return AuditPage(
            entries=shown, next_before=None if is_complete else shown[-1].position, complete=is_complete
        )
