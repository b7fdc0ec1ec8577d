"""Where the blocks of a pool lie in its buffers: strides and byte ranges. Pure; `storage` puts memory under it.

An order says how a block's elements follow each other; a layout, where blocks and layers lie. A buffer is one piece of
memory: a fully contiguous pool has one, a layer-separate pool one a layer.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from kvbm_core.errors import LayoutError
from storage_agent.shards import Axis, BlockLayout

DTYPE_BYTES = {
    "float16": 2,
    "bfloat16": 2,
    "float32": 4,
    "int8": 1,
    "float8_e4m3fn": 1,
    "float8_e5m2": 1,
}
"""Element types of a block, by torch's names, and their sizes in bytes."""

Order = Literal["NHD", "HND", "universal"]
MemoryKind = Literal["device", "pinned", "system"]
LayoutKind = Literal["fully_contiguous", "layer_separate_block_first", "layer_separate_outer_first"]

AXES: dict[Order, tuple[str, str, str, str, str]] = {
    "NHD": ("layers", "outer", "tokens", "heads", "head_dim"),
    "HND": ("layers", "outer", "heads", "tokens", "head_dim"),
    "universal": ("heads", "layers", "outer", "tokens", "head_dim"),
}
"""A block's dimensions in each order, slowest first. In the universal one a tensor-parallel slice is contiguous."""

Int64s = NDArray[np.int64]


class Strides(NamedTuple):
    """Bytes from one index of a dimension to the next, within a buffer; elements of a head follow each other.

    `layer` is 0 where each layer has a buffer of its own.
    """

    block: int
    layer: int
    outer: int
    token: int
    head: int


class Region(NamedTuple):
    """Bytes that lie together."""

    buffer: int
    offset: int
    bytes: int


class Regions(NamedTuple):
    """Many regions, as arrays of equal length."""

    buffers: Int64s
    offsets: Int64s
    lengths: Int64s


@dataclass(frozen=True, kw_only=True)
class PoolLayout(ABC):
    """What the layouts of a pool share. `heads` are those that this worker holds; `outer` is 2, or 1 for MLA.

    Every block starts at a multiple of `alignment_bytes` in its buffer (so does each part of one that lies apart).
    """

    blocks: int
    layers: int
    outer: int
    page_tokens: int
    heads: int
    head_dim: int
    dtype: str
    order: Order = "NHD"
    alignment_bytes: int = 1

    @property
    def inner(self) -> int:
        """Elements of one token, one layer and one outer: heads × head_dim."""
        return self.heads * self.head_dim

    @property
    def element_bytes(self) -> int:
        return DTYPE_BYTES[self.dtype]

    @cached_property
    def block_bytes(self) -> int:
        """Bytes of one block, without padding."""
        return self.layers * self.outer * self.page_tokens * self.inner * self.element_bytes

    @property
    def extents(self) -> dict[str, int]:
        """Sizes of a block's dimensions, by the names of `AXES`."""
        return {
            "layers": self.layers,
            "outer": self.outer,
            "tokens": self.page_tokens,
            "heads": self.heads,
            "head_dim": self.head_dim,
        }

    @property
    @abstractmethod
    def buffers(self) -> int:
        """How many buffers there are: layer `n` lies in buffer `n`, or all in the only one."""

    @property
    @abstractmethod
    def buffer_bytes(self) -> int:
        """Bytes of each buffer."""

    @property
    @abstractmethod
    def strides_bytes(self) -> Strides:
        """Within a buffer."""

    @property
    @abstractmethod
    def shape(self) -> tuple[int, ...]:
        """Of one buffer as a tensor: blocks and the axes of `order` that lie in it, the last two as one."""

    @property
    @abstractmethod
    def strides(self) -> tuple[int, ...]:
        """Elements from one index to the next, for each dimension of `shape`."""

    @property
    def total_bytes(self) -> int:
        return self.buffers * self.buffer_bytes

    @property
    @abstractmethod
    def parts(self) -> list[Region]:
        """Where block 0 lies, in the order of its elements: the fewest regions that cover it."""

    def regions(self, block: int) -> list[Region]:
        """Where a block lies: put one after another, its bytes in `order`. Raises `LayoutError` out of range."""
        self.check_block(block)
        start = block * self.strides_bytes.block
        return [Region(part.buffer, start + part.offset, part.bytes) for part in self.parts]

    def regions_of(self, blocks: Sequence[int]) -> Regions:
        """`regions` of many blocks, one block after another, for a list of NIXL descriptors."""
        for block in blocks:
            self.check_block(block)
        parts = np.array(self.parts, dtype=np.int64).reshape(-1, 3)
        starts = np.asarray(blocks, dtype=np.int64)[:, None] * self.strides_bytes.block
        return Regions(
            np.tile(parts[:, 0], len(blocks)),
            (starts + parts[:, 1]).reshape(-1),
            np.tile(parts[:, 2], len(blocks)),
        )

    def check_block(self, block: int) -> None:
        """Raises `LayoutError` unless there is such a block."""
        if not 0 <= block < self.blocks:
            raise LayoutError(f"block {block} is outside the pool: give an index from 0 to {self.blocks - 1}")


