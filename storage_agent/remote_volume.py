"""Volumes of kind `remote`: a volume of another host's agent. That agent owns it and tells of what is on it.

Commands go over its command URL, bytes by NIXL UCX; whoever gets them pulls: we from memory it lends, it from ours.
"""

from __future__ import annotations

import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from typing import Annotated

import msgspec

from event_plane.credentials_file import load_credentials
from event_plane.errors import TransportError
from storage_agent.block_header import PAGE_BYTES, BlockHeader, fold_checksums, page_ceiling, part_checksums
from storage_agent.block_wire import (
    header_from_wire,
    headers_from_wire,
    key_from_wire,
    keys_to_wire,
    outcome_of_block_from_wire,
    require_answers,
    require_key,
    shard_to_wire,
)
from storage_agent.client import AgentClient
from storage_agent.data_wire import (
    LOCATED_MAX,
    BorrowReply,
    BorrowRequest,
    DoneReply,
    ListRequest,
    LocateReply,
    LocateRequest,
    OfferRequest,
    OutcomesReply,
    PlaceWire,
    ReturnRequest,
)
from storage_agent.descriptor import VolumeDescriptor, wrong
from storage_agent.errors import (
    AgentUnreachable,
    BlockFormatError,
    CommandRefused,
    CorruptBlock,
    ShardError,
    StorageAgentError,
    TransferError,
    VolumeError,
)
from storage_agent.fifo_lock import FifoLock
from storage_agent.kinds import Opening, VolumeKind
from storage_agent.loans import WINDOW_BYTES_MIN, draw_mark, parts_that_fit, place_block, pulled_blocks
from storage_agent.nixl_window import NixlWindow
from storage_agent.port import BlockKey, CompactReport, Outcome, PutBlock, Result, ScrubReport, VolumeStat
from storage_agent.shards import Shard, check_layout, check_span
from storage_agent.transfers import Transfers
from storage_agent.volume import Accept, ReadResult

BATCH_SLOTS = 256
ABSENT_S = 2.0
"""For so long after its agent did not answer, a volume fails at once, so that gets do not wait for it each time."""
STAT_S = 2.0
"""Longest wait for the owner's stat: whoever looks at all volumes is not kept by one."""


