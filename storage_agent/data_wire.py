"""What processes that move the bytes of blocks themselves say to the agent that owns a volume, and its answers. Pure.

Clients on its host read and write the volume's own file: they attach, locate blocks, lease slots. Other agents pull
from memory, theirs or ours: they ask for a loan, or offer blocks of their own.
"""

from __future__ import annotations

import msgspec

from storage_agent.block_wire import U64, FactsWire, HeaderWire, KeyWire, OutcomeWire, ShardWire, Slot
from storage_agent.descriptor import VolumeDescriptor

LOCATED_MAX = 4096
"""Most blocks of one answer."""


class AttachRequest(msgspec.Struct, frozen=True, tag="attach"):
    """Where does the volume lie?"""

    volume: str


class AttachReply(msgspec.Struct, frozen=True, tag="attach"):
    """`descriptor` as registered, with the capacity it has now and the path that it was found at."""

    descriptor: VolumeDescriptor


class LocateRequest(msgspec.Struct, frozen=True, tag="locate"):
    """Which slots hold these blocks? `count_reads`: they are going to be read, which is told as an Access."""

    volume: str
    keys: list[KeyWire]
    count_reads: bool


class LocateReply(msgspec.Struct, frozen=True, tag="locate"):
    headers: list[HeaderWire | None]
    capacity_blocks: int


class HoldingRequest(msgspec.Struct, frozen=True, tag="holding"):
    """Which of your own volumes would give me each of these blocks, or the slice of worker `wanted`, now?"""

    keys: list[KeyWire]
    wanted: ShardWire | None


class HoldingReply(msgspec.Struct, frozen=True, tag="holding"):
    """The fastest for each block, also of one that is on its way between two; empty where none does."""

    volumes: list[str]


class ListRequest(msgspec.Struct, frozen=True, tag="list"):
    """Blocks that are served, in order of their slots, from `first_slot` on."""

    volume: str
    first_slot: int


class VerifyRequest(msgspec.Struct, frozen=True, tag="verify"):
    """A client read these and found them damaged: read them yourself."""

    volume: str
    keys: list[KeyWire]


class OutcomesReply(msgspec.Struct, frozen=True, tag="outcomes"):
    outcomes: list[OutcomeWire]


class LeaseRequest(msgspec.Struct, frozen=True, tag="lease"):
    """Slots for shards: (facts of the whole block, number of the shard)."""

    volume: str
    shards: list[tuple[FactsWire, int]]


class GrantWire(msgspec.Struct, frozen=True, array_like=True):
    """A lease on a shard in `slot`, or why there is none."""

    lease: U64
    slot: Slot
    refused: OutcomeWire | None = None


class LeaseReply(msgspec.Struct, frozen=True, tag="lease"):
    grants: list[GrantWire]


class ConfirmRequest(msgspec.Struct, frozen=True, tag="confirm"):
    """The places of these leases are locked: may they be written?"""

    volume: str
    leases: list[U64]


class ConfirmReply(msgspec.Struct, frozen=True, tag="confirm"):
    may_write: list[bool]


class CommitRequest(msgspec.Struct, frozen=True, tag="commit"):
    """(lease, XXH3-64) of shards that are written and synced."""

    volume: str
    shards: list[tuple[U64, U64]]


class ReleaseRequest(msgspec.Struct, frozen=True, tag="release"):
    """These leases are given up."""

    volume: str
    leases: list[U64]


class DoneReply(msgspec.Struct, frozen=True, tag="done"):
    pass


class PlaceWire(msgspec.Struct, frozen=True, array_like=True):
    """A block in a lender's memory: one header page that names the address as its place, then the payload."""

    header: HeaderWire
    address: U64


class BorrowRequest(msgspec.Struct, frozen=True, tag="borrow"):
    """Read blocks into memory that I can pull from; of each the slice of worker `wanted` alone."""

    volume: str
    keys: list[KeyWire]
    wanted: ShardWire | None


class LentWire(msgspec.Struct, frozen=True, array_like=True):
    """Where a block lies, or why it was not lent."""

    outcome: OutcomeWire
    place: PlaceWire | None


class BorrowReply(msgspec.Struct, frozen=True, tag="borrow"):
    """For the first keys, as many as there was room for. `mark` is in every header page."""

    loan: U64
    metadata: bytes
    mark: U64
    lent: list[LentWire]


class ReturnRequest(msgspec.Struct, frozen=True, tag="return"):
    """What was lent is pulled: the memory may be used again."""

    loan: U64


class OfferRequest(msgspec.Struct, frozen=True, tag="offer"):
    """Pull these blocks from my memory and put them."""

    volume: str
    metadata: bytes
    mark: U64
    places: list[PlaceWire]
    read_back: bool


DataRequest = (
    AttachRequest
    | LocateRequest
    | HoldingRequest
    | ListRequest
    | VerifyRequest
    | LeaseRequest
    | ConfirmRequest
    | CommitRequest
    | ReleaseRequest
    | BorrowRequest
    | ReturnRequest
    | OfferRequest
)
DataReply = (
    AttachReply | LocateReply | HoldingReply | OutcomesReply | LeaseReply | ConfirmReply | DoneReply | BorrowReply
)
