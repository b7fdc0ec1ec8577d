"""Which slot holds which block: the table of one slab, in memory. Pure, and used under its owner's lock.

A slot is always in exactly one state. `FREEING` lasts from the moment a block is no longer served until its header on
the volume is erased; its key stays reserved meanwhile, so that a block is never twice on a volume.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from enum import StrEnum
from typing import NamedTuple

from storage_agent.errors import SlotStateError
from storage_agent.port import BlockKey
from storage_agent.slab_format import SlotHeader


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


class SlotTable:
    """States, keys and pins of `capacity` slots. Not thread-safe: its owner holds a lock around every call.

    Slots freed longest ago are reused first. Raises `SlotStateError` for a step that `TRANSITIONS` does not allow.
    """

    def __init__(self, capacity: int, recovered: list[SlotHeader], generation_next: int) -> None:
        self._states: list[SlotState] = [SlotState.FREE] * capacity
        self._headers: dict[int, SlotHeader] = {}
        self._keys: dict[BlockKey, int] = {}
        self._pins: dict[int, int] = {}
        self._writing_keys: dict[int, BlockKey] = {}
        self._freeing: set[int] = set()
        self.generation_next = generation_next
        self.retired_total = 0
        """Blocks ever taken out of service; a search over volumes that saw it unchanged missed nothing."""
        for header in recovered:
            if header.key in self._keys or self._states[header.slot] is not SlotState.FREE:
                raise SlotStateError(f"slot {header.slot}: block {header.key} or the slot was recovered twice")
            self._states[header.slot] = SlotState.LIVE
            self._headers[header.slot] = header
            self._keys[header.key] = header.slot
            self.generation_next = max(self.generation_next, header.generation + 1)
        self._free = deque(slot for slot, state in enumerate(self._states) if state is SlotState.FREE)

    def reserve(self, key: BlockKey) -> Reservation | Refusal:
        """Take a free slot for a put of `key`."""
        held = self._keys.get(key)
        if held is not None:
            return Refusal.PRESENT if self._states[held] is SlotState.LIVE else Refusal.BUSY
        if not self._free:
            return Refusal.FULL
        slot = self._free.popleft()
        self._step(slot, SlotTrigger.RESERVE)
        self._keys[key] = slot
        self._writing_keys[slot] = key
        generation = self.generation_next
        self.generation_next += 1
        return Reservation(slot, generation)

    def publish(self, header: SlotHeader) -> None:
        """The put is durable: serve it."""
        if self._writing_keys.get(header.slot) != header.key:
            raise SlotStateError(f"slot {header.slot} was not reserved for block {header.key}")
        self._step(header.slot, SlotTrigger.PUBLISH)
        del self._writing_keys[header.slot]
        self._headers[header.slot] = header

    def abandon(self, slot: int) -> None:
        """The put failed and left nothing on the volume."""
        self._step(slot, SlotTrigger.ABANDON)
        del self._keys[self._writing_keys.pop(slot)]
        self._free.append(slot)

    def pin(self, key: BlockKey) -> SlotHeader | None:
        """The live slot of `key`, held in place until `unpin`; None where there is none."""
        header = self.live(key)
        if header is not None:
            self._pins[header.slot] = self._pins.get(header.slot, 0) + 1
        return header

    def unpin(self, slot: int) -> None:
        pins = self._pins.get(slot, 0)
        if pins == 0:
            raise SlotStateError(f"slot {slot} is not pinned")
        if pins == 1:
            del self._pins[slot]
        else:
            self._pins[slot] = pins - 1

    def is_pinned(self, slot: int) -> bool:
        return slot in self._pins

    def retire(self, key: BlockKey) -> SlotHeader | Refusal | None:
        """Stop serving `key`. Readers that pinned it may go on; its slot is reused only after `release`.

        None where there is no such block, `BUSY` where a put or delete of it is under way.
        """
        slot = self._keys.get(key)
        if slot is None:
            return None
        if self._states[slot] is not SlotState.LIVE:
            return Refusal.BUSY
        self._step(slot, SlotTrigger.RETIRE)
        self._freeing.add(slot)
        self.retired_total += 1
        return self._headers[slot]

    def restore(self, slot: int) -> None:
        """Erasing the header failed, so the block is still there: serve it again."""
        self._step(slot, SlotTrigger.RESTORE)
        self._freeing.remove(slot)

    def release(self, slot: int) -> None:
        """The header is erased: the slot may be reused."""
        if self.is_pinned(slot):
            raise SlotStateError(f"slot {slot} is still being read; wait for its readers")
        self._step(slot, SlotTrigger.RELEASE)
        self._freeing.remove(slot)
        del self._keys[self._headers.pop(slot).key]
        self._free.append(slot)

    def live(self, key: BlockKey) -> SlotHeader | None:
        slot = self._keys.get(key)
        return self._headers[slot] if slot is not None and self._states[slot] is SlotState.LIVE else None

    def live_headers(self) -> Iterator[SlotHeader]:
        return (header for slot, header in self._headers.items() if self._states[slot] is SlotState.LIVE)

    def state(self, slot: int) -> SlotState:
        return self._states[slot]

    @property
    def free_count(self) -> int:
        return len(self._free)

    @property
    def live_count(self) -> int:
        return len(self._headers) - len(self._freeing)

    @property
    def is_settled(self) -> bool:
        """No put, delete or read is under way, and none was left in doubt."""
        return not (self._pins or self._writing_keys or self._freeing)

    def _step(self, slot: int, trigger: SlotTrigger) -> None:
        state = self._states[slot]
        target = TRANSITIONS[state].get(trigger)
        if target is None:
            raise SlotStateError(f"slot {slot} is {state.value}: it cannot {trigger.value}")
        self._states[slot] = target