class RemoteOptions(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """`endpoint` names `[endpoints.NAME]`, whose URL is the owner's command URL; `volume` is its id there."""

    endpoint: str
    volume: str = ""
    """The same id as here where it is empty."""
    timeout_s: Annotated[float, msgspec.Meta(gt=0, le=600)] = 30.0


class RemoteVolume:
    """Implements `volume.Volume` by asking the owner. Thread-safe.

    Its `retired_total` counts what was deleted from here alone.
    """

    def __init__(
        self,
        descriptor: VolumeDescriptor,
        volume: str,
        connect: Callable[[float], AgentClient],
        *,
        timeout_s: float,
        deadline_s: float,
    ) -> None:
        """`connect`: a client of the owner that waits so many seconds for each answer.

        Raises `VolumeError`: nobody answers, no such volume there, or it takes smaller blocks.
        """
        self.descriptor = descriptor
        self._volume = volume
        self._connect = connect
        self._timeout_s = timeout_s
        self._agent = connect(timeout_s)
        self._looking = connect(min(timeout_s, STAT_S))
        """Never behind a batch of blocks, so that a stat is answered while the owner does not move bytes."""
        self._turn = FifoLock()
        self._absent_until_s = 0.0
        self._is_doubtful = False
        """Whether it did not answer when it was last asked."""
        self._degraded = ""
        self._corrupt_total = 0
        self.retired_total = 0
        self._reads, self._writes = Transfers(), Transfers()
        window_bytes = max(WINDOW_BYTES_MIN, PAGE_BYTES + page_ceiling(descriptor.block_bytes_max))
        try:
            there = self._owner_stat()
            if there.descriptor.block_bytes_max < descriptor.block_bytes_max:
                raise VolumeError(
                    f"volume {descriptor.id!r}: block_bytes_max is {descriptor.block_bytes_max}, its owner takes "
                    f"{there.descriptor.block_bytes_max}; lower it"
                )
            self._window = NixlWindow(f"volume {descriptor.id}", window_bytes, deadline_s=deadline_s)
        except (AgentUnreachable, CommandRefused, TransferError) as error:
            self._close_clients()
            raise VolumeError(f"volume {descriptor.id!r} cannot be used: {error}") from error
        except VolumeError:
            self._close_clients()
            raise

    @property
    def batch_slots(self) -> int:
        """See `Volume.batch_slots`."""
        return BATCH_SLOTS

    def live_headers(self) -> list[BlockHeader]:
        """See `Volume.live_headers`. None where the owner does not answer."""
        found: list[BlockHeader] = []
        try:
            while True:
                first_slot = found[-1].slot + 1 if found else 0
                with self._owner() as owner:
                    reply = owner.ask(ListRequest(self._volume, first_slot), LocateReply)
                more = [header_from_wire(header) for header in reply.headers if header is not None]
                if any(header.slot < first_slot for header in more):
                    raise CommandRefused(f"the agent lists slots below {first_slot} again; run one release on both")
                found += more
                if len(more) < LOCATED_MAX:
                    return found
        except (AgentUnreachable, CommandRefused):
            return []

    def live_header(self, key: BlockKey) -> BlockHeader | None:
        """See `Volume.live_header`. None where the owner does not answer."""
        request = LocateRequest(self._volume, keys_to_wire([key]), count_reads=False)
        try:
            with self._owner() as owner:
                return headers_from_wire([key], owner.ask(request, LocateReply).headers)[0]
        except (AgentUnreachable, CommandRefused):
            return None

    def stat(self) -> VolumeStat:
        """See `Volume.stat`; bytes and seconds are those moved from here. Answered within `STAT_S`."""
        try:
            there = self._owner_stat()
        except (AgentUnreachable, CommandRefused) as error:
            there = VolumeStat(self.descriptor, blocks=0, payload_bytes=0, slots_free=0, mode="", degraded=str(error))
        capacity = there.descriptor.capacity_blocks
        self.descriptor = msgspec.structs.replace(self.descriptor, capacity_blocks=capacity)
        return msgspec.structs.replace(
            there,
            descriptor=self.descriptor,
            mode="remote",
            read_bytes_total=self._reads.payload_bytes,
            read_seconds_total=self._reads.seconds,
            write_bytes_total=self._writes.payload_bytes,
            write_seconds_total=self._writes.seconds,
            read_times=list(self._reads.times),
            write_times=list(self._writes.times),
            degraded=self._degraded or there.degraded,
            corrupt_total=self._corrupt_total,
        )

    def put(self, blocks: Sequence[PutBlock], *, read_back: bool = False) -> list[Outcome]:
        """See `Volume.put`."""
        outcomes: dict[int, Outcome] = {}
        offered: dict[int, tuple[BlockHeader, memoryview]] = {}
        for number, block in enumerate(blocks):
            refused = self._refuse_put(block)
            if refused is not None:
                outcomes[number] = refused
            else:
                payload = block.host_payload.cast("B")
                offered[number] = _header(number, block, payload), payload
        numbers = list(offered)
        for start in range(0, len(numbers), BATCH_SLOTS):
            batch = numbers[start : start + BATCH_SLOTS]
            for part in parts_that_fit([offered[number][0] for number in batch], self._window.window_bytes):
                some = batch[part]
                answered = self._offer([offered[number] for number in some], read_back)
                outcomes |= dict(zip(some, answered, strict=True))
        return [outcomes[number] for number in range(len(blocks))]

    def read(self, keys: Sequence[BlockKey], accept: Accept, wanted: Shard | None = None) -> list[ReadResult]:
        """See `Volume.read`."""
        results: list[ReadResult] = []
        while len(results) < len(keys):
            first = len(results)
            part = keys[first : first + BATCH_SLOTS]
            try:
                results += self._borrow(part, first, accept, wanted)
            except (AgentUnreachable, CommandRefused, TransferError) as error:
                self._degrade(error)
                results += [ReadResult(self._outcome(key, Result.FAILED, reason=str(error))) for key in part]
        return results

    def delete(self, keys: Sequence[BlockKey]) -> list[Outcome]:
        """See `Volume.delete`."""
        try:
            with self._owner() as owner:
                answer = owner.delete(uuid.uuid4().hex, self._volume, keys)
            require_answers(len(answer.outcomes), len(keys))
        except (AgentUnreachable, CommandRefused) as error:
            self._degrade(error)
            return [self._outcome(key, Result.FAILED, reason=str(error)) for key in keys]
        outcomes = [msgspec.structs.replace(outcome, volume=self.descriptor.id) for outcome in answer.outcomes]
        self.retired_total += sum(outcome.result is Result.DELETED for outcome in outcomes)
        return outcomes

    def scrub(self) -> ScrubReport:
        """See `Volume.scrub`: the owner reads. Raises `StorageAgentError` where it does not answer."""
        with self._connect(self._timeout_s) as owner:  # it takes long: gets do not wait for it
            return owner.scrub(uuid.uuid4().hex, self._volume)

    def compact(self) -> int:
        """See `Volume.compact`: the owner does it. Raises `StorageAgentError` where it does not answer."""
        with self._connect(self._timeout_s) as owner:
            return owner.compact(uuid.uuid4().hex, self._volume).freed_bytes

    def lay_out(self, keys: Sequence[BlockKey]) -> CompactReport:
        """See `Volume.lay_out`: as `compact`."""
        with self._connect(self._timeout_s) as owner:
            return owner.compact(uuid.uuid4().hex, self._volume, keys)

    def resize(self, capacity_blocks: int) -> VolumeStat:
        """Raises `VolumeError`: the owner alone can."""
        raise VolumeError(
            f"volume {self.descriptor.id!r} cannot be given {capacity_blocks} blocks from here; "
            f"ask its owner at {self._agent.command_url}"
        )

    def close(self) -> None:
        """See `Volume.close`."""
        self._window.close()
        self._close_clients()

    def _close_clients(self) -> None:
        self._agent.close()
        self._looking.close()

    # Put

    def _refuse_put(self, block: PutBlock) -> Outcome | None:
        """What the owner would refuse but cannot be put into a header either."""
        size = block.payload.nbytes
        if size > self.descriptor.block_bytes_max:
            reason = f"the block has {size} bytes, {self.descriptor.id!r} takes {self.descriptor.block_bytes_max}"
            return self._outcome(block.key, Result.TOO_LARGE, reason=reason)
        if size == 0 or not block.payload.c_contiguous:
            reason = "the block is empty" if size == 0 else "the payload is not contiguous; copy it first"
            return self._outcome(block.key, Result.FAILED, reason=reason)
        try:
            if block.layout is not None:
                check_layout(block.layout)
            if block.span is not None:
                check_span(block.span, size, block.layout)
        except ShardError as error:
            return self._outcome(block.key, Result.FAILED, reason=str(error))
        return None

    def _offer(self, blocks: Sequence[tuple[BlockHeader, memoryview]], read_back: bool) -> list[Outcome]:
        """Lay blocks into our window and have the owner pull them."""
        outcomes: dict[int, Outcome] = {}
        placed: dict[int, PlaceWire] = {}
        started = time.monotonic()
        try:
            with self._window.exclusive() as memory:
                mark, at = draw_mark(), 0
                for number, (header, payload) in enumerate(blocks):
                    try:
                        placed[number] = place_block(self._window, memory, at, header, payload, mark)
                    except BlockFormatError as error:
                        outcomes[number] = self._outcome(header.key, Result.FAILED, reason=str(error))
                        continue
                    at += PAGE_BYTES + page_ceiling(payload.nbytes)
                if placed:
                    request = OfferRequest(self._volume, self._window.metadata, mark, list(placed.values()), read_back)
                    with self._window.served(), self._owner() as owner:
                        reply = owner.ask(request, OutcomesReply)
                    require_answers(len(reply.outcomes), len(placed))
                    for number, answered in zip(placed, reply.outcomes, strict=True):
                        outcomes[number] = msgspec.structs.replace(
                            outcome_of_block_from_wire(answered), volume=self.descriptor.id
                        )
        except (AgentUnreachable, CommandRefused, TransferError) as error:
            self._degrade(error)
            for number, (header, _) in enumerate(blocks):
                outcomes.setdefault(number, self._outcome(header.key, Result.FAILED, reason=str(error)))
        stored = [outcome for outcome in outcomes.values() if outcome.result is Result.STORED]
        self._writes.add(sum(outcome.payload_bytes for outcome in stored), time.monotonic() - started)
        return [outcomes[number] for number in range(len(blocks))]

    # Read

    def _borrow(
        self, keys: Sequence[BlockKey], first: int, accept: Accept, wanted: Shard | None
    ) -> list[ReadResult]:
        """The first of `keys`, as many as are lent at once. Raises as `_owner`, and `TransferError`."""
        request = BorrowRequest(self._volume, keys_to_wire(keys), shard_to_wire(wanted))
        results: dict[int, ReadResult] = {}
        # Ours first: who waited for it with a loan would keep the owner's memory from who has it and waits for a loan.
        with self._window.exclusive() as memory:
            started = time.monotonic()
            with self._owner() as owner:
                reply = owner.ask(request, BorrowReply)
            places: list[tuple[int, PlaceWire]] = []
            try:
                if not reply.lent or len(reply.lent) > len(keys):  # it may answer about the first of them alone
                    require_answers(len(reply.lent), len(keys))
                for number, lent in enumerate(reply.lent):
                    if lent.place is not None:
                        require_key(key_from_wire(lent.place.header.facts.key), keys[number])
                        places.append((number, lent.place))
                    else:
                        outcome = outcome_of_block_from_wire(lent.outcome)
                        results[number] = ReadResult(msgspec.structs.replace(outcome, volume=self.descriptor.id))
                if places:
                    self._pull(reply, places, memory, first, accept, results)
            finally:
                if reply.loan:
                    self._return(reply.loan)
            payload_bytes = sum(r.outcome.payload_bytes for r in results.values() if r.header is not None)
            self._reads.add(payload_bytes, time.monotonic() - started)
            self._corrupt_total += sum(r.outcome.result is Result.CORRUPT for r in results.values())
        return [results[number] for number in range(len(reply.lent))]

    def _pull(
        self,
        reply: BorrowReply,
        places: Sequence[tuple[int, PlaceWire]],
        memory: memoryview,
        first: int,
        accept: Accept,
        results: dict[int, ReadResult],
    ) -> None:
        """Raises `TransferError`."""
        headers = [header_from_wire(place.header) for _, place in places]
        addresses = [place.address for _, place in places]
        for part in parts_that_fit(headers, self._window.window_bytes):
            pulled = pulled_blocks(self._window, memory, reply.metadata, reply.mark, headers[part], addresses[part])
            for (number, _), header, payload in zip(places[part], headers[part], pulled, strict=True):
                if isinstance(payload, CorruptBlock):  # the loan was over; the copy there is good
                    reason = f"what was pulled is not what was lent: {payload}"
                    results[number] = ReadResult(self._outcome(header.key, Result.FAILED, reason=reason))
                    continue
                refused = accept(first + number, header, payload)
                result = Result.FAILED if refused else Result.HIT
                results[number] = ReadResult(self._outcome(header.key, result, payload.nbytes, refused), header)

    # The owner

    @property
    def is_asking(self) -> bool:
        """Whether something waits for the owner now, a look at its figures apart."""
        return self._turn.is_held

    def _return(self, loan: int) -> None:
        """The owner finds out by itself where it does not hear of it."""
        with suppress(AgentUnreachable, CommandRefused), self._owner() as owner:
            owner.ask(ReturnRequest(loan), DoneReply)

    def _owner_stat(self) -> VolumeStat:
        """Raises as `_owner`."""
        self._require_present()
        try:
            stat = self._looking.stat()
        except AgentUnreachable:
            self._note_absent()
            raise
        for found in stat.volumes:
            if found.descriptor.id == self._volume:
                return found
        raise CommandRefused(f"the agent at {self._agent.command_url} has no volume {self._volume!r}")

    @contextmanager
    def _owner(self) -> Iterator[AgentClient]:
        """To ask something, one after another. Raises `CommandRefused`, and `AgentUnreachable`: at once where it was so
        a moment ago, for those that waited behind who found out as well; after that within `STAT_S`, until it answers.
        """
        with self._turn:
            self._require_present()
            if self._is_doubtful:
                self._owner_stat()
                self._is_doubtful = False
            try:
                yield self._agent
            except AgentUnreachable:
                self._note_absent()
                raise

    def _note_absent(self) -> None:
        self._absent_until_s = time.monotonic() + ABSENT_S
        self._is_doubtful = True

    def _require_present(self) -> None:
        if time.monotonic() < self._absent_until_s:
            raise AgentUnreachable(f"the agent at {self._agent.command_url} did not answer; it is asked again soon")

    def _degrade(self, error: StorageAgentError) -> None:
        self._degraded = self._degraded or str(error)

    def _outcome(self, key: BlockKey, result: Result, payload_bytes: int = 0, reason: str = "") -> Outcome:
        return Outcome(key, result, self.descriptor.id, payload_bytes, reason)


def _header(slot: int, block: PutBlock, payload: memoryview) -> BlockHeader:
    """For the way to the owner, which gives it a slot and a generation of its own."""
    checksums = part_checksums(payload, block.span.shard_bytes if block.span is not None else payload.nbytes)
    return BlockHeader(
        slot=slot,
        key=block.key,
        namespace=block.namespace,
        parent_hash=block.parent_hash,
        depth=block.depth,
        block_tokens=block.block_tokens,
        payload_bytes=payload.nbytes,
        payload_checksum=fold_checksums(checksums.each),
        generation=0,
        span=block.span,
        layout=block.layout,
    )


def _open(opening: Opening) -> RemoteVolume:
    options = opening.options
    assert isinstance(options, RemoteOptions)
    name = opening.descriptor.id
    endpoint = opening.endpoints.get(options.endpoint)
    if endpoint is None:
        said = f"endpoint {options.endpoint!r} is not in the agent's settings"
        remedy = f"use one of {sorted(opening.endpoints)} or add [endpoints.{options.endpoint}]"
        raise wrong(f"volume {name!r}:", said, remedy, "options.endpoint", options.endpoint)
    try:
        credentials = load_credentials(endpoint.credentials_file)
    except TransportError as error:
        raise VolumeError(f"volume {name!r}: {error}") from error
    return RemoteVolume(
        opening.descriptor,
        options.volume or name,
        partial(AgentClient, endpoint.url, credentials=credentials),
        timeout_s=options.timeout_s,
        deadline_s=opening.deadline_s,
    )


KIND = VolumeKind(options=RemoteOptions, open=_open, path="none", is_view=True)
