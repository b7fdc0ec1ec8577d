"""A tensor-parallel worker as a process: puts its shard of blocks into an owner's slab, one block at a time.

Prints the result of each. Told to halt at a block, it says so when that shard is written but neither synced nor
committed, and waits to be killed.
"""

from __future__ import annotations

import os
import signal
import sys

import numpy as np
import numpy.typing as npt

from event_plane.schema import Namespace
from storage_agent.port import BlockKey, PutBlock
from storage_agent.shards import Axis, BlockLayout, ShardSpan
from storage_agent.slab_client import SlabClient

NAMESPACE = Namespace(tenant="tp", model="llama", block_tokens=16)
HEADS = 8


def layout(element_count: int) -> BlockLayout:
    """Of a block of 96 × `element_count` × 8 heads × 2 bytes."""
    return BlockLayout(
        (Axis("layer", 3), Axis("outer", 2), Axis("token", 16), Axis("head", HEADS), Axis("element", element_count)),
        2,
        "head",
        "float16",
    )


def key(number: int) -> BlockKey:
    return BlockKey(NAMESPACE.namespace_id, 0, number << 64 | 0x77)


def whole(number: int, element_count: int) -> npt.NDArray[np.uint16]:
    """What all workers together hold of a block."""
    shape = [axis.extent for axis in layout(element_count).axes]
    return np.random.default_rng(number).integers(0, 2**16, shape, dtype=np.uint16)


def part(number: int, element_count: int, index: int, workers: int) -> bytes:
    """What worker `index` holds of it."""
    return np.ascontiguousarray(np.split(whole(number, element_count), workers, axis=3)[index]).tobytes()


def shard(number: int, element_count: int, index: int, workers: int) -> PutBlock:
    payload = part(number, element_count, index, workers)
    span = ShardSpan(len(payload), index, workers)
    return PutBlock(key(number), NAMESPACE, memoryview(payload), span=span, layout=layout(element_count))


def halt() -> None:
    print("halted", flush=True)
    while True:
        signal.pause()


def main(url: str, index: int, workers: int, element_count: int, block_count: int, halt_at: int) -> None:
    with SlabClient(url, "shared") as client:
        for number in range(block_count):
            if number == halt_at:
                os.fdatasync = lambda fd: halt()  # reached with the shard written
            (outcome,) = client.put([shard(number, element_count, index, workers)])
            print(outcome.result.value, flush=True)


if __name__ == "__main__":
    main(sys.argv[1], *(int(each) for each in sys.argv[2:]))
