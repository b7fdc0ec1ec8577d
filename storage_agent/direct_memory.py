"""Memory of callers', a GPU's or the host's, that blocks go to a file from, and come into, with no copy in between.

Where that cannot be (`slot_direct`), the same spans are copied through the host's memory.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

import numpy as np

if TYPE_CHECKING:
    import torch


class DirectMemory:
    """The memory of one tensor, a pool's as a rule, which it keeps. NIXL is told of it once, not with each span.

    What lies on a GPU: whoever fills a span sees to it that this has ended (an event, `torch.cuda.synchronize`) before
    it is put; after a get every stream may read it.
    """

    def __init__(self, tensor: torch.Tensor) -> None:
        """Of any dtype. Raises `ValueError`: empty, with gaps, or on a device that is neither a GPU nor the host."""
        import torch  # here: whoever has a tensor has it loaded, and an agent does without

        kind = tensor.device.type
        if kind not in ("cpu", "cuda"):
            raise ValueError(f"the tensor is on {tensor.device}; give one on a CUDA device or the CPU")
        if not tensor.is_contiguous() or not tensor.nbytes:
            raise ValueError(
                f"the tensor has shape {tuple(tensor.shape)}, strides {tensor.stride()}; give one without gaps"
            )
        self.bytes: torch.Tensor = tensor.detach().reshape(-1).view(torch.uint8)
        """All of it as u8, one after another."""
        self.address = self.bytes.data_ptr()
        """Of the first byte; on a GPU in its own address space."""
        self.size_bytes = self.bytes.nbytes
        self.kind: Literal["DRAM", "VRAM"] = "VRAM" if kind == "cuda" else "DRAM"
        """As NIXL says it."""
        self.device = tensor.device.index or 0

    def span(self, offset_bytes: int = 0, size_bytes: int | None = None) -> DirectSpan:
        """A part; without a size, up to the end. Raises `ValueError` for what is not inside."""
        size = self.size_bytes - offset_bytes if size_bytes is None else size_bytes
        if offset_bytes < 0 or size < 1 or offset_bytes + size > self.size_bytes:
            raise ValueError(
                f"{size} bytes from {offset_bytes} on are not inside the memory's {self.size_bytes}"
            )
        return DirectSpan(self, offset_bytes, size)


class DirectSpan:
    """`nbytes` bytes of a `DirectMemory`, in the place of a payload or of a buffer. Keeps the memory."""

    __slots__ = ("memory", "nbytes", "offset_bytes")

    c_contiguous = True

    def __init__(self, memory: DirectMemory, offset_bytes: int, size_bytes: int) -> None:
        """Made by `DirectMemory.span`."""
        self.memory = memory
        self.offset_bytes = offset_bytes
        self.nbytes = size_bytes

    @property
    def address(self) -> int:
        return self.memory.address + self.offset_bytes

    @property
    def bytes(self) -> torch.Tensor:
        """As u8, `[nbytes]`, without a copy."""
        return self.memory.bytes[self.offset_bytes : self.offset_bytes + self.nbytes]

    def in_host_memory(self) -> memoryview:
        """The bytes; a copy where they lie on a GPU."""
        held: memoryview = self.bytes.cpu().numpy().data
        return held

    def fill(self, payload: memoryview) -> None:
        """Copy `payload` to the start; done when it returns. It fits."""
        import torch

        start = self.bytes[: payload.nbytes]
        if start.device.type == "cpu":
            np.copyto(start.numpy(), np.frombuffer(payload, np.uint8))
        else:
            start.copy_(torch.frombuffer(bytearray(payload), dtype=torch.uint8))
