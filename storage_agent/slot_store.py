"""What a kind of volume provides under `slot_volume.SlotVolume`: slots of bytes on one medium.

A store writes and reads headers and payloads and checks them against each other; which block is in which slot, who may
read it, what is announced and counted is the volume's, the same for every kind.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Sequence
from typing import NamedTuple, Protocol, TypeVar, runtime_checkable

from storage_agent.block_header import (
    BlockHeader,
    PartChecksums,
    copy_with_checksums,
    fold_checksums,
    part_checksums,
)
from storage_agent.errors import BlockFormatError, CorruptBlock, TransferError
from storage_agent.fragmentation import Footprint, Stretch
from storage_agent.slot_classes import SlotClasses
from storage_agent.slot_rows import SlotRows

Item = TypeVar("Item")
Take = Callable[[int, CorruptBlock | None, memoryview], None]
"""Gets a read's number in the batch, what is wrong with it if anything, and its bytes, which last for the call."""


class SlotWrite:
    """A payload bound for a slot. `number`: its place in the caller's batch. `payload` has format `B`.

    Its checksums are reckoned when first asked for: a store asks while other payloads are on their way already.
    """

    __slots__ = ("_checksums", "_header", "number", "payload")

    def __init__(
        self, number: int, header: BlockHeader, payload: memoryview, checksums: PartChecksums | None = None
    ) -> None:
        """With `checksums`, those of `payload`'s parts as `header` has them; without, they are put into the header."""
        self.number = number
        self.payload = payload
        self._header = header
        self._checksums = checksums

    @property
    def checksums(self) -> PartChecksums:
        """Of each part of the payload (`BlockHeader.parts`)."""
        if self._checksums is None:
            return self.note_checksums(part_checksums(self.payload, self._header.part_bytes))
        return self._checksums

    def copy_payload(self, target: memoryview) -> None:
        """To memory as long as the payload; the checksums are those of the copy, where they were not known."""
        if self._checksums is None:
            self.note_checksums(copy_with_checksums(self.payload, self._header.part_bytes, target))
        else:
            target[:] = self.payload

    def note_checksums(self, checksums: PartChecksums) -> PartChecksums:
        """Those of the payload, by whoever reckoned them."""
        self._header = self._header._replace(payload_checksum=fold_checksums(checksums.each))
        self._checksums = checksums
        return checksums

    @property
    def header(self) -> BlockHeader:
        """What the slot will hold."""
        if self._checksums is None:
            self.note_checksums(part_checksums(self.payload, self._header.part_bytes))
        return self._header

    @property
    def slot(self) -> int:
        return self._header.slot

    @property
    def part_bytes(self) -> int:
        """See `BlockHeader.part_bytes`."""
        return self._header.part_bytes

    @property
    def payload_bytes(self) -> int:
        """Of the block; `payload` is empty where its bytes are in the slot already."""
        return self._header.payload_bytes

    def with_payload(self, payload: memoryview) -> SlotWrite:
        """Other bytes under the same header."""
        return SlotWrite(self.number, self.header, payload, self.checksums)


class SlotRead(NamedTuple):
    """`parts` parts of a slot's payload, from `first` on."""

    header: BlockHeader
    first: int
    parts: int

    @property
    def offset(self) -> int:
        return self.first * self.header.part_bytes

    @property
    def payload_bytes(self) -> int:
        return self.parts * self.header.part_bytes


class Recovered(NamedTuple):
    """What a store found when it was opened. Generations from `generation_next` on were never used.

    `classes`: sizes of its slots, where they are not equal; such a store is not resized.
    """

    rows: SlotRows
    generation_next: int
    classes: SlotClasses = ()


