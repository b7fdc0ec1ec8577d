"""The orders in which a block's axes lie: what attention kernels work on, and what any tensor-parallel size can cut."""

from __future__ import annotations

from enum import StrEnum

import torch

from kernels.errors import ShapeError


class KvLayout(StrEnum):
    """Shape of one block; a tensor of blocks has one more axis before it.

    NHD `[layers, outer, tokens, heads, head_dim]`, HND `[layers, outer, heads, tokens, head_dim]`, universal
    `[heads, layers, outer, tokens, head_dim]`, where the heads of one tensor-parallel worker lie together.
    """

    NHD = "NHD"
    HND = "HND"
    UNIVERSAL = "universal"

    @property
    def axes(self) -> tuple[str, ...]:
        return _AXES[self]

    @property
    def head_axis(self) -> int:
        """Where the heads are in a tensor of blocks, `[blocks, *axes]`."""
        return 1 + self.axes.index("heads")

    def order(self, other: KvLayout) -> tuple[int, ...]:
        """The axes of a tensor of blocks in this layout, as `torch.permute` takes them to give `other`."""
        return (0, *(1 + self.axes.index(axis) for axis in other.axes))


_AXES = {
    KvLayout.NHD: ("layers", "outer", "tokens", "heads", "head_dim"),
    KvLayout.HND: ("layers", "outer", "heads", "tokens", "head_dim"),
    KvLayout.UNIVERSAL: ("heads", "layers", "outer", "tokens", "head_dim"),
}


def check_blocks(name: str, blocks: torch.Tensor, layout: KvLayout) -> None:
    """Raises `ShapeError` unless `blocks` has a block axis and those of `layout`."""
    if blocks.dim() != 6:
        raise ShapeError(
            f"{name} has shape {tuple(blocks.shape)}: {layout} blocks have the axes blocks, {', '.join(layout.axes)}; "
            f"split heads × head_dim with unflatten(-1, (heads, head_dim)) where they are one"
        )
