"""A pool's layout as workers of other tensor-parallel sizes are told of it, and which of its bytes are theirs. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import msgspec
import numpy as np

from kvbm_core.config import KvbmConfig
from kvbm_core.errors import LayoutError, LayoutFormatError
from kvbm_core.layout import DTYPE_BYTES, Int64s, MemoryKind, Order, PoolLayout, Strides

VERSION = 1
_EXTENT_MAX = 1 << 24
_BYTES_MAX = 1 << 62
"""Addresses and sizes stay in the signed numbers that arrays of them hold."""


class BufferPlace(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """A piece of memory, by its owner's addresses."""

    address: int
    size_bytes: int


class SerializedLayout(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """All that is needed to find any element of any block of a worker's pool. `strides` in bytes.

    Layer `n` lies in buffer `n` where there are several buffers, else all layers lie in the one. The worker holds
    `heads` of `heads_total`, from `first_head` on.
    """

    version: int = VERSION
    blocks: int
    layers: int
    outer: int
    page_tokens: int
    head_dim: int
    heads_total: int
    first_head: int
    heads: int
    tensor_parallel_rank: int
    tensor_parallel_size: int
    dtype: str
    order: Order
    strides: Strides
    memory: MemoryKind
    device: int
    """Number of the GPU; 0 for memory of the host."""
    buffers: tuple[BufferPlace, ...]

    @property
    def element_bytes(self) -> int:
        return DTYPE_BYTES[self.dtype]

    def encode(self) -> bytes:
        return msgspec.msgpack.encode(self)

    def addresses(self, buffers: Int64s, offsets: Int64s, blocks: Sequence[int]) -> Int64s:
        """Of places within a block, for many blocks: those of the first block, then those of the next.

        Raises `LayoutError` for a block that the pool has not.
        """
        for block in blocks:
            if not 0 <= block < self.blocks:
                raise LayoutError(f"block {block} is outside the pool: give an index from 0 to {self.blocks - 1}")
        bases = np.array([buffer.address for buffer in self.buffers], dtype=np.int64)
        starts = np.asarray(blocks, dtype=np.int64)[:, None] * self.strides.block
        found: Int64s = (starts + (bases[buffers] + offsets)).reshape(-1)
        return found


class Runs(NamedTuple):
    """Byte ranges, each of `run_bytes`, that the same elements of block 0 take in two pools; arrays of equal length."""

    their_buffers: Int64s
    their_offsets: Int64s
    our_buffers: Int64s
    our_offsets: Int64s
    run_bytes: int


class _Dimension(NamedTuple):
    extent: int
    theirs: int
    ours: int


def serialize(
    layout: PoolLayout, config: KvbmConfig, buffers: Sequence[BufferPlace], *, memory: MemoryKind, device: int
) -> SerializedLayout:
    """The layout of a pool of `config`'s worker, in memory that lies at `buffers`."""
    return SerializedLayout(
        blocks=layout.blocks,
        layers=layout.layers,
        outer=layout.outer,
        page_tokens=layout.page_tokens,
        head_dim=layout.head_dim,
        heads_total=config.heads,
        first_head=config.shard.index * config.shard_heads,
        heads=config.shard_heads,
        tensor_parallel_rank=config.tensor_parallel_rank,
        tensor_parallel_size=config.tensor_parallel_size,
        dtype=layout.dtype,
        order=layout.order,
        strides=layout.strides_bytes,
        memory=memory,
        device=device,
        buffers=tuple(buffers),
    )


class _Versioned(msgspec.Struct, frozen=True):
    version: int


def decode_layout(raw: bytes) -> SerializedLayout:
    """Raises `LayoutFormatError` for anything but a layout of this version whose blocks lie within its buffers."""
    try:
        version = msgspec.msgpack.decode(raw, type=_Versioned).version
        if version != VERSION:
            raise LayoutFormatError(f"a layout of version {version}: this release reads {VERSION}; update the older")
        layout = msgspec.msgpack.decode(raw, type=SerializedLayout)
    except msgspec.MsgspecError as error:
        raise LayoutFormatError(f"{len(raw)} bytes are no serialised layout: {error}") from error
    _check_numbers(layout)
    _check_places(layout)
    return layout


def check_same_blocks(theirs: SerializedLayout, ours: SerializedLayout) -> None:
    """Raises `LayoutError` unless the blocks of all workers together are the same, however they lie."""
    for name in ("layers", "outer", "page_tokens", "head_dim", "heads_total", "dtype"):
        their_value, our_value = getattr(theirs, name), getattr(ours, name)
        if their_value != our_value:
            raise LayoutError(f"their blocks have {name} = {their_value}, ours {our_value}: they are not of one model")


def runs_between(theirs: SerializedLayout, ours: SerializedLayout) -> Runs:
    """Where the heads that both workers hold lie in a block of each, in as few and long ranges as can be.

    Raises `LayoutError`: their blocks are other ones than ours, or no head is in both.
    """
    check_same_blocks(theirs, ours)
    low = max(theirs.first_head, ours.first_head)
    high = min(theirs.first_head + theirs.heads, ours.first_head + ours.heads)
    if low >= high:
        raise LayoutError(
            f"worker {theirs.tensor_parallel_rank} of {theirs.tensor_parallel_size} holds none of the heads of worker "
            f"{ours.tensor_parallel_rank} of {ours.tensor_parallel_size}: ask another (`peers_for`)"
        )
    rest = [
        _Dimension(ours.outer, theirs.strides.outer, ours.strides.outer),
        _Dimension(ours.page_tokens, theirs.strides.token, ours.strides.token),
        _Dimension(high - low, theirs.strides.head, ours.strides.head),
    ]
    if len(theirs.buffers) == len(ours.buffers) == 1:
        rest.append(_Dimension(ours.layers, theirs.strides.layer, ours.strides.layer))
        layers = np.zeros(1, dtype=np.int64)
    else:
        layers = np.arange(ours.layers, dtype=np.int64)
    rest, run_bytes = _joined(rest, ours.head_dim * ours.element_bytes)
    skip_theirs, skip_ours = (low - side.first_head for side in (theirs, ours))
    their_offsets = _spread([(each.extent, each.theirs) for each in rest]) + skip_theirs * theirs.strides.head
    our_offsets = _spread([(each.extent, each.ours) for each in rest]) + skip_ours * ours.strides.head
    return Runs(
        *_over_layers(theirs, layers, their_offsets), *_over_layers(ours, layers, our_offsets), run_bytes=run_bytes
    )


def peers_for(ours: SerializedLayout, peers: Sequence[SerializedLayout]) -> list[int]:
    """Positions in `peers` of workers that together hold our heads, the fewest, by their first heads.

    Raises `LayoutError` where a head of ours is with none.
    """
    chosen = []
    head, end = ours.first_head, ours.first_head + ours.heads
    while head < end:
        holding = [i for i, peer in enumerate(peers) if peer.first_head <= head < peer.first_head + peer.heads]
        if not holding:
            raise LayoutError(f"no peer holds head {head} of {ours.heads_total}: wait for its worker's layout")
        best = max(holding, key=lambda i: peers[i].first_head + peers[i].heads)
        chosen.append(best)
        head = peers[best].first_head + peers[best].heads
    return chosen


def _joined(dimensions: list[_Dimension], run_bytes: int) -> tuple[list[_Dimension], int]:
    """Dimensions whose elements follow each other on both sides become one longer run; the others, slowest first."""
    rest = [each for each in dimensions if each.extent > 1]
    while next_one := next((each for each in rest if each.theirs == each.ours == run_bytes), None):
        rest.remove(next_one)
        run_bytes *= next_one.extent
    return sorted(rest, key=lambda each: -each.ours), run_bytes


def _spread(dimensions: Sequence[tuple[int, int]]) -> Int64s:
    """Offsets of every combination of indexes, the last dimension's changing fastest."""
    offsets = np.zeros(1, dtype=np.int64)
    for extent, stride in dimensions:
        offsets = (offsets[:, None] + np.arange(extent, dtype=np.int64) * stride).reshape(-1)
    return offsets


def _over_layers(side: SerializedLayout, layers: Int64s, offsets: Int64s) -> tuple[Int64s, Int64s]:
    """(buffer, offset) for the offsets within each layer, one layer after another."""
    buffers = layers if len(side.buffers) > 1 else np.zeros_like(layers)
    starts = layers * side.strides.layer
    return np.repeat(buffers, len(offsets)), (starts[:, None] + offsets).reshape(-1)


def _check_numbers(layout: SerializedLayout) -> None:
    for name, low, high in (
        ("blocks", 1, _EXTENT_MAX),
        ("layers", 1, 1_024),
        ("outer", 1, 2),
        ("page_tokens", 1, 65_535),
        ("head_dim", 1, 65_536),
        ("heads_total", 1, 4_096),
        ("heads", 1, layout.heads_total),
        ("first_head", 0, layout.heads_total - layout.heads),
        ("tensor_parallel_size", 1, 4_096),
        ("tensor_parallel_rank", 0, layout.tensor_parallel_size - 1),
        ("device", 0, 1_023),
    ):
        value = getattr(layout, name)
        if not low <= value <= high:
            raise LayoutFormatError(f"the layout says {name} = {value}, which is not from {low} to {high}")
    if layout.dtype not in DTYPE_BYTES:
        raise LayoutFormatError(f"the layout says dtype = {layout.dtype!r}: {', '.join(DTYPE_BYTES)} are known")
    if len(layout.buffers) not in (1, layout.layers):
        raise LayoutFormatError(f"the layout has {len(layout.buffers)} buffers for {layout.layers} layers")
    for buffer in layout.buffers:
        if not (buffer.address >= 0 and buffer.size_bytes > 0 and buffer.address + buffer.size_bytes < _BYTES_MAX):
            raise LayoutFormatError(f"the layout has a buffer of {buffer.size_bytes} bytes at {buffer.address}")


def _check_places(layout: SerializedLayout) -> None:
    """No two elements of a buffer lie in one place, and none outside."""
    strides = layout.strides
    if not all(0 <= stride < _BYTES_MAX for stride in strides) or (len(layout.buffers) > 1 and strides.layer):
        raise LayoutFormatError(f"the layout's {strides} cannot be, with {len(layout.buffers)} buffers")
    dimensions = [
        ("block", layout.blocks, strides.block),
        ("outer", layout.outer, strides.outer),
        ("token", layout.page_tokens, strides.token),
        ("head", layout.heads, strides.head),
    ]
    if len(layout.buffers) == 1:
        dimensions.append(("layer", layout.layers, strides.layer))
    reach = layout.head_dim * layout.element_bytes
    for name, extent, stride in sorted(dimensions, key=lambda each: each[2]):
        if extent > 1:
            if stride < reach:
                raise LayoutFormatError(f"the layout's {name} stride of {stride} bytes runs into the {reach} before it")
            reach += stride * (extent - 1)
    smallest = min(buffer.size_bytes for buffer in layout.buffers)
    if reach > smallest:
        raise LayoutFormatError(f"the layout's blocks reach over {reach} bytes of a buffer of {smallest}")
