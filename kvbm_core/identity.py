"""What a block is, apart from where it lies."""

from __future__ import annotations

from dataclasses import dataclass

from event_plane.schema import Namespace
from storage_agent.port import BlockKey


@dataclass(frozen=True, slots=True)
class BlockIdentity:
    """A full block's key and its place in the prefix tree. Hashes are 128-bit; parent 0 is the root."""

    key: BlockKey
    namespace: Namespace
    parent_hash: int
    prefix_hash: int
    depth: int
    block_tokens: int
