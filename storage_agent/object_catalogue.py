"""Which slot of a volume lies where in which object: in memory, rebuilt from the objects. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from storage_agent.block_header import BlockHeader
from storage_agent.object_format import ObjectIndex, StoredBlock

_SLACK_OBJECTS = 8
"""So many objects' worth of waste is never worth the work."""


class Place(NamedTuple):
    """Block number `entry` of object `mark`; its header page is at byte `offset`."""

    mark: int
    entry: int
    offset: int


@dataclass(slots=True)
class KnownObject:
    """An object and what of it is held. `slots`: by number of the block, those that are not free."""

    index: ObjectIndex
    size_bytes: int
    """As it was listed: less than the index says where it was cut."""
    slots: dict[int, int] = field(default_factory=dict)

    @property
    def freed(self) -> set[int]:
        return set(range(len(self.index.blocks))) - self.slots.keys()

    @property
    def held_bytes(self) -> int:
        """Of the blocks that are not free."""
        return sum(block.end - block.offset for block in (self.index.blocks[entry] for entry in self.slots))


class ObjectCatalogue:
    """Not thread-safe: its owner holds a lock around every call."""

    def __init__(self) -> None:
        self.objects: dict[int, KnownObject] = {}
        self._places: dict[int, Place] = {}
        self._headers: dict[int, BlockHeader] = {}
        self._object_bytes = 0
        self._held_bytes = 0

    def add(self, index: ObjectIndex, slots: dict[int, int], size_bytes: int | None = None) -> None:
        """An object is there; `slots` are those of its blocks that are held, by number of the block."""
        self.objects[index.mark] = KnownObject(index, size_bytes or index.object_bytes, dict(slots))
        self._object_bytes += index.object_bytes
        for entry, slot in slots.items():
            block = index.blocks[entry]
            self._held_bytes += block.end - block.offset
            self._places[slot] = Place(index.mark, entry, block.offset)
            self._headers[slot] = block.header._replace(slot=slot)

    def place(self, slot: int) -> Place | None:
        return self._places.get(slot)

    def after_freeing(self, slots: Iterable[int]) -> dict[int, set[int]]:
        """The numbers of all free blocks of each object that would change."""
        changed: dict[int, set[int]] = {}
        for slot in slots:
            place = self._places.get(slot)
            if place is not None:
                changed.setdefault(place.mark, self.objects[place.mark].freed).add(place.entry)
        return changed

    def free(self, slots: Iterable[int]) -> None:
        """Forget blocks, and objects without any."""
        for slot in slots:
            place = self._places.pop(slot, None)
            if place is None:
                continue
            del self._headers[slot]
            known = self.objects[place.mark]
            del known.slots[place.entry]
            self._held_bytes -= known.index.blocks[place.entry].end - place.offset
            if not known.slots:
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
            slot = known.slots.get(source.entry) if known is not None else None
            if slot is not None:
                slots[entry] = slot
        self.free(list(slots.values()))
        if slots:
            self.add(index, slots)
        return slots

    def expired(self, before_ms: int) -> list[BlockHeader]:
        """What was put before then, by the clock of whoever put it."""
        return [
            self._headers[slot]
            for known in self.objects.values()
            for entry, slot in known.slots.items()
            if known.index.blocks[entry].stored_ms < before_ms
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
                blocks += len(known.slots)
                holey += is_holey
        return small if len(small) > 1 or holey else []

    def blocks_of(self, marks: Iterable[int]) -> list[tuple[Place, StoredBlock]]:
        """What is held of these objects; headers with their slots."""
        found: list[tuple[Place, StoredBlock]] = []
        for mark in marks:
            known = self.objects.get(mark)
            for entry, slot in (known.slots if known is not None else {}).items():
                block = self.objects[mark].index.blocks[entry]
                found.append((self._places[slot], block._replace(header=self._headers[slot])))
        return found
