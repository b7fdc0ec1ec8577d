"""Offload and onboard on each path, beside the raw copy or I/O of the same bytes, for `kvadvisor bench core`.

Each figure is of a call as an engine makes it, with queues, copies, checksums, registration and the agent's own checks.
A round moves the same blocks there and back, and the raw ways follow it.
"""

from __future__ import annotations

import os
import secrets
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path

import torch

from event_plane.figures import Figure
from event_plane.memory_transport import MemoryPublisher
from event_plane.schema import producer_id
from kvbm_core.bench_beside import computation, memory_ways, socket_ways
from kvbm_core.bench_pool import PAGE_TOKENS
from kvbm_core.config import KvbmConfig, TierVolumes
from kvbm_core.errors import BenchError, KvbmError
from kvbm_core.identity import BlockIdentity
from kvbm_core.manager import KvBlockManager
from kvbm_core.sequence import TokenBlockSequence
from kvbm_core.torch_threads import one_torch_thread
from storage_agent.agent import StorageAgent
from storage_agent.bench_agent import FOLDER_VARIABLE
from storage_agent.bench_media import Medium, MediumAbsent, RawWay, medium
from storage_agent.bench_peer import serving_peer
from storage_agent.descriptor import VolumeDescriptor
from storage_agent.endpoints import Endpoint
from storage_agent.errors import StorageAgentError

VOLUME = "bench"
LAYER_BYTES = 32 * 1024
"""Keys and values of a page in one layer: 8 heads of 64, 2 bytes."""
LAYERS = (2, 32)
LAYERS_QUICK = (32,)
ROUND_BYTES = 32 << 20
CELL_S = 4.0
CELL_S_QUICK = 0.4
ROUNDS_MIN = 3
WORKERS = (1, 2, 4)
WORKERS_QUICK = (1, 2)


@dataclass
class _Times:
    """Seconds of each round, there and back; `raw` by way."""

    there: list[float] = field(default_factory=list)
    back: list[float] = field(default_factory=list)
    raw_there: dict[str, list[float]] = field(default_factory=dict)
    raw_back: dict[str, list[float]] = field(default_factory=dict)


@dataclass(frozen=True)
class Leg:
    """The two paths between two tiers. `place` is opened for blocks of a size; None: the host, without volumes."""

    there: str
    back: str
    tier: str = ""
    place: Callable[[Path, int, int, ExitStack], Medium] | None = None


def path_figures(quick: bool) -> list[Figure]:
    """Three minutes; `quick` ten seconds, with one size and without an object store. torch uses one thread."""
    budget_s, workers = (CELL_S_QUICK, WORKERS_QUICK) if quick else (CELL_S, WORKERS)
    legs = [
        Leg("device to host", "host to device"),
        Leg("host to disk", "disk to device", "disk", slab),
        Leg("host to remote (agent)", "remote (agent) to device", "remote", peer),
    ]
    if not quick:
        legs.append(Leg("host to remote (object)", "remote (object) to device", "remote", objects))
    figures: list[Figure] = []
    with (
        one_torch_thread(),
        tempfile.TemporaryDirectory(prefix="kvadvisor-bench-", dir=os.environ.get(FOLDER_VARIABLE)) as folder,
    ):
        for layers in LAYERS_QUICK if quick else LAYERS:
            for number, leg in enumerate(legs):
                inside = Path(folder) / f"{layers}-{number}"
                inside.mkdir()
                figures += leg_figures(leg, inside, layers * LAYER_BYTES, budget_s, workers)
    return figures


def leg_figures(
    leg: Leg, folder: Path, block_bytes: int, budget_s: float, workers: Sequence[int]
) -> list[Figure]:
    size = f"{block_bytes >> 10} KiB"
    try:
        with ExitStack() as closing:
            core = _Core(leg, folder, block_bytes, closing)
            times = core.measure(budget_s)
            loads = [core.beside_compute(count, budget_s) for count in workers]
    except (MediumAbsent, StorageAgentError, KvbmError) as error:
        row = f"{leg.there} {size}"
        return [Figure(row, None, "", note=str(error)).placed(row, "why not")]
    figures = [
        *_figures(f"{leg.there} {size}", times.there, times.raw_there),
        *_figures(f"{leg.back} {size}", times.back, times.raw_back),
    ]
    for count, (bytes_s, left) in zip(workers, loads, strict=True):
        row = f"{leg.back} {size}, {count} at once beside compute"
        figures.append(Figure(row, bytes_s / 1e9, "GB/s").placed(row, "GB/s"))
        figures.append(Figure(f"{row}: compute left", left * 100, "%").placed(row, "compute left %"))
    return figures


