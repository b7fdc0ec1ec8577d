"""What the REST API shows of deletions and takes: typed pictures at one moment, and the port that answers."""

from __future__ import annotations

from typing import Protocol

from advisor.deletions import Scope
from advisor.views import View


class SweepView(View):
    """One volume's part of a deletion."""

    volume: str
    state: str
    """`deleting`, `proving`, `waiting` or `clear`: proven gone."""
    why: str
    """Why it waits, or what failed last; empty where nothing did."""
    blocks: int
    """Copies that are gone."""
    block_bytes: int
    asked: int
    """Keys that the agent answered `miss` to, each after its copies were freed."""
    found: int
    """Copies that the agent had still when it was asked, and freed then."""
    pending: int
    """Copies of the wave under way that are there still."""


class DeletionView(View):
    id: str
    tenant: str
    namespace_id: str
    """16 hex digits; empty where a tenant is deleted."""
    prefix: str
    """32 hex digits; empty where it is all of a tenant or namespace."""
    actor: str
    again: bool
    """Not ordered: blocks of a refused tenant came back."""
    state: str
    """`requested`, `deleting`, `proving`, `waiting`, `done` or `failed`."""
    note: str
    requested_us: int
    changed_us: int
    """Of its last change of state: when it ended, where it has."""
    blocks: int
    """Copies that are gone, of all volumes."""
    block_bytes: int
    engine_blocks: int
    """Blocks that lay elsewhere when it ended, and on no volume: in engines' memory, not ours to delete."""
    left_blocks: int
    """Copies that were stored while it ran, and left; of a tenant there are none."""
    volumes: list[SweepView]


class RefusedTenantView(View):
    tenant: str
    since_us: int
    actor: str
    returned_blocks: int
    """Copies that came to a volume all the same, and were deleted again."""


class DeletionPage(View):
    deletions: list[DeletionView]
    """Newest first; the last 256 that ended."""
    next_cursor: str | None
    """Give it as `after` for the next page; None at the end."""
    refused: list[RefusedTenantView]
    """Tenants that are refused until they are enabled."""


class AdvisorDeletions(Protocol):
    """Raises `advisor.errors.NothingSuch` and `ActionRefused`. An order returns when it is logged and applied."""

    def order(self, scope: Scope, actor: str) -> tuple[DeletionView, bool]:
        """A deletion of `scope`, and whether it is a fresh one: False where one of the same is open already."""

    def get(self, deletion_id: str, tenant: str = "") -> DeletionView:
        """`tenant`: only that one's deletions are known; empty: all."""

    def page(self, after: str | None = None, limit: int = 100, tenant: str = "") -> DeletionPage:
        """Raises `ValueError` for a bad cursor."""

    def abandon(self, deletion_id: str, actor: str) -> DeletionView: ...
    def enable(self, tenant: str, actor: str) -> list[RefusedTenantView]:
        """Those that are refused still."""
