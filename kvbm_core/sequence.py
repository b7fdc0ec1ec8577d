"""From a request's tokens to the identities of its full blocks."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from event_plane.hashing import SequenceHasher, Tokens, little_endian_u32
from kvbm_core.config import KvbmConfig
from kvbm_core.identity import BlockIdentity
from storage_agent.port import BlockKey

_TOKEN_BYTES = 4


class TokenBlockSequence:
    """One sequence of a tenant, which grows and may be cut. Not thread-safe; tokens short of a block wait for more.

    `adapter`, where given, is in the place of the configuration's; requests that give a `cache_salt` share blocks only
    with those that give the same.
    """

    def __init__(
        self,
        config: KvbmConfig,
        tenant: str,
        tokens: Tokens = (),
        *,
        adapter: str | None = None,
        cache_salt: str = "",
    ) -> None:
        self.salt = config.salt_of(tenant, adapter, cache_salt)
        """u64 seed of its token hashes, for `MutableBlock.init_sequence`."""
        self.blocks: list[BlockIdentity] = []
        """Every full block so far, root first."""
        self._namespace = config.namespace_of(tenant, adapter, cache_salt)
        self._namespace_id = self._namespace.namespace_id
        self._secret = config.secret_of(tenant)
        self._block_tokens = config.page_tokens
        self._tokens = bytearray()
        self._hasher = self._hasher_after(0)
        self.extend(tokens)

    def __len__(self) -> int:
        """Tokens, those short of a block included."""
        return len(self._tokens) // _TOKEN_BYTES

    @property
    def tokens(self) -> npt.NDArray[np.uint32]:
        """A copy of its token ids, `[len(self)]`."""
        return np.frombuffer(bytes(self._tokens), "<u4")

    def tokens_of(self, depth: int) -> npt.NDArray[np.uint32]:
        """A copy of the token ids of the block at `depth`; the last one's may be short of a block, or none."""
        if not 0 <= depth <= len(self.blocks):
            raise IndexError(f"there is no block at depth {depth}: the sequence has {len(self.blocks)} full ones")
        size_bytes = self._block_tokens * _TOKEN_BYTES
        return np.frombuffer(bytes(self._tokens[depth * size_bytes : (depth + 1) * size_bytes]), "<u4")

    def extend(self, tokens: Tokens) -> list[BlockIdentity]:
        """Append token ids (each a u32; `ValueError` otherwise) and return the blocks that they complete, in order."""
        added = little_endian_u32(tokens)
        self._tokens += added
        hashes = self._hasher.extend(np.frombuffer(added, "<u4"))
        before = len(self.blocks)
        for sequence_hash in hashes:
            self.blocks.append(
                BlockIdentity(
                    key=BlockKey(self._namespace_id, 0, sequence_hash),
                    namespace=self._namespace,
                    parent_hash=self._last_hash(),
                    prefix_hash=self.blocks[0].key.sequence_hash if self.blocks else sequence_hash,
                    depth=len(self.blocks),
                    block_tokens=self._block_tokens,
                )
            )
        return self.blocks[before:]

    def truncate(self, tokens: int) -> list[BlockIdentity]:
        """Keep the first `tokens` tokens, as if no others had come; the blocks that are full no more, in order.

        Raises `ValueError` for more tokens than there are, or a negative number.
        """
        if not 0 <= tokens <= len(self):
            raise ValueError(f"{tokens} tokens cannot be kept of {len(self)}: give a number from 0 to {len(self)}")
        kept = tokens // self._block_tokens
        cut = self.blocks[kept:]
        del self.blocks[kept:]
        del self._tokens[tokens * _TOKEN_BYTES :]
        self._hasher = self._hasher_after(self._last_hash())
        self._hasher.extend(self.tokens_of(kept))
        return cut

    def _last_hash(self) -> int:
        return self.blocks[-1].key.sequence_hash if self.blocks else 0

    def _hasher_after(self, sequence_hash: int) -> SequenceHasher:
        return SequenceHasher(self.salt, self._secret, self._block_tokens, after=sequence_hash)
