"""What TensorRT-LLM's KV cache connector loads and saves, step by step. Pure.

A request's full blocks are named by their tokens, as the core names them. Blocks are loaded before the first step of a
request, behind what the GPU has already; blocks that a step fills are saved after it, once each.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

from kvbm_core.identity import BlockIdentity


class StepOfRequest(Protocol):
    """What is used of TensorRT-LLM's `RequestData`."""

    request_id: int
    new_tokens: list[int]
    new_block_ids: list[int]
    computed_position: int
    num_scheduled_tokens: int


class Growing(Protocol):
    """A sequence of tokens and the identities of its full blocks (`kvbm_core.sequence`)."""

    blocks: list[BlockIdentity]

    def extend(self, tokens: Sequence[int]) -> list[BlockIdentity]: ...

    def __len__(self) -> int: ...


class Save(NamedTuple):
    identity: BlockIdentity
    engine_block: int


class StepWork(NamedTuple):
    """`loads`: (request, its number among the blocks that were found for it, block of the engine)."""

    loads: list[tuple[int, int, int]]
    saves: list[Save]


@dataclass(slots=True)
class _Request:
    sequence: Growing
    had: int
    """Full blocks that the GPU had."""
    found: int
    """Blocks behind them that are to be loaded."""
    engine_blocks: list[int] = field(default_factory=list)
    tokens_told: int = 0
    offered: int = 0
    """Blocks that need no save any more, from the root on."""


class TrtllmPlan:
    """The requests of one engine. Not thread-safe."""

    def __init__(self, block_tokens: int) -> None:
        self._block_tokens = block_tokens
        self._requests: dict[int, _Request] = {}

    def wanted(self, request_id: int, sequence: Growing, computed_tokens: int) -> list[BlockIdentity]:
        """Blocks to look for: behind what the GPU has, and short of the last token, which must be computed.

        Nothing where the GPU has a part of a block: it would be loaded over what is there.
        """
        had, rest = divmod(computed_tokens, self._block_tokens)
        self._requests[request_id] = _Request(sequence, had, 0, offered=had)
        if rest:
            return []
        return sequence.blocks[had : (len(sequence) - 1) // self._block_tokens]

    def found(self, request_id: int, count: int) -> int:
        """The first `count` of the wanted blocks are at hand; the tokens that they make."""
        request = self._requests[request_id]
        request.found = count
        request.offered = request.had + count
        return count * self._block_tokens

    def step(self, starting: Sequence[StepOfRequest], going_on: Sequence[StepOfRequest]) -> StepWork:
        """A request that nobody asked `wanted` for is left alone: its tokens alone may not say what its blocks are."""
        work = StepWork([], [])
        for each in starting:
            if each.request_id not in self._requests:
                continue
            self._advance(each, work)
            request = self._requests[each.request_id]
            blocks = request.engine_blocks[request.had : request.had + request.found]
            work.loads.extend((each.request_id, number, block) for number, block in enumerate(blocks))
        for each in going_on:
            if each.request_id in self._requests:
                self._advance(each, work)
        return work

    def finished(self, request_id: int) -> None:
        self._requests.pop(request_id, None)

    def _advance(self, step: StepOfRequest, work: StepWork) -> None:
        """Releases differ in whether `computed_position` counts loaded tokens. Where it does not, a block that this
        step fills is saved after the next one; never before it is computed."""
        request = self._requests[step.request_id]
        request.tokens_told += len(step.new_tokens)
        untold = request.tokens_told - len(request.sequence)
        if untold > 0:
            request.sequence.extend(step.new_tokens[len(step.new_tokens) - untold :])
        request.engine_blocks += step.new_block_ids
        computed = min(step.computed_position + step.num_scheduled_tokens, len(request.sequence))
        end = min(computed // self._block_tokens, len(request.sequence.blocks), len(request.engine_blocks))
        for number in range(request.offered, end):
            work.saves.append(Save(request.sequence.blocks[number], request.engine_blocks[number]))
        request.offered = max(request.offered, end)
