"""Blocks lent to other agents, in memory that they pull from; and theirs, pulled from their memory and put.

Each block lies behind a header page with a mark drawn for this one loan. Memory is used again when a loan is returned
or its time is over, whether its borrower is done or dead: one that comes late finds another mark, or bytes that do not
have their checksums.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from storage_agent.agent import StorageAgent
from storage_agent.block_header import (
    PAGE_BYTES,
    BlockHeader,
    check_header,
    check_parts,
    checksum,
    fold_checksums,
    is_sound,
    pack_header,
    page_ceiling,
    part_checksums,
)
from storage_agent.block_wire import (
    header_from_wire,
    header_to_wire,
    keys_from_wire,
    outcome_of_block_to_wire,
    shard_from_wire,
)
from storage_agent.data_wire import (
    BorrowReply,
    BorrowRequest,
    LentWire,
    OfferRequest,
    OutcomesReply,
    PlaceWire,
)
from storage_agent.errors import CommandRefused, CorruptBlock, TransferError
from storage_agent.nixl_window import PROGRESS_INTERVAL_S, NixlWindow
from storage_agent.port import BlockKey, Outcome, PutBlock, Result
from storage_agent.shards import Shard
from storage_agent.volume import Volume

WINDOWS_MAX = 2
"""Loans at a time. Each window is made when it is first needed, and stays."""
WINDOW_BYTES_MIN = 16 * 1024 * 1024
LOAN_S = 30.0
"""A loan that is not returned in this time is over."""
WINDOW_WAIT_S = 10.0


class Loans:
    """One agent's windows. Thread-safe."""

    def __init__(self, agent: StorageAgent) -> None:
        self._agent = agent
        self._changed = threading.Condition()  # guards everything below
        self._free: list[NixlWindow] = []
        self._made = 0
        self._lent: dict[int, _Loan] = {}
        self._closed = False
        self._next = int.from_bytes(os.urandom(4), "little") << 32
        self._thread = threading.Thread(target=self._serve, name=f"loans-{agent.name}", daemon=True)
        self._thread.start()

    def lend(self, request: BorrowRequest) -> BorrowReply:
        """Read blocks into a window; the caller pulls, then gives it back. Raises `StorageAgentError`."""
        keys = keys_from_wire(request.keys)
        wanted = shard_from_wire(request.wanted)
        with self._agent.use_volume(request.volume) as volume:
            window = self._take_window(PAGE_BYTES + page_ceiling(volume.descriptor.block_bytes_max))
            loan = 0
            try:
                mark = draw_mark()
                with window.exclusive() as memory:
                    lent, headers = _fill(window, memory, volume, keys, wanted, mark)
                    metadata = window.metadata
                self._agent.count_reads(volume.descriptor, headers)
                if headers:
                    loan = self._note(window)
            finally:
                if not loan:
                    self._give_back(window)
        return BorrowReply(loan, metadata, mark, lent)

    def take_back(self, loan: int) -> None:
        """The borrower is done. Nothing where its time was over."""
        with self._changed:
            known = self._lent.pop(loan, None)
        if known is not None:
            self._give_back(known.window)

    def pull_and_put(self, request: OfferRequest) -> OutcomesReply:
        """Pull blocks from a caller's memory, check them, put them. Raises `StorageAgentError`."""
        with self._agent.use_volume(request.volume) as volume:
            window = self._take_window(PAGE_BYTES + page_ceiling(volume.descriptor.block_bytes_max))
            outcomes: list[Outcome] = []
            try:
                headers = [header_from_wire(place.header) for place in request.places]
                addresses = [place.address for place in request.places]
                for part in parts_that_fit(headers, window.window_bytes):
                    with window.exclusive() as memory:
                        outcomes += _pull_and_put(
                            window, memory, volume, headers[part], addresses[part], request, self._agent
                        )
            finally:
                self._give_back(window)
        return OutcomesReply([outcome_of_block_to_wire(outcome) for outcome in outcomes])

    def close(self) -> None:
        """Idempotent."""
        with self._changed:
            self._closed = True
            windows = [*self._free, *(loan.window for loan in self._lent.values())]
            self._free.clear()
            self._lent.clear()
            self._changed.notify_all()
        self._thread.join()
        for window in windows:
            window.close()

    def _take_window(self, bytes_min: int) -> NixlWindow:
        """A window that nobody else uses, large enough for one block. Raises `StorageAgentError`."""
        with self._changed:
            self._changed.wait_for(lambda: self._closed or self._free or self._made < WINDOWS_MAX, WINDOW_WAIT_S)
            if self._closed:
                raise CommandRefused(f"agent {self._agent.name!r} is closing")
            window = self._free.pop() if self._free else None
            if window is None:
                if self._made == WINDOWS_MAX:
                    raise CommandRefused(f"all {WINDOWS_MAX} windows are lent; ask again in a moment")
                self._made += 1
        if window is not None and window.window_bytes >= bytes_min:
            return window
        try:
            if window is not None:
                window.close()
            return NixlWindow(f"loans of {self._agent.name}", max(WINDOW_BYTES_MIN, bytes_min))
        except TransferError:
            with self._changed:
                self._made -= 1
                self._changed.notify_all()
            raise

    def _give_back(self, window: NixlWindow) -> None:
        with self._changed:
            if not self._closed:
                self._free.append(window)
                self._changed.notify_all()
                return
        window.close()

    def _note(self, window: NixlWindow) -> int:
        with self._changed:
            self._next += 1
            self._lent[self._next] = _Loan(window, time.monotonic() + LOAN_S)
            self._changed.notify_all()
            return self._next

    def _serve(self) -> None:
        """Let borrowers' pulls go on; end the loans whose time is over."""
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._closed or self._lent)
                if self._closed:
                    return
                loans = dict(self._lent)
            for number, loan in loans.items():
                loan.window.progress()
                if time.monotonic() >= loan.until_s:
                    self.take_back(number)
            time.sleep(PROGRESS_INTERVAL_S)


