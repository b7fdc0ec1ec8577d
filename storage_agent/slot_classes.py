"""Slots of several sizes on one volume, so that small blocks do not take large slots. Pure.

A block takes a free slot of the smallest class that holds it, and of a larger one when those are all taken: a block
that is kept is worth more than the room that it wastes. Compaction carries it to a slot of its own class once one is
free.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from itertools import accumulate, pairwise
from typing import Annotated

import msgspec

from storage_agent.descriptor import BLOCK_BYTES_MAX, CAPACITY_BLOCKS_MAX, VolumeDescriptor, of_another_type
from storage_agent.errors import VolumeError

CLASSES_MAX = 16


class SlotClass(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """`blocks` slots, each for a block of at most `block_bytes`."""

    block_bytes: Annotated[int, msgspec.Meta(ge=1, le=BLOCK_BYTES_MAX)]
    blocks: Annotated[int, msgspec.Meta(ge=1, le=CAPACITY_BLOCKS_MAX)]


SlotClasses = tuple[SlotClass, ...]
"""From the smallest to the largest; slots are numbered through them in this order. Empty: all slots are equal."""


class SlotsByClass:
    """Which class a slot is of."""

    def __init__(self, classes: Sequence[SlotClass]) -> None:
        self.firsts = [0, *accumulate(each.blocks for each in classes)][:-1]
        """First slot of each class."""
        self.ends = [first + each.blocks for first, each in zip(self.firsts, classes, strict=True)]

    def number(self, slot: int) -> int:
        """Counted from 0, the smallest."""
        return bisect_right(self.firsts, slot) - 1


def classes_of(descriptor: VolumeDescriptor) -> SlotClasses:
    """The option `classes` of a volume, checked; empty where it is not given. Raises `VolumeError` with the remedy."""
    name = f"volume {descriptor.id!r}"
    try:
        classes = msgspec.convert(descriptor.options.get("classes", []), SlotClasses)
    except msgspec.ValidationError as error:
        raise of_another_type(f"{name}: option classes", error, "options.classes") from error
    if not classes:
        return ()
    sizes = [each.block_bytes for each in classes]
    if len(classes) > CLASSES_MAX or any(small >= large for small, large in pairwise(sizes)):
        raise VolumeError(
            f"{name}: option classes has block_bytes {sizes}; give at most {CLASSES_MAX}, each larger than the last"
        )
    slots, largest = sum(each.blocks for each in classes), sizes[-1]
    if (slots, largest) != (descriptor.capacity_blocks, descriptor.block_bytes_max):
        raise VolumeError(
            f"{name}: its classes have {slots} slots and take {largest} bytes, but capacity_blocks is "
            f"{descriptor.capacity_blocks} and block_bytes_max {descriptor.block_bytes_max}; set them to {slots} and "
            f"{largest}"
        )
    return classes
