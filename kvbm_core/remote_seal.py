"""What stands beside exported memory: for each block of a set whether it may be read or written, and checksums. Pure.

Memory that was taken back can still be read by a peer, and no call of NIXL's says so. So a seal names one export of one
block, the owner wipes it before anything else happens to the block, and whoever moves bytes compares it. Bytes that
were changed since, or while they were read, do not have the checksums.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from enum import IntEnum
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from storage_agent.block_header import checksum

HeadBytes = NDArray[np.uint8]
"""Some heads of a block in the universal order, `[heads, layers, outer, tokens, bytes of a head's elements]`."""

_MAGIC = b"KVSEAL1\0"
_SEAL = struct.Struct("<8sQQHHI")  # magic, mark, generation, state, heads, nothing
_CHECKSUM = struct.Struct("<Q")
_ALIGNMENT_BYTES = 64


class SealState(IntEnum):
    READABLE = 1
    WRITABLE = 2
    TAKEN = 3
    """Every head was written and verified; the owner has the block."""
    REFUSED = 4
    """What was written is not what was announced, or a writer gave up."""


class Seal(NamedTuple):
    """`mark`: of one registration of memory. `generation`: of one export in it; no two have the same.

    `head_checksums`: XXH3-64 of each head's elements in the universal order, so that workers that hold other heads, or
    lay them out otherwise, can compare theirs. 0 where nothing may be read.
    """

    mark: int
    generation: int
    state: SealState
    head_checksums: tuple[int, ...]


def seal_bytes(heads: int) -> int:
    """Bytes that a seal of a block with so many heads takes."""
    exact = _SEAL.size + _CHECKSUM.size * (heads + 1)
    return -(-exact // _ALIGNMENT_BYTES) * _ALIGNMENT_BYTES


def pack_seal(seal: Seal) -> bytes:
    heads = len(seal.head_checksums)
    body = _SEAL.pack(_MAGIC, seal.mark, seal.generation, seal.state, heads, 0)
    body += struct.pack(f"<{heads}Q", *seal.head_checksums)
    body = body.ljust(seal_bytes(heads) - _CHECKSUM.size, b"\0")
    return body + _CHECKSUM.pack(checksum(body))


def unpack_seal(packed: bytes) -> Seal | None:
    """None for bytes that are no whole seal: wiped, or read while it was written."""
    if len(packed) < _SEAL.size + _CHECKSUM.size or not packed.startswith(_MAGIC):
        return None
    body = packed[: -_CHECKSUM.size]
    if _CHECKSUM.unpack(packed[-_CHECKSUM.size :]) != (checksum(body),):
        return None
    _, mark, generation, state, heads, _ = _SEAL.unpack_from(body)
    if seal_bytes(heads) != len(packed) or state not in tuple(SealState):
        return None
    return Seal(mark, generation, SealState(state), struct.unpack_from(f"<{heads}Q", body, _SEAL.size))


def head_checksums(heads: HeadBytes) -> tuple[int, ...]:
    """One for each head. `heads` is contiguous."""
    return tuple(checksum(head.reshape(-1).data) for head in heads)


def damaged_heads(heads: HeadBytes, checksums: Sequence[int]) -> list[int]:
    """Which of `heads`, counted from 0, do not have their checksums."""
    pairs = zip(head_checksums(heads), checksums, strict=True)
    return [number for number, (found, expected) in enumerate(pairs) if found != expected]
