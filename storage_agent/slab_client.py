"""A slab from another process on its owner's host: bytes by NIXL straight from and to the file, all else by asking.

Only the owner knows which slot holds what, and only it writes headers. A client writes shards into slots that it leased
and whose places it locked (`slot_locks`), syncs, and tells the owner, which checks and publishes. To read, it asks
where blocks lie and checks what it finds there; a block that moved on meanwhile does not pass, and is asked for again.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator, Sequence
from contextlib import suppress
from math import inf
from pathlib import Path
from types import TracebackType
from typing import NamedTuple

import msgspec

from event_plane.credentials import NO_CREDENTIALS, Credentials
from storage_agent.block_header import PAGE_BYTES, BlockHeader, checksum, page_ceiling
from storage_agent.block_wire import (
    facts_to_wire,
    headers_from_wire,
    keys_to_wire,
    outcome_of_block_from_wire,
    require_answers,
)
from storage_agent.buffers import fill_buffer, require_one_each
from storage_agent.client import AgentClient
from storage_agent.data_wire import (
    AttachReply,
    AttachRequest,
    CommitRequest,
    ConfirmReply,
    ConfirmRequest,
    LeaseReply,
    LeaseRequest,
    LocateReply,
    LocateRequest,
    OutcomesReply,
    ReleaseRequest,
    VerifyRequest,
)
from storage_agent.errors import CorruptBlock, ShardError, StorageAgentError, TransferError, VolumeError
from storage_agent.file_transfer import Extent, FileTransfer
from storage_agent.leases import BlockFacts
from storage_agent.port import BlockKey, Buffer, Outcome, PutBlock, Result
from storage_agent.shards import Shard, ShardSpan, gather
from storage_agent.slab_file import SlabFile, open_slab_as_client
from storage_agent.slab_reading import read_slots
from storage_agent.sliced_read import SlicedRead, plan_read
from storage_agent.slot_locks import lock_shard, locks_work, unlock_shard
from storage_agent.transfer_choice import open_transfer

STAGING_BYTES_TARGET = 16 * 1024 * 1024
BATCH_SLOTS_MAX = 256
_TRIES = 4
"""Times a block is asked for again that moved on while it was read."""


class _Piece(NamedTuple):
    """One shard that is put. `number`: of its block in the caller's batch."""

    number: int
    facts: BlockFacts
    shard: int
    payload: memoryview


class _Leased(NamedTuple):
    piece: _Piece
    lease: int
    slot: int


