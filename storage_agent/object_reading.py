"""Which ranges of which objects a batch of reads asks for, and where in memory they go. Pure."""

from __future__ import annotations

from collections.abc import Sequence

from storage_agent.block_header import PAGE_BYTES
from storage_agent.nixl_objects import ObjectRange
from storage_agent.object_catalogue import Place
from storage_agent.object_format import blocks_name
from storage_agent.slot_store import SlotRead

MERGED_BYTES_MAX = 2 * 1024 * 1024
"""Neighbours in an object are read by ranges of this size, several at once."""


class ReadPlan:
    """`places` and `staged_at`, by number of the read: where a block lies, and where its header page goes.

    A place may be changed when the block was moved; its memory stays.
    """

    def __init__(self, prefix: str, reads: Sequence[SlotRead], places: Sequence[Place]) -> None:
        self._prefix = prefix
        self.reads = reads
        self.places = list(places)
        self._in_place = sorted(range(len(reads)), key=lambda number: self.places[number])
        self.staged_at = [0] * len(reads)
        at = 0
        for number in self._in_place:
            self.staged_at[number] = at
            at = self.staged_end(number)

    def payload_at(self, number: int) -> int:
        return self.staged_at[number] + PAGE_BYTES

    def staged_end(self, number: int) -> int:
        return self.payload_at(number) + self.reads[number].payload_bytes

    def alone(self, number: int) -> list[ObjectRange]:
        """One for a block, two for shards in the middle of one."""
        place, read = self.places[number], self.reads[number]
        name, at = blocks_name(self._prefix, place.mark), self.staged_at[number]
        if read.first == 0:
            return [ObjectRange(name, place.offset, PAGE_BYTES + read.payload_bytes, at)]
        return [
            ObjectRange(name, place.offset, PAGE_BYTES, at),
            ObjectRange(name, place.offset + PAGE_BYTES + read.offset, read.payload_bytes, self.payload_at(number)),
        ]

    def merged(self) -> list[tuple[ObjectRange, list[int]]]:
        """Ranges for all reads, neighbours together, and whose they are."""
        merged: list[tuple[ObjectRange, list[int]]] = []
        for number in self._in_place:
            for part in self.alone(number):
                if merged and _is_next(merged[-1][0], part):
                    last, numbers = merged[-1]
                    numbers.append(number)
                    merged[-1] = last._replace(length=last.length + part.length), numbers
                else:
                    merged.append((part, [number]))
        return merged


def _is_next(last: ObjectRange, part: ObjectRange) -> bool:
    follows = (last.name, last.offset + last.length, last.staging_offset + last.length) == (
        part.name, part.offset, part.staging_offset,
    )  # fmt: skip
    return follows and last.length + part.length <= MERGED_BYTES_MAX