@dataclass(frozen=True, kw_only=True)
class FullyContiguousLayout(PoolLayout):
    """`[blocks, layers, outer, page, inner]` in one buffer, for order NHD; each block's bytes lie together."""

    @property
    def buffers(self) -> int:
        return 1

    @property
    def buffer_bytes(self) -> int:
        return self.blocks * self.block_stride_bytes

    @property
    def block_stride_bytes(self) -> int:
        """Bytes from one block to the next: `block_bytes` rounded up to the alignment."""
        return align_up(self.block_bytes, self.alignment_bytes)

    @cached_property
    def strides_bytes(self) -> Strides:
        by_axis = _packed(self.order, self.extents, self.element_bytes)
        return Strides(
            self.block_stride_bytes, by_axis["layers"], by_axis["outer"], by_axis["tokens"], by_axis["heads"]
        )

    @property
    def shape(self) -> tuple[int, ...]:
        extents = [self.extents[axis] for axis in AXES[self.order]]
        return (self.blocks, *extents[:3], extents[3] * extents[4])

    @property
    def strides(self) -> tuple[int, ...]:
        by_axis = _packed(self.order, self.extents, 1)
        axes = AXES[self.order]
        return (self.block_stride_bytes // self.element_bytes, *(by_axis[axis] for axis in axes[:3]), 1)

    @cached_property
    def parts(self) -> list[Region]:
        return [Region(0, 0, self.block_bytes)]


@dataclass(frozen=True, kw_only=True)
class LayerSeparateLayout(PoolLayout):
    """One buffer a layer: `[blocks, outer, page, inner]`, or `[outer, blocks, page, inner]` where `outer_first`.

    Of order NHD or HND: in the universal one layers do not lie apart.
    """

    outer_first: bool = False

    def __post_init__(self) -> None:
        if self.order == "universal":
            raise LayoutError("a layer-separate layout has no universal order: set NHD or HND, or fully_contiguous")

    @property
    def buffers(self) -> int:
        return self.layers

    @property
    def buffer_bytes(self) -> int:
        block, _, outer, _, _ = self.strides_bytes
        return self.outer * outer if self.outer_first else self.blocks * block

    @property
    def page_bytes(self) -> int:
        """Bytes of one outer of one layer of a block."""
        return self.page_tokens * self.inner * self.element_bytes

    @cached_property
    def strides_bytes(self) -> Strides:
        within = _packed(self.order, self.extents, self.element_bytes)
        if self.outer_first:
            block = align_up(self.page_bytes, self.alignment_bytes)
            outer = self.blocks * block
        else:
            block = align_up(self.outer * self.page_bytes, self.alignment_bytes)
            outer = self.page_bytes
        return Strides(block, 0, outer, within["tokens"], within["heads"])

    @property
    def shape(self) -> tuple[int, ...]:
        third, fourth, fifth = (self.extents[axis] for axis in AXES[self.order][2:])
        first_two = (self.outer, self.blocks) if self.outer_first else (self.blocks, self.outer)
        return (*first_two, third, fourth * fifth)

    @property
    def strides(self) -> tuple[int, ...]:
        block, outer = (n // self.element_bytes for n in (self.strides_bytes.block, self.strides_bytes.outer))
        first_two = (outer, block) if self.outer_first else (block, outer)
        return (*first_two, self.shape[-1], 1)

    @cached_property
    def parts(self) -> list[Region]:
        if not self.outer_first:
            return [Region(layer, 0, self.outer * self.page_bytes) for layer in range(self.layers)]
        outer_stride = self.strides_bytes.outer
        return [
            Region(layer, outer * outer_stride, self.page_bytes)
            for layer in range(self.layers)
            for outer in range(self.outer)
        ]


def align_up(size_bytes: int, alignment_bytes: int) -> int:
    return -(-size_bytes // alignment_bytes) * alignment_bytes


def block_layout_of(layout: PoolLayout, heads_total: int) -> BlockLayout:
    """The whole block of all workers, whose model has `heads_total` heads, as a storage agent is told of it."""
    extents = layout.extents | {"heads": heads_total}
    return BlockLayout(
        axes=tuple(Axis(axis, extents[axis]) for axis in AXES[layout.order]),
        element_bytes=layout.element_bytes,
        sharded_axis="heads",
        dtype=layout.dtype,
    )


def _packed(order: Order, extents: dict[str, int], element_size: int) -> dict[str, int]:
    """Strides of dimensions that follow each other in `order` without padding, in units of `element_size`."""
    strides = {}
    for axis in reversed(AXES[order]):
        strides[axis] = element_size
        element_size *= extents[axis]
    return strides
