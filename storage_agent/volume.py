"""The contract of a volume: what `agent.StorageAgent` asks of every kind, and `volume_contract` holds it to.

Thread-safe. Every block of a batch has its own outcome; reads, puts and deletes raise nothing for a bad medium. A block
that was answered `stored` survives the process and, as far as the medium is honest, the power; a block that is read is
the one that was put, or it is a miss with a reason.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple, Protocol

from storage_agent.block_header import BlockHeader
from storage_agent.descriptor import VolumeDescriptor
from storage_agent.port import BlockKey, CompactReport, Outcome, PutBlock, ScrubReport, VolumeStat
from storage_agent.shards import Shard

Announce = Callable[[Sequence[BlockHeader]], None]
"""Tells the world about blocks that were stored or freed. Called without locks, before the table changes again."""
Accept = Callable[[int, BlockHeader, memoryview], str]
"""Takes verified bytes (number in the batch, header, bytes that last for the call); says why it cannot, or ''."""


class ReadResult(NamedTuple):
    """`header` is what the slot held, where the block was read.

    `in_doubt`: the memory that it was read into may be written still, so nothing else may be read into it.
    """

    outcome: Outcome
    header: BlockHeader | None = None
    in_doubt: bool = False


class Volume(Protocol):
    """One place for blocks. Sizes in bytes, capacity in blocks."""

    @property
    def descriptor(self) -> VolumeDescriptor:
        """Its owner's description, with the capacity that it has now."""

    @property
    def batch_slots(self) -> int:
        """Blocks of one batch: what others on this volume wait for at most."""

    @property
    def retired_total(self) -> int:
        """Blocks ever taken out of service here; a search that saw it unchanged missed nothing."""

    def live_headers(self) -> list[BlockHeader]:
        """Every block that is served now."""

    def live_header(self, key: BlockKey) -> BlockHeader | None:
        """What is served under `key` now."""

    def stat(self) -> VolumeStat:
        """The volume as it is now. `blocks` + `slots_free` + slots under way or held back are the capacity."""

    def put(self, blocks: Sequence[PutBlock], *, read_back: bool = False) -> list[Outcome]:
        """Write blocks and make them durable. With `read_back`, also read and verify each before it is served."""

    def read(self, keys: Sequence[BlockKey], accept: Accept, wanted: Shard | None = None) -> list[ReadResult]:
        """Read and verify blocks; `accept` gets each good one, or the slice of worker `wanted`.

        A corrupt one is freed, and its outcome says so.
        """

    def delete(self, keys: Sequence[BlockKey]) -> list[Outcome]:
        """Free blocks, durably, once their readers are done."""

    def scrub(self) -> ScrubReport:
        """Read and verify every block; free what is corrupt. Others come in between its batches."""

    def compact(self) -> int:
        """Rewrite what is fragmented, keeping chains together. Bytes given back to the medium."""

    def lay_out(self, keys: Sequence[BlockKey]) -> CompactReport:
        """Rewrite blocks so that they lie one after another in this order. See `AgentPort.compact`.

        At every moment, and after a crash at any, each of them can be read. Raises `VolumeError`.
        """

    def resize(self, capacity_blocks: int) -> VolumeStat:
        """Change the capacity while blocks are served.

        Raises `VolumeError`, with the capacity as it was: no room to grow, too many blocks to shrink, or not possible.
        """

    def close(self) -> None:
        """Let go of it; its blocks stay. The caller sees to it that nothing else is under way. Idempotent."""