@dataclass(frozen=True, slots=True)
class _Loan:
    window: NixlWindow
    until_s: float


def draw_mark() -> int:
    return int.from_bytes(os.urandom(8), "little")


def room_bytes(header: BlockHeader) -> int:
    """What a block takes in a window."""
    return PAGE_BYTES + page_ceiling(header.payload_bytes)


def parts_that_fit(headers: Sequence[BlockHeader], window_bytes: int) -> Iterator[slice]:
    """Runs of blocks that fit a window together; one that does not fit alone makes a run of its own."""
    start, taken = 0, 0
    for number, header in enumerate(headers):
        if number > start and taken + room_bytes(header) > window_bytes:
            yield slice(start, number)
            start, taken = number, 0
        taken += room_bytes(header)
    if start < len(headers):
        yield slice(start, len(headers))


def place_block(
    window: NixlWindow, memory: memoryview, at: int, header: BlockHeader, payload: memoryview, mark: int
) -> PlaceWire:
    """Lay a block into a window at byte `at`. Hold `exclusive`. Raises `BlockFormatError`."""
    address = window.address + at
    checksums = part_checksums(payload, header.part_bytes)
    header = header._replace(payload_checksum=fold_checksums(checksums.each))  # its volume may sum by another
    memory[at : at + PAGE_BYTES] = pack_header(header, checksums, place=address, mark=mark)
    memory[at + PAGE_BYTES : at + PAGE_BYTES + payload.nbytes] = payload
    return PlaceWire(header_to_wire(header), address)


