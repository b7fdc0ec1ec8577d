"""The storage agent's port: what its callers may ask, in process (`agent.StorageAgent`) or from afar (`client`).

All calls take batches of blocks and answer per block, in the order asked; one bad block never fails its batch.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from types import NoneType
from typing import NamedTuple, Protocol, TypeAlias

import msgspec

from event_plane.schema import Namespace
from storage_agent.descriptor import VolumeDescriptor
from storage_agent.direct_memory import DirectSpan
from storage_agent.shards import BlockLayout, Shard, ShardSpan

Buffer: TypeAlias = memoryview | DirectSpan
"""Where a get puts a block: a span is written as `StoragePort.get` says."""


class BlockKey(NamedTuple):
    """A block's identity on a volume: u64 namespace id, cache group, 128-bit sequence hash."""

    namespace_id: int
    group: int
    sequence_hash: int


class Result(StrEnum):
    """What became of one block of a batch."""

    HIT = "hit"
    STORED = "stored"
    PRESENT = "present"
    PARTIAL = "partial"
    """A client's shard is durable, but the block is not there until the others are."""
    COPIED = "copied"
    DELETED = "deleted"
    MISS = "miss"
    CORRUPT = "corrupt"
    FULL = "full"
    TOO_LARGE = "too_large"
    BUSY = "busy"
    FAILED = "failed"

    @property
    def ok(self) -> bool:
        return self in _OK


_OK = frozenset({Result.HIT, Result.STORED, Result.PRESENT, Result.COPIED, Result.DELETED})


_PARTS_OF_BLOCK: tuple[tuple[str, tuple[type, ...]], ...] = (
    ("key", (BlockKey,)),
    ("namespace", (Namespace,)),
    ("payload", (memoryview, DirectSpan)),
    ("span", (ShardSpan, NoneType)),
    ("layout", (BlockLayout, NoneType)),
)


@dataclass(frozen=True, slots=True)
class PutBlock:
    """One block to write. `payload` is C-contiguous bytes, at most the volume's `block_bytes_max`.

    Where it is a span, a volume that can takes it from there, on a GPU too; every other one, by the host's memory.
    """

    key: BlockKey
    namespace: Namespace
    payload: memoryview | DirectSpan
    parent_hash: int = 0
    depth: int = 0xFFFF_FFFF
    block_tokens: int = 0
    span: ShardSpan | None = None
    """Which shards `payload` holds, one after another; None where it is not split."""
    layout: BlockLayout | None = None
    """Of the whole block; without it no worker of a group of another size can read its slice."""

    def __post_init__(self) -> None:
        """Raises `TypeError` that names the field: told here, a caller's slip touches no volume."""
        for name, kinds in _PARTS_OF_BLOCK:
            value = getattr(self, name)
            if not isinstance(value, kinds):
                raise TypeError(f"PutBlock.{name} is of type {type(value).__name__}; give {kinds[0].__name__}")

    @property
    def host_payload(self) -> memoryview:
        """The payload in the host's memory, a copy where it is on a GPU."""
        payload = self.payload
        return payload if isinstance(payload, memoryview) else payload.in_host_memory()


class Outcome(msgspec.Struct, frozen=True):
    """One block's answer. `volume`: which volume was read or written. `reason`: a sentence where `result` is not ok."""

    key: BlockKey
    result: Result
    volume: str = ""
    payload_bytes: int = 0
    reason: str = ""


class ClassStat(msgspec.Struct, frozen=True):
    """The slots for blocks of at most `block_bytes`: how many there are, and what they hold."""

    block_bytes: int
    slots: int
    blocks: int
    payload_bytes: int
    slots_free: int


class Fragmentation(msgspec.Struct, frozen=True):
    """How the blocks of a volume lie on its medium. Sizes in bytes, header pages included.

    Chains are a sample of at most 64, each the path from a root to some block. An extent is bytes one after another in
    one file or object: what a reader of the chain gets by one request.
    """

    held_bytes: int = 0
    """What blocks and the remains of blocks take."""
    live_bytes: int = 0
    """What the blocks alone take."""
    reclaimable_bytes: int = 0
    """What a compaction would give back."""
    objects: int = 0
    """Files or objects that blocks lie in."""
    objects_least: int = 0
    """As few as they would fit in."""
    chains: int = 0
    chain_blocks: int = 0
    extents: int = 0
    """Of all chains of the sample."""
    extents_least: float = 0.0
    """What they would come to at best, branches considered."""


