"""A registered volume whose medium cannot be used now: everything is a miss with the reason, until it is back."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from storage_agent.block_header import BlockHeader
from storage_agent.descriptor import VolumeDescriptor
from storage_agent.errors import VolumeError
from storage_agent.port import BlockKey, CompactReport, Outcome, PutBlock, Result, ScrubReport, VolumeStat
from storage_agent.shards import Shard
from storage_agent.volume import Accept, ReadResult


def _nothing() -> list[BlockHeader]:
    return []


class AbsentVolume:
    """Implements `volume.Volume`. Holds no medium, and nothing but what `announced` says is told of it."""

    batch_slots = 256
    retired_total = 0

    def __init__(
        self, descriptor: VolumeDescriptor, reason: str, announced: Callable[[], list[BlockHeader]] = _nothing
    ) -> None:
        """`announced`: the blocks that the world takes to be there."""
        self.descriptor = descriptor
        self.reason = reason
        self._announced = announced

    def live_headers(self) -> list[BlockHeader]:
        """See `Volume.live_headers`: what was announced."""
        return self._announced()

    def live_header(self, key: BlockKey) -> BlockHeader | None:
        """None: nothing is served."""
        return None

    def stat(self) -> VolumeStat:
        """See `Volume.stat`."""
        return VolumeStat(
            descriptor=self.descriptor, blocks=0, payload_bytes=0, slots_free=0, mode="absent", degraded=self.reason
        )

    def put(self, blocks: Sequence[PutBlock], *, read_back: bool = False) -> list[Outcome]:
        """See `Volume.put`: every block fails."""
        return [self._outcome(block.key, Result.FAILED) for block in blocks]

    def read(self, keys: Sequence[BlockKey], accept: Accept, wanted: Shard | None = None) -> list[ReadResult]:
        """See `Volume.read`: every block is a miss."""
        return [ReadResult(self._outcome(key, Result.MISS)) for key in keys]

    def delete(self, keys: Sequence[BlockKey]) -> list[Outcome]:
        """See `Volume.delete`: every block fails, for it may be there when the medium is back."""
        return [self._outcome(key, Result.FAILED) for key in keys]

    def scrub(self) -> ScrubReport:
        """Raises `VolumeError`."""
        raise self._error()

    def compact(self) -> int:
        """Raises `VolumeError`."""
        raise self._error()

    def lay_out(self, keys: Sequence[BlockKey]) -> CompactReport:
        """Raises `VolumeError`."""
        raise self._error()

    def resize(self, capacity_blocks: int) -> VolumeStat:
        """Raises `VolumeError`."""
        raise self._error()

    def close(self) -> None:
        """Nothing."""

    def _error(self) -> VolumeError:
        return VolumeError(f"volume {self.descriptor.id!r} cannot be used now: {self.reason}")

    def _outcome(self, key: BlockKey, result: Result) -> Outcome:
        return Outcome(key, result, self.descriptor.id, reason=self.reason)
