"""Which regions of a slab changed since its slot table was saved, told on the slab before the first change. Pure.

A region is told ahead of the batch that reaches it where batches go up through the slots, so that the batch's own sync
makes it last and no other is needed.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from storage_agent.slab_format import NO_TABLE, Intents, Regions, Superblock


class SlabIntents:
    """Not thread-safe. `told`: durable on the slab. `written`: on it, lasting once it is synced."""

    def __init__(self, superblock: Superblock, found: Intents | None, table_next: int) -> None:
        """`found` None: every region counts as changed."""
        self._region_slots = superblock.region_slots
        everything = np.ones(superblock.regions, dtype=np.bool_)
        self.written: Regions = found.changed.copy() if found is not None else everything
        self.told: Regions = self.written.copy()
        self.table = found.table if found is not None else NO_TABLE
        self.table_next = table_next
        self._since_save: Regions = np.zeros_like(self.written)
        self._is_stale = True
        """The page on the slab names another next table."""

    def note(self, slots: Sequence[int], ahead: int) -> tuple[bool, bool]:
        """`slots` are about to change, and soon perhaps as many as `ahead` after them.

        Returns whether the page must be written, and whether it must be durable before they change.
        """
        regions = {slot // self._region_slots for slot in slots}
        for region in regions:
            self._since_save[region] = True
        must_last = self._is_stale or not all(self.told[region] for region in regions)
        regions.add(min((max(slots) + ahead) // self._region_slots, len(self.written) - 1))
        must_write = must_last or not all(self.written[region] for region in regions)
        if must_write:
            self.written[list(regions)] = True
            self._is_stale = False
        return must_write, must_last

    def page(self) -> Intents:
        return Intents(self.table, self.table_next, self._region_slots, self.written.copy())

    def synced(self, written: Regions) -> None:
        """The slab was synced after a page with these regions was written."""
        self.told = self.told | written

    @property
    def changed_regions(self) -> int:
        return int(np.count_nonzero(self.told))

    def begin_save(self) -> None:
        """The table is about to be copied: changes noted from now on may not be in it."""
        self._since_save[:] = False

    def end_save(self, unsettled: Sequence[int], table_next: int) -> None:
        """The table is saved under the mark `table_next` had; write and sync `page` now."""
        kept = self._since_save.copy()
        if unsettled:
            kept[np.unique(np.asarray(unsettled) // self._region_slots)] = True
        self.written, self.told = kept, kept.copy()
        self.table, self.table_next = self.table_next, table_next
        self._is_stale = False
