"""The memory behind a pool: device, pinned, system and NIXL memory behind one allocator, and blocks laid out in it.

Memory of the host starts at a page, holds zeros, and stays mapped until the last view of it is gone, so that no view
ever points to memory of somebody else. `close` gives up what is ours: the pin and the registration, once.
"""

from __future__ import annotations

import mmap
import weakref
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from event_plane.schema import Tier
from kvbm_core.config import KvbmConfig
from kvbm_core.errors import LayoutError, StorageClosedError, TensorAllocationError
from kvbm_core.layout import FullyContiguousLayout, Int64s, LayerSeparateLayout, MemoryKind, PoolLayout
from kvbm_core.serialized_layout import BufferPlace, SerializedLayout, serialize
from storage_agent.nixl_memory import HOST_MEMORY, MemoryPlace, MemoryRegion, NixlMemory

TORCH_DTYPES = {
    "float16": torch.float16,
    "bfloat16": torch.bfloat16,
    "float32": torch.float32,
    "int8": torch.int8,
    "float8_e4m3fn": torch.float8_e4m3fn,
    "float8_e5m2": torch.float8_e5m2,
}


class Storage:
    """One piece of memory of `size_bytes`. `kind` and `device` say where it lies."""

    kind: MemoryKind

    def __init__(self, flat: torch.Tensor) -> None:
        self._flat: torch.Tensor | None = flat
        self.size_bytes = flat.numel()
        self.device = flat.device
        self.address = flat.data_ptr()
        """Of the first byte; on a GPU in its own address space."""

    @property
    def flat(self) -> torch.Tensor:
        """All of it as u8, `[size_bytes]`. Raises `StorageClosedError`."""
        if self._flat is None:
            raise StorageClosedError(f"{self.kind} memory of {self.size_bytes} bytes was closed: allocate it again")
        return self._flat

    def close(self) -> None:
        """Let go of the memory; it is freed once no view of it is left. Idempotent."""
        self._flat = None


class SystemStorage(Storage):
    """Host memory in pages of 4 KiB, which the system provides when each is first touched."""

    kind = "system"

    def __init__(self, size_bytes: int, setting: str = "") -> None:
        """Raises `TensorAllocationError`."""
        super().__init__(_map_host(size_bytes, 0, f"{self.kind} memory", setting))


class PinnedStorage(Storage):
    """Host memory in pages of 4 KiB that are all there from the start; where CUDA is, pinned and known to it."""

    kind = "pinned"

    def __init__(self, size_bytes: int, setting: str = "") -> None:
        """Raises `TensorAllocationError`."""
        flat = _map_host(size_bytes, mmap.MAP_POPULATE, f"{self.kind} memory", setting)
        super().__init__(flat)
        self._unpin: weakref.finalize[[int], PinnedStorage] | None = None
        if torch.cuda.is_available():
            status = _cudart().cudaHostRegister(self.address, size_bytes, 0)
            if int(status) != 0:
                raise TensorAllocationError(
                    f"CUDA does not pin {size_bytes} bytes of host memory (error {int(status)}): lower "
                    f"{setting or 'the size'}, or raise the limit of locked memory (`ulimit -l`)"
                )
            self._unpin = weakref.finalize(self, _unpin, self.address)

    def close(self) -> None:
        if self._unpin is not None:
            self._unpin()
        super().close()


class DeviceStorage(Storage):
    """Memory of a GPU; of the host, in its place, where CUDA is not."""

    kind = "device"

    def __init__(self, size_bytes: int, setting: str = "", device_index: int = 0) -> None:
        """Raises `TensorAllocationError`."""
        if not torch.cuda.is_available():
            super().__init__(_map_host(size_bytes, mmap.MAP_POPULATE, "memory in the place of a device's", setting))
            return
        device = torch.device("cuda", device_index)
        try:
            super().__init__(torch.zeros(size_bytes, dtype=torch.uint8, device=device))
        except RuntimeError as error:
            raise TensorAllocationError(
                f"{device} has no {size_bytes} bytes left: lower {setting or 'the size'}"
            ) from error


class NixlStorage(Storage):
    """Memory of any kind that peers reach by NIXL until it is closed. Owns `memory`."""

    def __init__(self, memory: Storage, name: str) -> None:
        """Raises `TransferError`: NIXL does not take it; `memory` is then the caller's still."""
        super().__init__(memory.flat)
        self.kind = memory.kind
        self._memory = memory
        self.nixl = NixlMemory(name, [region_of(memory)])
        """What peers need to know, and lets their transfers go on."""
        # Also when nobody closes it: a peer that reads memory which is not mapped any more ends this process.
        self._unregister = weakref.finalize(self, self.nixl.close)

    def close(self) -> None:
        self._unregister()
        super().close()
        self._memory.close()


