"""Deletions of the running service: what the REST API asks for."""

from __future__ import annotations

from uuid import uuid4

from advisor.deletion_views import DeletionPage, DeletionView, RefusedTenantView, SweepView
from advisor.deletions import Deletion, DeletionTable, Scope, Sweep
from advisor.entries import OperatorEntry
from advisor.errors import NothingSuch
from advisor.service import AdvisorService


class ServiceDeletions:
    """`advisor.deletion_views.AdvisorDeletions` over a running service."""

    def __init__(self, service: AdvisorService) -> None:
        self._service = service

    @property
    def _table(self) -> DeletionTable:
        return self._service.fold.deletions

    def order(self, scope: Scope, actor: str) -> tuple[DeletionView, bool]:
        """See `AdvisorDeletions.order`."""
        with self._service.lock:
            if (same := self._table.open_of(scope)) is not None:
                return _view(same), False
            self._table.require_room(scope)
        deletion_id = f"d-{uuid4().hex[:12]}"
        prefix = f"{scope.prefix:032x}" if scope.prefix else ""
        entry = OperatorEntry(
            actor, "delete", deletion=deletion_id, tenant=scope.tenant, namespace_id=scope.namespace_id, prefix=prefix
        )
        self._service.submit(entry).result()
        with self._service.lock:
            taken = self._table.get(deletion_id)
            if taken is None and (taken := self._table.open_of(scope)) is None:
                self._table.require_room(scope)  # another order took the last place
                raise NothingSuch(f"the deletion of {scope} was overtaken by another order: ask again")
            return _view(taken), taken.deletion_id == deletion_id

    def get(self, deletion_id: str, tenant: str = "") -> DeletionView:
        """See `AdvisorDeletions.get`."""
        with self._service.lock:
            deletion = self._table.get(deletion_id)
            if deletion is None or not self._is_of(deletion, tenant):
                raise NothingSuch(f"there is no deletion {deletion_id!r}: GET /api/v1/deletions lists them")
            return _view(deletion)

    def page(self, after: str | None = None, limit: int = 100, tenant: str = "") -> DeletionPage:
        """See `AdvisorDeletions.page`."""
        with self._service.lock:
            kept = [*reversed(self._table.open.values()), *reversed(self._table.finished)]
            newest = [deletion for deletion in kept if self._is_of(deletion, tenant)]
            newest.sort(key=lambda deletion: -deletion.requested_us)
            start = 0
            if after is not None:
                ids = [deletion.deletion_id for deletion in newest]
                if after not in ids:
                    raise ValueError(f"no deletion {after!r} is kept: begin at the first page")
                start = ids.index(after) + 1
            shown = newest[start : start + limit]
            more = start + limit < len(newest)
            return DeletionPage(
                deletions=[_view(deletion) for deletion in shown],
                next_cursor=shown[-1].deletion_id if more else None,
                refused=[refused for refused in self._refused() if tenant in ("", refused.tenant)],
            )

    def abandon(self, deletion_id: str, actor: str) -> DeletionView:
        """See `AdvisorDeletions.abandon`."""
        if self.get(deletion_id).state in ("done", "failed"):
            raise NothingSuch(f"deletion {deletion_id!r} has ended: there is nothing to abandon")
        self._service.submit(OperatorEntry(actor, "abandon", deletion=deletion_id)).result()
        return self.get(deletion_id)

    def enable(self, tenant: str, actor: str) -> list[RefusedTenantView]:
        """See `AdvisorDeletions.enable`."""
        with self._service.lock:
            if tenant not in self._table.refused:
                raise NothingSuch(f"tenant {tenant!r} is not refused: there is nothing to enable")
            self._table.require_enabling(tenant)
        self._service.submit(OperatorEntry(actor, "enable", tenant=tenant)).result()
        with self._service.lock:
            self._table.require_enabling(tenant)
            return self._refused()

    def _is_of(self, deletion: Deletion, tenant: str) -> bool:
        """A deletion of one namespace is its tenant's, as long as that is known."""
        scope = deletion.scope
        namespace = self._service.fold.namespaces.get(scope.namespace_id)
        return tenant in ("", scope.tenant) or (namespace is not None and namespace.tenant == tenant)

    def _refused(self) -> list[RefusedTenantView]:
        return [
            RefusedTenantView(tenant=r.tenant, since_us=r.since_us, actor=r.actor, returned_blocks=r.returned_blocks)
            for r in sorted(self._table.refused.values(), key=lambda refused: refused.tenant)
        ]


def _view(deletion: Deletion) -> DeletionView:
    scope = deletion.scope
    return DeletionView(
        id=deletion.deletion_id,
        tenant=scope.tenant,
        namespace_id=f"{scope.namespace_id:016x}" if scope.namespace_id else "",
        prefix=f"{scope.prefix:032x}" if scope.prefix else "",
        actor=deletion.actor,
        again=deletion.is_again,
        state=str(deletion.state),
        note=deletion.note,
        requested_us=deletion.requested_us,
        changed_us=deletion.changed_us,
        blocks=deletion.blocks,
        block_bytes=deletion.block_bytes,
        engine_blocks=deletion.engine_blocks,
        left_blocks=deletion.left_blocks,
        volumes=[_sweep_view(sweep) for sweep in deletion.sweeps.values()],
    )


def _sweep_view(sweep: Sweep) -> SweepView:
    why = sweep.reason or sweep.note
    if sweep.is_clear:
        state = "clear"
    elif why:
        state = "waiting"
    else:
        state = "deleting" if sweep.pending else "proving"
    if sweep.answer is not None and not sweep.is_clear and not why:
        why = f"its agent answered; events up to its batch {sweep.answer.sequence} are on their way"
    return SweepView(
        volume=sweep.volume,
        state=state,
        why=why,
        blocks=sweep.blocks,
        block_bytes=sweep.block_bytes,
        asked=sweep.asked,
        found=sweep.found,
        pending=len(sweep.pending),
    )
