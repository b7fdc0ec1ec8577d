"""What a tensor-parallel worker holds of a block, and where in the stored shards its slice lies. Pure: no I/O.

A block is stored as the shards of the workers that wrote it, one after another. A worker of a group of another size
reads the shards that its slice touches and takes its part of each: the split axis is the same, the cuts are not.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod
from typing import NamedTuple

import msgspec
import numpy as np

from storage_agent.errors import ShardError

AXES_MAX = 8
AXIS_EXTENT_MAX = 1 << 24
ELEMENT_BYTES_MAX = 16
SHARD_COUNT_MAX = 256


class Axis(msgspec.Struct, frozen=True, array_like=True):
    """One dimension of a whole block: `extent` elements."""

    name: str
    extent: int


class BlockLayout(msgspec.Struct, frozen=True, array_like=True):
    """Order and extents of a whole block's dimensions (all shards together), slowest first, without padding.

    `sharded_axis` names the one that tensor parallelism splits, usually the KV heads; empty where none is.
    """

    axes: tuple[Axis, ...]
    element_bytes: int
    sharded_axis: str = ""
    dtype: str = ""

    @property
    def block_bytes(self) -> int:
        return prod(axis.extent for axis in self.axes) * self.element_bytes

    def split(self) -> tuple[int, int, int]:
        """(rows, extent, bytes): elements of the slower axes; of the sharded axis; bytes of one element of that axis.

        Raises `ShardError` where no axis has the name.
        """
        names = [axis.name for axis in self.axes]
        if self.sharded_axis not in names:
            raise ShardError(f"a layout of axes {names} has no axis {self.sharded_axis!r} to split; name one of them")
        at = names.index(self.sharded_axis)
        extents = [axis.extent for axis in self.axes]
        return prod(extents[:at]), extents[at], prod(extents[at + 1 :]) * self.element_bytes


@dataclass(frozen=True, slots=True)
class Shard:
    """Part `index` of a block that is split among `count` workers.

    `layout`: how whole blocks lie where the worker reads them into. One that lies otherwise on its volume has as many
    bytes, in another order, and is not given. None: the worker looks for itself.
    """

    index: int
    count: int
    layout: BlockLayout | None = None


@dataclass(frozen=True, slots=True)
class ShardSpan:
    """Which shards a payload holds, one after another: from `first`, each `shard_bytes`, of `count` in all."""

    shard_bytes: int
    first: int
    count: int

    def held(self, payload_bytes: int) -> int:
        return payload_bytes // self.shard_bytes


def lacking(held: ShardSpan | None, held_bytes: int, put: ShardSpan | None, put_bytes: int) -> str:
    """Why a block that is there lacks shards that are put, or empty where it has them. A span of None is all of it."""
    if held is None:
        return ""
    end = held.first + held.held(held_bytes)
    first, last, count = (0, 1, 1) if put is None else (put.first, put.first + put.held(put_bytes), put.count)
    if held.first * count <= first * held.count and last * held.count <= end * count:
        return ""
    return (
        f"it is there with {end - held.first} of {held.count} shards, from {held.first} on, and takes no more: let "
        "each worker put through storage_agent.client_storage.ClientStorage, or to a volume of its own"
    )


class Slice(NamedTuple):
    """Rows to copy out of one stored shard into a worker's buffer. All in bytes but `rows`."""

    shard: int
    row_bytes: int
    rows: int
    source_offset: int
    source_stride: int
    target_offset: int
    target_stride: int


def check_span(span: ShardSpan, payload_bytes: int, layout: BlockLayout | None) -> None:
    """Raises `ShardError` unless `payload_bytes` are whole shards of a block of `layout`."""
    if not 1 <= span.count <= SHARD_COUNT_MAX:
        raise ShardError(f"a block of {span.count} shards is not possible; 1 to {SHARD_COUNT_MAX} are")
    if span.shard_bytes < 1 or payload_bytes % span.shard_bytes:
        raise ShardError(f"{payload_bytes} bytes are not whole shards of {span.shard_bytes}; put whole shards")
    if span.first < 0 or span.first + span.held(payload_bytes) > span.count:
        raise ShardError(
            f"{span.held(payload_bytes)} shards from number {span.first} are not of {span.count}; correct the span"
        )
    if layout is not None and span.shard_bytes * span.count != layout.block_bytes:
        raise ShardError(
            f"{span.count} shards of {span.shard_bytes} bytes are not the {layout.block_bytes} bytes of the layout; "
            "give the layout of the whole block"
        )


def check_layout(layout: BlockLayout) -> None:
    """Raises `ShardError` for a number out of range, or for a sharded axis that is none."""
    if not 1 <= len(layout.axes) <= AXES_MAX:
        raise ShardError(f"a layout has 1 to {AXES_MAX} axes, this has {len(layout.axes)}")
    for axis in layout.axes:
        if not 1 <= axis.extent <= AXIS_EXTENT_MAX:
            raise ShardError(f"axis {axis.name!r} has extent {axis.extent}; set it between 1 and {AXIS_EXTENT_MAX}")
    if not 1 <= layout.element_bytes <= ELEMENT_BYTES_MAX:
        raise ShardError(f"element_bytes is {layout.element_bytes}; set it between 1 and {ELEMENT_BYTES_MAX}")
    if layout.sharded_axis:
        layout.split()


def slices(layout: BlockLayout, written: int, wanted: Shard) -> list[Slice]:
    """What worker `wanted` copies out of shards that `written` workers stored, in ascending order of shard.

    Raises `ShardError` where the sharded axis cannot be split evenly among either group, or there is no such worker.
    """
    if not 0 <= wanted.index < wanted.count:
        raise ShardError(f"there is no worker {wanted.index} of {wanted.count}; count from 0")
    rows, extent, inner_bytes = layout.split()
    for workers in (written, wanted.count):
        if workers < 1 or extent % workers:
            raise ShardError(
                f"axis {layout.sharded_axis!r} of extent {extent} cannot be split evenly among {workers} workers"
            )
    stored, taken = extent // written, extent // wanted.count
    low = wanted.index * taken
    found = []
    for shard in range(low // stored, (low + taken - 1) // stored + 1):
        start, end = max(low, shard * stored), min(low + taken, (shard + 1) * stored)
        found.append(
            Slice(
                shard=shard,
                row_bytes=(end - start) * inner_bytes,
                rows=rows,
                source_offset=(start - shard * stored) * inner_bytes,
                source_stride=stored * inner_bytes,
                target_offset=(start - low) * inner_bytes,
                target_stride=taken * inner_bytes,
            )
        )
    return found


def gather(parts: Sequence[Slice], shards: memoryview, first_shard: int) -> memoryview:
    """The worker's slice, copied out of `shards`: stored shards one after another, from number `first_shard`."""
    rows, target_stride = parts[0].rows, parts[0].target_stride
    taken = np.empty((rows, target_stride), dtype=np.uint8)
    stored = np.frombuffer(shards, dtype=np.uint8).reshape(-1, rows, parts[0].source_stride)
    for part in parts:
        source = stored[part.shard - first_shard, :, part.source_offset : part.source_offset + part.row_bytes]
        taken[:, part.target_offset : part.target_offset + part.row_bytes] = source
    return taken.data.cast("B")
