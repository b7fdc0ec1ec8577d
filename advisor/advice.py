"""How large a fast volume must be, and what to let onto it, judged by a replay of what was recorded. Pure.

The model is that of two tiers (docs/policies.md): everything is in a slow volume, the fast one holds copies.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from typing import Any

from advisor.caches import replay_cache
from advisor.errors import AdvisorError
from advisor.tiers import Costs, TierFigures, Tiering, own_eviction, replay_tiers, timed
from advisor.traces import Trace

DEFAULT_ADMISSION = "auto"
"""What is advised where it is about as good as the best: it goes on being right when the workload changes."""
FIXED = ("touch-2", "touch-3", "always")
"""Tried at every capacity of the curve: a replay of the default, which learns, takes a hundred times as long."""
CANDIDATES = (DEFAULT_ADMISSION, *FIXED)

CURVE_SHARES = (1 / 64, 1 / 32, 1 / 16, 1 / 8, 1 / 4, 1 / 2, 1.0)
"""Capacities of the curve, of the different blocks."""
KNEE_SHARE = 0.9
"""Aimed at where nothing is asked for: so much of what an endless fast volume would serve."""

_ABOUT_AS_GOOD = 0.01
_EQUAL = 0.005
_DAY_S = 86_400.0
_PRECISION = 0.02
"""Of a capacity that is searched for."""
_TRIES_MAX = 3
"""Of the default, to find where it reaches a target, after the first."""
STEPS_MAX = 4 + _TRIES_MAX
"""Progress: the fixed ones' curve is one step, and so is each replay of the default."""

Progress = Callable[[int], None]


class AdviceError(AdvisorError):
    """A question that this recording cannot answer."""


@dataclass(frozen=True, slots=True)
class Choice:
    """One admission at one capacity. `hit_ratio`: prompt tokens read from the fast volume over all prompt tokens.

    `bound`: the most that any policy could, which knew the future. `moves_per_block`: over different blocks.
    """

    capacity_blocks: int
    capacity_bytes: int
    admission: str
    hit_ratio: float
    bound: float
    moves_per_block: float
    written_bytes_per_day: float
    first_token_s: float


@dataclass(frozen=True, slots=True)
class WorkloadFacts:
    """What was replayed. `seen_before`: share of the prompt tokens that some earlier request had computed."""

    requests: int
    span_s: float
    input_tokens: int
    blocks: int
    block_bytes: int
    seen_before: float
    first_token_s_without: float


@dataclass(frozen=True, slots=True)
class Advice:
    """`chosen` is one of `at_capacity`, all admissions there; `curve` has the best of each capacity, rising.

    The default is tried at that capacity and at those of the curve next to it. `target`: the hit ratio aimed at, None
    where a capacity was given.
    """

    workload: WorkloadFacts
    target: float | None
    chosen: Choice
    at_capacity: tuple[Choice, ...]
    curve: tuple[Choice, ...]

    def as_json(self) -> dict[str, Any]:
        return asdict(self)


