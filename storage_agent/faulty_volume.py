"""Volumes of kind `faulty`: any kind that has a store, with seeded faults of its medium. For tests and drills.

The faults are under the checks, where real ones are: bytes are cut short, torn, flipped or not written at all, and
what the volume makes of that is its own work. The same seed and calls give the same faults.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import replace
from enum import StrEnum
from random import Random
from typing import Annotated, Any

import msgspec
from msgspec import structs

from storage_agent.block_header import BlockHeader
from storage_agent.descriptor import wrong
from storage_agent.errors import TransferError, VolumeError
from storage_agent.fragmentation import Footprint, Stretch
from storage_agent.inspection import Inspection
from storage_agent.kinds import Opening, VolumeKind, checked_options, kind_named
from storage_agent.slot_rows import SlotRows
from storage_agent.slot_store import OrderedStore, PackingStore, Recovered, SlotRead, SlotStore, SlotWrite, Take
from storage_agent.volume import Volume

SLOW_S_MAX = 60.0
Share = Annotated[float, msgspec.Meta(ge=0.0, le=1.0)]
"""Of calls, or of blocks where the fault is of a block."""


class Fault(StrEnum):
    """What may go wrong with a call (error, slow, full, vanished) or with a block (short, torn, flipped)."""

    ERROR = "error"
    SLOW = "slow"
    FULL = "full"
    VANISHED = "vanished"
    SHORT = "short"
    TORN = "torn"
    FLIPPED = "flipped"


class FaultyOptions(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """`inner`: the kind that is made faulty. Shares are probabilities, all 0 unless set."""

    inner: str = "memory"
    inner_options: dict[str, Any] = {}
    """The inner kind's own, whole."""
    seed: Annotated[int, msgspec.Meta(ge=0, le=2**63 - 1)] = 0
    error: Share = 0.0
    """Writes, reads, erasures and syncs that fail, with nothing done."""
    slow: Share = 0.0
    """Calls that take `slow_s` longer."""
    slow_s: Annotated[float, msgspec.Meta(ge=0.0, le=SLOW_S_MAX)] = 0.01
    full: Share = 0.0
    """Writes that find no room."""
    short: Share = 0.0
    """Blocks that are read in part only; the read fails."""
    torn: Share = 0.0
    """Blocks of which the second half is not written, though the write says it was."""
    flipped: Share = 0.0
    """Blocks that are written with one bit changed."""
    vanished_after: Annotated[int, msgspec.Meta(ge=0, le=2**63 - 1)] = 0
    """The medium is gone from this call on, until `FaultyStore.come_back`; 0 never."""


