"""What the live planner remembers of blocks: owned by the fold, changed by its entries alone, saved in checkpoints."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from advisor.index import ArrayIndex
from advisor.policies.rules.eviction import eviction_key
from advisor.policies.rules.noting import (
    COUNTS,
    FIRST_SEEN,
    GIVEN_AWAY,
    GREEDY,
    NOTE_DTYPE,
    NOTES,
    NOTES_OF_3,
    TURN,
    WAYS,
    find_notes,
    leaves_before_parents,
    note_blocks,
    part_from_lost,
    worthy_absent,
)
from advisor.policies.rules.score import HALF_LIFE_S

SLOTS = 1 << 18
"""Blocks remembered: 34 MB when all are. A block that is not is taken for one touched once, at its last touch."""

Array = npt.NDArray[Any]


class HeatBook:
    """A note of each block touched lately. Rows are the index's and good until its next batch."""

    def __init__(self) -> None:
        self.notes: Array = np.zeros(SLOTS, NOTE_DTYPE)
        self.counts = np.zeros(COUNTS, np.int64)
        self._at = np.full(0, -1, np.int64)

    @property
    def turn(self) -> int:
        """Uses so far."""
        return int(self.counts[TURN])

    @property
    def first_seen(self) -> int:
        """Blocks that the last `note` saw for the first time."""
        return int(self.counts[FIRST_SEEN])

    def note(self, index: ArrayIndex, rows: Array) -> tuple[Array, Array]:
        """Put down how often blocks `rows` (i4) were used since they were last noted: `Learning.hear` uses it up.

        Returns the slots of their notes, which another of `rows` may have taken meanwhile, and what changed hands.
        """
        t = index.tables
        slots, given = np.empty(len(rows), np.int64), np.empty(len(rows), np.int64)
        note_blocks(t.blocks, t.realms, rows, self.notes, self.counts, slots, given)
        return slots, given[: self.counts[GIVEN_AWAY]]

    def part_from_lost(self) -> None:
        """Blocks whose parent is not noted any more have none."""
        part_from_lost(self.notes)

    def used(self) -> Array:
        """Slots in use, in order."""
        return np.flatnonzero(self.notes["tag"]) if self.counts[NOTES] else np.zeros(0, np.int64)

    def of(self, index: ArrayIndex, rows: Array) -> Array:
        """Slots of the notes of blocks `rows`, -1 where there is none."""
        t = index.tables
        slots = np.empty(len(rows), np.int64)
        find_notes(t.blocks, t.realms, rows, self.notes, slots)
        return slots

    def still_of(self, rows: Array, slots: Array) -> Array:
        """`slots` where `note` put `rows` just now, -1 where another block has taken one since."""
        return np.where(self.notes["row"][slots] == rows, slots, -1)

    def slot(self, index: ArrayIndex, row: int) -> int:
        return int(self.of(index, np.array([row], np.int32))[0])

    def next_turn(self) -> int:
        self.counts[TURN] += 1
        return int(self.counts[TURN])

    def keep_out(self, slots: Sequence[int]) -> None:
        """Blocks were kept out of the fast volume now."""
        self.notes["out_turn"][[slot for slot in slots if slot >= 0]] = self.turn

    def make_key(self, slot: int, rule: int, inflation: float) -> None:
        """The note's key of eviction, as a use would make it now."""
        note = self.notes[slot]
        note.key = (
            inflation
            if rule == GREEDY
            else eviction_key(rule, inflation, int(note.touches), self.turn, float(note.score))
        )

    def scores(self, index: ArrayIndex, rows: Array, slots: Array) -> Array:
        """Decayed scores, f8."""
        scores = np.array(self.notes["score"][slots])
        lacking = np.flatnonzero(slots < 0)
        scores[lacking] = last_touch_ms(index, rows[lacking]) / 1000.0 / HALF_LIFE_S
        return scores

    def worths(self, slots: Array) -> Array:
        """Uses to come, f8; 0 of a block that is not noted."""
        return np.where(slots >= 0, self.notes["worth"][slots], 0.0)

    def worthy_absent(self, index: ArrayIndex, place: int, least: float) -> Array:
        """Rows (i4) of blocks worth `least` that are not in a place."""
        t = index.tables
        rows = np.empty(SLOTS, np.int32)
        count = worthy_absent(t.blocks, t.realms, t.placements, self.notes, place, least, rows)
        return rows[:count]

    def leaves_first(self, index: ArrayIndex, rows: Array, keys: Array) -> Array:
        """`rows` by key, smallest first, each after all its descendants among them. `keys` is changed."""
        blocks = index.tables.blocks
        depths = blocks["depth"][rows].astype(np.int64)
        top = int(rows.max(initial=-1)) + 1
        parents = int(blocks["parent"][rows].max(initial=-1)) + 1
        if len(self._at) < max(top, parents):
            self._at = np.full(2 * max(top, parents), -1, np.int64)
        leaves_before_parents(blocks, rows, keys, self._at, np.argsort(-depths, kind="stable"))
        return rows[np.lexsort((rows, -depths, keys))]

    def saved(self) -> tuple[bytes, bytes, bytes]:
        """Slots in use, their notes, and the counts."""
        used = self.used()
        return used.astype("<i8").tobytes(), self.notes[used].tobytes(), self.counts.astype("<i8").tobytes()

    def described(self) -> list[bytes]:
        """For a digest: as `saved`, without the index's row numbers."""
        used, notes, counts = self.saved()
        without = np.frombuffer(notes, NOTE_DTYPE).copy()
        without["row"] = 0
        return [used, without.tobytes(), counts]

    def restore(self, used: bytes, notes: bytes, counts: bytes) -> None:
        """From `saved`. Raises `ValueError`."""
        slots = np.frombuffer(used, "<i8")
        if len(slots) and not 0 <= slots.min() <= slots.max() < SLOTS:
            raise ValueError(f"notes of slots {slots.min()} to {slots.max()}; there are {SLOTS}")
        told = np.frombuffer(counts, "<i8")
        if len(told) == len(self.counts):
            self.notes[slots] = np.frombuffer(notes, NOTE_DTYPE)
        else:
            self._restore_3(slots, np.frombuffer(notes, NOTES_OF_3))
        self.counts[: len(told)] = told

    def _restore_3(self, slots: Array, notes: Array) -> None:
        """Notes of states up to version 3 knew no parents and no worth."""
        for name in NOTES_OF_3.names or ():
            self.notes[name][slots] = notes[name]
        self.notes["counted"][slots] = notes["touches"]
        self.notes["parent"][slots] = -1
        self.notes["row"][slots] = 0


def last_touch_ms(index: ArrayIndex, rows: Array) -> Array:
    blocks = index.tables.blocks[rows]
    return (blocks["marks"].astype(np.int64) >> 10 & 0x3FF) << 32 | blocks["last_touch"].astype(np.int64)


assert SLOTS % WAYS == 0
