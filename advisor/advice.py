"""How large a fast volume must be, and what to let onto it, judged by a replay of what was recorded. Pure.

The model is that of two tiers (docs/policies.md): everything is in a slow volume, the fast one holds copies.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from functools import cached_property
from typing import Any

from advisor.caches import replay_cache
from advisor.errors import AdvisorError
from advisor.tiers import Costs, TierFigures, Tiering, own_eviction, replay_tiers, timed
from advisor.traces import Trace

DEFAULT_ADMISSION = "auto"
"""What is advised where it is about as good as the best: it goes on being right when the workload changes."""
CANDIDATES = (DEFAULT_ADMISSION, "touch-2", "touch-3", "always")

CURVE_SHARES = (1 / 64, 1 / 32, 1 / 16, 1 / 8, 1 / 4, 1 / 2, 1.0)
"""Capacities of the curve, of the different blocks."""
KNEE_SHARE = 0.9
"""Aimed at where nothing is asked for: so much of what an endless fast volume would serve."""

_ABOUT_AS_GOOD = 0.01
_EQUAL = 0.005
_DAY_S = 86_400.0
_PRECISION = 0.02
"""Of a capacity that is searched for."""

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

    `target`: the hit ratio aimed at, None where a capacity was given.
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

    @cached_property
    def curve(self) -> tuple[Choice, ...]:
        """The best of each capacity."""
        capacities = sorted({max(1, round(self.facts.blocks * share)) for share in CURVE_SHARES})
        return tuple(best(self.at(capacity)) for capacity in capacities)

    def at(self, capacity_blocks: int, admissions: Sequence[str] = CANDIDATES) -> tuple[Choice, ...]:
        """All admissions at one capacity; of the trace's blocks at most, more is the same."""
        blocks = min(capacity_blocks, self.facts.blocks)
        missing = [name for name in admissions if (blocks, name) not in self._choices]
        if missing:
            bound = self._run_tokens(blocks) / self.facts.input_tokens
            with ThreadPoolExecutor(2) as pool:
                for choice in pool.map(lambda name: self._choice(name, blocks, bound), missing):
                    self._choices[blocks, choice.admission] = choice
        return tuple(self._choices[blocks, name] for name in admissions)

    def reaching(self, hit_ratio: float) -> int:
        """The smallest capacity at which the best admission of its neighbourhood comes to `hit_ratio`.

        Raises `AdviceError` where none does.
        """
        enough = [choice for choice in self.curve if choice.hit_ratio >= hit_ratio]
        if not enough:
            most = max(self.curve, key=lambda choice: choice.hit_ratio)
            raise AdviceError(
                f"a hit ratio of {hit_ratio:g} is out of reach: {self.facts.seen_before:.3f} of the prompt tokens had"
                f" been seen before, {most.hit_ratio:.3f} would be served with everything kept: aim lower, or record"
                " for longer"
            )
        admission, high = enough[0].admission, enough[0].capacity_blocks
        low = max((c.capacity_blocks for c in self.curve if c.capacity_blocks < high), default=0)
        while high - low > max(1, _PRECISION * high):
            middle = (low + high) // 2
            if self.at(middle, (admission,))[0].hit_ratio >= hit_ratio:
                high = middle
            else:
                low = middle
        return high

    def _choice(self, admission: str, blocks: int, bound: float) -> Choice:
        tiering = Tiering(admission, own_eviction(admission), blocks, self._budget)
        figures: TierFigures = replay_tiers(self._timed, tiering, self._costs)
        self._progress(1)
        facts = self.facts
        return Choice(
            blocks,
            blocks * facts.block_bytes,
            admission,
            figures.fhit,
            bound,
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
            target = KNEE_SHARE * max(choice.hit_ratio for choice in sizing.curve)
        capacity_blocks = sizing.reaching(target)
    at_capacity = sizing.at(capacity_blocks)
    return Advice(sizing.facts, target, best(at_capacity), at_capacity, sizing.curve)
