"""What a block is, apart from where it lies."""

from __future__ import annotations

import msgspec

from event_plane.schema import Namespace
from storage_agent.port import BlockKey


class BlockIdentity(msgspec.Struct, frozen=True, gc=False):
    """A full block's key and its place in the prefix tree. Hashes are 128-bit; parent 0 is the root."""

    key: BlockKey
    namespace: Namespace
    parent_hash: int
    prefix_hash: int
    depth: int
    block_tokens: int
