"""An engine's worker under a scenario: a real block manager, a real storage agent, real files."""

from __future__ import annotations

import secrets
import shutil
from collections import Counter
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import NamedTuple, Self

import msgspec

from event_plane.memory_transport import MemoryPublisher
from event_plane.schema import producer_id
from kvbm_core.block import ImmutableBlock
from kvbm_core.config import KvbmConfig, PathLimits, TierVolumes
from kvbm_core.identity import BlockIdentity
from kvbm_core.manager import KvBlockManager
from kvbm_core.paths import TransferPath
from kvbm_core.pattern import compute_pattern, wrong_patterns
from kvbm_core.scenarios.machine_model import Source
from kvbm_core.scenarios.script import Setup, TokenIds
from kvbm_core.sequence import TokenBlockSequence
from storage_agent.agent import StorageAgent
from storage_agent.descriptor import VolumeDescriptor

TENANT = "scenario"
_NEVER_S = 86_400.0
"""The agent looks after its volumes when the scenario says so, not by the clock."""


class Loaded(NamedTuple):
    """One call that brought blocks to the device, or failed to."""

    source: Source
    blocks: int


@dataclass(slots=True)
class Found:
    """What of a prompt was had, from the root on: guards of device blocks, and how they came there.

    `lost`: blocks that some tier has and that could not be had, by reason.
    """

    held: list[ImmutableBlock] = field(default_factory=list)
    loads: list[Loaded] = field(default_factory=list)
    lost: Counter[str] = field(default_factory=Counter)


class CoreTally(msgspec.Struct):
    """What cores did, summed over their lives. Blocks, by path, pool, tier or reason."""

    moved: Counter[str] = msgspec.field(default_factory=Counter)
    allocated: Counter[str] = msgspec.field(default_factory=Counter)
    evicted: Counter[str] = msgspec.field(default_factory=Counter)
    evicted_unmatched: Counter[str] = msgspec.field(default_factory=Counter)
    offload_skipped: Counter[str] = msgspec.field(default_factory=Counter)
    put_refused: Counter[str] = msgspec.field(default_factory=Counter)

    def add(self, manager: KvBlockManager) -> None:
        """Sum in what one manager counts so far."""
        totals = manager.totals()
        self.moved.update({str(path): each.blocks for path, each in totals.paths.items() if each.blocks})
        for name, (_, counters) in manager.pools().items():
            self.allocated[name] += counters.allocated
            self.evicted[name] += counters.evicted
            self.evicted_unmatched[name] += counters.evicted_unmatched
        skipped = totals.offload_skipped.items()
        self.offload_skipped.update({f"{target}: {reason}".removeprefix(": "): n for (target, reason), n in skipped})
        self.put_refused.update({str(reason): n for reason, n in totals.put_refused.items()})


