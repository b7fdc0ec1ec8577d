"""Stores and removes of the host's blocks in vLLM's own stream, for an engine whose core publishes nothing itself."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

from vllm.distributed.kv_events import MEDIUM_CPU, BlockRemoved, BlockStored
from vllm.v1.core.kv_cache_utils import maybe_convert_block_hash

from kvbm_core.connectors.engine_blocks import hash_of_digest
from kvbm_core.hooks import BlockStep, LifeStep

if TYPE_CHECKING:
    from vllm.distributed.kv_events import KVCacheEvent
    from vllm.v1.request import Request

_GONE = frozenset({LifeStep.EVICTED, LifeStep.FORGOTTEN})


class _Named(NamedTuple):
    """What vLLM's events say of a block, which only its request knows."""

    digest: bytes
    parent: bytes | None
    tokens: list[int]
    adapter: str | None


class HandedBack:
    """`name` and `finished` are the scheduler's thread's, `on_step` any thread's, `take` the scheduler's again."""

    def __init__(self, block_tokens: int) -> None:
        self._block_tokens = block_tokens
        self._named: dict[int, _Named] = {}
        self._placed: set[int] = set()
        self._events: deque[KVCacheEvent] = deque()

    def name(self, request: Request, start: int) -> None:
        """A request's full blocks from number `start` on: their events can be told from now on."""
        digests: Sequence[bytes] = request.block_hashes
        adapter = None if request.lora_request is None else request.lora_request.lora_name
        for number in range(start, len(digests)):
            first = number * self._block_tokens
            self._named[hash_of_digest(digests[number])] = _Named(
                digests[number],
                digests[number - 1] if number else None,
                list(request.all_token_ids[first : first + self._block_tokens]),
                adapter,
            )

    def finished(self, request: Request) -> None:
        """Forget the request's blocks that are not in the host."""
        for digest in request.block_hashes:
            sequence_hash = hash_of_digest(digest)
            if sequence_hash not in self._placed:
                self._named.pop(sequence_hash, None)

    def on_step(self, step: BlockStep) -> None:
        """A hook of the host's pool."""
        if step.identity is None:
            return
        sequence_hash = step.identity.key.sequence_hash
        if step.step is LifeStep.REGISTERED:
            self._stored(sequence_hash)
        elif step.step in _GONE and sequence_hash in self._placed:
            self._placed.discard(sequence_hash)
            gone = self._named.pop(sequence_hash)
            self._events.append(BlockRemoved([maybe_convert_block_hash(gone.digest)], MEDIUM_CPU, 0))

    def take(self) -> list[KVCacheEvent]:
        """What happened since the last time, in order."""
        return [self._events.popleft() for _ in range(len(self._events))]

    def _stored(self, sequence_hash: int) -> None:
        named = self._named.get(sequence_hash)
        if named is None or sequence_hash in self._placed:
            return
        self._placed.add(sequence_hash)
        self._events.append(
            BlockStored(
                block_hashes=[maybe_convert_block_hash(named.digest)],
                parent_block_hash=None if named.parent is None else maybe_convert_block_hash(named.parent),
                token_ids=named.tokens,
                block_size=self._block_tokens,
                lora_id=None,
                medium=MEDIUM_CPU,
                lora_name=named.adapter,
                group_idx=0,
            )
        )
