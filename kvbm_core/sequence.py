"""From a request's tokens to the identities of its full blocks."""

from __future__ import annotations

from event_plane.hashing import SequenceHasher, Tokens
from kvbm_core.config import KvbmConfig
from kvbm_core.identity import BlockIdentity
from storage_agent.port import BlockKey


class TokenBlockSequence:
    """One growing sequence of a tenant. Not thread-safe; tokens short of a block wait for the next `extend`."""

    def __init__(self, config: KvbmConfig, tenant: str, tokens: Tokens = ()) -> None:
        self._namespace = config.namespace_of(tenant)
        self._namespace_id = self._namespace.namespace_id
        self._block_tokens = config.page_tokens
        self._hasher = SequenceHasher(config.salt_of(tenant), config.secret_of(tenant), config.page_tokens)
        self.blocks: list[BlockIdentity] = []
        """Every full block so far, root first."""
        self.extend(tokens)

    def extend(self, tokens: Tokens) -> list[BlockIdentity]:
        """Append token ids (each a u32; `ValueError` otherwise) and return the blocks that they complete, in order."""
        completed = []
        for sequence_hash in self._hasher.extend(tokens):
            first = self.blocks[0].key.sequence_hash if self.blocks else sequence_hash
            block = BlockIdentity(
                key=BlockKey(self._namespace_id, 0, sequence_hash),
                namespace=self._namespace,
                parent_hash=self.blocks[-1].key.sequence_hash if self.blocks else 0,
                prefix_hash=first,
                depth=len(self.blocks),
                block_tokens=self._block_tokens,
            )
            self.blocks.append(block)
            completed.append(block)
        return completed
