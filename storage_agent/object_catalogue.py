"""Which slot of a volume lies where in which object: in memory, rebuilt from the objects. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

import numpy as np

from storage_agent.block_header import BlockHeader
from storage_agent.object_format import Numbers, ObjectIndex, StoredBlock

_SLACK_OBJECTS = 8
"""So many objects' worth of waste is never worth the work."""


class Place(NamedTuple):
    """Block number `entry` of object `mark`; its header page is at byte `offset`."""

    mark: int
    entry: int
    offset: int


class KnownObject:
    """An object and what of it is held. `slots`: of its blocks, by number; -1 where one is free.

    `size_bytes`: as it was listed; less than the index says where it was cut.
    """

    __slots__ = ("index", "oldest_ms", "size_bytes", "slots")

    def __init__(self, index: ObjectIndex, slots: dict[int, int], size_bytes: int) -> None:
        self.index = index
        self.size_bytes = size_bytes
        self.slots: Numbers = np.full(len(index), -1, dtype=np.int64)
        self.slots[list(slots)] = list(slots.values())
        self.oldest_ms = int(index.stored_ms.min())

    @property
    def held(self) -> list[int]:
        """Numbers of the blocks that are not free."""
        return np.flatnonzero(self.slots >= 0).tolist()

    @property
    def freed(self) -> set[int]:
        return set(np.flatnonzero(self.slots < 0).tolist())

    @property
    def held_bytes(self) -> int:
        """Of the blocks that are not free."""
        return int(self.index.block_bytes[self.slots >= 0].sum())


class ObjectCatalogue:
    """Not thread-safe: its owner holds a lock around every call."""

    def __init__(self) -> None:
        self.objects: dict[int, KnownObject] = {}
        self._marks: dict[int, int] = {}
        """By slot."""
        self._object_bytes = 0
        self._held_bytes = 0

    def add(self, index: ObjectIndex, slots: dict[int, int], size_bytes: int | None = None) -> None:
        """An object is there; `slots` are those of its blocks that are held, by number of the block."""
        known = self.objects[index.mark] = KnownObject(index, slots, size_bytes or index.object_bytes)
        self._object_bytes += index.object_bytes
        self._held_bytes += known.held_bytes
        self._marks |= dict.fromkeys(slots.values(), index.mark)

    def place(self, slot: int) -> Place | None:
        mark = self._marks.get(slot)
        if mark is None:
            return None
        known = self.objects[mark]
        (entry,) = np.flatnonzero(known.slots == slot).tolist()
        return Place(mark, entry, int(known.index.offsets[entry]))

    def stored(self, slot: int) -> tuple[Place, StoredBlock] | None:
        """Where a slot's block lies, and what it is, with its slot; None where it holds none."""
        place = self.place(slot)
        if place is None:
            return None
        known = self.objects[place.mark]
        return place, known.index.block(place.entry)._replace(header=self._header(known, place.entry))

    @property
    def footprint(self) -> tuple[int, int]:
        """Bytes of the objects, and of the blocks held in them."""
        return self._object_bytes, self._held_bytes

    def after_freeing(self, slots: Iterable[int]) -> dict[int, set[int]]:
        """The numbers of all free blocks of each object that would change."""
        changed: dict[int, set[int]] = {}
        for slot in slots:
            place = self.place(slot)
            if place is not None:
                changed.setdefault(place.mark, self.objects[place.mark].freed).add(place.entry)
        return changed

    def free(self, slots: Iterable[int]) -> None:
        """Forget blocks, and objects without any."""
        for slot in slots:
            place = self.place(slot)
            if place is None:
                continue
            del self._marks[slot]
            known = self.objects[place.mark]
            known.slots[place.entry] = -1
            self._held_bytes -= int(known.index.block_bytes[place.entry])
            if not known.held:
                self._object_bytes -= known.index.object_bytes
                del self.objects[place.mark]

    def move(self, index: ObjectIndex, sources: Sequence[Place]) -> dict[int, int]:
        """Blocks were copied from `sources` into the object `index`, in that order: hold them there from now on.

        The slots by number in the new object, without what was freed meanwhile. Old objects that hold nothing any more
        are forgotten.
        """
        slots: dict[int, int] = {}
        for entry, source in enumerate(sources):
            known = self.objects.get(source.mark)
            if known is not None and known.slots[source.entry] >= 0:
                slots[entry] = int(known.slots[source.entry])
        self.free(list(slots.values()))
        if slots:
            self.add(index, slots)
        return slots

    def expired(self, before_ms: int) -> list[BlockHeader]:
        """What was put before then, by the clock of whoever put it."""
        return [
            self._header(known, entry)
            for known in self.objects.values()
            if known.oldest_ms < before_ms
            for entry in known.held
            if known.index.stored_ms[entry] < before_ms
        ]

    def is_wasteful(self, object_bytes: int) -> bool:
        """Whether half of what lies there is dead, or four times the objects that the blocks need."""
        needed = 1 + self._held_bytes // object_bytes
        is_dead = self._object_bytes > 2 * self._held_bytes + _SLACK_OBJECTS * object_bytes
        return is_dead or len(self.objects) > 4 * (needed + _SLACK_OBJECTS)

    def worth_rewriting(self, object_bytes: int, blocks_max: int) -> list[int]:
        """Objects whose blocks fill less than half of `object_bytes` or of themselves; none where one is alone in that.

        No more than begin with `blocks_max` blocks.
        An object that is full and whole is never among them, so a second compaction finds at most one.
        """
        small: list[int] = []
        holey = blocks = 0
        for mark, known in self.objects.items():
            if blocks >= blocks_max:
                break
            held = known.held_bytes
            is_holey = 2 * held < known.index.object_bytes
            if is_holey or 2 * held < object_bytes:
                small.append(mark)
                blocks += len(known.held)
                holey += is_holey
        return small if len(small) > 1 or holey else []

    def blocks_of(self, marks: Iterable[int]) -> list[tuple[Place, StoredBlock]]:
        """What is held of these objects; headers with their slots."""
        found: list[tuple[Place, StoredBlock]] = []
        for mark in marks:
            known = self.objects.get(mark)
            if known is None:
                continue
            for entry in known.held:
                block = known.index.block(entry)._replace(header=self._header(known, entry))
                found.append((Place(mark, entry, block.offset), block))
        return found

    def _header(self, known: KnownObject, entry: int) -> BlockHeader:
        return known.index.block(entry).header._replace(slot=int(known.slots[entry]))