class VolumeStat(msgspec.Struct, frozen=True):
    """A volume as it is now. `mode`: `O_DIRECT` or `buffered`, as probed. Times in seconds, sizes in bytes."""

    descriptor: VolumeDescriptor
    blocks: int
    payload_bytes: int
    slots_free: int
    mode: str
    read_bytes_total: int = 0
    read_seconds_total: float = 0.0
    write_bytes_total: int = 0
    write_seconds_total: float = 0.0
    degraded: str = ""
    """Empty, or why the volume is degraded: a write or read failed since it was opened."""
    corrupt_total: int = 0
    """Blocks found with bytes that were not put; their copies were freed."""
    classes: list[ClassStat] = []
    """Where its slots are of several sizes: each of them, the smallest first."""
    fragmentation: Fragmentation = Fragmentation()
    """Some seconds old at most; all 0 where nobody here can tell."""
    read_times: list[int] = []
    """Transfers by how long they took, as `storage_agent.transfers` counts them; empty where nobody does."""
    write_times: list[int] = []


class ScrubReport(msgspec.Struct, frozen=True):
    """What a scrub found: blocks good, corrupt (freed) and not readable; bytes of the good ones."""

    good: int
    corrupt: int
    failed: int
    payload_bytes: int


class CompactReport(msgspec.Struct, frozen=True):
    """What a compaction gave back: to the medium, or, of slots of several sizes, to larger blocks.

    Where it was asked to lay chains out: what it wrote for them, and the extents of their blocks before and after; what
    that gave back is seen in the figures' `held_bytes`.
    """

    freed_bytes: int
    moved_blocks: int = 0
    moved_bytes: int = 0
    extents_before: int = 0
    extents_after: int = 0
    fragmentation: Fragmentation = Fragmentation()
    """Of the volume, afterwards."""


class AgentStat(msgspec.Struct, frozen=True):
    """An agent and its volumes. `producer` is the id its events carry. `views`: volumes of other agents."""

    agent: str
    producer: int
    epoch: int
    volumes: list[VolumeStat]
    views: list[VolumeStat] = []
    gpu_direct: str = ""
    """The backend of NIXL's that was proven to move a GPU's memory to files here, or why there is none."""
    refused_tenants: list[str] = []
    """Whose blocks it does not take, in order."""


class CommandOutcome(msgspec.Struct, frozen=True):
    """Answer to a copy or delete. The events it caused lie in this producer's batches up to `sequence` of `epoch`.

    `sequence` is -1 where the agent has published nothing.
    """

    command_id: str
    outcomes: list[Outcome]
    producer: int = 0
    epoch: int = 0
    sequence: int = 0
    seconds: float = 0.0


class AgentPort(Protocol):
    """What the advisor may ask of an agent. Idempotent by `command_id`: asked again, it answers as before.

    `term` is the advisor's, 0 for others: a command of an older one than was heard of, in this life of the agent or an
    earlier one, is refused by `StaleTerm`.
    """

    def stat(self) -> AgentStat:
        """The agent's volumes now."""

    def copy(
        self, command_id: str, keys: Sequence[BlockKey], source: str, target: str, *, term: int = 0
    ) -> CommandOutcome:
        """Copy blocks between two volumes, make them durable, read them back and verify, then serve both copies."""

    def delete(self, command_id: str, volume: str, keys: Sequence[BlockKey], *, term: int = 0) -> CommandOutcome:
        """Free the blocks' slots on `volume`. A block that is not there is `miss`."""

    def move(
        self, command_id: str, keys: Sequence[BlockKey], source: str, target: str, *, keep: bool, term: int = 0
    ) -> CommandOutcome:
        """Copy blocks as `copy` does; unless `keep`, free those on `source` whose copy on `target` is verified."""

    def scrub(self, command_id: str, volume: str, *, term: int = 0) -> ScrubReport:
        """Read and verify every block of a volume; what is corrupt is freed and announced."""

    def compact(
        self, command_id: str, volume: str, keys: Sequence[BlockKey] = (), *, term: int = 0
    ) -> CompactReport:
        """Rewrite what is fragmented on a volume; or lay `keys`, at most 4,096, one after another in the order given.

        A block whose parent is not the one before it begins a chain of its own. What is not there, or lies well
        already, is left alone, so doing it again does no harm.
        """

    def refuse_tenants(self, tenants: Sequence[str], *, term: int = 0) -> None:
        """Take no blocks of these tenants from now on, and again of all others: a put of theirs is `failed`.

        Kept over restarts where the agent has a folder for it. Raises `CommandRefused`.
        """

    def register_volume(self, descriptor: VolumeDescriptor, *, term: int = 0) -> VolumeStat:
        """Open or create a volume. Raises `VolumeError` with what is wrong and the remedy."""

    def unregister_volume(self, volume: str, *, drain_s: float = 0.0, term: int = 0) -> None:
        """Close a volume; its file and blocks stay.

        Waits so long for the gets, puts and moves that use it; raises `VolumeError` if they still do.
        """

    def resize_volume(self, volume: str, capacity_blocks: int, *, term: int = 0) -> VolumeStat:
        """Change a volume's capacity while it serves. Raises `VolumeError`, with the capacity as it was."""