class SlotStore(Protocol):
    """Slots on one medium. Thread-safe. Raises `TransferError` where bytes cannot be moved."""

    @property
    def mode(self) -> str:
        """How bytes move, for people: `O_DIRECT`, `buffered`, …"""

    @property
    def batch_slots(self) -> int:
        """Most slots of one call of `write`, `read` or `erase`."""

    def recover(self) -> Recovered:
        """Called once, before anything else. What is torn, or older than its double, is freed on the medium first.

        Raises `OSError` or `VolumeError`.
        """

    def write(self, writes: Sequence[SlotWrite]) -> None:
        """Write headers and payloads; `sync` makes them durable.

        Raises `BlockFormatError` before anything of its block is written, `TransferError` after which any part of any
        may be.
        """

    def sync(self) -> None:
        """Make everything written so far durable. Raises `TransferError`, in doubt where it may be or not."""

    def read(self, reads: Sequence[SlotRead], take: Take) -> None:
        """Read parts of slots, check them against their headers, hand each to `take`, once, in any order.

        Raises `TransferError` where bytes cannot be had: of those that were not handed over.
        """

    def erase(self, headers: Sequence[BlockHeader]) -> None:
        """Free slots on the medium, durably: after a restart they are not found again."""

    def forget_cached(self, headers: Sequence[BlockHeader]) -> None:
        """Have the next read of these slots come from the medium, as far as that can be had."""

    def resize(self, capacity_blocks: int) -> None:
        """Make or give back room; slots from the smaller capacity on are free. Durable. Raises `VolumeError`."""

    def compact(self) -> int:
        """Rewrite what is fragmented, keeping chains together. Bytes given back.

        At every moment, and after a crash at any, each block that is not erased can be read.
        """

    @property
    def upkeep_due(self) -> bool:
        """Whether `upkeep` now is worth its time."""

    def upkeep(self, copy_table: Callable[[], tuple[SlotRows, list[int]]]) -> None:
        """Save the table where that shortens the next recovery; give back what is dead.

        Raises `OSError`, `TransferError`, and has done no harm then.

        `copy_table` returns the rows, and the slots being written or freed: of these the medium alone can tell.
        """

    def close(self, *, in_order: bool, generation_next: int) -> None:
        """Let go of the medium. `in_order`: nothing is under way or in doubt. Idempotent."""


@runtime_checkable
class OrderedStore(Protocol):
    """A `SlotStore` may say whether slots lie in the order of their numbers: chains are laid out by choosing slots."""

    @property
    def slots_in_order(self) -> bool: ...


@runtime_checkable
class PackingStore(Protocol):
    """What a `SlotStore` offers besides where slots are mere numbers, and blocks lie packed in files or objects."""

    @property
    def unit_bytes(self) -> int:
        """The most that one file or object takes."""

    def footprint(self) -> Footprint:
        """Figures of all that lies there. Waits for no transfer."""

    def stretches(self, slots: Sequence[int]) -> list[Stretch | None]:
        """Where the blocks of slots lie; None where there is none any more. Waits for no transfer."""

    def lay_out(self, headers: Sequence[BlockHeader]) -> None:
        """Write blocks one after another, in this order, and verify the copies; then the old ones go.

        Promises what `SlotStore.compact` does. Raises `TransferError`. What is damaged stays as it is.
        """


def read_each(
    store: SlotStore, reads: Sequence[SlotRead], take: Take, taken: Container[int]
) -> list[tuple[int, TransferError]]:
    """Read all together; if that fails, each of those that are not in `taken` by then alone. The numbers that failed.

    `take` puts the numbers of what it gets into `taken`.
    """
    if not reads:
        return []
    try:
        store.read(reads, take)
    except TransferError as error:
        left = [number for number in range(len(reads)) if number not in taken]
        if error.in_doubt or len(reads) == 1:
            return [(number, error) for number in left]
    else:
        return []
    failed: list[tuple[int, TransferError]] = []
    for number in left:

        def take_alone(_: int, error: CorruptBlock | None, payload: memoryview, number: int = number) -> None:
            take(number, error, payload)

        try:
            store.read([reads[number]], take_alone)
        except TransferError as error:
            failed.append((number, error))
    return failed


def each_alone_if_one_fails(
    items: Sequence[Item], transfer: Callable[[Sequence[Item]], None]
) -> list[tuple[Item, TransferError | BlockFormatError]]:
    """Run `transfer` on all of `items`; if that fails, on each alone, so that one bad place fails one block only.

    Returns those that failed. A failure in doubt (a deadline) fails all at once: each alone would wait as long again.
    """
    if not items:
        return []
    try:
        transfer(items)
    except (TransferError, BlockFormatError) as error:
        if len(items) == 1 or (isinstance(error, TransferError) and error.in_doubt):
            return [(item, error) for item in items]
        return [failure for item in items for failure in each_alone_if_one_fails([item], transfer)]
    return []
