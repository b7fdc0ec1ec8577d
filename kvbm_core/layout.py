"""Where a block's elements lie. Fully contiguous only; layer-separate and universal layouts come with issue 5."""

from __future__ import annotations

from dataclasses import dataclass

from kvbm_core.config import DTYPE_BYTES, KvbmConfig


@dataclass(frozen=True, slots=True)
class FullyContiguousLayout:
    """`[blocks, layers, outer, page, inner]` in one buffer, the last index fastest; sizes in elements unless named."""

    blocks: int
    layers: int
    outer: int
    page_tokens: int
    inner: int
    element_bytes: int
    alignment_bytes: int = 1

    @property
    def shape(self) -> tuple[int, int, int, int, int]:
        return (self.blocks, self.layers, self.outer, self.page_tokens, self.inner)

    @property
    def strides(self) -> tuple[int, int, int, int, int]:
        """Elements from one index to the next, for each dimension of `shape`."""
        page = self.page_tokens * self.inner
        return (self.block_stride_bytes // self.element_bytes, self.outer * page, page, self.inner, 1)

    @property
    def block_bytes(self) -> int:
        """Bytes of one block, without the padding after it."""
        return self.layers * self.outer * self.page_tokens * self.inner * self.element_bytes

    @property
    def block_stride_bytes(self) -> int:
        """Bytes from one block to the next: `block_bytes` rounded up to the alignment."""
        return -(-self.block_bytes // self.alignment_bytes) * self.alignment_bytes

    @property
    def total_bytes(self) -> int:
        return self.blocks * self.block_stride_bytes


def layout_of(config: KvbmConfig, blocks: int) -> FullyContiguousLayout:
    """The layout of a pool of `blocks` blocks."""
    return FullyContiguousLayout(
        blocks=blocks,
        layers=config.layers,
        outer=config.outer,
        page_tokens=config.page_tokens,
        inner=config.inner,
        element_bytes=DTYPE_BYTES[config.dtype],
        alignment_bytes=config.alignment_bytes,
    )
