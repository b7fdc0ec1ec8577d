"""NH-64, the checksum of blocks that were put from where they lay: of bytes of the host, and of spans on their device.

The kernels are loaded when the first such block is met: they bring PyTorch with them, which takes seconds.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from storage_agent.errors import TransferError

if TYPE_CHECKING:
    import torch


def nh64_of_bytes(part: memoryview | bytes) -> int:
    from kernels.checksum import checksum_bytes

    return checksum_bytes(part)


def nh64_of_tensors(tensors: Sequence[torch.Tensor]) -> list[tuple[int, ...]]:
    """For each tensor, `[parts, bytes]`, the checksum of each part, reckoned where it lies.

    Raises `TransferError` where the device does not do it.
    """
    from kernels.checksum import checksum_blocks, unsigned

    try:
        sums = [checksum_blocks(tensor) for tensor in tensors]  # a GPU works on all before the first is waited for
        return [tuple(unsigned(each)) for each in sums]
    except RuntimeError as error:
        raise TransferError(f"the device does not sum {len(tensors)} payloads: {error}") from error
