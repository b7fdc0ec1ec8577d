"""A shadow's own index: the real one's blocks under keys of their own, in volumes as the shadow's policy fills them."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt

from advisor.index import ArrayIndex, IndexSize
from advisor.index.layout import (
    BLOCK_DTYPE,
    BLOCK_TOP,
    PLACE_DTYPE,
    PLACEMENT_DTYPE,
    PLACEMENT_TOP,
    REALM_DTYPE,
)
from advisor.index.match_kernel import match_several
from advisor.index.saved_index import FORMAT, STATE_SAVED, Contents, Section
from advisor.turnstile import Turnstile

Array = npt.NDArray[Any]

BLOCK_BYTES = 170
"""Memory for each block held: its row, two placements, hash entries of a table that is half full."""


class SavedIndex(msgspec.Struct, array_like=True):
    """`ShadowIndex` in a checkpoint: its tables as far as they are used, row by row."""

    state: list[int] = []
    places: list[tuple[int, int, str]] = []
    blocks: bytes = b""
    placements: bytes = b""
    place_rows: bytes = b""
    realms: bytes = b""


class ShadowIndex(ArrayIndex):
    """Room for `blocks_max` blocks, each on two volumes. Nothing in it is waiting to be drained when it is saved."""

    def __init__(self, blocks_max: int, *, lock: Turnstile, hash_bits: int = 12) -> None:
        self.blocks_max = blocks_max
        super().__init__(replace(IndexSize.for_blocks(blocks_max, 2 * blocks_max), hash_bits=hash_bits), lock=lock)

    def realm_of(self, namespace_id: int, group: int) -> int:
        """What the namespace and group are numbered as here; -1 where they have no block."""
        return self._realm_ids.get((namespace_id, group), -1)

    def held(self, hashes: Array, realms: Array, place: int) -> Array:
        """Whether each block is in `place`: bool. `hashes` u8 (n, 2), low half first; `realms` i8, of `realm_of`."""
        out = np.empty(len(hashes), np.int64)
        match_several(self._lookup, hashes, np.arange(1, len(hashes) + 1, dtype=np.int64), realms, place, out)
        return out > 0

    def saved(self) -> SavedIndex:
        """The same for the same history: rows are numbered by it."""
        return SavedIndex(
            self._state[list(STATE_SAVED)].tolist(),
            [(key.producer, key.tier, key.location) for key in self.places],
            self.tables.blocks[: self._state[BLOCK_TOP]].tobytes(),
            self.tables.placements[: self._state[PLACEMENT_TOP]].tobytes(),
            self.tables.places[: len(self.places)].tobytes(),
            self.tables.realms[: self._realms_made].tobytes(),
        )

    @classmethod
    def restored(cls, saved: SavedIndex, blocks_max: int, lock: Turnstile) -> ShadowIndex:
        """From `saved`. Raises `ValueError` for bytes that are none."""
        rows = {
            "blocks": np.frombuffer(saved.blocks, BLOCK_DTYPE),
            "placements": np.frombuffer(saved.placements, PLACEMENT_DTYPE),
            "places": np.frombuffer(saved.place_rows, PLACE_DTYPE),
            "realms": np.frombuffer(saved.realms, REALM_DTYPE),
        }
        bits = 12
        while 4 * len(rows["blocks"]) > 3 << bits:
            bits += 1
        index = cls(blocks_max, lock=lock, hash_bits=min(bits, IndexSize.for_blocks(blocks_max).hash_bits_max))
        for name, table in rows.items():
            getattr(index.tables, name)[: len(table)] = table
        if saved.state:
            index.tables.state[list(STATE_SAVED)] = saved.state
        sections = {name: Section(len(table), table.itemsize, 0) for name, table in rows.items()}
        index._adopt(Contents(FORMAT, saved.state, saved.places, sections, b""))
        return index
