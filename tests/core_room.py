"""A block manager for tests: a real storage agent behind it, and everything it publishes folded as a reader would."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import count
from typing import Any

import numpy as np
import torch

from event_plane.memory_transport import MemoryPublisher, MemorySubscriber
from event_plane.schema import Batch, EventType, producer_id
from event_plane.transport import Message
from event_plane.wire import decode
from kvbm_core.block import ImmutableBlock, MutableBlock
from kvbm_core.config import KvbmConfig, TierVolumes
from kvbm_core.identity import BlockIdentity
from kvbm_core.manager import KvBlockManager
from kvbm_core.pool import BlockPool
from kvbm_core.sequence import TokenBlockSequence
from storage_agent.agent import StorageAgent
from storage_agent.descriptor import VolumeDescriptor
from storage_agent.port import Outcome

DISK = TierVolumes(volumes=("disk",), retention_s=60.0)
REMOTE = TierVolumes(volumes=("far",), retention_s=60.0)
SIZES: dict[str, Any] = {
    "layers": 2,
    "page_tokens": 4,
    "heads": 2,
    "head_dim": 16,
    "device_blocks": 8,
    "host_blocks": 16,
    "hash_secret": "a secret of the tests",
    "model": "tiny",
    "headroom_bytes": 0,
}
PATIENCE_S = 60.0
_rooms = count()


class HeldAgent(StorageAgent):
    """An agent whose gets and puts wait, while `held`, until they are `let_go`: a volume that hangs."""

    def __init__(self) -> None:
        super().__init__("agent", publisher=None, allowed_roots=[])
        self.may_go = threading.Event()
        self.may_go.set()
        self.came = threading.Semaphore(0)

    @contextmanager
    def held(self) -> Iterator[None]:
        self.may_go.clear()
        try:
            yield
        finally:
            self.may_go.set()

    def get(self, *asked: Any, **named: Any) -> list[Outcome]:
        self._wait()
        return super().get(*asked, **named)

    def put(self, *asked: Any, **named: Any) -> list[Outcome]:
        self._wait()
        return super().put(*asked, **named)

    def _wait(self) -> None:
        self.came.release()
        assert self.may_go.wait(PATIENCE_S), "nobody let the agent go"


class CoreRoom:
    """A core over memory volumes `disk` (G3) and `far` (G4); `disk` and `remote` of the configuration use them."""

    def __init__(self, *, has_agent: bool = True, capacity_blocks: int = 64, **settings: Any) -> None:
        self.config = KvbmConfig(**SIZES | settings)
        url = f"memory://core-{next(_rooms)}"
        self.publisher = MemoryPublisher(url, producer=producer_id("core"))
        self.subscriber = MemorySubscriber("core", url, when_slow="drop")
        self.agent = HeldAgent()
        for name, tier in (("disk", 3), ("far", 4)):
            self.agent.register_volume(
                VolumeDescriptor(
                    id=name,
                    kind="memory",
                    tier=tier,
                    capacity_blocks=capacity_blocks,
                    block_bytes_max=self.config.block_bytes,
                    speed_rank=tier,
                )
            )
        self.manager = KvBlockManager(self.config, self.publisher, self.agent if has_agent else None)
        self.batches: list[Batch] = []

    @property
    def device_pool(self) -> BlockPool:
        return self.manager._tiers.device.pool

    @property
    def host_pool(self) -> BlockPool:
        assert self.manager._tiers.host is not None
        return self.manager._tiers.host.pool

    def sequence(self, blocks: int, first_token: int = 0, tenant: str = "acme") -> list[BlockIdentity]:
        tokens = np.arange(first_token, first_token + blocks * self.config.page_tokens, dtype=np.uint32)
        return TokenBlockSequence(self.config, tenant, tokens).blocks

    def write(self, places: Sequence[MutableBlock], wanted: Sequence[BlockIdentity]) -> None:
        """What a model would compute: each block full of a number of its own, each layer of another."""
        for place, identity in zip(places, wanted, strict=True):
            for layer in range(self.config.layers):
                self.write_layer(place.index, identity, layer)

    def write_layer(self, index: int, identity: BlockIdentity, layer: int) -> None:
        self.manager.device.layer_view(index, layer).fill_(number_of(identity) + layer)

    def compute(self, wanted: Sequence[BlockIdentity], *, priority: int = 35) -> list[ImmutableBlock]:
        places = self.manager.allocate(len(wanted)).blocks
        self.write(places, wanted)
        return self.manager.register_many(self.manager.complete(places, wanted), priority=priority)

    def compute_and_release(self, wanted: Sequence[BlockIdentity], *, offload: bool = True) -> None:
        held = self.compute(wanted)
        if offload:
            self.manager.offload(len(wanted))
        release(held)

    def push_out_of_device(self, first_token: int = 90_000) -> None:
        """Fill the device with blocks that nobody asks for and that are not offloaded."""
        release(self.compute(self.sequence(self.config.device_blocks, first_token)))
        self.manager._offloads._queue.clear()

    def push_out_of_host(self, first_token: int = 50_000) -> None:
        """Fill device and host with blocks that nobody asks for. They go to volumes too."""
        for start in range(0, self.config.host_blocks, self.config.device_blocks):
            self.compute_and_release(self.sequence(self.config.device_blocks, first_token + 1_000 * start))

    def is_right(self, block: ImmutableBlock) -> bool:
        """Whether each layer reads as it was written, as far as the dtype holds the number."""
        for layer in range(self.config.layers):
            view = self.manager.device.layer_view(block.index, layer)
            expected = torch.empty_like(view).fill_(number_of(block.identity) + layer)
            if not torch.equal(view.float(), expected.float()):
                return False
        return True

    def published(self) -> list[Batch]:
        """Everything so far."""
        self.manager.flush_events()
        return self.received()

    def received(self) -> list[Batch]:
        """What the core has handed to its publisher of itself."""
        self.publisher.flush()
        while received := self.subscriber.receive(1_000):
            self.batches += [decode(each.payload) for each in received if isinstance(each, Message)]
        return self.batches

    def events(self, tier: int | None = None) -> list[tuple[str, int, int, int]]:
        """(type, tier, flags, low half of the hash) of every event, or of a tier's, in order."""
        return [
            (
                EventType(record["event_type"]).name,
                int(record["tier"]),
                int(record["flags"]),
                int(record["sequence_hash_lo"]),
            )
            for batch in self.published()
            for record in batch.records
            if tier in (None, record["tier"])
        ]

    def close(self) -> None:
        self.agent.may_go.set()
        self.manager.close()
        self.subscriber.close()
        self.publisher.close()
        self.agent.close()


def number_of(identity: BlockIdentity) -> int:
    return identity.key.sequence_hash % 400


def low(identity: BlockIdentity) -> int:
    return identity.key.sequence_hash & 0xFFFF_FFFF_FFFF_FFFF


def release(blocks: Sequence[ImmutableBlock]) -> None:
    """The root last, so that tails are evicted before what many share."""
    for block in reversed(blocks):
        block.release()
