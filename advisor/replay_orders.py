"""What a replay is asked to run, and the command line that runs it. Pure."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Self

from pydantic import BaseModel, ConfigDict, Field, model_validator

from advisor.caches import POLICIES, require_policy
from advisor.errors import AdvisorError
from advisor.recording_views import NAME_PATTERN
from advisor.replay_tiers import DEFAULT_ADMISSIONS, tierings
from advisor.tiers import ADMISSIONS, EVICTIONS

RUNS_MAX = 64
"""Results of one replay."""
DEFAULT_POLICIES = ("lru", "s3-fifo")
_EACH_MAX = 16

Words = Annotated[list[Annotated[str, Field(min_length=1, max_length=32)]], Field(max_length=_EACH_MAX)]
Blocks = Annotated[list[Annotated[int, Field(ge=1, le=2**31 - 1)]], Field(max_length=_EACH_MAX)]
Budgets = Annotated[list[Annotated[float, Field(ge=0, le=1e6)]], Field(max_length=_EACH_MAX)]


class ReplayOrder(BaseModel):
    """One tier: every policy at every capacity. With `fast_blocks` two: every admission with every eviction, size and
    budget."""

    model_config = ConfigDict(
        extra="forbid",
        frozen=True,
        json_schema_extra={
            "examples": [
                {"recording": "evening", "policies": ["lru", "s3-fifo"], "capacities": [10_000, 50_000]},
                {"recording": "evening", "fast_blocks": [10_000], "admissions": ["auto", "touch-2"], "budgets": [0.1]},
            ]
        },
    )

    recording: str = Field(pattern=NAME_PATTERN, description="Name of a recording that is whole.")
    policies: Words = Field(
        default=[], description=f"Of {', '.join(sorted(POLICIES))}; none: {', '.join(DEFAULT_POLICIES)}."
    )
    capacities: Blocks = Field(default=[], description="Blocks that the cache holds; none: `kvadvisor replay`'s own.")
    fast_blocks: Blocks = Field(default=[], description="Blocks that the fast one of two tiers holds.")
    admissions: Words = Field(
        default=[], description=f"To the fast tier, of {', '.join(ADMISSIONS)}; none: {', '.join(DEFAULT_ADMISSIONS)}."
    )
    evictions: Words = Field(default=[], description=f"From it, of {', '.join(EVICTIONS)}; none: the admission's own.")
    budgets: Budgets = Field(default=[], description="Moves for each different block; none: unlimited.")
    advise: bool = Field(default=True, description="Say what to choose, too, as `kvadvisor advise` does.")

    @model_validator(mode="after")
    def _possible(self) -> Self:
        of_one_tier = {"policies": self.policies, "capacities": self.capacities}
        of_two_tiers = {"admissions": self.admissions, "evictions": self.evictions, "budgets": self.budgets}
        wrong = [name for name, given in (of_one_tier if self.fast_blocks else of_two_tiers).items() if given]
        if wrong and self.fast_blocks:
            raise ValueError(f"{wrong[0]} is of one tier and fast_blocks of two: leave one of them out")
        if wrong:
            raise ValueError(f"{wrong[0]} is of two tiers: give fast_blocks too, the sizes of the fast one")
        try:
            runs = self.runs
        except AdvisorError as error:
            raise ValueError(str(error)) from error
        if runs > RUNS_MAX:
            raise ValueError(f"{runs} results are asked for, and at most {RUNS_MAX} at once: ask for fewer")
        return self

    @property
    def runs(self) -> int:
        """Results that it gives; of the command's own capacities, for one of them. Raises `AdvisorError`."""
        if self.fast_blocks:
            admissions = self.admissions or list(DEFAULT_ADMISSIONS)
            return len(tierings(self.fast_blocks, admissions, self.evictions, self.budgets))
        policies, capacities = self.policies or list(DEFAULT_POLICIES), self.capacities or [1]
        for policy in policies:
            for blocks in capacities:
                require_policy(policy, blocks)
        return len(policies) * len(capacities)


def replay_arguments(order: ReplayOrder, recording: Path, results: Path, report: Path) -> list[str]:
    """`kvadvisor …`: writes `results` after each of them, and the `report` at the end."""
    arguments = ["replay", str(recording), "--json", str(results), "--resume", "--html", str(report)]
    options: dict[str, list[str] | list[int] | list[float]] = {
        "--fast": order.fast_blocks,
        "--admission": order.admissions,
        "--eviction": order.evictions,
        "--budget": order.budgets,
        "--policy": [] if order.fast_blocks else order.policies or list(DEFAULT_POLICIES),
        "--capacity": order.capacities,
    }
    for option, values in options.items():
        for value in values:
            arguments += [option, str(value)]
    return arguments


def advise_arguments(recording: Path, advice: Path) -> list[str]:
    return ["advise", str(recording), "--json", str(advice)]
