"""Which slot holds which block: the table of one volume, in memory. Pure, and used under its owner's lock.

A slot is always in exactly one state. `FREEING` lasts from the moment a block is no longer served until its header on
the volume is erased; its key stays reserved meanwhile, so that a block is never twice on a volume.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from enum import StrEnum
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from storage_agent.block_header import PAGE_BYTES, BlockHeader, pack_key, page_ceiling
from storage_agent.errors import BlockFormatError, SlotStateError
from storage_agent.fragmentation import FreeStretches
from storage_agent.port import BlockKey, ClassStat
from storage_agent.slot_classes import SlotClasses, SlotsByClass
from storage_agent.slot_rows import SlotRows


class SlotState(StrEnum):
    FREE = "free"
    WRITING = "writing"
    LIVE = "live"
    FREEING = "freeing"


class SlotTrigger(StrEnum):
    RESERVE = "reserve"
    PUBLISH = "publish"
    ABANDON = "abandon"
    RETIRE = "retire"
    RESTORE = "restore"
    RELEASE = "release"


TRANSITIONS: dict[SlotState, dict[SlotTrigger, SlotState]] = {
    SlotState.FREE: {SlotTrigger.RESERVE: SlotState.WRITING},
    SlotState.WRITING: {SlotTrigger.PUBLISH: SlotState.LIVE, SlotTrigger.ABANDON: SlotState.FREE},
    SlotState.LIVE: {SlotTrigger.RETIRE: SlotState.FREEING},
    SlotState.FREEING: {SlotTrigger.RELEASE: SlotState.FREE, SlotTrigger.RESTORE: SlotState.LIVE},
}


class Reservation(NamedTuple):
    slot: int
    generation: int


class Refusal(StrEnum):
    """Why no slot was reserved."""

    PRESENT = "present"
    BUSY = "busy"
    FULL = "full"


_STATES = tuple(SlotState)
_FREE, _WRITING, _LIVE, _FREEING = range(len(_STATES))
_STEPS = {
    (_STATES.index(state), trigger): _STATES.index(target)
    for state, steps in TRANSITIONS.items()
    for trigger, target in steps.items()
}


class SlotTable:
    """States, keys and pins of `rows`'s slots, live where they hold something. Not thread-safe: its owner holds a lock
    around every call.

    Slots freed longest ago are reused first. Raises `SlotStateError` for a step that `TRANSITIONS` does not allow.
    """

    def __init__(self, recovered: SlotRows, generation_next: int, classes: SlotClasses = ()) -> None:
        """Takes `recovered` over; `classes` are of all its slots. Raises `SlotStateError` where a block is in it twice.
        """
        self._rows = recovered
        live = recovered.live_slots()
        live_slots = live.tolist()
        states = np.full(len(recovered), _FREE, dtype=np.uint8)
        states[live] = _LIVE
        self._states = bytearray(states.data)
        self._keys: dict[bytes, int] = dict(zip(recovered.packed_keys(live), live_slots, strict=True))
        if len(self._keys) != len(live_slots):
            raise SlotStateError(f"{len(live_slots) - len(self._keys)} blocks were recovered twice")
        self._pins: dict[int, int] = {}
        self._writing_keys: dict[int, bytes | None] = {}
        """Slots being written, by the key that they are reserved for; None for a copy of a block that is here."""
        self._freeing: dict[int, bytes | None] = {}
        """Slots being freed, by the key that stays reserved; None where the block goes on in another slot."""
        newest = int(recovered.rows["generation"].max(initial=0))
        self.generation_next = max(generation_next, newest + 1)
        self.retired_total = 0
        """Blocks ever taken out of service; a search over volumes that saw it unchanged missed nothing."""
        self._limit = len(recovered)
        self._live_count = len(live_slots)
        self.classes = classes
        self._by_class = SlotsByClass(classes)
        self._free: list[deque[int]] = self._free_slots()
        """By class; of equal slots there is one."""

    @property
    def capacity(self) -> int:
        return len(self._states)

    # Put

    def reserve(self, key: BlockKey, payload_bytes: int) -> Reservation | Refusal:
        """Take a free slot for a put of `key`: of the smallest class with one that `payload_bytes` fit in.

        Raises `BlockFormatError` where it is no key.
        """
        packed = pack_key(key)
        held = self._keys.get(packed)
        if held is not None:
            return Refusal.PRESENT if self._states[held] == _LIVE else Refusal.BUSY
        free = self._free_for(payload_bytes)
        if not free:
            return Refusal.FULL
        reserved = self._reserve_slot(packed, free)
        self._keys[packed] = reserved.slot
        return reserved

    def reserve_copy(self, held: BlockHeader) -> Reservation | None:
        """Take a free slot for a block that is in another one, where there are several sizes of a smaller class.

        None where none is free.
        """
        free = self._free_for(held.payload_bytes)
        if not free or (self.classes and self._class_number(free[0]) >= self._class_number(held.slot)):
            return None
        return self._reserve_slot(None, free)

    def reserve_together(self, runs: Sequence[Sequence[BlockHeader]], extents: Sequence[int]) -> dict[int, Reservation]:
        """Free slots for copies of blocks, by the slot that each is in: those of a run one after another.

        The blocks of a run are of one class (`class_number`). None for a run that would lie in as many stretches as
        its `extents`.
        """
        stretches: dict[int, FreeStretches] = {}
        taken: dict[int, int] = {}
        for run, extent_count in zip(runs, extents, strict=True):
            number = self.class_number(run[0].payload_bytes)
            if number not in stretches:
                stretches[number] = FreeStretches(np.sort(np.fromiter(self._free[number], np.intp)))
            slots = stretches[number].take(len(run), extent_count - 1)
            taken |= dict(zip((header.slot for header in run), slots, strict=False))
        chosen = set(taken.values())
        for number in stretches:
            self._free[number] = deque(slot for slot in self._free[number] if slot not in chosen)
        return {old: self._reserve_free(None, slot) for old, slot in taken.items()}

    def class_number(self, payload_bytes: int) -> int:
        """The smallest class that holds so much; 0 of equal slots."""
        sizes = (number for number, each in enumerate(self.classes) if payload_bytes <= each.block_bytes)
        return next(sizes, 0)

    def oversized(self) -> list[BlockHeader]:
        """The blocks whose slots are of a larger class than they need."""
        found: list[BlockHeader] = []
        for header in self.live_headers():
            number = self._class_number(header.slot)
            if number > 0 and header.payload_bytes <= self.classes[number - 1].block_bytes:
                found.append(header)
        return found

    def class_bytes(self, slot: int) -> int:
        """The largest block that `slot` takes, where slots are of several sizes."""
        return self.classes[self._class_number(slot)].block_bytes

    def hold(self, slot: int) -> bool:
        """Keep a free slot from being reserved, until `abandon`. False where it is not free."""
        if slot >= self._limit or self._states[slot] != _FREE:
            return False
        self._free[self._class_number(slot)].remove(slot)
        self._step(slot, SlotTrigger.RESERVE)
        self._writing_keys[slot] = None
        return True

    def publish(self, header: BlockHeader) -> None:
        """The put is durable: serve it."""
        if self._writing_keys.get(header.slot) != pack_key(header.key):
            raise SlotStateError(f"slot {header.slot} was not reserved for block {header.key}")
        self._serve(header)
        self._live_count += 1

    def abandon(self, slot: int) -> None:
        """The put failed and left nothing on the volume."""
        self._step(slot, SlotTrigger.ABANDON)
        packed = self._writing_keys.pop(slot)
        if packed is not None:
            del self._keys[packed]
        self._give_back(slot)

    def switch(self, old: BlockHeader, copy: BlockHeader) -> bool:
        """Serve a block from its durable copy in a slot of `reserve_copy`; the old slot is being freed from now on.

        False where the block went meanwhile: nothing was changed, and the copy must be abandoned.
        """
        packed = pack_key(old.key)
        if self.live(old.key) != old:
            return False
        self._step(old.slot, SlotTrigger.RETIRE)
        self._freeing[old.slot] = None
        self._serve(copy)
        self._keys[packed] = copy.slot
        return True

    # Read

    def pin(self, keys: Sequence[BlockKey]) -> list[tuple[int, BlockHeader]]:
        """The live slots of `keys`, held in place until `unpin`, by number; keys that have none are left out."""
        pins, states, slot_of, header_of = self._pins, self._states, self._keys.get, self._rows.header
        pinned: list[tuple[int, BlockHeader]] = []
        for number, key in enumerate(keys):
            packed = _packed_or_none(key)
            slot = slot_of(packed) if packed is not None else None
            if slot is not None and states[slot] == _LIVE:
                pins[slot] = pins.get(slot, 0) + 1
                pinned.append((number, header_of(slot, key)))
        return pinned

    def unpin(self, slots: Iterable[int]) -> None:
        for slot in slots:
            left = self._pins.get(slot, 0) - 1
            if left < 0:
                raise SlotStateError(f"slot {slot} is not pinned")
            if left:
                self._pins[slot] = left
            else:
                del self._pins[slot]

    def is_pinned(self, slot: int) -> bool:
        return slot in self._pins

    # Delete

    def retire(self, key: BlockKey) -> BlockHeader | Refusal | None:
        """Stop serving `key`. Readers that pinned it may go on; its slot is reused only after `release`.

        None where there is no such block, `BUSY` where a put or delete of it is under way.
        """
        packed = _packed_or_none(key)
        slot = self._keys.get(packed) if packed is not None else None
        if slot is None:
            return None
        if self._states[slot] != _LIVE:
            return Refusal.BUSY
        self._step(slot, SlotTrigger.RETIRE)
        self._freeing[slot] = packed
        self._live_count -= 1
        self.retired_total += 1
        return self._rows.header(slot)

    def restore(self, slot: int) -> None:
        """Erasing the header failed, so the block is still there: serve it again."""
        if self._freeing.get(slot) is None:
            raise SlotStateError(f"slot {slot} is not being freed, or its block goes on in another")
        self._step(slot, SlotTrigger.RESTORE)
        del self._freeing[slot]
        self._live_count += 1

    def release(self, slot: int) -> None:
        """The header is erased: the slot may be reused."""
        if self.is_pinned(slot):
            raise SlotStateError(f"slot {slot} is still being read; wait for its readers")
        self._step(slot, SlotTrigger.RELEASE)
        packed = self._freeing.pop(slot)
        if packed is not None:
            del self._keys[packed]
        self._rows.clear(slot)
        self._give_back(slot)

    # Capacity

    def grow(self, capacity: int) -> None:
        """Slots up to `capacity` may be used from now on. Of equal slots only, as all of these."""
        first = len(self._states)
        self._rows.resize(capacity)
        self._states.extend(bytes(capacity - first))
        self._free[0].extend(range(first, capacity))
        self._limit = capacity

    def limit(self, capacity: int) -> list[BlockHeader]:
        """No slot from `capacity` on is reserved any more. The blocks that are still there."""
        self._limit = capacity
        self._free = self._free_slots()
        return [self._rows.header(s) for s in range(capacity, len(self._states)) if self._states[s] == _LIVE]

    @property
    def is_empty_past_limit(self) -> bool:
        return not any(self._states[self._limit :])

    def shrink(self) -> None:
        """Drop the slots from the limit on. Raises `SlotStateError` while one of them is not free."""
        if not self.is_empty_past_limit:
            raise SlotStateError(f"a slot from {self._limit} on is not free; empty it first")
        del self._states[self._limit :]
        self._rows.resize(self._limit)

    def unlimit(self) -> None:
        """Take back a limit: every slot may be used."""
        self.limit(len(self._states))

    # What is there

    def live(self, key: BlockKey) -> BlockHeader | None:
        try:
            slot = self._keys.get(pack_key(key))
        except BlockFormatError:
            return None  # nothing is held under what is no key
        return self._rows.header(slot, key) if slot is not None and self._states[slot] == _LIVE else None

    def live_headers(self) -> Iterator[BlockHeader]:
        """Do not change the table meanwhile."""
        return (self._rows.header(slot) for slot, state in enumerate(self._states) if state == _LIVE)

    def state(self, slot: int) -> SlotState:
        return _STATES[self._states[slot]]

    def settled_rows(self) -> tuple[SlotRows, list[int]]:
        """A copy of the rows, and the slots that are being written or freed: of these the volume alone can tell."""
        return self._rows.copy(), [*self._writing_keys, *self._freeing]

    @property
    def free_count(self) -> int:
        return sum(map(len, self._free))

    @property
    def live_count(self) -> int:
        return self._live_count

    @property
    def is_settled(self) -> bool:
        """No put, delete or read is under way, and none was left in doubt."""
        return not (self._pins or self._writing_keys or self._freeing)

    def path(self, slot: int, blocks_max: int) -> list[BlockHeader]:
        """The block of a slot and its ancestors as far as they are here, root first; none where the slot is not live.
        """
        if self._states[slot] != _LIVE or blocks_max < 1:
            return []
        found = [self._rows.header(slot)]
        while len(found) < blocks_max and (parent_hash := found[-1].parent_hash):
            parent = self.live(found[-1].key._replace(sequence_hash=parent_hash))
            if parent is None or parent.slot == found[-1].slot:
                break
            found.append(parent)
        return found[::-1]

    def live_slots(self) -> npt.NDArray[np.intp]:
        return np.flatnonzero(np.frombuffer(bytes(self._states), dtype=np.uint8) == _LIVE)

    def parents(self) -> npt.NDArray[np.uint64]:
        """The low halves of the parents' hashes of all live blocks that have a parent."""
        parents: npt.NDArray[np.uint64] = self._rows.rows["parent_lo"][self.live_slots()]
        of_some: npt.NDArray[np.uint64] = parents[parents != 0]
        return of_some

    def live_bytes(self) -> int:
        """Of the live blocks, with their header pages: `held_bytes` counts neither those that are being freed."""
        sizes = self._rows.rows["payload_bytes"][self.live_slots()]
        return int(sizes.sum(dtype=np.uint64)) + len(sizes) * PAGE_BYTES

    def held_bytes(self, slot_bytes: int) -> int:
        """Of the slots that hold them; `slot_bytes` of each where all are equal."""
        if not self.classes:
            return self._live_count * slot_bytes
        return sum(each.blocks * (PAGE_BYTES + page_ceiling(each.block_bytes)) for each in self.class_stats())

    def misfit_bytes(self) -> int:
        """What larger blocks would have again if small ones were in free slots of their own size."""
        if not self.classes:
            return 0
        sizes = np.array([each.block_bytes for each in self.classes])
        rows, left, found = self._rows.rows["payload_bytes"], [len(free) for free in self._free], 0
        for number in range(len(self.classes) - 1, 0, -1):
            part = rows[self._by_class.firsts[number] : self._by_class.ends[number]]
            wanted = np.bincount(np.searchsorted(sizes, part[part > 0]), minlength=len(sizes))
            for smaller in range(number):
                moved = min(int(wanted[smaller]), left[smaller])
                left[smaller] -= moved
                found += moved * int(sizes[number] - sizes[smaller])
        return found

    def class_stats(self) -> list[ClassStat]:
        """What the slots of each class hold; none of equal slots."""
        stats: list[ClassStat] = []
        if not self.classes:
            return stats
        is_live = np.frombuffer(bytes(self._states), dtype=np.uint8) == _LIVE
        for each, free, first in zip(self.classes, self._free, self._by_class.firsts, strict=True):
            part = slice(first, first + each.blocks)
            payload_bytes = int(self._rows.rows["payload_bytes"][part][is_live[part]].sum(dtype=np.uint64))
            blocks = int(np.count_nonzero(is_live[part]))
            stats.append(ClassStat(each.block_bytes, each.blocks, blocks, payload_bytes, len(free)))
        return stats

    def _free_slots(self) -> list[deque[int]]:
        is_free = np.frombuffer(bytes(self._states[: self._limit]), dtype=np.uint8) == _FREE
        starts = self._by_class.firsts or [0]
        ends = self._by_class.ends or [self._limit]
        return [
            deque((np.flatnonzero(is_free[first:end]) + first).tolist())
            for first, end in zip(starts, ends, strict=True)
        ]

    def _free_for(self, payload_bytes: int) -> deque[int]:
        """The free slots to take one from; empty where none is left that is large enough."""
        if not self.classes:
            return self._free[0]
        large_enough = (f for c, f in zip(self.classes, self._free, strict=True) if payload_bytes <= c.block_bytes)
        return next(filter(None, large_enough), deque())

    def _class_number(self, slot: int) -> int:
        return self._by_class.number(slot) if self.classes else 0

    def _reserve_slot(self, packed: bytes | None, free: deque[int]) -> Reservation:
        return self._reserve_free(packed, free.popleft())

    def _reserve_free(self, packed: bytes | None, slot: int) -> Reservation:
        self._step(slot, SlotTrigger.RESERVE)
        self._writing_keys[slot] = packed
        generation = self.generation_next
        self.generation_next += 1
        return Reservation(slot, generation)

    def _serve(self, header: BlockHeader) -> None:
        self._step(header.slot, SlotTrigger.PUBLISH)
        del self._writing_keys[header.slot]
        self._rows.set(header)

    def _give_back(self, slot: int) -> None:
        if slot < self._limit:
            self._free[self._class_number(slot)].append(slot)

    def _step(self, slot: int, trigger: SlotTrigger) -> None:
        state = self._states[slot]
        target = _STEPS.get((state, trigger))
        if target is None:
            raise SlotStateError(f"slot {slot} is {_STATES[state].value}: it cannot {trigger.value}")
        self._states[slot] = target


def _packed_or_none(key: BlockKey) -> bytes | None:
    try:
        return pack_key(key)
    except BlockFormatError:
        return None  # nothing is held under what is no key