def _figures(row: str, ours: Sequence[float], raw: dict[str, list[float]]) -> list[Figure]:
    name, theirs = min(raw.items(), key=lambda way: statistics.median(way[1]))
    ratio = statistics.median(their / our for their, our in zip(theirs, ours, strict=True))
    slowest = sorted(ours)[min(len(ours) - 1, int(len(ours) * 0.99))]
    return [
        Figure(row, ROUND_BYTES / statistics.median(ours) / 1e9, "GB/s").placed(row, "GB/s"),
        Figure(f"{row}: raw", ROUND_BYTES / statistics.median(theirs) / 1e9, "GB/s").placed(row, "raw GB/s"),
        Figure(f"{row}: against raw", ratio, "×").placed(row, "× raw"),
        Figure(f"{row}: p50", statistics.median(ours) * 1e3, "ms").placed(row, "p50 ms"),
        Figure(f"{row}: p99", slowest * 1e3, "ms").placed(row, "p99 ms"),
        Figure(f"{row}: raw by", None, "", note=name).placed(row, "raw by"),
    ]


class _Core:
    """A core with the round's blocks in its device and its host, and a volume without any."""

    def __init__(self, leg: Leg, folder: Path, block_bytes: int, closing: ExitStack) -> None:
        blocks = ROUND_BYTES // block_bytes
        place = None if leg.place is None else leg.place(folder, block_bytes, blocks, closing)
        volumes = TierVolumes(volumes=(VOLUME,), retention_s=3_600.0)
        config = KvbmConfig(
            layers=block_bytes // LAYER_BYTES,
            heads=8,
            head_dim=64,
            page_tokens=PAGE_TOKENS,
            device_blocks=blocks,
            host_blocks=blocks,
            disk=volumes if leg.tier == "disk" else None,
            remote=volumes if leg.tier == "remote" else None,
            headroom_bytes=0,
            hash_secret="a benchmark has no secrets",
        )
        publisher = MemoryPublisher(f"memory://bench-{secrets.token_hex(8)}", producer=producer_id("bench"))
        closing.callback(publisher.close)
        self._agent: StorageAgent | None = None
        mode = ""
        if place is not None:
            self._agent = closing.enter_context(
                StorageAgent(
                    "bench",
                    publisher=None,
                    allowed_roots=place.allowed_roots,
                    endpoints=place.endpoints,
                    mend_interval_s=3_600.0,
                )
            )
            mode = self._agent.register_volume(place.descriptor).mode
        self._manager = closing.enter_context(KvBlockManager(config, publisher, self._agent))
        self._raw = _own_mode(memory_ways(ROUND_BYTES) if place is None else place.raw_ways(mode, closing))
        self._blocks = TokenBlockSequence(config, "bench", range(blocks * PAGE_TOKENS)).blocks
        tensor = self._manager.device_tensor
        tensor.copy_(torch.rand(tensor.shape, device=tensor.device))
        self._compute = computation(tensor.device)
        self._onto_device()
        self._offload()
        self._forget_stored()

    def measure(self, budget_s: float) -> _Times:
        """Rounds until `budget_s` is over; the first is not counted."""
        times = _Times()
        self._there_and_back(_Times())
        ends_s = time.monotonic() + budget_s
        while len(times.there) < ROUNDS_MIN or time.monotonic() < ends_s:
            self._there_and_back(times)
        return times

    def beside_compute(self, workers: int, budget_s: float) -> tuple[float, float]:
        """Bytes/s of so many loads at once, and what share of its speed alone a computation has meanwhile."""
        self._onto_device()
        self._offload()
        with self._compute() as alone:
            time.sleep(budget_s / 2)
        seconds: list[float] = []
        shares = [self._blocks[number::workers] for number in range(workers)]
        with self._compute() as beside:
            ends_s = time.monotonic() + budget_s
            while len(seconds) < ROUNDS_MIN or time.monotonic() < ends_s:
                self._forget_near()
                seconds.append(_seconds(lambda: self._onboard(shares)))
        self._forget_near(host_too=False)
        self._forget_stored()
        return ROUND_BYTES / statistics.median(seconds), beside() / alone()

    def _there_and_back(self, times: _Times) -> None:
        if self._agent is None:
            self._manager.reset("host")
        self._manager.reset("device")
        self._onto_device()
        times.there.append(_seconds(self._offload))
        self._forget_near()
        times.back.append(_seconds(lambda: self._onboard([self._blocks])))
        self._forget_stored()
        for way in self._raw:
            times.raw_there.setdefault(way.name, []).append(_seconds(way.write))
            way.forget_cached()
            times.raw_back.setdefault(way.name, []).append(_seconds(way.read))

    def _onto_device(self) -> None:
        """As if computed: registered, waiting for their offload, and let go of."""
        manager = self._manager
        places = manager.allocate(len(self._blocks)).blocks
        for block in reversed(manager.register_many(manager.complete(places, self._blocks))):
            block.release()

    def _offload(self) -> None:
        before = self._manager.totals()
        self._manager.offload(len(self._blocks))
        after = self._manager.totals()
        if self._agent is not None and after.put[VOLUME] - before.put[VOLUME] < len(self._blocks):
            refused = ", ".join(f"{reason} {blocks}" for reason, blocks in after.put_refused.items())
            raise BenchError(f"the volume did not take all blocks ({refused}): mend that, then try again")

    def _onboard(self, shares: Sequence[Sequence[BlockIdentity]]) -> None:
        for future in [self._manager.onboard_soon(share) for share in shares]:
            found = future.result()
            for block in found.blocks:
                block.release()
            if found.ended:
                raise BenchError(f"not all blocks were loaded ({found.ended}): mend that, then try again")

    def _forget_near(self, *, host_too: bool = True) -> None:
        """Take the blocks from the device, and from the host where a volume has them."""
        self._manager.reset("device")
        if self._agent is not None and host_too:
            self._manager.reset("host")

    def _forget_stored(self) -> None:
        """Take the blocks from the volume, whose room the raw ways use."""
        if self._agent is not None:
            self._agent.delete("", VOLUME, [block.key for block in self._blocks])


