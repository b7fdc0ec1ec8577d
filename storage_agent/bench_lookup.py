"""What a get costs beside moving bytes: finding the block, holding its slot, planning the read, saying the outcome."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence

from event_plane.schema import Namespace
from storage_agent.agent import StorageAgent
from storage_agent.block_header import BlockHeader
from storage_agent.descriptor import VolumeDescriptor
from storage_agent.port import BlockKey, PutBlock
from storage_agent.slot_rows import SlotRows
from storage_agent.slot_store import Recovered, SlotRead, SlotWrite, Take
from storage_agent.slot_volume import SlotVolume

BLOCKS = 256
ROUNDS = 200
ROUNDS_WARM = 100
_NAMESPACE = Namespace(tenant="bench")


class _NowhereStore:
    """Implements `slot_store.SlotStore` with nothing behind it: reads hand over one byte at once."""

    mode = "nowhere"
    batch_slots = BLOCKS
    upkeep_due = False

    def recover(self) -> Recovered:
        return Recovered(SlotRows.empty(BLOCKS), 1)

    def write(self, writes: Sequence[SlotWrite]) -> None:
        pass

    def sync(self) -> None:
        pass

    def read(self, reads: Sequence[SlotRead], take: Take) -> None:
        content = memoryview(b"x")
        for number in range(len(reads)):
            take(number, None, content)

    def erase(self, headers: Sequence[BlockHeader]) -> None:
        pass

    def forget_cached(self, headers: Sequence[BlockHeader]) -> None:
        pass

    def resize(self, capacity_blocks: int) -> None:
        pass

    def compact(self) -> int:
        return 0

    def upkeep(self, copy_table: Callable[[], tuple[SlotRows, list[int]]]) -> None:
        pass

    def close(self, *, in_order: bool, generation_next: int) -> None:
        pass


def lookup_us() -> float:
    """Microseconds of the processor for each block of a get of `BLOCKS` through an agent; the median of `ROUNDS`."""
    descriptor = VolumeDescriptor(id="nowhere", kind="memory", capacity_blocks=BLOCKS, block_bytes_max=1)
    volume = SlotVolume(descriptor, _NowhereStore(), on_stored=lambda headers: None, on_freed=lambda headers: None)
    keys = [BlockKey(_NAMESPACE.namespace_id, 0, number + 1) for number in range(BLOCKS)]
    buffers = [memoryview(bytearray(1)) for _ in keys]
    with StorageAgent("bench", publisher=None, allowed_roots=[]) as agent:
        agent._shelf.add([volume])
        agent.put("nowhere", [PutBlock(key, _NAMESPACE, memoryview(b"x")) for key in keys])
        samples = []
        for _ in range(ROUNDS_WARM):  # the processor, too
            agent.get(keys, buffers)
        for _ in range(ROUNDS):
            started_s = time.thread_time()
            agent.get(keys, buffers)
            samples.append(time.thread_time() - started_s)
    return statistics.median(samples) / BLOCKS * 1e6