class Worker:
    """A core and its agent with volumes in a folder of their own. Not thread-safe: one request after another."""

    def __init__(self, setup: Setup, folder: Path, page_tokens: int) -> None:
        self._setup = setup
        self._folder = folder
        self.config = _config(setup, page_tokens)
        self.wrong_blocks = 0
        """Blocks that were found with other bytes than theirs: there must be none."""
        self._tally = CoreTally()
        self._slabs = {name: folder / f"{name}.slab" for name, _, _ in self._volumes()}
        self._open()

    def blocks_of(self, tokens: TokenIds) -> list[BlockIdentity]:
        """A prompt's full blocks."""
        return TokenBlockSequence(self.config, TENANT, tokens).blocks

    def find(self, blocks: Sequence[BlockIdentity]) -> Found:
        """Bring the leading blocks that are anywhere to the device, and compare every byte.

        Blocks of one place are asked for by themselves: those of two would come side by side, and which of them is
        older in the host would be a matter of chance.
        """
        found = Found(held=self._manager.match(blocks))
        if found.held:
            found.loads.append(Loaded(Source.DEVICE, len(found.held)))
        while len(found.held) < len(blocks):
            source, run = self._run(blocks[len(found.held) :])
            got = self._manager.onboard(run)
            found.held += got.blocks
            found.loads += self._loads(source, got.sources)
            found.lost.update({str(reason): blocks for reason, blocks in got.account.not_loaded.items()})
            if len(got.blocks) < len(run):
                break
        self.wrong_blocks += wrong_patterns(self._manager, found.held)
        return found

    def compute(self, blocks: Sequence[BlockIdentity]) -> list[ImmutableBlock]:
        """Write and register blocks, as a prefill does. Raises `PoolExhaustedError`."""
        return compute_pattern(self._manager, blocks)

    def offload(self) -> None:
        """Carry everything that waits to the lower tiers, and wait for it."""
        self._manager.offload(self.config.offload_queue_blocks)

    def restart(self) -> None:
        """Die and come back: the volumes lie as they were at that moment, which no close had put in order."""
        for slab in self._slabs.values():
            shutil.copy(slab, slab.with_suffix(".left"))
        self._close()
        for slab in self._slabs.values():
            slab.with_suffix(".left").replace(slab)
        self._open()

    def vanish(self) -> None:
        """The remote tier's medium fails from now on."""
        self._open_remote_anew(error=1.0)

    def come_back(self) -> None:
        """It works again, with what it held."""
        self._open_remote_anew(error=0.0)

    def tally(self) -> CoreTally:
        """Of all lives so far; this worker serves no more after it."""
        self._close()
        return self._tally

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._closing.close()

    def _run(self, blocks: Sequence[BlockIdentity]) -> tuple[Source | None, list[BlockIdentity]]:
        """The leading blocks that are in one place: device, host, or (None) on volumes if anywhere."""
        source, run = self._place(blocks[0]), [blocks[0]]
        for block in blocks[1:]:
            if self._place(block) is not source:
                break
            run.append(block)
        return source, run

    def _place(self, block: BlockIdentity) -> Source | None:
        copies = {copy.tier: copy.state for copy in self._manager.explain(block.key).copies}
        if copies["G1"] != "absent":
            return Source.DEVICE
        return Source.HOST if copies.get("G2", "absent") != "absent" else None

    def _loads(self, asked: Source | None, sources: Sequence[str]) -> list[Loaded]:
        """By where the blocks came from; where none came from volumes that were asked, the call alone."""
        if asked is not None:
            return [Loaded(asked, len(sources))]
        came = Counter(Source(source) for source in sources)
        volumes = [Source(name) for name, _, _ in self._volumes()]
        return [Loaded(source, came[source]) for source in volumes if came[source]] or [
            Loaded(source, 0) for source in volumes[:1]
        ]

    def _volumes(self) -> list[tuple[str, int, int]]:
        """Name, tier and capacity in blocks of those that the setup has."""
        setup = self._setup
        return [
            (name, tier, blocks)
            for name, tier, blocks in ((Source.DISK, 3, setup.disk_blocks), (Source.REMOTE, 4, setup.remote_blocks))
            if blocks
        ]

    def _descriptor(self, name: str, tier: int, capacity_blocks: int, error: float = 0.0) -> VolumeDescriptor:
        """`error`: share of calls to the remote tier's medium that fail."""
        is_remote = name == Source.REMOTE
        return VolumeDescriptor(
            id=name,
            kind="faulty" if is_remote else "slab",
            path=str(self._slabs[name]),
            tier=tier,
            speed_rank=tier,
            capacity_blocks=capacity_blocks,
            block_bytes_max=self.config.block_bytes,
            options={"inner": "slab", "error": error} if is_remote else {},
        )

    def _open(self) -> None:
        with ExitStack() as closing:
            channel = f"memory://scenario-{secrets.token_hex(8)}"
            publisher = MemoryPublisher(channel, producer=producer_id("scenario"))
            closing.callback(publisher.close)
            self._agent = closing.enter_context(
                StorageAgent("scenario", publisher=None, allowed_roots=[self._folder], mend_interval_s=_NEVER_S)
            )
            self._agent.register_volumes([self._descriptor(*volume) for volume in self._volumes()])
            self._manager = closing.enter_context(KvBlockManager(self.config, publisher, self._agent))
            self._closing = closing.pop_all()

    def _close(self) -> None:
        self._tally.add(self._manager)
        self._closing.close()

    def _open_remote_anew(self, error: float) -> None:
        for name, tier, blocks in self._volumes():
            if name == Source.REMOTE:
                self._agent.unregister_volume(name)
                self._agent.register_volume(self._descriptor(name, tier, blocks, error))


def _config(setup: Setup, page_tokens: int) -> KvbmConfig:
    """Small blocks; one batch under way on each path, so that one seed gives one result."""
    tiers = {
        name: TierVolumes(volumes=(name,), retention_s=3_600.0)
        for name, blocks in ((Source.DISK, setup.disk_blocks), (Source.REMOTE, setup.remote_blocks))
        if blocks
    }
    return KvbmConfig(
        layers=2,
        heads=2,
        head_dim=16,
        page_tokens=page_tokens,
        device_blocks=setup.device_blocks,
        host_blocks=setup.host_blocks,
        disk=tiers.get(Source.DISK),
        remote=tiers.get(Source.REMOTE),
        reuse=setup.reuse,
        offload_policy=setup.offload_policy,
        transfer_blocks=4_096,
        transfers={path: PathLimits(concurrency=1, deadline_s=60.0) for path in TransferPath},
        headroom_bytes=0,
        hash_secret="a scenario has no secrets",
    )
