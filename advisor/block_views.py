"""What the admin view shows of one block: what it is and where it lies, and what the log says of it."""

from __future__ import annotations

from typing import Protocol

from advisor.views import BlockView, View


class BlockDetail(View):
    """One block, now."""

    block: BlockView
    revision: str
    adapter: str
    kv_dtype: str
    hash_scheme: str
    first_touch_us: int
    children: list[str]
    """Hashes, the newest first, the first 100. `block.children` counts them all; one that is placed nowhere counts too,
    where it has children of its own."""
    open_move: str
    """Id of the move that is under way; empty where none is, and for whoever sees one tenant alone."""


class BlockStep(View):
    """One thing that the log says of a block."""

    position: int | None
    """Of its entry. None for whoever sees one tenant alone: positions count what all write."""
    time_us: int
    """When the entry was logged."""
    kind: str
    """`stored`, `accessed`, `removed`, `cleared` (all that its producer had placed), `forgotten` (what that placed is
    not known any more), `planned`, `moved`, `deletion`."""
    namespace_id: str
    group: int | None
    place: str
    tier: int | None
    producer: str
    epoch: str
    hits: int
    """Uses, of `accessed`."""
    move: str
    """Its id; empty where the step is of none, or of one of several that is not known any more; never shown to whoever
    sees one tenant alone."""
    text: str
    """One sentence, with the reason."""


class HistoryPage(View):
    """Newest first."""

    steps: list[BlockStep]
    next_before: str | None
    """Give it as `before` to look further back; None once the oldest kept entry was looked at."""
    complete: bool
    looked_back_us: int
    """When the oldest entry that was looked at was logged; 0 where none is kept."""


class AdvisorBlocks(Protocol):
    """Questions about one block. Thread-safe. `tenant`: only that tenant's blocks are known; None: all."""

    def named(
        self, sequence_hash: int, *, namespace_id: int | None = None, tenant: str | None = None
    ) -> list[BlockDetail]:
        """Every block with this hash, one for each namespace and group, at most 100; empty where there is none."""

    async def history(
        self, sequence_hash: int, *, namespace_id: int | None = None, group: int | None = None,
        tenant: str | None = None, before: str | None = None, limit: int = 100,
    ) -> HistoryPage:
        """What the log says of it: a page that ends after `limit` steps or a short look. Raises `ValueError` for a bad
        `before`."""