class StoragePort(AgentPort, Protocol):
    """What the KVBM core may ask of an agent."""

    def put(self, volume: str, blocks: Sequence[PutBlock]) -> list[Outcome]:
        """Write blocks; `stored` means durable and readable."""

    def get(
        self, keys: Sequence[BlockKey], buffers: Sequence[Buffer], wanted: Shard | None = None
    ) -> list[Outcome]:
        """Read each block from its fastest verified copy into its buffer; anything but `hit` is a miss to recompute.

        A memoryview is written with verified bytes only. A span may hold anything unless the answer is `hit`, and
        where the reason says that it may be written still, nothing may be kept there until this process ends.

        `wanted`: only that worker's slice, whatever the number of workers that put the block. Without it the shards
        come one after another as they were put, which is no whole block.
        """

    def holding(self, keys: Sequence[BlockKey], wanted: Shard | None = None) -> list[str]:
        """The fastest volume that would give each block to a `get` now; empty where none would. No use is counted.

        Raises `StorageAgentError` where the agent does not answer.
        """


class AsyncAgentPort(Protocol):
    """`AgentPort` for callers on an event loop: the same names, arguments, answers and errors.

    A cancelled call may have run, as one that was not answered in time may: ask again with the same command id.
    """

    async def stat(self) -> AgentStat: ...

    async def copy(
        self, command_id: str, keys: Sequence[BlockKey], source: str, target: str, *, term: int = 0
    ) -> CommandOutcome: ...

    async def delete(
        self, command_id: str, volume: str, keys: Sequence[BlockKey], *, term: int = 0
    ) -> CommandOutcome: ...

    async def move(
        self, command_id: str, keys: Sequence[BlockKey], source: str, target: str, *, keep: bool, term: int = 0
    ) -> CommandOutcome: ...

    async def scrub(self, command_id: str, volume: str, *, term: int = 0) -> ScrubReport: ...

    async def compact(
        self, command_id: str, volume: str, keys: Sequence[BlockKey] = (), *, term: int = 0
    ) -> CompactReport: ...

    async def refuse_tenants(self, tenants: Sequence[str], *, term: int = 0) -> None: ...

    async def register_volume(self, descriptor: VolumeDescriptor, *, term: int = 0) -> VolumeStat: ...

    async def unregister_volume(self, volume: str, *, drain_s: float = 0.0, term: int = 0) -> None: ...

    async def resize_volume(self, volume: str, capacity_blocks: int, *, term: int = 0) -> VolumeStat: ...


class AsyncStoragePort(AsyncAgentPort, Protocol):
    """`StoragePort` likewise. A cancelled put is not undone: put again, and it is `present` where it was stored."""

    async def put(self, volume: str, blocks: Sequence[PutBlock]) -> list[Outcome]: ...

    async def get(
        self, keys: Sequence[BlockKey], buffers: Sequence[Buffer], wanted: Shard | None = None
    ) -> list[Outcome]: ...

    async def holding(self, keys: Sequence[BlockKey], wanted: Shard | None = None) -> list[str]: ...
