"""Some heads of one block, on their way between workers: packed in the order of the pool that a peer reads or writes.

In the peer's own order they are the fewest and longest byte ranges of its memory. Checksums are of the universal order.
"""

from __future__ import annotations

import msgspec
import numpy as np
import torch

from kvbm_core.layout import AXES, FullyContiguousLayout
from kvbm_core.remote_seal import HeadBytes
from kvbm_core.serialized_layout import BufferPlace, Runs, SerializedLayout, runs_between
from kvbm_core.storage import TensorStorage


class PackedHeads:
    """Heads `first_head` to `first_head + heads - 1` of the whole model, of one block of a peer's pool.

    `runs`: where they lie in block 0 of the pool (`their_…`) and in the packed bytes (`our_offsets`).
    """

    def __init__(self, theirs: SerializedLayout, first_head: int, heads: int) -> None:
        """Raises `LayoutError` where the peer does not hold them."""
        self.theirs = theirs
        self.first_head = first_head
        self.heads = heads
        packed = FullyContiguousLayout(
            blocks=1,
            layers=theirs.layers,
            outer=theirs.outer,
            page_tokens=theirs.page_tokens,
            heads=heads,
            head_dim=theirs.head_dim,
            dtype=theirs.dtype,
            order=theirs.order,
        )
        self.size_bytes = packed.block_bytes
        ours = msgspec.structs.replace(
            theirs,
            first_head=first_head,
            heads=heads,
            strides=packed.strides_bytes,
            buffers=(BufferPlace(0, packed.block_bytes),),
        )
        self.runs: Runs = runs_between(theirs, ours)
        self._axes = AXES[theirs.order]
        extents = packed.extents | {"head_dim": theirs.head_dim * theirs.element_bytes}
        self._shape = [extents[axis] for axis in self._axes]

    def unpack(self, packed: memoryview) -> HeadBytes:
        """A copy of the heads in the universal order."""
        moved = np.frombuffer(packed, dtype=np.uint8).reshape(self._shape)
        return moved.transpose([self._axes.index(axis) for axis in AXES["universal"]]).copy(order="C")

    def pack(self, heads: HeadBytes, packed: memoryview) -> None:
        """Write `heads` into `packed`, `size_bytes` long."""
        target = np.frombuffer(packed, dtype=np.uint8).reshape(self._shape)
        target[:] = heads.transpose([AXES["universal"].index(axis) for axis in self._axes])


def heads_in(storage: TensorStorage, block: int, first: int, count: int) -> HeadBytes:
    """A copy of some heads of a pool's block, counted from the pool's first, in host memory."""
    layout = storage.layout
    head_bytes = layout.head_dim * layout.element_bytes
    found = np.empty((count, layout.layers, layout.outer, layout.page_tokens, head_bytes), dtype=np.uint8)
    for layer in range(layout.layers):
        lying = storage.layer_view(block, layer)[:, :, first : first + count].view(torch.uint8)
        found[:, layer] = lying.cpu().numpy().transpose(2, 0, 1, 3)  # in numpy: torch copies such bytes at a tenth
    return found


def put_heads_in(storage: TensorStorage, block: int, first: int, heads: HeadBytes) -> None:
    """Write heads into a pool's block, from the pool's number `first` on."""
    for layer in range(storage.layout.layers):
        target = storage.layer_view(block, layer)[:, :, first : first + len(heads)].view(torch.uint8)
        moved = heads[:, layer].transpose(1, 2, 0, 3)
        if target.is_cpu:
            target.numpy()[:] = moved
        else:
            target.copy_(torch.from_numpy(np.ascontiguousarray(moved)))
