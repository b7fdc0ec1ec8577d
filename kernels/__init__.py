"""Block copies between paged pools and contiguous staging. Knows no other room."""

from kernels.dispatch import gather_blocks, scatter_blocks

__all__ = ["gather_blocks", "scatter_blocks"]
