"""What a policy is measured by, live or in the shadow: one counter for all of them. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt

from advisor.index import ArrayIndex, Key
from advisor.policies.rules.admission import PING_PONG_S

Array = npt.NDArray[Any]

MARK_US = 20_000_000
MARKS_MAX = 181
"""An hour of marks."""
REMEMBERED_MAX = 1 << 16
"""Blocks that came and were not used yet, and blocks that left lately; past it the oldest are forgotten. 6 MB each."""

_MIX = 0x9E3779B97F4A7C15
LOW_64 = (1 << 64) - 1


def tags_of(index: ArrayIndex, rows: Array) -> Array:
    """A number for each block, u8: the same in every index, and the same for two blocks next to never."""
    blocks = index.tables.blocks[rows]
    realms = index.tables.realms[blocks["realm"]]
    mixed = realms["namespace_id"] + realms["group"].astype(np.uint64)
    tags: Array = blocks["hash_lo"] ^ blocks["hash_hi"] * np.uint64(_MIX) ^ mixed * np.uint64(_MIX)
    return tags


def tag_of(key: Key) -> int:
    """`tags_of` of one block."""
    low, high = key.sequence_hash & LOW_64, key.sequence_hash >> 64
    return (low ^ high * _MIX ^ (key.namespace_id + key.group) * _MIX) & LOW_64


class Counts(msgspec.Struct, array_like=True):
    """Since a beginning. A use is one of a block that volumes hold; it is *found* where the fastest volume has it."""

    uses: int = 0
    used_bytes: int = 0
    found: int = 0
    found_bytes: int = 0
    saved_s: float = 0.0
    """Against reading all of it from the slowest volume, of `timed` uses: those at whose time rates were known."""
    timed: int = 0
    moves: int = 0
    moved_bytes: int = 0
    """Copied by promotions and demotions."""
    came: int = 0
    """Moves to the fastest volume."""
    hit: int = 0
    """Those whose block was used before it left."""
    bounced: int = 0
    """Those of a block that had left it less than 10 minutes before."""

    def since(self, before: Counts) -> Counts:
        pairs = zip(msgspec.structs.astuple(self), msgspec.structs.astuple(before), strict=True)
        return Counts(*(now - then for now, then in pairs))


class Mark(msgspec.Struct, array_like=True):
    """The counts at a moment."""

    at_us: int
    counts: Counts


class SavedTally(msgspec.Struct, array_like=True):
    counts: Counts = msgspec.field(default_factory=Counts)
    marks: list[Mark] = []
    unused: list[int] = []
    left: list[tuple[int, int]] = []


class Tally:
    """One policy's counts, and what they need to be remembered of blocks: by tag."""

    def __init__(self, saved: SavedTally | None = None) -> None:
        saved = saved if saved is not None else SavedTally()
        self.counts = saved.counts
        self.marks = list(saved.marks)
        """The last hour's, oldest first."""
        self._unused = dict.fromkeys(saved.unused)
        """Came to the fastest volume, and were not used since."""
        self._left = dict(saved.left)
        """When blocks left it, µs; the oldest first."""

    def used(self, tags: Array, uses: Array, sizes: Array, found: Array, saved_s: float | None) -> None:
        """Blocks were used `uses` times each, where `found` on the fastest volume. Arrays of one length."""
        counts, total = self.counts, int(uses.sum())
        counts.uses += total
        counts.used_bytes += int((uses * sizes).sum())
        counts.found += int(uses[found].sum())
        counts.found_bytes += int((uses * sizes)[found].sum())
        if saved_s is not None:
            counts.saved_s += saved_s
            counts.timed += total
        if self._unused:
            for tag in self._unused.keys() & set(tags[found].tolist()):
                del self._unused[tag]
                counts.hit += 1

    def moved(self, copied_bytes: int) -> None:
        self.counts.moves += 1
        self.counts.moved_bytes += copied_bytes

    def came(self, tag: int, now_us: int) -> None:
        """A move brought a block to the fastest volume."""
        self.counts.came += 1
        since = self._left.pop(tag, None)
        if since is not None and now_us - since < PING_PONG_S * 1e6:
            self.counts.bounced += 1
        self._unused[tag] = None
        if len(self._unused) > REMEMBERED_MAX:
            del self._unused[next(iter(self._unused))]

    def left(self, tag: int, now_us: int) -> None:
        """A move took a block from the fastest volume."""
        self._unused.pop(tag, None)
        self._left.pop(tag, None)
        self._left[tag] = now_us
        if len(self._left) > REMEMBERED_MAX:
            del self._left[next(iter(self._left))]

    def mark(self, now_us: int) -> None:
        """Time has passed: keep a mark of it now and then."""
        if not self.marks or now_us - self.marks[-1].at_us >= MARK_US:
            self.marks.append(Mark(now_us, msgspec.structs.replace(self.counts)))
            del self.marks[:-MARKS_MAX]

    def last_hour(self, now_us: int) -> Counts:
        start = next((mark for mark in self.marks if now_us - mark.at_us <= 3_600_000_000), None)
        return self.counts if start is None else self.counts.since(start.counts)

    def saved(self) -> SavedTally:
        return SavedTally(
            msgspec.structs.replace(self.counts), list(self.marks), list(self._unused), list(self._left.items())
        )


def found_each(marks: Sequence[Mark]) -> list[float | None]:
    """Between each mark and the one before, the share of uses that were found; None where there were none."""
    shares: list[float | None] = []
    for before, now in pairwise(marks):
        step = now.counts.since(before.counts)
        shares.append(step.found / step.uses if step.uses else None)
    return shares
