"""What the half of a connector that schedules tells the half that moves bytes, for one step of the engine. Pure."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum

from kvbm_core.identity import BlockIdentity


class LoadMode(StrEnum):
    ASYNC = "async"
    """A request waits outside of steps until its blocks are there; nobody else has them before."""
    LAYERWISE = "layerwise"
    """A request's first step waits for each layer when the model comes to it."""


@dataclass(frozen=True, slots=True)
class Load:
    """Host blocks to copy into a request's, one for one. `ticket` is what the host holds them under."""

    ticket: int
    request: str
    host_blocks: tuple[int, ...]
    engine_blocks: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Save:
    """The engine's blocks that this step completes, or that it had, and what they hold."""

    identities: tuple[BlockIdentity, ...]
    engine_blocks: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class StepPlan:
    """Loads that begin with the step, and saves after its layers. `is_idle`: the step computes nothing."""

    loads: tuple[Load, ...] = ()
    saves: tuple[Save, ...] = ()
    is_idle: bool = False


@dataclass(slots=True)
class RequestBlocks:
    """One request as the schedule sees it: its chain of full blocks, how many of them were offered to be saved, and
    how many the engine had by itself when it last asked."""

    chain: list[BlockIdentity] = field(default_factory=list)
    offered: int = 0
    had: int = 0

    def offer(self, full: int, engine_blocks: list[int]) -> Save | None:
        """The blocks that are full after this step and were not offered yet. `engine_blocks`: the request's, in order.

        None where there are none.
        """
        end = min(full, len(self.chain), len(engine_blocks))
        start, self.offered = self.offered, max(self.offered, end)
        if start >= end:
            return None
        return Save(tuple(self.chain[start:end]), tuple(engine_blocks[start:end]))


def loadable_blocks(tokens: int, block_tokens: int) -> int:
    """Leading blocks of a request that may be loaded: an engine must compute its last token, or has no answer."""
    return max(0, tokens - 1) // block_tokens
