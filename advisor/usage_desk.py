"""What tenants' blocks take in the running service."""

from __future__ import annotations

import threading
import time
from collections import OrderedDict
from collections.abc import Collection

import numpy as np
import numpy.typing as npt

from advisor.index import ArrayIndex
from advisor.index.layout import PLACEMENT_TOP
from advisor.reader import place_name
from advisor.service import AdvisorService
from advisor.usage_views import PlaceUsage, TenantUsage
from advisor.views import TierView

COUNTED_FOR_S = 5.0
"""A count is given again for so long: a tenant that asks without pause costs the index nothing."""
COUNTS_KEPT_MAX = 256
ROWS_AT_ONCE = 65_536
"""Placements counted under the lock, about a millisecond."""


class ServiceUsage:
    """`advisor.usage_views.AdvisorUsage` over a running service. One count runs at a time."""

    def __init__(self, service: AdvisorService) -> None:
        self._service = service
        self._counting = threading.Lock()
        self._counts: OrderedDict[str, tuple[float, TenantUsage]] = OrderedDict()

    def usage(self, tenant: str) -> TenantUsage:
        """See `AdvisorUsage.usage`."""
        with self._counting:
            at_s, counted = self._counts.get(tenant, (0.0, None))
            if counted is None or time.monotonic() - at_s > COUNTED_FOR_S:
                counted = self._count(tenant)
                self._counts.pop(tenant, None)
                self._counts[tenant] = (time.monotonic(), counted)
                if len(self._counts) > COUNTS_KEPT_MAX:
                    self._counts.popitem(last=False)
            return counted

    def _count(self, tenant: str) -> TenantUsage:
        fold = self._service.fold
        with self._service.lock.shared():
            namespaces = {each for each, namespace in fold.namespaces.items() if namespace.tenant == tenant}
        blocks, sizes = count_by_place(fold.index, namespaces)
        with self._service.lock.shared():
            known = fold.index.totals().by_namespace
            places = [
                PlaceUsage(
                    place=place_name(fold, place), tier=fold.index.places[place].tier, blocks=int(blocks[place]),
                    block_bytes=int(sizes[place]),
                )
                for place in np.flatnonzero(blocks).tolist()
            ]  # fmt: skip
        tiers = [
            TierView(
                tier=tier, blocks=sum(each.blocks for each in places if each.tier == tier),
                block_bytes=sum(each.block_bytes for each in places if each.tier == tier),
            )
            for tier in (1, 2, 3, 4)
        ]  # fmt: skip
        return TenantUsage(
            tenant=tenant,
            namespaces=len(namespaces),
            blocks=sum(figures.blocks for each, figures in known.items() if each in namespaces),
            block_bytes=sum(each.block_bytes for each in places),
            tiers=[tier for tier in tiers if tier.blocks],
            places=sorted(places, key=lambda each: (-each.block_bytes, each.place)),
        )


def count_by_place(
    index: ArrayIndex, namespace_ids: Collection[int]
) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
    """Blocks and bytes of these namespaces by place id. Rows are counted in slices, each of one moment."""
    blocks = sizes = np.zeros(0, np.int64)
    first = 0
    wanted = np.array(sorted(namespace_ids), np.uint64)
    while True:
        with index.lock:
            end = int(index.tables.state[PLACEMENT_TOP])
            placed = index.tables.placements[first : min(first + ROWS_AT_ONCE, end)]
            placed = placed[placed["block"] >= 0]
            realms = np.isin(index.tables.realms["namespace_id"], wanted)
            placed = placed[realms[index.tables.blocks["realm"][placed["block"]]]]
            at_most = len(index.places)
        first += ROWS_AT_ONCE
        blocks = _added(blocks, np.bincount(placed["place"], minlength=at_most))
        sizes = _added(sizes, np.bincount(placed["place"], placed["block_bytes"], minlength=at_most).astype(np.int64))
        if first >= end:
            return blocks, sizes


def _added(one: npt.NDArray[np.int64], other: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
    """Places may be added between two slices."""
    total = np.zeros(max(len(one), len(other)), np.int64)
    total[: len(one)] += one
    total[: len(other)] += other
    return total
