"""Which parts of a stored block a reader needs: all, or the shards that a worker's slice touches. Pure."""

from __future__ import annotations

from typing import NamedTuple

from storage_agent.block_header import BlockHeader
from storage_agent.errors import ShardError
from storage_agent.shards import BlockLayout, Shard, Slice, slices
from storage_agent.slot_store import SlotRead

_NO_SLICES: list[Slice] = []


class SlicedRead(NamedTuple):
    """`slices` are empty where what is read is what is wanted, byte for byte."""

    asked: SlotRead
    slices: list[Slice]


def whole_read(header: BlockHeader) -> SlotRead:
    """The whole payload."""
    return SlotRead(header, 0, header.parts if header.span is not None else 1)


def plan_read(header: BlockHeader, wanted: Shard | None) -> SlicedRead:
    """What to read of the block for worker `wanted`; the whole payload for None.

    Raises `ShardError` where the header does not say how the block is split, or that it lies otherwise than wanted, or
    where the shards it takes are elsewhere.
    """
    if wanted is None:
        return SlicedRead(whole_read(header), _NO_SLICES)
    span, layout = header.span, header.layout
    if span is None or layout is None:
        raise ShardError("the block was put without its layout and shards, so no slice can be cut; read it whole")
    if wanted.layout is not None and wanted.layout != layout:
        raise ShardError(f"the block was put as {_said(layout)}, and is wanted as {_said(wanted.layout)}")
    parts = slices(layout, span.count, wanted)
    first, last = parts[0].shard, parts[-1].shard
    if first < span.first or last >= span.first + header.parts:
        raise ShardError(
            f"worker {wanted.index} of {wanted.count} needs shards {first} to {last}, here are {header.parts} from "
            f"{span.first} on; ask the agent that has the others"
        )
    asked = SlotRead(header, first - span.first, last - first + 1)
    is_whole_shard = len(parts) == 1 and parts[0].row_bytes == parts[0].source_stride == parts[0].target_stride
    return SlicedRead(asked, [] if is_whole_shard else parts)


def can_be_read(header: BlockHeader, wanted: Shard | None) -> bool:
    """Whether `plan_read` finds what to read."""
    try:
        plan_read(header, wanted)
    except ShardError:
        return False
    return True


def _said(layout: BlockLayout) -> str:
    axes = " × ".join(f"{axis.extent} {axis.name}" for axis in layout.axes)
    kind, split_by = layout.dtype or "elements", layout.sharded_axis or "nothing"
    return f"{axes} of {kind} ({layout.element_bytes} bytes), split by {split_by}"