def _own_mode(ways: Sequence[RawWay]) -> list[RawWay]:
    """Those in the mode that the volume itself uses, which is the first's."""
    mode = ways[0].name.partition(",")[0]
    return [way for way in ways if way.name.partition(",")[0] == mode]


def slab(folder: Path, block_bytes: int, blocks: int, closing: ExitStack) -> Medium:
    return medium("slab", folder, block_bytes, blocks, closing)


def objects(folder: Path, block_bytes: int, blocks: int, closing: ExitStack) -> Medium:
    return medium("object", folder, block_bytes, blocks, closing)


def peer(folder: Path, block_bytes: int, blocks: int, closing: ExitStack) -> Medium:
    """Memory of another agent's, in a process of its own; beside it, the bytes over a socket of this host."""
    facts = {"id": VOLUME, "capacity_blocks": blocks, "block_bytes_max": block_bytes}
    url = closing.enter_context(serving_peer(VolumeDescriptor(kind="memory", **facts), folder))  # type: ignore[arg-type]

    return Medium(
        descriptor=VolumeDescriptor(kind="remote", options={"endpoint": "peer"}, **facts),  # type: ignore[arg-type]
        allowed_roots=[],
        endpoints={"peer": Endpoint(url=url)},
        raw_ways=lambda mode, stack: socket_ways(ROUND_BYTES, stack),
    )


def _seconds(work: Callable[[], object]) -> float:
    started_s = time.perf_counter()
    work()
    return time.perf_counter() - started_s
