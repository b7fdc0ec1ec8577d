"""An agent that mends often, and what a subscriber to it believes: for tests of media that fail."""

from __future__ import annotations

import uuid
from pathlib import Path

from event_plane import wire
from event_plane.connect import open_publisher, open_subscriber
from event_plane.schema import EventType, Namespace, producer_id
from event_plane.transport import Message
from storage_agent.agent import StorageAgent
from storage_agent.descriptor import VolumeDescriptor
from storage_agent.port import BlockKey, PutBlock, Result, VolumeStat

NAMESPACE = Namespace(tenant="mend")
BLOCK_BYTES = 30_000
CAPACITY = 64


def key(number: int) -> BlockKey:
    return BlockKey(NAMESPACE.namespace_id, 0, number + 1)


def block(number: int) -> PutBlock:
    return PutBlock(key(number), NAMESPACE, memoryview(b"%06d" % number * (BLOCK_BYTES // 6)), depth=number)


class Watched:
    """An agent that mends ten times a second, and what it told of."""

    def __init__(self, folder: Path) -> None:
        plane = f"memory://{uuid.uuid4().hex}"
        self._subscriber = open_subscriber("agent", plane)
        self._publisher = open_publisher(plane, producer=producer_id("a"), flush_interval_s=60.0)
        self.agent = StorageAgent("a", publisher=self._publisher, allowed_roots=[folder], mend_interval_s=0.1)
        self._held: dict[str, set[int]] = {}
        self.agent.register_volume(
            VolumeDescriptor(id="other", kind="memory", capacity_blocks=8, block_bytes_max=BLOCK_BYTES, speed_rank=9)
        )

    def put(self, *numbers: int, volume: str = "v") -> list[Result]:
        return [outcome.result for outcome in self.agent.put(volume, [block(n) for n in numbers])]

    def get(self, *numbers: int) -> list[Result]:
        buffers = [memoryview(bytearray(BLOCK_BYTES)) for _ in numbers]
        outcomes = self.agent.get([key(n) for n in numbers], buffers)
        for number, outcome, buffer in zip(numbers, outcomes, buffers, strict=True):
            assert outcome.result is not Result.HIT or buffer == block(number).payload
        return [outcome.result for outcome in outcomes]

    def stat(self, volume: str = "v") -> VolumeStat:
        return next(each for each in self.agent.stat().volumes if each.descriptor.id == volume)

    def told(self, volume: str = "v") -> set[int]:
        """Blocks that a subscriber takes to be there."""
        self._publisher.flush()
        while messages := self._subscriber.receive(64):
            for message in messages:
                if isinstance(message, Message):
                    batch = wire.decode(message.payload)
                    for row in batch.records:
                        held = self._held.setdefault(batch.locations[int(row["storage_location"])], set())
                        if row["event_type"] == int(EventType.STORE):
                            held.add(int(row["sequence_hash_lo"]) - 1)
                        elif row["event_type"] == int(EventType.REMOVE):
                            held.discard(int(row["sequence_hash_lo"]) - 1)
        return self._held.get(volume, set())

    def close(self) -> None:
        self.agent.close()
        self._publisher.close()
        self._subscriber.close()


def descriptor(path: Path | str, **fields: object) -> VolumeDescriptor:
    facts = {"id": "v", "path": str(path), "capacity_blocks": CAPACITY, "block_bytes_max": BLOCK_BYTES, **fields}
    return VolumeDescriptor(**facts)  # type: ignore[arg-type]
