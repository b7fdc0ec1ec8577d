"""What a scenario is: a seeded list of requests and mishaps, and the setups that it is served with. Pure."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from kvbm_core.config import OffloadPolicyName, ReuseName
from kvbm_core.scenarios.machine_model import MachineModel

TokenIds = npt.NDArray[np.uint32]
TOKEN_IDS = 128_000


@dataclass(frozen=True, slots=True)
class Request:
    """A prompt that comes at `at_s`. `kind` names the row that it is reported in."""

    at_s: float
    kind: str
    prompt: TokenIds
    answer_tokens: int = 32


@dataclass(frozen=True, slots=True)
class Restart:
    """The worker dies: device and host memory are gone, volumes lie as they were. It serves again `takes_s` later."""

    at_s: float
    takes_s: float


@dataclass(frozen=True, slots=True)
class TierVanishes:
    """Every read and write of the remote tier fails from now on."""

    at_s: float


@dataclass(frozen=True, slots=True)
class TierReturns:
    """The remote tier works again, with what it held."""

    at_s: float


Step = Request | Restart | TierVanishes | TierReturns


@dataclass(frozen=True, kw_only=True)
class Setup:
    """One configuration of the hierarchy. Tiers of 0 blocks are not there."""

    name: str
    device_blocks: int
    host_blocks: int = 0
    disk_blocks: int = 0
    remote_blocks: int = 0
    reuse: ReuseName = "lru"
    offload_policy: OffloadPolicyName = "presence"
    spared: bool = False
    """Steps that are no requests do not happen to it: what the others are compared with."""


@dataclass(frozen=True, kw_only=True)
class Scenario:
    """`says` is a line for a person. `steps` gives the same list for the same seed, in order of time."""

    name: str
    says: str
    limit_ms: float
    """A request is a useful completion when its first token came within this."""
    setups: tuple[Setup, ...]
    steps: Callable[[int], Sequence[Step]]
    model: MachineModel = field(default_factory=MachineModel)


class Prompts:
    """Seeded prompts: documents, which are the same whenever asked for, and text that comes once."""

    def __init__(self, seed: int) -> None:
        self.random = np.random.default_rng(seed)
        self._documents_seed = int(self.random.integers(1 << 32))

    def document(self, number: int, tokens: int) -> TokenIds:
        """The first `tokens` of one document."""
        return _token_ids(np.random.default_rng((self._documents_seed, number)), tokens)

    def once(self, tokens: int) -> TokenIds:
        """Text that nobody asks for again."""
        return _token_ids(self.random, tokens)

    def about(self, number: int, tokens: int, question_tokens: int) -> TokenIds:
        """A document with a question behind it that comes once."""
        return np.concatenate([self.document(number, tokens), self.once(question_tokens)])

    def some_document(self, documents: int, skew: float) -> int:
        """One of `documents`, the first the likeliest: Zipf's law with exponent `skew`."""
        weights = np.arange(1, documents + 1, dtype=np.float64) ** -skew
        return int(self.random.choice(documents, p=weights / weights.sum()))

    def pause_s(self, mean_s: float) -> float:
        """Until the next of arrivals that know nothing of each other."""
        return float(self.random.exponential(mean_s))


def _token_ids(random: np.random.Generator, count: int) -> TokenIds:
    return random.integers(TOKEN_IDS, size=count, dtype=np.uint32)