class SlabClient:
    """One volume of another process's agent. Thread-safe: one batch at a time.

    After a fork only the parent may use it. Calls raise `AgentUnreachable` or `CommandRefused` where the owner does not
    answer or refuses; what was asked may be asked again.
    """

    def __init__(
        self,
        command_url: str,
        volume: str,
        *,
        timeout_s: float = 30.0,
        deadline_s: float = 30.0,
        credentials: Credentials = NO_CREDENTIALS,
        connect_s: float = inf,
    ) -> None:
        """Open the file that the agent at `command_url` owns. Raises `VolumeError` too: not a file of this host.

        `credentials` and `connect_s` are those of `AgentClient`.
        """
        self.volume = volume
        self._deadline_s = deadline_s
        self._lock = threading.Lock()
        self._agent = AgentClient(command_url, timeout_s, credentials, connect_s=connect_s)
        self._slab: SlabFile
        self._transfer: FileTransfer
        try:
            self._open()
        except StorageAgentError:
            self._agent.close()
            raise

    def put(self, blocks: Sequence[PutBlock]) -> list[Outcome]:
        """Write blocks, or shards of blocks (`PutBlock.span`). `stored`: durable and served by the owner from now on.

        `partial`: this block's shards are durable, and it is served when others' are too; they must be put with the
        same facts. `busy` where another client writes the same shard.
        """
        found: dict[int, list[Outcome]] = {number: [] for number in range(len(blocks))}
        pieces = [piece for number, block in enumerate(blocks) for piece in _pieces(number, block)]
        with self._lock:
            self._require_in_place()
            for batch in self._batches(pieces):
                for piece, outcome in zip(batch, self._put_batch(batch), strict=True):
                    found[piece.number].append(outcome)
        return [_worst(outcomes) for outcomes in found.values()]

    def get(
        self, keys: Sequence[BlockKey], buffers: Sequence[Buffer], wanted: Shard | None = None
    ) -> list[Outcome]:
        """See `port.StoragePort.get`, of this volume alone. Raises `ValueError` unless each key has a buffer."""
        require_one_each(len(keys), len(buffers))
        with self._lock:
            self._require_in_place()
            outcomes: dict[int, Outcome] = {}
            suspects: dict[int, BlockHeader] = {}
            for turn in range(_TRIES):
                pending = [number for number in range(len(keys)) if number not in outcomes]
                if not pending:
                    break
                located = self._locate([keys[number] for number in pending], count_reads=turn == 0)
                planned: list[tuple[int, SlicedRead]] = []
                for number, header in zip(pending, located, strict=True):
                    if header is None:
                        outcomes[number] = self._outcome(keys[number], Result.MISS, f"{self.volume!r} does not hold it")
                    elif suspects.get(number) == header:
                        self._ask_owner(number, header, outcomes)
                    else:
                        self._plan(number, header, wanted, planned, outcomes)
                self._read(planned, buffers, outcomes, suspects)
            for number, key in enumerate(keys):
                if number not in outcomes:
                    outcomes[number] = self._outcome(key, Result.FAILED, "it changed whenever it was read; try later")
        return [outcomes[number] for number in range(len(keys))]

    def close(self) -> None:
        """Idempotent."""
        with self._lock:
            self._transfer.close()
            self._slab.close()
            self._agent.close()

    def __enter__(self) -> SlabClient:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _open(self) -> None:
        reply = self._agent.ask(AttachRequest(self.volume), AttachReply)
        self._slab = open_slab_as_client(reply.descriptor, Path(reply.descriptor.path))
        superblock = self._slab.superblock
        if not locks_work(self._slab.fd):
            self._slab.close()
            raise VolumeError(
                f"volume {self.volume!r}: {self._slab.path} is on a file system without locks of open files; "
                "use a local one, or a volume of kind 'remote'"
            )
        self._transfer = open_transfer(
            f"client of volume {self.volume}",
            {self._slab.fd: superblock.file_bytes},
            staging_bytes=max(STAGING_BYTES_TARGET, superblock.slot_bytes),
            deadline_s=self._deadline_s,
        )
        self._staging_bytes = max(STAGING_BYTES_TARGET, superblock.slot_bytes)

    def _require_in_place(self) -> None:
        """The owner may have been given another file at the same place meanwhile."""
        if not self._slab.is_in_place:
            self._reopen()

    def _reopen(self) -> None:
        """The owner resized it, or opened another file."""
        self._transfer.close()
        self._slab.close()
        self._open()

    # Put

    def _batches(self, pieces: Sequence[_Piece]) -> Iterator[list[_Piece]]:
        batch: list[_Piece] = []
        staged = 0
        for piece in pieces:
            size = page_ceiling(piece.payload.nbytes)
            if batch and (staged + size > self._staging_bytes or len(batch) == BATCH_SLOTS_MAX):
                yield batch
                batch, staged = [], 0
            batch.append(piece)
            staged += size
        if batch:
            yield batch

    def _put_batch(self, pieces: Sequence[_Piece]) -> list[Outcome]:
        outcomes: dict[int, Outcome] = {}
        leased = self._lease(pieces, outcomes)
        locked = self._lock_places(leased, outcomes)
        if locked:
            self._write_and_commit(locked, outcomes)
        return [outcomes[index] for index in range(len(pieces))]

    def _lease(self, pieces: Sequence[_Piece], outcomes: dict[int, Outcome]) -> dict[int, _Leased]:
        """The leases by the piece's place in the batch; the outcomes of the others."""
        leased: dict[int, _Leased] = {}
        asked: dict[int, _Piece] = {}
        for index, piece in enumerate(pieces):
            reason = self._refuse(piece)
            if reason:
                outcomes[index] = self._outcome(piece.facts.key, Result.FAILED, reason)
            else:
                asked[index] = piece
        shards = [(facts_to_wire(piece.facts), piece.shard) for piece in asked.values()]
        reply = self._agent.ask(LeaseRequest(self.volume, shards), LeaseReply)
        require_answers(len(reply.grants), len(asked))
        for (index, piece), grant in zip(asked.items(), reply.grants, strict=True):
            if grant.refused is not None:
                outcomes[index] = outcome_of_block_from_wire(grant.refused)
            else:
                leased[index] = _Leased(piece, grant.lease, grant.slot)
        if any(each.slot >= self._slab.superblock.capacity_blocks for each in leased.values()):
            self._reopen()
        return leased

    def _refuse(self, piece: _Piece) -> str:
        if not piece.payload.c_contiguous:
            return "the payload is not contiguous; copy it first"
        span = piece.facts.span
        if span is not None and piece.payload.nbytes != span.shard_bytes:
            return f"{piece.payload.nbytes} bytes are not whole shards of {span.shard_bytes}; put whole shards"
        return ""

    def _lock_places(self, leased: dict[int, _Leased], outcomes: dict[int, Outcome]) -> dict[int, _Leased]:
        """Lock, then confirm: from then on nobody else is given the slot while this process can write into it."""
        locked: dict[int, _Leased] = {}
        for index, each in leased.items():
            if lock_shard(self._slab.fd, each.slot, each.piece.shard):
                locked[index] = each
            else:
                outcomes[index] = self._outcome(each.piece.facts.key, Result.BUSY, "another client still writes there")
        refused = [each.lease for index, each in leased.items() if index not in locked]
        if refused:
            self._agent.ask_only(ReleaseRequest(self.volume, refused))
        if not locked:
            return locked
        may_write: list[bool] = []
        try:
            leases = [each.lease for each in locked.values()]
            may_write = self._agent.ask(ConfirmRequest(self.volume, leases), ConfirmReply).may_write
        finally:
            for index, each in list(locked.items()):
                if not may_write or not may_write.pop(0):
                    reason = "the lease has run out; try again"
                    outcomes[index] = self._outcome(each.piece.facts.key, Result.FAILED, reason)
                    self._unlock(locked.pop(index))
        return locked

    def _write_and_commit(self, locked: dict[int, _Leased], outcomes: dict[int, Outcome]) -> None:
        leases = list(locked.values())
        try:
            self._write(leases)
        except TransferError as error:
            for index, each in locked.items():
                outcomes[index] = self._outcome(each.piece.facts.key, Result.FAILED, str(error))
            if not error.in_doubt:  # else the locks stay until this file is closed and its last write is over
                for each in leases:
                    self._unlock(each)
                self._agent.ask_only(ReleaseRequest(self.volume, [each.lease for each in leases]))
            return
        try:
            shards = [(each.lease, checksum(each.piece.payload)) for each in leases]
            reply = self._agent.ask(CommitRequest(self.volume, shards), OutcomesReply)
        finally:
            for each in leases:
                self._unlock(each)
        require_answers(len(reply.outcomes), len(locked))
        for (index, each), answered in zip(locked.items(), reply.outcomes, strict=True):
            # A lease that has run out has no block for the owner to name.
            outcome = outcome_of_block_from_wire(answered)
            outcomes[index] = msgspec.structs.replace(outcome, key=each.piece.facts.key)

    def _write(self, leases: Sequence[_Leased]) -> None:
        """Write the shards and sync. Raises `TransferError`."""
        superblock = self._slab.superblock
        extents: list[Extent] = []
        with self._transfer.exclusive() as staging:
            staged_at = 0
            for each in leases:
                payload, shard = each.piece.payload, each.piece.shard
                file_at = superblock.slot_offset(each.slot) + PAGE_BYTES + shard * payload.nbytes
                is_last = shard + 1 == (each.piece.facts.span.count if each.piece.facts.span else 1)
                length = page_ceiling(payload.nbytes) if is_last else payload.nbytes
                if file_at % PAGE_BYTES or length % PAGE_BYTES:
                    # Neighbours share a page: only the kernel can put together what two clients write into it.
                    self._slab.use_page_cache()
                    length = payload.nbytes
                staging[staged_at : staged_at + payload.nbytes] = payload
                staging[staged_at + payload.nbytes : staged_at + length] = bytes(length - payload.nbytes)
                extents.append((file_at, staged_at, length, self._slab.fd))
                staged_at += page_ceiling(payload.nbytes)
            self._transfer.write(extents)
        try:
            os.fdatasync(self._slab.fd)
        except OSError as error:
            raise TransferError(f"{self._slab.path} cannot be synced: {error.strerror}; check the device") from error

    def _unlock(self, leased: _Leased) -> None:
        with suppress(OSError):  # the file was closed, and the lock with it
            unlock_shard(self._slab.fd, leased.slot, leased.piece.shard)

    # Get

    def _locate(self, keys: Sequence[BlockKey], *, count_reads: bool) -> list[BlockHeader | None]:
        reply = self._agent.ask(LocateRequest(self.volume, keys_to_wire(keys), count_reads), LocateReply)
        if reply.capacity_blocks != self._slab.superblock.capacity_blocks:
            self._reopen()
        return headers_from_wire(keys, reply.headers)

    def _plan(
        self,
        number: int,
        header: BlockHeader,
        wanted: Shard | None,
        planned: list[tuple[int, SlicedRead]],
        outcomes: dict[int, Outcome],
    ) -> None:
        try:
            planned.append((number, plan_read(header, wanted)))
        except ShardError as error:
            outcomes[number] = self._outcome(header.key, Result.FAILED, str(error))

    def _read(
        self,
        planned: Sequence[tuple[int, SlicedRead]],
        buffers: Sequence[Buffer],
        outcomes: dict[int, Outcome],
        suspects: dict[int, BlockHeader],
    ) -> None:
        batch_slots = min(BATCH_SLOTS_MAX, self._staging_bytes // self._slab.superblock.slot_bytes)
        for start in range(0, len(planned), batch_slots):
            part = planned[start : start + batch_slots]

            def take(index: int, error: CorruptBlock | None, stored: memoryview, first: int = start) -> None:
                number, (asked, parts) = planned[first + index]
                if error is not None:
                    suspects[number] = asked.header
                    return
                payload = gather(parts, stored, parts[0].shard) if parts else stored
                reason = fill_buffer(buffers[number], payload)
                result = Result.FAILED if reason else Result.HIT
                outcomes[number] = Outcome(asked.header.key, result, self.volume, payload.nbytes, reason)

            try:
                read_slots(self._transfer, self._slab, [sliced.asked for _, sliced in part], take)
            except TransferError as error:
                for number, sliced in part:
                    outcomes[number] = self._outcome(sliced.asked.header.key, Result.FAILED, str(error))

    def _ask_owner(self, number: int, header: BlockHeader, outcomes: dict[int, Outcome]) -> None:
        """What did not pass lies where it should: the owner reads it too, and frees it if it is damaged."""
        request = VerifyRequest(self.volume, keys_to_wire([header.key]))
        reply = self._agent.ask(request, OutcomesReply)
        require_answers(len(reply.outcomes), 1)
        answered = reply.outcomes[0]
        if answered.result is not Result.HIT:
            outcomes[number] = outcome_of_block_from_wire(answered)

    def _outcome(self, key: BlockKey, result: Result, reason: str) -> Outcome:
        return Outcome(key, result, self.volume, reason=reason)


def _pieces(number: int, block: PutBlock) -> list[_Piece]:
    """A put block as the shards it carries; what is left over makes one that is refused."""
    span = block.span
    size = span.shard_bytes if span is not None and span.shard_bytes > 0 else block.payload.nbytes
    facts = BlockFacts(
        block.key,
        block.namespace,
        block.parent_hash,
        block.depth,
        block.block_tokens,
        span.shard_bytes * span.count if span is not None else block.payload.nbytes,
        ShardSpan(span.shard_bytes, 0, span.count) if span is not None else None,
        block.layout,
    )
    first = span.first if span is not None else 0
    payload = block.host_payload
    if not payload.c_contiguous or payload.nbytes == 0:
        return [_Piece(number, facts, first, payload)]
    payload = payload.cast("B")
    return [
        _Piece(number, facts, first + index, payload[at : at + size])
        for index, at in enumerate(range(0, payload.nbytes, size))
    ]


def _worst(outcomes: Sequence[Outcome]) -> Outcome:
    """What became of a block, by what became of its shards."""
    order = (Result.STORED, Result.PRESENT, Result.PARTIAL)  # one that is served is so with all its shards
    bad = [outcome for outcome in outcomes if outcome.result not in order]
    return bad[0] if bad else min(outcomes, key=lambda outcome: order.index(outcome.result))
