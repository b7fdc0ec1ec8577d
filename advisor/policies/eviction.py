"""Who leaves a volume first, by name. Every order is leaves first: a block goes after its descendants there."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt

from advisor.index import ArrayIndex
from advisor.policies.heat_book import HeatBook, last_touch_ms
from advisor.policies.rules.eviction import LFUDA_LEAF, LRU_LEAF, VALUE, eviction_key, inflation_of
from advisor.policies.rules.noting import GREEDY, placed_columns

Array = npt.NDArray[Any]

RESIDENTS_MAX = 1 << 18
"""Blocks of a volume that are ordered by key: of a larger one those used longest ago."""
SMALL_SHARE = 0.1
"""Of S3-FIFO's small queue."""
ENTRY_SHARE = 0.25
"""Of 2Q's first queue."""
FIRST, PROVEN = range(2)
"""Regions: S3-FIFO's small and main, 2Q's A1 and Am, ARC's T1 and T2."""


class Ageing(msgspec.Struct):
    """What an eviction remembers of a volume beside its blocks."""

    inflation: float = 0.0
    """LFU with ageing and GDSF: the last evicted key's."""
    hand: int = 0
    """SIEVE: the turn at which the block under the hand entered."""
    target: float = 0.0
    """ARC: how many blocks of one touch to keep."""


@dataclass
class Residents:
    """Blocks of a volume in columns, each made when an eviction asks for it. The caller holds the index's lock."""

    index: ArrayIndex
    book: HeatBook
    place: int
    rows: Array
    slots: Array
    capacity: int

    @cached_property
    def notes(self) -> Array:
        """The book's; those without one hold zeros."""
        notes = self.book.notes[self.slots]
        notes[self.slots < 0] = np.zeros((), notes.dtype)
        return notes

    @cached_property
    def depths(self) -> Array:
        return self.index.tables.blocks["depth"][self.rows].astype(np.int64)

    @cached_property
    def touches(self) -> Array:
        return self.index.tables.blocks["touches"][self.rows].astype(np.int64)

    @cached_property
    def _placed(self) -> tuple[Array, Array]:
        uses, sizes = np.empty(len(self.rows), np.int64), np.empty(len(self.rows), np.int64)
        placed_columns(self.index.tables.blocks, self.index.tables.placements, self.rows, self.place, uses, sizes)
        return uses, sizes

    @property
    def uses(self) -> Array:
        return self._placed[0]

    @property
    def sizes(self) -> Array:
        return self._placed[1]

    @cached_property
    def last_ms(self) -> Array:
        return last_touch_ms(self.index, self.rows)

    @property
    def scores(self) -> Array:
        return self.book.scores(self.index, self.rows, self.slots)

    @property
    def worths(self) -> Array:
        return self.book.worths(self.slots)

    @property
    def accessed(self) -> Array:
        """Since an eviction last looked at them."""
        return self.notes["touches"] > self.notes["seen_touches"]

    @property
    def entered(self) -> Array:
        """Positions in order of entry."""
        return _ranks(self.notes["entered_turn"], self.last_ms)


def residents(index: ArrayIndex, place: int, book: HeatBook, capacity: int) -> Residents:
    """The caller holds the index's lock."""
    count = min(index.place_figures(place).blocks, RESIDENTS_MAX)
    rows = np.array(index.coldest(place, count), np.int32)
    return Residents(index, book, place, rows, book.of(index, rows), capacity)


def _ranks(*keys: Array) -> Array:
    """Positions by `keys`, the first the most important, ties by the next."""
    order = np.lexsort(keys[::-1])
    ranks = np.empty(len(order))
    ranks[order] = np.arange(len(order))
    return ranks


def _lfuda(r: Residents, _: Ageing) -> Array:
    unnoted = np.array([eviction_key(LFUDA_LEAF, 0.0, int(t), 0, 0.0) for t in r.touches[r.slots < 0]])
    keys = r.notes["key"].copy()
    keys[r.slots < 0] = unnoted
    return keys


def _value(r: Residents, _: Ageing) -> Array:
    return r.scores


def _worth(r: Residents, _: Ageing) -> Array:
    return r.worths


def _gdsf(r: Residents, _: Ageing) -> Array:
    """Greedy dual: the inflation at the last touch plus uses since it came, of large blocks less."""
    mean = r.sizes.mean() if len(r.sizes) else 1.0
    return r.notes["key"] + (1 + r.uses) * (mean / np.maximum(r.sizes, 1))


def _length_aware(r: Residents, _: Ageing) -> Array:
    """The fewest uses since it came, then the deepest, then the one used longest ago."""
    return _ranks(r.uses, -r.depths, r.last_ms)


def _sieve(r: Residents, ageing: Ageing) -> Array:
    """From the hand on, in order of entry, those not used since it last passed."""
    behind = r.notes["entered_turn"] <= ageing.hand
    return _ranks(r.accessed, behind, r.entered)


def _s3_fifo(r: Residents, _: Ageing) -> Array:
    """The small queue's surplus that was not used since it came, then the main queue, then the rest."""
    small = r.notes["region"] == FIRST
    surplus = small.sum() - SMALL_SHARE * r.capacity
    unused = small & ~r.accessed
    ahead = unused & (_ranks(~unused, r.entered) < surplus)
    return _ranks(~ahead, small, r.accessed, r.entered)