class Sizing:
    """Replays `trace` at whatever capacity is asked for, each once. `budget`: moves for each different block."""

    def __init__(
        self, trace: Trace, costs: Costs, block_bytes: int, write_bytes_per_s: float | None, progress: Progress
    ) -> None:
        """Raises `AdviceError` for a trace too short to judge by."""
        requests = trace.as_requests()
        span_s = (trace.timestamps_ms[-1] - trace.timestamps_ms[0]) / 1000 if trace.requests else 0.0
        if not requests.blocks or span_s <= 0:
            raise AdviceError("there are no two requests at different times in it: record for longer")
        self._requests = requests
        self._timed = timed(requests, [ms / 1000 for ms in trace.timestamps_ms])
        self._costs = costs
        self._progress = progress
        self._choices: dict[tuple[int, str], Choice] = {}
        tokens = int(requests.input_tokens.sum())
        self.facts = WorkloadFacts(
            requests.requests,
            span_s,
            tokens,
            requests.blocks,
            block_bytes,
            self._run_tokens(requests.blocks) / tokens if tokens else 0.0,
            tokens / requests.requests / costs.prefill_tokens_per_s,
        )
        new_bytes_per_s = requests.blocks * block_bytes / span_s
        self._budget = None if write_bytes_per_s is None else write_bytes_per_s / new_bytes_per_s

    @property
    def capacities(self) -> list[int]:
        """Of the curve, rising."""
        return sorted({max(1, round(self.facts.blocks * share)) for share in CURVE_SHARES})

    def curve(self) -> tuple[Choice, ...]:
        """The best of each capacity, of what has been tried there: the fixed ones at least."""
        for capacity in self.capacities:
            self.at(capacity, FIXED)
        return tuple(
            best([choice for (blocks, _), choice in self._choices.items() if blocks == capacity])
            for capacity in self.capacities
        )

    def at(self, capacity_blocks: int, admissions: Sequence[str] = CANDIDATES) -> tuple[Choice, ...]:
        """These at one capacity; of the trace's blocks at most, more is the same."""
        blocks = min(capacity_blocks, self.facts.blocks)
        self.learn([blocks] if DEFAULT_ADMISSION in admissions else [])
        for name in admissions:
            if (blocks, name) not in self._choices:
                self._choices[blocks, name] = self._choice(name, blocks)
        return tuple(self._choices[blocks, name] for name in admissions)

    def learn(self, capacities: Sequence[int]) -> None:
        """Try the default at each of them, side by side."""
        missing = [blocks for blocks in dict.fromkeys(capacities) if (blocks, DEFAULT_ADMISSION) not in self._choices]
        with ThreadPoolExecutor(os.cpu_count() or 1) as pool:
            for choice in pool.map(lambda blocks: self._choice(DEFAULT_ADMISSION, blocks), missing):
                self._choices[choice.capacity_blocks, DEFAULT_ADMISSION] = choice
                self._progress(1)

    def beside(self, capacity_blocks: int) -> list[int]:
        """The next smaller and the next larger capacity of the curve."""
        smaller = [each for each in self.capacities if each < capacity_blocks * 0.9]
        larger = [each for each in self.capacities if each > capacity_blocks * 1.1]
        return [*smaller[-1:], *larger[:1]]

    def reaching(self, hit_ratio: float) -> int:
        """The smallest capacity at which the best admission comes to `hit_ratio`.

        The default's is taken where it is about as good: begun where the fixed ones reach it, narrowed by a few tries.
        Raises `AdviceError` where none does.
        """
        if self._fixed(self.facts.blocks) < hit_ratio:
            self.learn([self.facts.blocks])
        if max(choice.hit_ratio for choice in self.curve()) < hit_ratio:
            raise AdviceError(
                f"a hit ratio of {hit_ratio:g} is out of reach: {self.facts.seen_before:.3f} of the prompt tokens had"
                f" been seen before, {max(choice.hit_ratio for choice in self.curve()):.3f} would be served with"
                " everything kept: aim lower, or record for longer"
            )
        fixed = self._fixed_reaching(hit_ratio)
        self.learn([fixed, *self.beside(fixed)])
        if self._default(fixed) < self._fixed(fixed) - _ABOUT_AS_GOOD:
            return fixed
        for _ in range(_TRIES_MAX):
            guess = self._between(hit_ratio)
            if guess is None:
                break
            self.learn([guess])
        return min((blocks for blocks, found in self._learned() if found >= hit_ratio), default=fixed)

    def _learned(self) -> list[tuple[int, float]]:
        """Where the default has been tried, and what it found, by capacity."""
        return sorted((blocks, c.hit_ratio) for (blocks, name), c in self._choices.items() if name == DEFAULT_ADMISSION)

    def _between(self, hit_ratio: float) -> int | None:
        """Where the default is to be tried next for the least that reaches `hit_ratio`; None: near enough."""
        reaching = [each for each in self._learned() if each[1] >= hit_ratio]
        if not reaching:
            tried = self._learned()[-1][0]
            return next((each for each in self.capacities if each > tried), None)
        high, found = reaching[0]
        short = [each for each in self._learned() if each[0] < high]
        if not short:
            return next((each for each in reversed(self.capacities) if each < high), None)
        low, missed = short[-1]
        if high - low <= max(1, _PRECISION * high):
            return None
        share = min(0.9, max(0.1, (hit_ratio - missed) / max(found - missed, 1e-9)))
        return min(high - 1, max(low + 1, round(low * math.pow(high / low, share))))

    def _fixed(self, blocks: int) -> float:
        return max(choice.hit_ratio for choice in self.at(blocks, FIXED))

    def _default(self, blocks: int) -> float:
        return self.at(blocks, (DEFAULT_ADMISSION,))[0].hit_ratio

    def _fixed_reaching(self, hit_ratio: float) -> int:
        """The smallest capacity at which they do, within `_PRECISION` of it; all blocks where they never do."""
        high = next((each for each in self.capacities if self._fixed(each) >= hit_ratio), self.facts.blocks)
        low = max((capacity for capacity in self.capacities if capacity < high), default=0)
        while high - low > max(1, _PRECISION * high):
            middle = (low + high) // 2
            if self._fixed(middle) >= hit_ratio:
                high = middle
            else:
                low = middle
        return high

    def _choice(self, admission: str, blocks: int) -> Choice:
        tiering = Tiering(admission, own_eviction(admission), blocks, self._budget)
        figures: TierFigures = replay_tiers(self._timed, tiering, self._costs)
        facts = self.facts
        return Choice(
            blocks,
            blocks * facts.block_bytes,
            admission,
            figures.fhit,
            self._run_tokens(blocks) / facts.input_tokens,
            figures.moves_per_block,
            figures.moves * facts.block_bytes / facts.span_s * _DAY_S,
            figures.first_token_s.mean,
        )

    def _run_tokens(self, blocks: int) -> int:
        return replay_cache(self._requests, "belady-leaf", blocks).figures.run_tokens


def best(choices: Sequence[Choice]) -> Choice:
    """The default where it is about as good as any; else, of those that serve as much, the one that writes least."""
    most = max(choice.hit_ratio for choice in choices)
    for choice in choices:
        if choice.admission == DEFAULT_ADMISSION and choice.hit_ratio >= most - _ABOUT_AS_GOOD:
            return choice
    return min((c for c in choices if c.hit_ratio >= most - _EQUAL), key=lambda choice: choice.moves_per_block)


def advise_on(sizing: Sizing, *, target: float | None = None, capacity_blocks: int | None = None) -> Advice:
    """For a capacity, else for a target; for neither, the capacity from which more brings little.

    Raises `AdviceError` for a target out of reach.
    """
    if capacity_blocks is None:
        if target is None:
            target = KNEE_SHARE * max(choice.hit_ratio for choice in sizing.curve())
        capacity_blocks = sizing.reaching(target)
    else:
        sizing.learn([min(capacity_blocks, sizing.facts.blocks), *sizing.beside(capacity_blocks)])
    at_capacity = sizing.at(capacity_blocks)
    return Advice(sizing.facts, target, best(at_capacity), at_capacity, sizing.curve())
