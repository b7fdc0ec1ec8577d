"""A hash for each block of a trace, chained over its path: a block is the same only if its whole path is."""

from __future__ import annotations

import xxhash

from event_plane.recording import TRACE_BLOCK_TOKENS
from event_plane.schema import Namespace

NO_HASH = bytes(16)
HASH_SCHEME = "xxh3-128-path"
NAMESPACE = Namespace(block_tokens=TRACE_BLOCK_TOKENS, hash_scheme=HASH_SCHEME)


def path_hash(parent: bytes, block_id: int) -> bytes:
    """16 bytes, low half first. `parent`: the hash of the block before, `NO_HASH` at a root."""
    return xxhash.xxh3_128_digest(parent + (block_id & 0xFFFF_FFFF_FFFF_FFFF).to_bytes(8, "little"))
