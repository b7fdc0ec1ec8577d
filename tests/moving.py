"""A real agent with volumes on files and an advisor beside it that plans when it is told to."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from advisor.entries import Tick
from advisor.moves import Move
from advisor.service import AdvisorService
from advisor.settings import AdvisorSettings, AgentSettings, PolicySettings, SourceSettings
from event_plane.connect import open_publisher
from event_plane.schema import Namespace, producer_id
from storage_agent.agent import StorageAgent
from storage_agent.descriptor import VolumeDescriptor
from storage_agent.port import BlockKey, PutBlock, Result

NAMESPACE = Namespace(tenant="acme")
BLOCK_BYTES = 512


def eventually(holds: Callable[[], object], what: str, seconds: float = 60.0) -> None:
    deadline = time.monotonic() + seconds
    while not holds():
        assert time.monotonic() < deadline, f"not within {seconds} s: {what}"
        time.sleep(0.005)


def key(number: int) -> BlockKey:
    return BlockKey(NAMESPACE.namespace_id, 0, number)


def payload(number: int) -> bytes:
    return number.to_bytes(4, "little") * (BLOCK_BYTES // 4)


class Storage:
    """Agent `name` with volumes `volumes` (id: capacity in blocks, further fields), fastest first. May be closed and
    opened again: the blocks stay."""

    def __init__(
        self, folder: Path, volumes: Mapping[str, Mapping[str, Any]], name: str = "agent", rank: int = 0
    ) -> None:
        self.name = name
        self.url = f"zmq+ipc://{folder}/{name}.events"
        self._folder = folder
        self.descriptors = [
            VolumeDescriptor(
                id=volume, path=str(folder / f"{volume}.slab"), speed_rank=number, block_bytes_max=BLOCK_BYTES, **more
            )
            for number, (volume, more) in enumerate(volumes.items(), rank)
        ]
        self.open()

    def open(self) -> None:
        self._publisher = open_publisher(self.url, producer=producer_id(self.name), flush_interval_s=0.005)
        self.agent = StorageAgent(
            self.name, publisher=self._publisher, allowed_roots=[self._folder], mend_interval_s=0.05
        )
        self.agent.register_volumes(self.descriptors)

    def close(self) -> None:
        self.agent.close()
        self._publisher.close()

    def put(self, volume: str, *numbers: int) -> None:
        blocks = [PutBlock(key(n), NAMESPACE, memoryview(payload(n)), block_tokens=16) for n in numbers]
        assert {outcome.result for outcome in self.agent.put(volume, blocks)} == {Result.STORED}

    def get(self, *numbers: int) -> list[str]:
        """Volumes that blocks were read from, whole and right; empty for a miss."""
        buffers = [bytearray(BLOCK_BYTES) for _ in numbers]
        outcomes = self.agent.get([key(n) for n in numbers], [memoryview(buffer) for buffer in buffers])
        self.agent._announcer.flush_accesses()  # else told half a second later
        for number, outcome, buffer in zip(numbers, outcomes, buffers, strict=True):
            assert outcome.result is Result.MISS or buffer == payload(number)
        return [outcome.volume if outcome.result is Result.HIT else "" for outcome in outcomes]

    def held(self, volume: str) -> set[int]:
        """What the slots of a volume say."""
        with self.agent.use_volume(volume) as opened:
            return {header.key.sequence_hash for header in opened.live_headers()}


def settings_for(
    folder: Path,
    storages: Sequence[Storage],
    *,
    tick_s: float = 3_600,
    agents: Sequence[AgentSettings] = (),
    **policy: Any,
) -> AdvisorSettings:
    return AdvisorSettings(
        directory=folder / "state",
        tick_interval_s=tick_s,
        sources=tuple(SourceSettings(name=storage.name, url=storage.url) for storage in storages),
        agents=tuple(agents),
        policy=PolicySettings(**{"admission": "always", "hysteresis_s": 0.0, **policy}),
    )


@contextmanager
def running(service: AdvisorService) -> Iterator[AdvisorService]:
    """Started, and past the tick that every start begins with: the next plan is the test's own."""
    begun_us = time.time_ns() // 1000
    with service:
        eventually(lambda: service.fold.now_us >= begun_us, "the first tick")
        yield service


def folded(service: AdvisorService, volume: str) -> set[int]:
    """What the advisor believes to be on a volume."""
    with service.lock:
        state = service.fold.volumes.get(volume)
        if state is None:
            return set()
        return {b.key.sequence_hash for b in service.fold.index.page(limit=1_000, place=state.place)[0]}


def agrees(service: AdvisorService, storage: Storage) -> bool:
    return all(folded(service, d.id) == storage.held(d.id) for d in storage.descriptors)


def used(service: AdvisorService) -> set[int]:
    """Blocks whose use the next plan will see."""
    with service.lock:
        index = service.fold.index
        return {index.block(row).key.sequence_hash for row in index.touched().tolist()}


def plan(service: AdvisorService) -> list[Move]:
    """Tick; the moves that are planned. They may be under way already."""
    before = set(service.fold.moves.open)
    service.submit(Tick(time.time_ns() // 1000)).result()
    with service.lock:
        fold = service.fold
        known = (*fold.moves.open.values(), *fold.moves.finished)
        return [move for move in known if move.planned_us == fold.now_us and move.move_id not in before]


def settle(service: AdvisorService) -> None:
    """Until no move is open."""
    eventually(lambda: not service.fold.moves.open, "the end of all moves")
