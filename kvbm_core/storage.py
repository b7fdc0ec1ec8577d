"""The memory behind a pool: device memory (the CPU's where there is no GPU) and host memory, pinned where CUDA is."""

from __future__ import annotations

import torch

from event_plane.schema import Tier
from kvbm_core.errors import TensorAllocationError
from kvbm_core.layout import FullyContiguousLayout

TORCH_DTYPES = {
    "float16": torch.float16,
    "bfloat16": torch.bfloat16,
    "float32": torch.float32,
    "int8": torch.int8,
}


class TensorStorage:
    """Blocks of one tier in one tensor, `[blocks, layers, outer, page, inner]`.

    `location` is what its events say, e.g. `device:0` or `host`. Raises `TensorAllocationError` when memory is short.
    """

    def __init__(
        self, layout: FullyContiguousLayout, dtype: str, tier: Tier, location: str, device: torch.device
    ) -> None:
        self.layout = layout
        self.tier = tier
        self.location = location
        elements = layout.total_bytes // layout.element_bytes
        pinned = tier is Tier.G2 and torch.cuda.is_available()
        try:
            flat = torch.zeros(elements, dtype=TORCH_DTYPES[dtype], device=device, pin_memory=pinned)
        except (RuntimeError, MemoryError) as error:
            raise TensorAllocationError(
                f"{location} cannot hold {layout.blocks} blocks of {layout.block_bytes} bytes, {layout.total_bytes} in "
                f"all: lower device_blocks or host_blocks"
            ) from error
        self.tensor = torch.as_strided(flat, layout.shape, layout.strides)

    def payload(self, index: int) -> memoryview:
        """The block's bytes, writable and shared with the tensor; for tiers in CPU memory."""
        block = self.tensor[index].reshape(-1).view(torch.uint8)
        return block.numpy().data


def open_device(layout: FullyContiguousLayout, dtype: str) -> TensorStorage:
    """Tier G1: the first GPU, or CPU memory standing in for it where there is none."""
    device = torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")
    return TensorStorage(layout, dtype, Tier.G1, "device:0", device)


def open_host(layout: FullyContiguousLayout, dtype: str) -> TensorStorage:
    """Tier G2: CPU memory, pinned where CUDA is."""
    return TensorStorage(layout, dtype, Tier.G2, "host", torch.device("cpu"))