def pulled_blocks(
    window: NixlWindow,
    memory: memoryview,
    metadata: bytes,
    mark: int,
    headers: Sequence[BlockHeader],
    addresses: Sequence[int],
) -> list[memoryview | CorruptBlock]:
    """The payloads, pulled from a peer and checked, or what is wrong with each. Hold `exclusive`.

    Raises `TransferError`, also where they are too large for the window.
    """
    lengths = np.array([PAGE_BYTES + header.payload_bytes for header in headers], dtype=np.uint64)
    offsets = np.zeros(len(headers), dtype=np.uint64)
    np.cumsum([room_bytes(header) for header in headers[:-1]], out=offsets[1:])
    if int(offsets[-1] + lengths[-1]) > window.window_bytes:
        raise TransferError(f"{headers[-1].payload_bytes} bytes do not fit a window of {window.window_bytes}")
    window.pull(metadata, np.array(addresses, dtype=np.uint64), offsets, lengths)
    found: list[memoryview | CorruptBlock] = []
    for header, address, at in zip(headers, addresses, offsets.tolist(), strict=True):
        payload = memory[at + PAGE_BYTES : at + PAGE_BYTES + header.payload_bytes].toreadonly()
        try:
            if reason := is_sound(header, window.window_bytes):  # a peer says what it likes
                raise CorruptBlock(reason)
            checksums = check_header(bytes(memory[at : at + PAGE_BYTES]), header, place=address, mark=mark)
            check_parts(payload, header, checksums)
        except CorruptBlock as error:
            found.append(error)
        else:
            found.append(payload)
    return found


def _fill(
    window: NixlWindow,
    memory: memoryview,
    volume: Volume,
    keys: Sequence[BlockKey],
    wanted: Shard | None,
    mark: int,
) -> tuple[list[LentWire], list[BlockHeader]]:
    """Read as many of `keys` into the window as fit; how each went, and the headers of those that lie there."""
    offsets: list[int] = []
    taken = 0
    for key in keys:
        header = volume.live_header(key)
        room = room_bytes(header) if header is not None else 0
        if offsets and taken + room > window.window_bytes:
            break
        offsets.append(taken)
        taken += room
    ends = [*offsets[1:], taken]
    places: dict[int, PlaceWire] = {}

    def accept(number: int, header: BlockHeader, payload: memoryview) -> str:
        lent = header if wanted is None else _slice_header(header, payload)
        if room_bytes(lent) > ends[number] - offsets[number]:
            return "it was put again, larger, while it was read"
        places[number] = place_block(window, memory, offsets[number], lent, payload, mark)
        return ""

    reads = volume.read(keys[: len(offsets)], accept, wanted)
    lent = [LentWire(outcome_of_block_to_wire(read.outcome), places.get(n)) for n, read in enumerate(reads)]
    return lent, [read.header for n, read in enumerate(reads) if n in places and read.header is not None]


def _slice_header(header: BlockHeader, payload: memoryview) -> BlockHeader:
    """Of a slice that is lent as if it were a block: it was checked here, the borrower checks the way."""
    return header._replace(
        payload_bytes=payload.nbytes, payload_checksum=checksum(payload), span=None, layout=None
    )


def _pull_and_put(
    window: NixlWindow,
    memory: memoryview,
    volume: Volume,
    headers: Sequence[BlockHeader],
    addresses: Sequence[int],
    request: OfferRequest,
    agent: StorageAgent,
) -> list[Outcome]:
    outcomes: dict[int, Outcome] = {}
    blocks: dict[int, PutBlock] = {}
    pulled = pulled_blocks(window, memory, request.metadata, request.mark, headers, addresses)
    for number, (header, payload) in enumerate(zip(headers, pulled, strict=True)):
        if isinstance(payload, CorruptBlock):
            reason = f"what was pulled is not what was offered: {payload}"
            outcomes[number] = Outcome(header.key, Result.FAILED, volume.descriptor.id, reason=reason)
            continue
        if (refusal := agent.refusal(header.key, header.namespace, volume.descriptor)) is not None:
            outcomes[number] = refusal
            continue
        blocks[number] = PutBlock(
            header.key,
            header.namespace,
            payload,
            header.parent_hash,
            header.depth,
            header.block_tokens,
            header.span,
            header.layout,
        )
    stored = volume.put(list(blocks.values()), read_back=request.read_back)
    outcomes |= dict(zip(blocks, stored, strict=True))
    return [outcomes[number] for number in range(len(headers))]
