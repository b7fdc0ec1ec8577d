"""Toward the device: blocks found in the host or on a volume are copied in, in order, up to the first that is missing.

A block is registered only after its bytes are known to be right (the agent checks a volume's, a guard fences the
host's). A load that fails is a miss with a reason: the engine computes the block again.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from typing import NamedTuple

from kvbm_core.block import ImmutableBlock
from kvbm_core.config import KvbmConfig
from kvbm_core.counters import CoreCounters
from kvbm_core.errors import PoolExhaustedError
from kvbm_core.identity import BlockIdentity
from kvbm_core.transfer import TierPool, complete, copy_to
from storage_agent.errors import StorageAgentError
from storage_agent.port import Outcome, Result, StoragePort

HOST = "G2"
"""Source of a block that the host had; every other source is a volume's id, which has no capitals."""

OnAccess = Callable[[BlockIdentity], None]


class Onboarded(NamedTuple):
    """Device guards of the leading blocks that were found, and for each where: `HOST`, or a volume's id."""

    blocks: list[ImmutableBlock]
    sources: list[str]


class _Run(NamedTuple):
    """Host guards of consecutive blocks and where each was found. `ends`: the block after them is nowhere."""

    blocks: list[ImmutableBlock]
    sources: list[str]
    ends: bool


class Onboarder:
    """The paths host → device and volume → host → device. Used by the engine's thread."""

    def __init__(
        self,
        device: TierPool,
        host: TierPool,
        storage: StoragePort | None,
        config: KvbmConfig,
        counters: CoreCounters,
        on_host_access: OnAccess,
    ) -> None:
        self._device = device
        self._host = host
        self._storage = storage
        self._batch_blocks = config.transfer_blocks
        self._counters = counters
        self._on_host_access = on_host_access

    def onboard(self, identities: Sequence[BlockIdentity]) -> Onboarded:
        """Bring in the leading `identities` that can be had; the caller releases the guards."""
        found = Onboarded([], [])
        while len(found.blocks) < len(identities):
            ahead = identities[len(found.blocks) : len(found.blocks) + self._batch_blocks]
            run = self._from_host(ahead)
            if not run.blocks:
                run = self._from_volumes(ahead)
            if not self._to_device(run, found) or run.ends:
                break
        return found

    def _from_host(self, identities: Sequence[BlockIdentity]) -> _Run:
        """The leading blocks that the host has."""
        blocks = self._host.pool.match([identity.key for identity in identities])
        for block in blocks:
            self._on_host_access(block.identity)
        return _Run(blocks, [HOST] * len(blocks), ends=False)

    def _from_volumes(self, identities: Sequence[BlockIdentity]) -> _Run:
        """The leading blocks that volumes have, up to the next one of the host; read into the host."""
        in_host = (n for n, identity in enumerate(identities) if self._host.pool.has(identity.key))
        absent = identities[: next(in_host, len(identities))]
        blocks, sources = self._load(absent)
        return _Run(blocks, sources, ends=len(blocks) < len(absent))

    def _to_device(self, run: _Run, found: Onboarded) -> bool:
        """Copy a run to the device, release its host guards and add it to `found`. False: the device has no room."""
        with ExitStack() as held:
            for block in run.blocks:
                held.enter_context(block)
            try:
                found.blocks.extend(copy_to(self._host, run.blocks, self._device))
            except PoolExhaustedError:
                self._counters.load_misses["device_exhausted"] += len(run.blocks)
                return False
        found.sources.extend(run.sources)
        for source in run.sources:
            if source == HOST:
                self._counters.onboarded_host += 1
            else:
                self._counters.loaded[source] += 1
        return True

    def _load(self, identities: Sequence[BlockIdentity]) -> tuple[list[ImmutableBlock], list[str]]:
        """Read blocks from their volumes into the host; guards of those before the first miss, and their volumes."""
        if self._storage is None:
            return [], []
        try:
            places = self._host.pool.allocate(len(identities)).blocks
        except PoolExhaustedError:
            self._counters.load_misses["host_exhausted"] += len(identities)
            return [], []
        with ExitStack() as unused:
            for place in places:
                unused.enter_context(place)
            outcomes = self._get(self._storage, identities, [self._host.storage.payload(p.index) for p in places])
            hits = next((i for i, o in enumerate(outcomes) if o.result is not Result.HIT), len(outcomes))
            loaded = [
                complete(place, identity).register(copied=True)
                for place, identity in zip(places[:hits], identities[:hits], strict=True)
            ]
        for outcome in outcomes[hits:]:
            hit = outcome.result is Result.HIT
            self._counters.load_misses["behind_a_miss" if hit else outcome.result] += 1
        return loaded, [outcome.volume for outcome in outcomes[:hits]]

    def _get(
        self, storage: StoragePort, identities: Sequence[BlockIdentity], buffers: Sequence[memoryview]
    ) -> list[Outcome]:
        """The agent's answers; a block of another size than ours is no hit, whatever its checksum says."""
        try:
            outcomes = storage.get([identity.key for identity in identities], buffers)
        except StorageAgentError as error:
            return [Outcome(identity.key, Result.FAILED, reason=str(error)) for identity in identities]
        return [
            outcome
            if outcome.result is not Result.HIT or outcome.payload_bytes == len(buffer)
            else Outcome(outcome.key, Result.FAILED, volume=outcome.volume, reason="its size is not this layout's")
            for outcome, buffer in zip(outcomes, buffers, strict=True)
        ]
