"""Which blocks of a batch go between a volume and a caller's memory directly, and which through the host's."""

from __future__ import annotations

from collections.abc import Sequence

from storage_agent.block_header import BlockHeader
from storage_agent.buffers import fill_buffer
from storage_agent.direct_memory import DirectSpan
from storage_agent.port import BlockKey, Buffer, Outcome, PutBlock
from storage_agent.shards import Shard
from storage_agent.slot_direct import SlotDirect
from storage_agent.slot_volume import SlotVolume
from storage_agent.volume import ReadResult, Volume


def put_blocks(volume: Volume, blocks: Sequence[PutBlock]) -> list[Outcome]:
    """`volume.put`, with spans straight from where they lie as far as the volume can."""
    direct = _direct_of(volume)
    if direct is None:
        return volume.put(blocks)
    outcomes: dict[int, Outcome] = {}
    spans = {
        number: block.payload
        for number, block in enumerate(blocks)
        if isinstance(block.payload, DirectSpan) and direct.takes(block.payload)
    }
    if not spans:
        return volume.put(blocks)
    for batch in _batches(list(spans), direct):
        stored = direct.put([blocks[number] for number in batch], [spans[number] for number in batch])
        outcomes |= dict(zip(batch, stored, strict=True))
    rest = [number for number in range(len(blocks)) if number not in spans]
    outcomes |= dict(zip(rest, volume.put([blocks[number] for number in rest]), strict=True))
    return [outcomes[number] for number in range(len(blocks))]


def read_blocks(
    volume: Volume, keys: Sequence[BlockKey], buffers: Sequence[Buffer], wanted: Shard | None
) -> list[ReadResult]:
    """`volume.read` into buffers, straight into spans as far as the volume can."""
    direct = _direct_of(volume)
    spans: dict[int, DirectSpan] = {}
    if direct is not None:
        spans = {number: buffer for number, buffer in enumerate(buffers) if isinstance(buffer, DirectSpan)}
    if direct is None or not spans:
        return _read_by_host(volume, keys, buffers, wanted)
    results: dict[int, ReadResult] = {}
    for batch in _batches(list(spans), direct):
        results |= direct.read(keys, {number: spans[number] for number in batch}, wanted)
    rest = [number for number in range(len(keys)) if number not in results]
    read = _read_by_host(volume, [keys[number] for number in rest], [buffers[number] for number in rest], wanted)
    results |= dict(zip(rest, read, strict=True))
    return [results[number] for number in range(len(keys))]


def _read_by_host(
    volume: Volume, keys: Sequence[BlockKey], buffers: Sequence[Buffer], wanted: Shard | None
) -> list[ReadResult]:
    def fill(number: int, header: BlockHeader, payload: memoryview) -> str:
        return fill_buffer(buffers[number], payload)

    return volume.read(keys, fill, wanted)


def _direct_of(volume: Volume) -> SlotDirect | None:
    return volume.direct if isinstance(volume, SlotVolume) else None


def _batches(numbers: list[int], direct: SlotDirect) -> list[list[int]]:
    size = direct.batch_slots
    return [numbers[start : start + size] for start in range(0, len(numbers), size)]
