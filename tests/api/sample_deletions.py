"""`AdvisorDeletions` over plain values: one that is open, one that is done, one refused tenant."""

from __future__ import annotations

from advisor.deletion_views import DeletionPage, DeletionView, RefusedTenantView, SweepView
from advisor.deletions import IllegalDeletion, Scope
from advisor.errors import NothingSuch

NOW_US = 1_764_440_651_000_000


def view(deletion_id: str, scope: Scope, actor: str = "ann", state: str = "deleting") -> DeletionView:
    sweep = SweepView(
        volume="nvme-a", state="clear" if state == "done" else "deleting", why="", blocks=7, block_bytes=7 * 16_384,
        asked=7, found=0, pending=0 if state == "done" else 4,
    )  # fmt: skip
    return DeletionView(
        id=deletion_id, tenant=scope.tenant, namespace_id=f"{scope.namespace_id:016x}" if scope.namespace_id else "",
        prefix=f"{scope.prefix:032x}" if scope.prefix else "", actor=actor, again=False, state=state, note="",
        requested_us=NOW_US, changed_us=NOW_US, blocks=7, block_bytes=7 * 16_384, engine_blocks=2, left_blocks=0,
        volumes=[sweep],
    )  # fmt: skip


class SampleDeletions:
    def __init__(self) -> None:
        self.views = [view("d-2", Scope(tenant="agents")), view("d-1", Scope(tenant="chat"), state="done")]
        self.refused = {"agents": 0, "chat": 3}
        self.asked: list[tuple[Scope, str]] = []

    def order(self, scope: Scope, actor: str) -> tuple[DeletionView, bool]:
        if scope.tenant == "agents":
            return self.views[0], False
        if scope.tenant == "one-too-many":
            raise IllegalDeletion("64 deletions are open: wait until one is done, or abandon one")
        self.asked.append((scope, actor))
        return view("d-3", scope, actor, "requested"), True

    def get(self, deletion_id: str, tenant: str = "") -> DeletionView:
        for each in self.views:
            if each.id == deletion_id and tenant in ("", each.tenant):
                return each
        raise NothingSuch(f"there is no deletion {deletion_id!r}: GET /api/v1/deletions lists them")

    def page(self, after: str | None = None, limit: int = 100, tenant: str = "") -> DeletionPage:
        views = [each for each in self.views if tenant in ("", each.tenant)]
        ids = [each.id for each in views]
        if after is not None and after not in ids:
            raise ValueError(f"no deletion {after!r} is kept: begin at the first page")
        start = 0 if after is None else ids.index(after) + 1
        shown = views[start : start + limit]
        more = start + limit < len(views)
        refused = [each for each in self._refused() if tenant in ("", each.tenant)]
        return DeletionPage(deletions=shown, next_cursor=shown[-1].id if more else None, refused=refused)

    def abandon(self, deletion_id: str, actor: str) -> DeletionView:
        if self.get(deletion_id).state == "done":
            raise NothingSuch(f"deletion {deletion_id!r} has ended: there is nothing to abandon")
        return self.get(deletion_id).model_copy(update={"state": "failed", "note": f"given up by {actor}"})

    def enable(self, tenant: str, actor: str) -> list[RefusedTenantView]:
        if tenant not in self.refused:
            raise NothingSuch(f"tenant {tenant!r} is not refused: there is nothing to enable")
        if tenant == "agents":
            raise IllegalDeletion("deletion d-2 of tenant agents is deleting: wait for its end, or abandon it")
        del self.refused[tenant]
        return self._refused()

    def _refused(self) -> list[RefusedTenantView]:
        return [
            RefusedTenantView(tenant=tenant, since_us=NOW_US, actor="ann", returned_blocks=count)
            for tenant, count in self.refused.items()
        ]
