"""What an agent answers to processes that move the bytes of its blocks themselves: its clients and other agents."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

import msgspec

from storage_agent.agent import StorageAgent
from storage_agent.block_header import BlockHeader
from storage_agent.block_wire import (
    FactsWire,
    KeyWire,
    OutcomeWire,
    facts_from_wire,
    header_to_wire,
    keys_from_wire,
    outcome_of_block_to_wire,
    shard_from_wire,
)
from storage_agent.data_wire import (
    LOCATED_MAX,
    AttachReply,
    AttachRequest,
    BorrowRequest,
    CommitRequest,
    ConfirmReply,
    ConfirmRequest,
    DataReply,
    DataRequest,
    DoneReply,
    GrantWire,
    HoldingReply,
    HoldingRequest,
    LeaseReply,
    LeaseRequest,
    ListRequest,
    LocateReply,
    LocateRequest,
    OfferRequest,
    OutcomesReply,
    ReleaseRequest,
    ReturnRequest,
    VerifyRequest,
)
from storage_agent.errors import CommandRefused, VolumeError
from storage_agent.loans import Loans
from storage_agent.port import Outcome
from storage_agent.slot_leasing import Grant, SlotLeasing
from storage_agent.slot_volume import SlotVolume
from storage_agent.volume import Volume

RECLAIM_INTERVAL_S = 1.0
"""How often it is looked for clients that died with leases."""


class DataDesk:
    """Thread-safe. Owns the memory that other agents pull from and the thread that takes back leases."""

    def __init__(self, agent: StorageAgent) -> None:
        self._agent = agent
        self._loans = Loans(agent)
        self._closing = threading.Event()
        self._reclaiming = threading.Thread(target=self._reclaim, name=f"leases-{agent.name}", daemon=True)
        self._reclaiming.start()

    def carry_out(self, request: DataRequest) -> DataReply:
        """Raises `StorageAgentError`."""
        match request:
            case AttachRequest(volume):
                return self._attach(volume)
            case LocateRequest(volume, keys, count_reads):
                return self._locate(volume, keys, count_reads)
            case HoldingRequest(keys, wanted):
                return HoldingReply(self._agent.holding(keys_from_wire(keys), shard_from_wire(wanted)))
            case ListRequest(volume, first_slot):
                with self._agent.use_volume(volume) as opened:
                    headers = sorted((h for h in opened.live_headers() if h.slot >= first_slot), key=lambda h: h.slot)
                    found = [header_to_wire(header) for header in headers[:LOCATED_MAX]]
                    return LocateReply([*found], opened.descriptor.capacity_blocks)
            case VerifyRequest(volume, keys):
                with self._agent.use_volume(volume) as opened:
                    reads = opened.read(keys_from_wire(keys), lambda number, header, payload: "")
                return OutcomesReply([outcome_of_block_to_wire(read.outcome) for read in reads])
            case LeaseRequest(volume, shards):
                return LeaseReply([_grant_to_wire(each) for each in self._lease(volume, shards)])
            case ConfirmRequest(volume, leases):
                with self._agent.use_volume(volume) as opened:
                    return ConfirmReply(_leasing(opened).confirm(leases))
            case CommitRequest(volume, written):
                with self._agent.use_volume(volume) as opened:
                    return OutcomesReply(_outcomes(_leasing(opened).commit(written)))
            case ReleaseRequest(volume, leases):
                with self._agent.use_volume(volume) as opened:
                    _leasing(opened).release(leases)
                return DoneReply()
            case BorrowRequest():
                return self._loans.lend(request)
            case ReturnRequest(loan):
                self._loans.take_back(loan)
                return DoneReply()
            case OfferRequest():
                return self._loans.pull_and_put(request)

    def close(self) -> None:
        """Idempotent."""
        self._closing.set()
        self._reclaiming.join()
        self._loans.close()

    def _attach(self, volume: str) -> AttachReply:
        with self._agent.use_volume(volume) as opened:
            _leasing(opened)
            found = str(Path(opened.descriptor.path).resolve())
            return AttachReply(msgspec.structs.replace(opened.descriptor, path=found))

    def _lease(self, volume: str, shards: Sequence[tuple[FactsWire, int]]) -> list[Grant | Outcome]:
        wanted = [(facts_from_wire(facts), shard) for facts, shard in shards]
        with self._agent.use_volume(volume) as opened:
            refused = [self._agent.refusal(facts.key, facts.namespace, opened.descriptor) for facts, _ in wanted]
            taken = [each for each, no in zip(wanted, refused, strict=True) if no is None]
            leased = iter(_leasing(opened).lease(taken))
        return [next(leased) if no is None else no for no in refused]

    def _locate(self, volume: str, keys: Sequence[KeyWire], count_reads: bool) -> LocateReply:
        with self._agent.use_volume(volume) as opened:
            headers = [opened.live_header(key) for key in keys_from_wire(keys)]
            found: list[BlockHeader] = [header for header in headers if header is not None]
            if count_reads:
                self._agent.count_reads(opened.descriptor, found)
            return LocateReply(
                [header_to_wire(header) if header is not None else None for header in headers],
                opened.descriptor.capacity_blocks,
            )

    def _reclaim(self) -> None:
        while not self._closing.wait(RECLAIM_INTERVAL_S):
            for volume in self._agent.volumes():
                if isinstance(volume, SlotVolume) and volume.leasing is not None and volume.leasing.open_count:
                    # Looked up again: a volume in use is not closed under us. One that went away has no leases.
                    with suppress(VolumeError, CommandRefused), self._agent.use_volume(volume.descriptor.id) as opened:
                        _leasing(opened).reclaim()


def _leasing(volume: Volume) -> SlotLeasing:
    """Raises `CommandRefused` where other processes cannot write into the volume."""
    leasing = volume.leasing if isinstance(volume, SlotVolume) else None
    if leasing is None:
        kind = volume.descriptor.kind
        raise CommandRefused(f"clients cannot reach the bytes of a volume of kind {kind!r}; put and get by its agent")
    return leasing


def _outcomes(outcomes: Sequence[Outcome]) -> list[OutcomeWire]:
    return [outcome_of_block_to_wire(outcome) for outcome in outcomes]


def _grant_to_wire(leased: Grant | Outcome) -> GrantWire:
    if isinstance(leased, Outcome):
        return GrantWire(0, 0, outcome_of_block_to_wire(leased))
    return GrantWire(leased.lease, leased.slot)
