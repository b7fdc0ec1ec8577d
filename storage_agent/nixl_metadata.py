"""NIXL's metadata of an agent on its way to a peer: sealed, for NIXL ends the process over what is damaged. Pure.

A magic, an XXH3-64 of the rest, the release of NIXL that made it, the metadata. NIXL's own has no version.
"""

from __future__ import annotations

import struct

from storage_agent.block_header import checksum
from storage_agent.errors import TransferError

_MAGIC = b"KVANXL1\0"
_HEAD = struct.Struct("<8sQ")
_RELEASE_LENGTH = struct.Struct("<B")


def seal_metadata(metadata: bytes, release: str) -> bytes:
    """`release`: NIXL's here; empty where it has none."""
    packed = release.encode()
    body = _RELEASE_LENGTH.pack(len(packed)) + packed + metadata
    return _HEAD.pack(_MAGIC, checksum(body)) + body


def open_metadata(sealed: bytes, release: str) -> bytes:
    """What NIXL may be given. Raises `TransferError`: damaged, or of another release than `release`."""
    body = memoryview(sealed)[_HEAD.size :]
    if len(body) < _RELEASE_LENGTH.size or _HEAD.unpack_from(sealed) != (_MAGIC, checksum(body)):
        raise TransferError(f"{len(sealed)} bytes of a peer's metadata are damaged, or are none; ask it again")
    start = _RELEASE_LENGTH.size + body[0]
    theirs = bytes(body[_RELEASE_LENGTH.size : start]).decode(errors="replace")
    if theirs and release and theirs != release:
        raise TransferError(f"the peer has NIXL {theirs}, here is {release}; install one release on both hosts")
    return bytes(body[start:])
