"""What all compared policies are measured by at a tick: blocks of the live index, and where they are. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from advisor.index import ArrayIndex
from advisor.index.layout import FIRST_HIGH
from advisor.policies.budgets import saved_s
from advisor.policies.heat_book import HeatBook
from advisor.policies.plan import Volume
from advisor.policies.rules.noting import placed_columns
from advisor.shadow_tally import tags_of
from event_plane.schema import RECORD_DTYPE, Records

Array = npt.NDArray[Any]


class Touches:
    """Blocks that were used since the last tick, a row each; `rows` are the index's. The caller holds its lock.

    `held` as `placed_on` gives it, `records` and `namespace_ids` as `records_of`.
    """

    def __init__(
        self, index: ArrayIndex, volumes: Sequence[Volume], rows: Array, book: HeatBook, since_us: int
    ) -> None:
        blocks, placements = index.tables.blocks, index.tables.placements
        self.rows = rows
        self.tags = tags_of(index, rows)
        self.touches = blocks["touches"][rows].astype(np.int64)
        self.uses = _uses(blocks[rows], self.touches, book, book.of(index, rows), since_us)
        self.sizes = placements["block_bytes"][blocks["placed"][rows]].astype(np.int64)
        self.held = placed_on(index, rows, volumes)
        self.records, self.namespace_ids = records_of(index, rows)


def _uses(blocks: Array, touches: Array, book: HeatBook, slots: Array, since_us: int) -> Array:
    """How often since the last tick: what the live planner has noted less; without a note all of a block that was first
    used since then, and once otherwise.
    """
    first_ms = (blocks["marks"].astype(np.int64) & FIRST_HIGH) << 32 | blocks["first_touch"].astype(np.int64)
    noted = np.where(slots >= 0, book.notes["counted"][slots].astype(np.int64), touches - 1)
    noted = np.where((noted > touches) | (first_ms >= since_us // 1000), 0, noted)
    uses: Array = np.maximum(touches - noted, 1)
    return uses


def placed_on(index: ArrayIndex, rows: Array, volumes: Sequence[Volume]) -> Array:
    """Which volume holds which block: bool (volumes, rows)."""
    held = np.zeros((len(volumes), len(rows)), np.bool_)
    uses, sizes = np.empty(len(rows), np.int64), np.empty(len(rows), np.int64)
    for rank, volume in enumerate(volumes):
        placed_columns(index.tables.blocks, index.tables.placements, rows, volume.place, uses, sizes)
        held[rank] = uses >= 0
    return held


def records_of(index: ArrayIndex, rows: Array) -> tuple[Records, list[int]]:
    """Blocks as events without type and place, and the namespaces that they name."""
    blocks, realms = index.tables.blocks, index.tables.realms
    found = blocks[rows]
    numbers, place = np.unique(found["realm"], return_inverse=True)
    namespaces, named = np.unique(realms["namespace_id"][numbers], return_inverse=True)
    records = np.zeros(len(rows), RECORD_DTYPE)
    records["namespace"] = named[place]
    records["group"] = realms["group"][numbers][place]
    for name in ("depth", "block_tokens"):
        records[name] = found[name]
    records["sequence_hash_lo"], records["sequence_hash_hi"] = found["hash_lo"], found["hash_hi"]
    below = found["parent"] >= 0
    parents = blocks[found["parent"][below]]
    records["parent_hash_lo"][below], records["parent_hash_hi"][below] = parents["hash_lo"], parents["hash_hi"]
    records["block_size"] = index.tables.placements["block_bytes"][found["placed"]]
    return records, namespaces.tolist()


def saved_s_of(volumes: Sequence[Volume], touches: Touches, held: Array) -> float | None:
    """Seconds that readers saved against reading from the slowest volume; None where a rate is not known."""
    fastest, total_s = held.argmax(axis=0), 0.0
    for rank, volume in enumerate(volumes[:-1]):
        here = held.any(axis=0) & (fastest == rank)
        gain_s = saved_s(int((touches.uses * touches.sizes)[here].sum()), volumes[-1], volume)
        if gain_s is None:
            return None
        total_s += gain_s
    return total_s
