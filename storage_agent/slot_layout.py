"""How a volume's blocks lie, and chains brought together on it, for every kind of store."""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence

from storage_agent.block_header import PAGE_BYTES, BlockHeader, page_ceiling
from storage_agent.fragmentation import (
    SAMPLED_BLOCKS,
    Footprint,
    Stretch,
    count_extents,
    expected_breaks,
    runs_of,
    sampled,
)
from storage_agent.port import BlockKey, CompactReport, Fragmentation
from storage_agent.slot_moving import ReadAll, Verify, move_together
from storage_agent.slot_store import OrderedStore, PackingStore, SlotStore
from storage_agent.slot_table import SlotTable

FIGURES_S = 5.0
"""Figures are reckoned anew so often at most, and the longer that takes the less often."""
_REST_TIMES = 100
_MASK64 = 0xFFFF_FFFF_FFFF_FFFF


class SlotLayout:
    """Thread-safe; `unpinned` guards the table."""

    def __init__(
        self,
        table: SlotTable,
        unpinned: threading.Condition,
        store: SlotStore,
        *,
        slot_bytes: int,
        read_all: ReadAll,
        verify: Verify,
    ) -> None:
        """`slot_bytes`: what a slot takes where all are equal."""
        self._table = table
        self._unpinned = unpinned
        self._store = store
        self._packing = store if isinstance(store, PackingStore) else None
        self._in_order = isinstance(store, OrderedStore) and store.slots_in_order
        self._slot_bytes = slot_bytes
        self._read_all = read_all
        self._verify = verify
        self._lock = threading.Lock()  # guards the three below
        self._figures = Fragmentation()
        self._of: tuple[int, int] | None = None
        self._due_s = 0.0

    def fragmentation(self, *, fresh: bool = False) -> Fragmentation:
        """The figures: as they are now, or as they were some seconds ago."""
        with self._lock:
            started_s = time.monotonic()
            with self._unpinned:
                now = self._table.generation_next, self._table.retired_total
            if fresh or (now != self._of and started_s >= self._due_s):
                self._figures = self._reckon()
                ended_s = time.monotonic()
                self._of, self._due_s = now, ended_s + max(FIGURES_S, _REST_TIMES * (ended_s - started_s))
            return self._figures

    def lay_out(self, keys: Sequence[BlockKey]) -> CompactReport:
        """See `Volume.lay_out`. Raises `TransferError`."""
        runs = self._runs(keys)
        lying = {header.key: self._stretch(header) for run in runs for header in run}
        extents = [self._extents(run) for run in runs]
        scattered = [(run, now) for run, now in zip(runs, extents, strict=True) if now > self._least(run)]
        if scattered and self._packing is not None:
            self._packing.lay_out([header for run, _ in scattered for header in run])
        elif scattered and self._in_order:
            move_together(scattered, self._table, self._unpinned, self._store, self._read_all, self._verify)
        laid = self._runs(keys)
        moved = [h.payload_bytes for run in laid for h in run if lying.get(h.key) != self._stretch(h)]
        return CompactReport(
            freed_bytes=0,
            moved_blocks=len(moved),
            moved_bytes=sum(moved),
            extents_before=sum(extents),
            extents_after=sum(map(self._extents, laid)),
            fragmentation=self.fragmentation(fresh=True),
        )

    def _runs(self, keys: Sequence[BlockKey]) -> list[list[BlockHeader]]:
        """Those of the blocks that are here; of slots of several sizes, a run's are of one."""
        with self._unpinned:
            headers = [header for key in dict.fromkeys(keys) if (header := self._table.live(key)) is not None]
        runs: list[list[BlockHeader]] = []
        for run in runs_of(headers):
            for number, header in enumerate(run):
                is_same = number and self._class_number(header) == self._class_number(run[number - 1])
                if is_same:
                    runs[-1].append(header)
                else:
                    runs.append([header])
        return runs

    def _class_number(self, header: BlockHeader) -> int:
        return self._table.class_number(header.payload_bytes)

    def _stretch(self, header: BlockHeader) -> Stretch | None:
        if self._packing is not None:
            return self._packing.stretches([header.slot])[0]
        return Stretch(0, header.slot, header.slot + 1)

    def _extents(self, run: Sequence[BlockHeader]) -> int:
        if self._packing is None:
            return count_extents([Stretch(0, header.slot, header.slot + 1) for header in run]) if self._in_order else 0
        found = self._packing.stretches([header.slot for header in run])
        return count_extents([stretch for stretch in found if stretch is not None])

    def _least(self, run: Sequence[BlockHeader]) -> int:
        """Extents of a run that lies as well as it can."""
        if self._packing is None:
            return 1 if self._in_order else 0
        return -(-sum(_bytes_of(header) for header in run) // self._packing.unit_bytes)

    def _footprint(self) -> Footprint:
        if self._packing is not None:
            return self._packing.footprint()
        with self._unpinned:
            live_bytes = self._table.live_bytes()
            held_bytes = self._table.held_bytes(self._slot_bytes)
            return Footprint(held_bytes, live_bytes, self._table.misfit_bytes(), 1, 1)

    def _reckon(self) -> Fragmentation:
        with self._unpinned:
            slots = self._table.live_slots()
            parents_of_all = self._table.parents()
        chains = blocks = extents = 0
        least = 0.0
        parents: list[int] = []
        for number in sampled(len(slots)):
            with self._unpinned:
                path = self._table.path(int(slots[number]), SAMPLED_BLOCKS - blocks)
            if not path:
                continue  # it went, or the sample is large enough
            chains += 1
            blocks += len(path)
            extents += self._extents(path)
            least += self._least(path)
            parents += [header.parent_hash & _MASK64 for header in path[1:]]
        if self._in_order or self._packing is not None:
            least = min(float(extents), least + expected_breaks(parents, parents_of_all))
        footprint = self._footprint()
        return Fragmentation(*footprint, chains=chains, chain_blocks=blocks, extents=extents, extents_least=least)


def _bytes_of(header: BlockHeader) -> int:
    return PAGE_BYTES + page_ceiling(header.payload_bytes)