class FaultyStore:
    """Implements `slot_store.SlotStore` on another store, which it owns. Faults are drawn in call order."""

    def __init__(self, inner: SlotStore, options: FaultyOptions, *, pause: Callable[[float], object]) -> None:
        """`pause` waits so many seconds."""
        self._inner = inner
        self._options = options
        self._pause = pause
        self._lock = threading.Lock()
        self._random = Random(options.seed)
        self._calls = 0
        self._is_gone = False
        self.drawn: dict[Fault, int] = dict.fromkeys(Fault, 0)
        """Faults so far."""

    @property
    def mode(self) -> str:
        """See `SlotStore.mode`."""
        return f"{self._inner.mode}, faulty"

    @property
    def batch_slots(self) -> int:
        """See `SlotStore.batch_slots`."""
        return self._inner.batch_slots

    def come_back(self) -> None:
        """A vanished medium is there again, with what it held."""
        with self._lock:
            self._is_gone = False
            self._calls = 0

    def vanish(self) -> None:
        """The medium is gone until `come_back`."""
        with self._lock:
            self._is_gone = True

    def recover(self) -> Recovered:
        """See `SlotStore.recover`; without faults."""
        return self._inner.recover()

    def write(self, writes: Sequence[SlotWrite]) -> None:
        """See `SlotStore.write`."""
        self._call("write")
        if self._draw(Fault.FULL, self._options.full):
            raise TransferError("write failed: ENOSPC, as asked of kind 'faulty'")
        self._inner.write([self._spoil(write) for write in writes])

    def sync(self) -> None:
        """See `SlotStore.sync`."""
        self._call("sync", in_doubt=True)
        self._inner.sync()

    def read(self, reads: Sequence[SlotRead], take: Take) -> None:
        """See `SlotStore.read`."""
        self._call("read")
        if any(self._draw(Fault.SHORT, self._options.short) for _ in reads):
            raise TransferError("read failed: only a part of the bytes, as asked of kind 'faulty'")
        self._inner.read(reads, take)

    def erase(self, headers: Sequence[BlockHeader]) -> None:
        """See `SlotStore.erase`."""
        self._call("erase")
        self._inner.erase(headers)

    def forget_cached(self, headers: Sequence[BlockHeader]) -> None:
        """See `SlotStore.forget_cached`."""
        self._inner.forget_cached(headers)

    def resize(self, capacity_blocks: int) -> None:
        """See `SlotStore.resize`."""
        try:
            self._call("resize")
        except TransferError as error:
            raise VolumeError(str(error)) from error
        self._inner.resize(capacity_blocks)

    def compact(self) -> int:
        """See `SlotStore.compact`."""
        self._call("compact")
        return self._inner.compact()

    @property
    def slots_in_order(self) -> bool:
        """See `OrderedStore`."""
        return isinstance(self._inner, OrderedStore) and self._inner.slots_in_order

    @property
    def upkeep_due(self) -> bool:
        """See `SlotStore.upkeep_due`."""
        return self._inner.upkeep_due

    def upkeep(self, copy_table: Callable[[], tuple[SlotRows, list[int]]]) -> None:
        """See `SlotStore.upkeep`."""
        self._inner.upkeep(copy_table)

    def close(self, *, in_order: bool, generation_next: int) -> None:
        """See `SlotStore.close`."""
        self._inner.close(in_order=in_order, generation_next=generation_next)

    def _call(self, what: str, *, in_doubt: bool = False) -> None:
        """Count a call; raises what became of it."""
        options = self._options
        with self._lock:
            self._calls += 1
            self._is_gone = self._is_gone or 0 < options.vanished_after < self._calls
            gone = self._is_gone
            self.drawn[Fault.VANISHED] += gone
        if gone:
            raise TransferError(f"{what} failed: ENODEV, as asked of kind 'faulty'")
        if self._draw(Fault.SLOW, options.slow):
            self._pause(options.slow_s)
        if self._draw(Fault.ERROR, options.error):
            raise TransferError(f"{what} failed: EIO, as asked of kind 'faulty'", in_doubt=in_doubt)

    def _draw(self, fault: Fault, share: float) -> bool:
        if not share:
            return False
        with self._lock:
            hit = self._random.random() < share
            self.drawn[fault] += hit
        return hit

    def _spoil(self, write: SlotWrite) -> SlotWrite:
        """The write as it reaches the medium: its header says what was meant, its bytes are something else."""
        spoilt = bytearray(write.payload)
        if self._draw(Fault.TORN, self._options.torn):
            half = len(spoilt) // 2
            spoilt[half:] = bytes(byte ^ 0xFF for byte in spoilt[half:])
        elif self._draw(Fault.FLIPPED, self._options.flipped):
            with self._lock:
                bit = self._random.randrange(len(spoilt) * 8)
            spoilt[bit // 8] ^= 1 << bit % 8
        else:
            return write
        return write.with_payload(memoryview(bytes(spoilt)))


class FaultyPackingStore(FaultyStore):
    """A `FaultyStore` on a `PackingStore`, and as such one itself."""

    def __init__(self, inner: SlotStore, options: FaultyOptions, *, pause: Callable[[float], object]) -> None:
        super().__init__(inner, options, pause=pause)
        assert isinstance(inner, PackingStore)
        self._packing = inner

    @property
    def unit_bytes(self) -> int:
        """See `PackingStore.unit_bytes`."""
        return self._packing.unit_bytes

    def footprint(self) -> Footprint:
        """See `PackingStore.footprint`."""
        return self._packing.footprint()

    def stretches(self, slots: Sequence[int]) -> list[Stretch | None]:
        """See `PackingStore.stretches`."""
        return self._packing.stretches(slots)

    def lay_out(self, headers: Sequence[BlockHeader]) -> None:
        """See `PackingStore.lay_out`."""
        self._call("layout")
        self._packing.lay_out(headers)


def _open(opening: Opening) -> Volume:
    """What the inner kind makes of a store, on its own with faults."""
    options = opening.options
    assert isinstance(options, FaultyOptions)
    inner, beneath = _inner(opening)
    if inner.open_store is None:
        raise _cannot_be_faulty(opening)
    own = inner.open_store(beneath)
    faulty = FaultyPackingStore if isinstance(own, PackingStore) else FaultyStore
    store = faulty(own, options, pause=threading.Event().wait)
    return inner.volume_on(replace(beneath, descriptor=opening.descriptor), store, own)


def _inspect(opening: Opening) -> Inspection:
    inner, beneath = _inner(opening)
    if inner.inspect is None:
        raise VolumeError(
            f"volume {opening.descriptor.id!r}: kind {beneath.descriptor.kind!r} cannot be looked at from outside; ask "
            "its agent"
        )
    return inner.inspect(beneath)


def _inner(opening: Opening) -> tuple[VolumeKind, Opening]:
    """The kind beneath, and the opening as if the volume were of it. Raises `VolumeError`."""
    options = opening.options
    assert isinstance(options, FaultyOptions)
    volume = opening.descriptor.id
    if options.inner == opening.descriptor.kind:
        raise _cannot_be_faulty(opening)
    inner = kind_named(options.inner, volume)
    if inner.path == "none" and opening.path is not None:
        raise VolumeError(f"volume {volume!r}: kind {options.inner!r} takes no path; remove {str(opening.path)!r}")
    descriptor = structs.replace(opening.descriptor, kind=options.inner, options=options.inner_options)
    return inner, replace(opening, descriptor=descriptor, options=checked_options(inner, descriptor))


def _cannot_be_faulty(opening: Opening) -> VolumeError:
    options = opening.options
    assert isinstance(options, FaultyOptions)
    volume = opening.descriptor.id
    said = f"kind {options.inner!r} cannot be made faulty"
    return wrong(f"volume {volume!r}:", said, "use one that has a store", "options.inner", options.inner)


KIND = VolumeKind(options=FaultyOptions, open=_open, inspect=_inspect, path="optional", is_harmful=True)
