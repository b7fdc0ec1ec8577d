"""An engine's block as ours: its key and its place in the chain. Pure.

An engine that hashes its blocks itself keeps its hash: 128 bits of it are the block's sequence hash, and the namespace
names the scheme, so that no two schemes' blocks are ever one. The half that the engine's events carry is the low one,
as `event_plane.dialects` reads it. Layout and tensor-parallel rank are no part of the key; a slot's header says them.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from event_plane.schema import DEPTH_UNKNOWN, Namespace
from kvbm_core.errors import ConfigError
from kvbm_core.identity import BlockIdentity
from storage_agent.port import BlockKey
from storage_agent.shards import BlockLayout, Shard, ShardSpan

_HASH_BYTES = 16
_SAYS_NOTHING = frozenset({"_name_or_path", "name_or_path", "transformers_version"})


def hash_of_digest(digest: bytes) -> int:
    """128-bit sequence hash of an engine's digest: its last 16 bytes, big-endian. Raises `ValueError` if short."""
    if len(digest) < _HASH_BYTES:
        raise ValueError(f"hash {digest.hex()} has {len(digest)} bytes, at least {_HASH_BYTES} name a block")
    return int.from_bytes(digest[-_HASH_BYTES:], "big")


def digest_of_config(config: Mapping[str, object]) -> str:
    """16 hexadecimal digits of a model's `config.json` as its engine reads it; equal where the model computes alike.

    Where it lies and which release wrote it are left out.
    """
    said = {key: value for key, value in config.items() if key not in _SAYS_NOTHING}
    return hashlib.sha256(json.dumps(said, sort_keys=True, default=str).encode()).hexdigest()[:16]


def hash_of_page(page: str) -> int:
    """128-bit sequence hash of SGLang's hexadecimal page key.

    SGLang's events carry the first 8 bytes of its SHA-256: they are the low half, the next 8 the high one. Raises
    `ValueError` for a key that is no such digest.
    """
    try:
        low, high = bytes.fromhex(page[:16]), bytes.fromhex(page[16:32])
    except ValueError as error:
        raise ValueError(f"page key {page!r} is no hexadecimal digest: {error}") from error
    if len(low) + len(high) < _HASH_BYTES:
        raise ValueError(f"page key {page!r} is too short: 32 hexadecimal digits name a block")
    return int.from_bytes(high, "big") << 64 | int.from_bytes(low, "big")


@dataclass(frozen=True, slots=True)
class EngineBlocks:
    """The blocks of one model in one engine: all of one namespace and cache group."""

    namespace: Namespace
    group: int = 0

    def key(self, sequence_hash: int) -> BlockKey:
        return BlockKey(self.namespace.namespace_id, self.group, sequence_hash)

    def alone(self, sequence_hash: int) -> BlockIdentity:
        """A block of which nobody says where in a sequence it stands."""
        return self.placed(sequence_hash, 0, 0, DEPTH_UNKNOWN)

    def placed(self, sequence_hash: int, parent_hash: int, prefix_hash: int, depth: int) -> BlockIdentity:
        """`depth`: its number in the sequence, `DEPTH_UNKNOWN` where nobody says; parent 0 at the root."""
        return BlockIdentity(
            self.key(sequence_hash), self.namespace, parent_hash, prefix_hash, depth, self.namespace.block_tokens
        )

    def chain(self, hashes: Sequence[int], before: Sequence[int] | None) -> list[BlockIdentity]:
        """Blocks that follow one another after those of `before`, which starts at the root; None: nobody says."""
        parent = before[-1] if before else 0
        prefix = before[0] if before else 0
        depth = DEPTH_UNKNOWN if before is None else len(before)
        found = []
        for sequence_hash in hashes:
            if depth == 0:
                prefix = sequence_hash
            found.append(self.placed(sequence_hash, parent, prefix, depth))
            parent = sequence_hash
            depth = DEPTH_UNKNOWN if before is None else depth + 1
        return found


@dataclass(frozen=True, slots=True)
class WorkersPart:
    """What worker `index` of `count` holds of every block, and how the whole block lies.

    A layout lets workers of a group of another size read their part, and refuses blocks that lie otherwise. Without
    one a block is bytes, and one worker has all of it.
    """

    index: int = 0
    count: int = 1
    layout: BlockLayout | None = None

    def __post_init__(self) -> None:
        """Raises `ConfigError`: a worker that is not of the group, or a block that cannot be split as is said."""
        if not 0 <= self.index < self.count:
            raise ConfigError(f"there is no worker {self.index} of {self.count}: count from 0")
        if self.layout is None and self.count > 1:
            raise ConfigError(f"blocks split among {self.count} workers need a layout: without one nobody can cut them")
        if self.layout is not None:
            _, extent, _ = self.layout.split()
            if extent % self.count:
                raise ConfigError(
                    f"{extent} {self.layout.sharded_axis} cannot be split evenly among {self.count} workers"
                )

    @property
    def part_bytes(self) -> int:
        """Bytes of this worker's part; 0 where no layout says it."""
        return self.layout.block_bytes // self.count if self.layout is not None else 0

    @property
    def wanted(self) -> Shard | None:
        return Shard(self.index, self.count, self.layout) if self.layout is not None else None

    @property
    def span(self) -> ShardSpan | None:
        return ShardSpan(self.part_bytes, self.index, self.count) if self.layout is not None else None