def region_of(memory: Storage) -> MemoryRegion:
    """A piece of memory, as NIXL is told of it."""
    place = MemoryPlace("VRAM", memory.device.index) if memory.device.type == "cuda" else HOST_MEMORY
    return MemoryRegion(memory.address, memory.size_bytes, place)


def allocate(kind: MemoryKind, size_bytes: int, *, setting: str = "", nixl_name: str = "") -> Storage:
    """`size_bytes` of zeroed memory; with a `nixl_name`, registered with NIXL under it.

    `setting` is the number to lower, as the error is to name it. Raises `TensorAllocationError` and, from NIXL,
    `TransferError`; nothing stays allocated then.
    """
    memory: Storage = _KINDS[kind](size_bytes, setting)
    return NixlStorage(memory, nixl_name) if nixl_name else memory


class TensorStorage:
    """The blocks of one tier, laid out in as many pieces of memory as its layout has buffers.

    `location` is what its events say, e.g. `device:0` or `host`. All views share the memory. Owns `memory`.
    """

    def __init__(self, layout: PoolLayout, tier: Tier, location: str, memory: Sequence[Storage]) -> None:
        """Raises `LayoutError` unless `memory` has the layout's number of buffers, each at least as large."""
        if len(memory) != layout.buffers or any(each.size_bytes < layout.buffer_bytes for each in memory):
            sizes = ", ".join(str(each.size_bytes) for each in memory)
            raise LayoutError(
                f"{location} is given buffers of {sizes or 'no'} bytes: its layout needs {layout.buffers} of "
                f"{layout.buffer_bytes}"
            )
        self.layout = layout
        self.tier = tier
        self.location = location
        self.memory = tuple(memory)
        dtype = TORCH_DTYPES[layout.dtype]
        elements = [each.flat[: layout.buffer_bytes].view(dtype) for each in memory]
        self.tensors = tuple(torch.as_strided(each, layout.shape, layout.strides) for each in elements)
        """One tensor a buffer, of the layout's `shape`."""
        self.layer_tensors = tuple(self._layer_of_all_blocks(elements, layer) for layer in range(layout.layers))
        """Of each layer all blocks, `[blocks, outer, tokens, heads, head_dim]`, whatever the layout and order."""
        self._bytes = _host_bytes(memory[0]) if isinstance(layout, FullyContiguousLayout) else None

    @property
    def tensor(self) -> torch.Tensor:
        """All blocks, `[blocks, layers, outer, page, inner]` for order NHD; of a fully contiguous layout only."""
        if isinstance(self.layout, LayerSeparateLayout):
            raise LayoutError(f"{self.location} has a tensor for each layer: use `tensors` or `layer_view`")
        self._check_open()
        return self.tensors[0]

    @property
    def device(self) -> torch.device:
        return self.memory[0].device

    def block_view(self, block: int) -> torch.Tensor:
        """One block, `[layers, outer, tokens, heads, head_dim]` in any order; of a fully contiguous layout only."""
        layout = self.layout
        layout.check_block(block)
        stride = layout.strides_bytes
        size = layout.element_bytes
        shape = (layout.layers, layout.outer, layout.page_tokens, layout.heads, layout.head_dim)
        steps = (stride.layer // size, stride.outer // size, stride.token // size, stride.head // size, 1)
        return torch.as_strided(self.tensor, shape, steps, block * stride.block // size)

    def layer_view(self, block: int, layer: int) -> torch.Tensor:
        """One layer of a block, `[outer, tokens, heads, head_dim]`."""
        self.layout.check_block(block)
        if not 0 <= layer < self.layout.layers:
            raise LayoutError(f"layer {layer} is not in the block: give one from 0 to {self.layout.layers - 1}")
        self._check_open()
        return self.layer_tensors[layer][block]

    def outer_view(self, block: int, layer: int, outer: int) -> torch.Tensor:
        """Keys (`outer` 0) or values (1) of one layer of a block, `[tokens, heads, head_dim]`."""
        if not 0 <= outer < self.layout.outer:
            raise LayoutError(f"outer {outer} is not in the block: give one from 0 to {self.layout.outer - 1}")
        return self.layer_view(block, layer)[outer]

    def payload(self, index: int) -> memoryview:
        """A block's bytes in its order, writable and shared; of a fully contiguous layout in host memory only.

        What `storage_agent`'s `put` and `get` take.
        """
        if self._bytes is None:
            self._check_open()
            raise LayoutError(f"blocks of {self.location} are no single pieces of host memory: copy them to the host")
        self.layout.check_block(index)
        start = index * self.layout.strides_bytes.block
        return self._bytes[start : start + self.layout.block_bytes]

    def addresses_of(self, blocks: Sequence[int]) -> tuple[Int64s, Int64s]:
        """(address, length) of every region of the blocks, one block after another."""
        buffers, offsets, lengths = self.layout.regions_of(blocks)
        return np.array([each.address for each in self.memory], dtype=np.int64)[buffers] + offsets, lengths

    def serialized(self, config: KvbmConfig) -> SerializedLayout:
        """What another worker needs to find any element in here; `config` is this worker's."""
        places = [BufferPlace(each.address, each.size_bytes) for each in self.memory]
        kind, device = self.memory[0].kind, self.device.index or 0
        return serialize(self.layout, config, places, memory=kind, device=device)

    def close(self) -> None:
        """Let go of the memory. Views that were given out stay valid. Idempotent."""
        self.tensors = self.layer_tensors = ()
        self._bytes = None
        for each in self.memory:
            each.close()

    def _check_open(self) -> None:
        if not self.tensors:
            raise StorageClosedError(f"the blocks of {self.location} were closed: open them again")

    def _layer_of_all_blocks(self, elements: Sequence[torch.Tensor], layer: int) -> torch.Tensor:
        layout, stride, size = self.layout, self.layout.strides_bytes, self.layout.element_bytes
        shape = (layout.blocks, layout.outer, layout.page_tokens, layout.heads, layout.head_dim)
        steps = (stride.block // size, stride.outer // size, stride.token // size, stride.head // size, 1)
        buffer = elements[layer if layout.buffers > 1 else 0]
        return torch.as_strided(buffer, shape, steps, layer * stride.layer // size)


def open_blocks(layout: PoolLayout, kind: MemoryKind, tier: Tier, location: str, *, setting: str) -> TensorStorage:
    """Memory for a pool of `layout`. Raises `TensorAllocationError` that names `setting`; nothing stays allocated."""
    memory = [allocate(kind, layout.buffer_bytes, setting=setting) for _ in range(layout.buffers)]
    return TensorStorage(layout, tier, location, memory)


def open_device(layout: PoolLayout) -> TensorStorage:
    """Tier G1: the first GPU, or host memory standing in for it where there is none."""
    return open_blocks(layout, "device", Tier.G1, "device:0", setting=f"device_blocks, now {layout.blocks}")


def open_engines_host(layout: PoolLayout) -> TensorStorage:
    """Tier G2, pinned where CUDA is: where the engine keeps G1 itself, in the place of the device."""
    return open_blocks(layout, "pinned", Tier.G2, "host", setting=f"device_blocks, now {layout.blocks}")


def open_host(layout: FullyContiguousLayout) -> TensorStorage:
    """Tier G2: host memory, pinned where CUDA is."""
    return open_blocks(layout, "pinned", Tier.G2, "host", setting=f"host_blocks, now {layout.blocks}")


def open_staging(layout: FullyContiguousLayout) -> TensorStorage:
    """The buffer between volumes and device where there is no host tier. Nothing is announced of it."""
    return open_blocks(layout, "pinned", Tier.G2, "staging", setting=f"staging_blocks, now {layout.blocks}")


_KINDS = {"device": DeviceStorage, "pinned": PinnedStorage, "system": SystemStorage}


def _map_host(size_bytes: int, flags: int, what: str, setting: str) -> torch.Tensor:
    """Zeroed pages as u8. The tensor keeps the mapping, which is therefore never closed by hand."""
    try:
        mapped = mmap.mmap(-1, size_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | flags)
    except (OSError, ValueError, OverflowError) as error:
        raise TensorAllocationError(
            f"no {size_bytes} bytes of {what} can be had ({error}): lower {setting or 'the size'}"
        ) from error
    return torch.frombuffer(mapped, dtype=torch.uint8)


def _host_bytes(memory: Storage) -> memoryview | None:
    return memory.flat.numpy().data if memory.device.type == "cpu" else None


def _cudart() -> Any:
    return torch.cuda.cudart()  # type: ignore[no-untyped-call]


def _unpin(address: int) -> None:
    _cudart().cudaHostUnregister(address)
