"""Batches of parts of remote blocks, through a window to and from their owners' memory.

Nothing goes straight into a pool: a peer that answers after its deadline writes into memory that is nobody's any more.
Seals are read after the bytes, so that one which still stands says that they were held when they were read.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import NamedTuple

import numpy as np

from kvbm_core.errors import (
    RemoteBlockDamagedError,
    RemoteBlockGoneError,
    RemoteMemoryError,
    RemotePeerError,
    RemoteWriteInDoubtError,
)
from kvbm_core.remote_blocks import RemotePart
from kvbm_core.remote_seal import HeadBytes, Seal, SealState, damaged_heads, head_checksums, seal_bytes, unpack_seal
from kvbm_core.remote_wire import GivenUpNote, WrittenNote, encode_note
from storage_agent.errors import TransferError
from storage_agent.nixl_window import NixlWindow, Offsets

DESCRIPTORS_MAX = 8_192
"""Byte ranges of one batch, unless a single part has more."""
_POLL_S_MIN = 0.000_5
_POLL_S_MAX = 0.02
_ALIGNMENT_BYTES = 64
_UNSEEN_MAX = 3
"""Looks in a row that find no seal: one may come while it is written."""


class _Placed(NamedTuple):
    """A part, and where its seal and its packed heads lie in the window."""

    part: RemotePart
    seal_at: int
    heads_at: int


def room_bytes(heads: int, packed_bytes: int) -> int:
    """What a part takes in a window. `heads`: of the owner's pool."""
    return seal_bytes(heads) + -(-packed_bytes // _ALIGNMENT_BYTES) * _ALIGNMENT_BYTES


def batches(parts: Sequence[RemotePart], window_bytes: int) -> Iterator[list[int]]:
    """Positions in `parts` that go together: one owner's, as many as fit the window."""
    by_owner: dict[bytes, list[int]] = {}
    for number, part in enumerate(parts):
        by_owner.setdefault(part.imported.layout.metadata, []).append(number)
    for numbers in by_owner.values():
        batch: list[int] = []
        taken_bytes = ranges = 0
        for number in numbers:
            part = parts[number]
            room = _room(part)
            count = len(part.packed.runs.our_offsets)
            if batch and (taken_bytes + room > window_bytes or ranges + count > DESCRIPTORS_MAX):
                yield batch
                batch, taken_bytes, ranges = [], 0, 0
            batch.append(number)
            taken_bytes += room
            ranges += count
        yield batch


def pull_parts(
    window: NixlWindow, parts: Sequence[RemotePart], known: RemotePeerError | None = None
) -> list[HeadBytes | RemoteMemoryError]:
    """The heads of each part, verified, or why not. Of one owner, and small enough for the window.

    `known`: the owner is known to be gone; it is not asked.
    """
    if known is not None:
        return [known] * len(parts)
    placed = _place(parts)
    try:
        with window.exclusive() as memory, _named_errors():
            _pull_heads(window, placed)
            seals = _pull_seals(window, memory, placed)
            return [_verified(each, seal, memory) for each, seal in zip(placed, seals, strict=True)]
    except RemotePeerError as error:
        return [error] * len(parts)


def push_parts(
    window: NixlWindow, parts: Sequence[RemotePart], heads: Sequence[HeadBytes]
) -> list[RemoteMemoryError | None]:
    """Write heads into each part, with a note of their checksums behind them; None where that was done.

    Raises `RemotePeerError` where nothing was written, `RemoteWriteInDoubtError` where any of it may have been.
    """
    placed = _place(parts)
    with window.exclusive() as memory, _named_errors():
        seals = _pull_seals(window, memory, placed)
        refusals = [_refusal(each, seal) for each, seal in zip(placed, seals, strict=True)]
        wanted = [number for number, refusal in enumerate(refusals) if refusal is None]
        if wanted:
            for number in wanted:
                each = placed[number]
                each.part.packed.pack(heads[number], memory[each.heads_at :][: each.part.packed.size_bytes])
            checksums = [list(head_checksums(heads[number])) for number in wanted]
            _push_heads(window, [placed[number] for number in wanted], checksums)
    return refusals


def await_taken(window: NixlWindow, parts: Sequence[RemotePart], deadline_s: float) -> list[RemoteMemoryError | None]:
    """Whether the owner took what was pushed to each part; None where it did. Waits until it has judged, in all."""
    placed = _place(parts)
    until_s = time.monotonic() + deadline_s
    pause_s = _POLL_S_MIN
    outcomes: dict[int, RemoteMemoryError | None] = {}
    unseen = [0] * len(parts)
    while len(outcomes) < len(parts):
        rest = [number for number in range(len(parts)) if number not in outcomes]
        try:
            with window.exclusive() as memory, _named_errors():
                seals = _pull_seals(window, memory, [placed[number] for number in rest])
        except RemotePeerError as error:
            outcomes |= dict.fromkeys(rest, error)
            break
        is_late = time.monotonic() >= until_s
        for number, seal in zip(rest, seals, strict=True):
            state = _standing(parts[number], seal)
            unseen[number] = 0 if state is not None else unseen[number] + 1
            if state is SealState.TAKEN:
                outcomes[number] = None
            elif state is SealState.REFUSED:
                reason = "its owner refuses it: heads are damaged or late, or a writer gave up"
                outcomes[number] = RemoteBlockDamagedError(f"{_name(parts[number])}: {reason}")
            elif unseen[number] == _UNSEEN_MAX:
                outcomes[number] = RemoteBlockGoneError(f"{_name(parts[number])}: its owner dropped it meanwhile")
            elif is_late:
                reason = f"its owner did not take it in {deadline_s} s; it waits for other writers, or is busy"
                outcomes[number] = RemotePeerError(f"{_name(parts[number])}: {reason}")
        time.sleep(pause_s)
        pause_s = min(2 * pause_s, _POLL_S_MAX)
    return [outcomes[number] for number in range(len(parts))]


def give_up(window: NixlWindow, parts: Sequence[RemotePart]) -> None:
    """Tell one owner that nothing will be written into these parts. Nothing where it is gone or does not answer."""
    layout, packed = parts[0].imported.layout, parts[0].packed
    generations = [part.exported.generation for part in parts]
    note = GivenUpNote(layout.mark, packed.first_head, packed.heads, generations)
    with suppress(TransferError), window.exclusive() as memory:
        _pull_seals(window, memory, _place(parts[:1]), encode_note(note))


@contextmanager
def _named_errors() -> Iterator[None]:
    try:
        yield
    except TransferError as error:
        kind = RemoteWriteInDoubtError if error.in_doubt else RemotePeerError
        raise kind(f"another worker's memory cannot be reached: {error}") from error


def _room(part: RemotePart) -> int:
    return room_bytes(part.imported.layout.layout.heads, part.packed.size_bytes)


def _place(parts: Sequence[RemotePart]) -> list[_Placed]:
    placed = []
    at = 0
    for part in parts:
        placed.append(_Placed(part, at, at + part.imported.layout.seal_bytes))
        at += _room(part)
    return placed


def _pull_seals(
    window: NixlWindow, memory: memoryview, placed: Sequence[_Placed], note: bytes = b""
) -> list[Seal | None]:
    layout = placed[0].part.imported.layout
    addresses = np.array([layout.seal_address(each.part.exported.seal) for each in placed], dtype=np.uint64)
    offsets = np.array([each.seal_at for each in placed], dtype=np.uint64)
    lengths = np.full_like(offsets, layout.seal_bytes)
    window.pull(layout.metadata, addresses, offsets, lengths, notification=note)
    return [unpack_seal(bytes(memory[each.seal_at : each.seal_at + layout.seal_bytes])) for each in placed]


def _pull_heads(window: NixlWindow, placed: Sequence[_Placed]) -> None:
    layout = placed[0].part.imported.layout
    window.pull(layout.metadata, *_ranges(placed), layout.place)


def _push_heads(window: NixlWindow, placed: Sequence[_Placed], checksums: Sequence[list[int]]) -> None:
    layout, packed = placed[0].part.imported.layout, placed[0].part.packed
    generations = [each.part.exported.generation for each in placed]
    note = WrittenNote(layout.mark, packed.first_head, list(zip(generations, checksums, strict=True)))
    window.push(layout.metadata, *_ranges(placed), layout.place, notification=encode_note(note))


def _ranges(placed: Sequence[_Placed]) -> tuple[Offsets, Offsets, Offsets]:
    """Addresses there, offsets in the window, and lengths of the byte ranges of all heads."""
    addresses, offsets, lengths = [], [], []
    for part, _, heads_at in placed:
        runs = part.packed.runs
        their = part.packed.theirs.addresses(runs.their_buffers, runs.their_offsets, [part.exported.block])
        addresses.append(their)
        offsets.append(runs.our_offsets + heads_at)
        lengths.append(np.full(len(their), runs.run_bytes))
    together = (np.concatenate(each).astype(np.uint64) for each in (addresses, offsets, lengths))
    return tuple(together)  # type: ignore[return-value]


def _standing(part: RemotePart, seal: Seal | None) -> SealState | None:
    """What the seal says of this export of the block; None where it says nothing of it."""
    ours = (part.imported.layout.mark, part.exported.generation)
    return seal.state if seal is not None and (seal.mark, seal.generation) == ours else None


def _verified(placed: _Placed, seal: Seal | None, memory: memoryview) -> HeadBytes | RemoteMemoryError:
    part, packed = placed.part, placed.part.packed
    if seal is None or _standing(part, seal) is not SealState.READABLE:
        return RemoteBlockGoneError(f"{_name(part)}: its owner took it back; compute it, or import a set that has it")
    heads = packed.unpack(memory[placed.heads_at : placed.heads_at + packed.size_bytes])
    first = packed.first_head - packed.theirs.first_head
    damaged = damaged_heads(heads, seal.head_checksums[first : first + packed.heads])
    if damaged:
        return RemoteBlockDamagedError(
            f"{_name(part)}: heads {[packed.first_head + head for head in damaged]} are not what was offered; read it "
            "again, or compute it"
        )
    return heads


def _refusal(placed: _Placed, seal: Seal | None) -> RemoteMemoryError | None:
    if _standing(placed.part, seal) is SealState.WRITABLE:
        return None
    return RemoteBlockGoneError(f"{_name(placed.part)}: its owner does not wait for it any more; nothing was written")


def _name(part: RemotePart) -> str:
    theirs = part.packed.theirs
    return (
        f"block {part.exported.identity.key.sequence_hash:032x} of worker {theirs.tensor_parallel_rank} of "
        f"{theirs.tensor_parallel_size}"
    )