def _two_queues(r: Residents, _: Ageing) -> Array:
    """The entry queue's surplus in order of entry, then those that came back, by last use."""
    entry = r.notes["region"] == FIRST
    surplus = entry.sum() - ENTRY_SHARE * r.capacity
    ahead = entry & (_ranks(~entry, r.entered) < surplus)
    return _ranks(~ahead, entry, np.where(entry, r.entered, r.last_ms))


def _arc(r: Residents, ageing: Ageing) -> Array:
    """Blocks of one touch past the target, else those of more, by last use."""
    once = (r.notes["region"] == FIRST) & ~r.accessed
    ahead = once & (_ranks(~once, r.last_ms) < once.sum() - ageing.target)
    return _ranks(~ahead, once, r.last_ms)


def _no_mark(book: HeatBook, slot: int, ageing: Ageing, capacity: int) -> None:
    """An order that needs no more than the index and the note hold."""


def _returns(book: HeatBook, slot: int, capacity: int) -> bool:
    """It was dropped within as many uses as the volume has blocks."""
    dropped = int(book.notes["dropped_turn"][slot])
    return dropped > 0 and book.turn - dropped < capacity


def _enter_queue(book: HeatBook, slot: int, ageing: Ageing, capacity: int) -> None:
    book.notes["region"][slot] = PROVEN if _returns(book, slot, capacity) else FIRST


def _enter_arc(book: HeatBook, slot: int, ageing: Ageing, capacity: int) -> None:
    region = FIRST
    if _returns(book, slot, capacity):
        step = 1.0 if book.notes["region"][slot] == FIRST else -1.0
        ageing.target = min(float(capacity), max(0.0, ageing.target + step))
        region = PROVEN
    book.notes["region"][slot] = region


def _age_lfuda(book: HeatBook, slot: int, ageing: Ageing, capacity: int) -> None:
    ageing.inflation = inflation_of(LFUDA_LEAF, float(book.notes["key"][slot]))


def _age_greedy(book: HeatBook, slot: int, ageing: Ageing, capacity: int) -> None:
    ageing.inflation = max(ageing.inflation, float(book.notes["key"][slot]) + 1.0)


def _move_hand(book: HeatBook, slot: int, ageing: Ageing, capacity: int) -> None:
    """Those that the hand passed on its way are not used since."""
    notes, entered = book.notes, int(book.notes["entered_turn"][slot])
    ahead, before = notes["entered_turn"] > ageing.hand, notes["entered_turn"] < entered
    passed = ahead & before if entered > ageing.hand else ahead | before
    notes["seen_touches"][passed] = notes["touches"][passed]
    ageing.hand = entered


def _prove_older(book: HeatBook, slot: int, ageing: Ageing, capacity: int) -> None:
    """Those of its queue that came before the one that leaves and were used enter the main queue again, last."""
    notes, entered = book.notes, int(book.notes["entered_turn"][slot])
    used = (notes["region"] == notes["region"][slot]) & (notes["touches"] > notes["seen_touches"])
    passed = np.flatnonzero(used & (notes["entered_turn"] > 0) & (notes["entered_turn"] < entered))
    for again in passed[np.argsort(notes["entered_turn"][passed], kind="stable")].tolist():
        notes["region"][again] = PROVEN
        notes["seen_touches"][again] = notes["touches"][again]
        notes["entered_turn"][again] = book.next_turn()


Mark = Callable[[HeatBook, int, Ageing, int], None]


@dataclass(frozen=True, slots=True)
class Eviction:
    """`keys` None: the index's own order, `index_order`. `rule`: what a note's key is made by.

    `enter` and `leave` mark the note, and the volume's ageing, when a block comes and goes.
    """

    keys: Callable[[Residents, Ageing], Array] | None
    index_order: str = "lru"
    rule: int = LRU_LEAF
    enter: Mark = _no_mark
    leave: Mark = _no_mark
    by_entry: bool = False
    """It goes by when blocks came to the fastest volume: slower ones go by their last use."""


EVICTIONS: dict[str, Eviction] = {
    "lru": Eviction(None),
    "lru-leaf": Eviction(None),
    "lfu": Eviction(None, "lfu"),
    "lfuda-leaf": Eviction(_lfuda, rule=LFUDA_LEAF, leave=_age_lfuda),
    "value": Eviction(_value, rule=VALUE),
    "worth": Eviction(_worth, rule=VALUE),
    "gdsf": Eviction(_gdsf, rule=GREEDY, leave=_age_greedy),
    "length-aware": Eviction(_length_aware),
    "sieve": Eviction(_sieve, leave=_move_hand, by_entry=True),
    "s3-fifo": Eviction(_s3_fifo, enter=_enter_queue, leave=_prove_older, by_entry=True),
    "2q": Eviction(_two_queues, enter=_enter_queue, by_entry=True),
    "arc": Eviction(_arc, enter=_enter_arc, by_entry=True),
}


def in_order(
    index: ArrayIndex, place: int, eviction: Eviction, book: HeatBook, ageing: Ageing, capacity: int
) -> Iterable[int]:
    """Rows of a volume in the order in which they leave. The caller holds the index's lock until it is done."""
    if eviction.keys is None:
        return index.every_leaf_first(place)
    r = residents(index, place, book, capacity)
    keys = np.array(eviction.keys(r, ageing), np.float64)
    ordered: list[int] = book.leaves_first(index, r.rows, keys).tolist()
    return ordered
