"""What the policies are to reach in replay: which replays that takes, and the figures that they come to. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from advisor.tiers import Costs, Tiering, TimedTrace, own_eviction, replay_tiers, scan_survival
from event_plane.figures import Figure, at_least, at_most

CONVERSATION = "conversation"
CONVERSATION_FAST_BLOCKS = 5_859
BUDGETS = (0.02, 0.05, 0.10, 0.25, 0.50, None)
BEST_LINES = (0.089, 0.120, 0.153, 0.183, 0.186, 0.189)
"""The best line of the reference's table at each budget; the goal is within .005 of it."""
SECOND_HALF = (0.10, 0.138, 0.171, 0.205, 0.21, 0.21)
LINE_TOLERANCE = 0.005
SAVED_MOVES = 0.67
"""Over the second touch's, where moves are to be saved."""

OTHER_BUDGETS = (0.02, 0.10, 0.25, None)
OTHER_TOLERANCE = 0.01
FIXED = (
    ("always", "lru"),
    ("touch-2", "lfuda-leaf"),
    ("touch-2", "lru-leaf"),
    ("touch-3", "lru-leaf"),
    ("ghost", "lru-leaf"),
    ("ranked", "value"),
)
SIGNAL_BUDGETS = (0.05, 0.10, 0.25, None)
BY_HASHES, BY_PRIORITY, BY_TURN = "hashes", "priority", "turn"

Budget = float | None


@dataclass(frozen=True, slots=True)
class Workload:
    """`told`: its requests, with what policies may go by beside hashes: nothing, priorities, a session's turn."""

    told: Mapping[str, TimedTrace]
    fast_blocks: int


@dataclass(frozen=True, slots=True)
class Job:
    """One replay, and what of it is wanted."""

    workload: str
    tiering: Tiering
    wanted: Literal["whole", "second half", "scan survival"] = "whole"
    told: str = BY_HASHES


@dataclass(frozen=True, slots=True)
class Outcome:
    """`share`: the fhit of what is counted, or what of the hot blocks survived the scan."""

    share: float
    moves_per_block: float


Outcomes = Mapping[Job, Outcome]


def outcome_of(workloads: Mapping[str, Workload], job: Job) -> Outcome:
    trace = workloads[job.workload].told[job.told]
    if job.wanted == "scan survival":
        return Outcome(scan_survival(trace, job.tiering, Costs()), 0.0)
    counted_from = len(trace.ends) // 2 if job.wanted == "second half" else 0
    found = replay_tiers(trace, job.tiering, Costs(), counted_from=counted_from)
    return Outcome(found.fhit, found.moves_per_block)


def fixed(fast_blocks: int, budget: Budget) -> list[Tiering]:
    return [Tiering(admission, eviction, fast_blocks, budget) for admission, eviction in FIXED]


def auto(fast_blocks: int, budget: Budget, *, save_moves: bool = False) -> Tiering:
    return Tiering("auto", own_eviction("auto"), fast_blocks, budget, save_moves)


SECOND_TOUCH = Tiering("touch-2", "lfuda-leaf", CONVERSATION_FAST_BLOCKS, None)


@dataclass(frozen=True, slots=True)
class OnConversation:
    """`equal_budget`: moves a block that the second touch took without a limit."""

    budgets: Sequence[Budget]
    equal_budget: float

    def jobs(self) -> list[Job]:
        found = [Job(CONVERSATION, tiering) for budget in self.budgets for tiering in self._fixed(budget)]
        for budget in self.budgets:
            found += [self._auto(budget), Job(CONVERSATION, self._auto(budget).tiering, "second half")]
        return [*found, self._equal(), self._saving(), *(self._scan(budget) for budget in self.budgets)]

    def figures(self, outcomes: Outcomes, note: str) -> Iterator[Figure]:
        """`note`: why there are no outcomes, where there are none."""
        for budget in self.budgets:
            yield from self._at(budget, outcomes, note)
        second, equal, saving = (
            outcomes.get(job) for job in (Job(CONVERSATION, SECOND_TOUCH), self._equal(), self._saving())
        )
        name = "auto with no more moves than the 2nd touch's: fhit less its"
        yield at_least(name, equal.share - second.share if equal and second else None, "", -0.0005, note)
        name = "auto saving moves: fhit less the 2nd touch's"
        yield at_least(name, saving.share - second.share if saving and second else None, "", -LINE_TOLERANCE, note)
        ratio = saving.moves_per_block / second.moves_per_block if saving and second else None
        yield at_most("auto saving moves: moves over the 2nd touch's", ratio, "×", SAVED_MOVES, note)

    def _at(self, budget: Budget, outcomes: Outcomes, note: str) -> Iterator[Figure]:
        at, name = BUDGETS.index(budget), budget_text(budget)
        for tiering in self._fixed(budget):
            line = f"{tiering.admission}, {tiering.eviction}"
            if found := outcomes.get(Job(CONVERSATION, tiering)):
                yield Figure(f"{line} at {name}: fhit", found.share, "").placed(line, name)
        whole = outcomes.get(self._auto(budget))
        late = outcomes.get(Job(CONVERSATION, self._auto(budget).tiering, "second half"))
        goal = BEST_LINES[at] - LINE_TOLERANCE
        share = whole.share if whole else None
        yield at_least(f"auto at {name}: fhit", share, "", round(goal, 4), note).placed("auto", name)
        if whole:
            yield Figure(f"auto at {name}: moves a block", whole.moves_per_block, "").placed("auto, moves", name)
        share = late.share if late else None
        yield at_least(f"auto at {name}: second half", share, "", SECOND_HALF[at], note).placed("auto, 2nd half", name)
        survived = outcomes.get(self._scan(budget))
        share = survived.share if survived else None
        yield at_least(f"auto at {name}: scan survival", share, "", 1.0, note).placed("auto, scan survival", name)

    def _fixed(self, budget: Budget) -> list[Tiering]:
        return fixed(CONVERSATION_FAST_BLOCKS, budget)

    def _auto(self, budget: Budget) -> Job:
        return Job(CONVERSATION, auto(CONVERSATION_FAST_BLOCKS, budget))

    def _equal(self) -> Job:
        return Job(CONVERSATION, auto(CONVERSATION_FAST_BLOCKS, self.equal_budget))

    def _saving(self) -> Job:
        return Job(CONVERSATION, auto(CONVERSATION_FAST_BLOCKS, None, save_moves=True))

    def _scan(self, budget: Budget) -> Job:
        return Job(CONVERSATION, auto(CONVERSATION_FAST_BLOCKS, budget), "scan survival")


@dataclass(frozen=True, slots=True)
class OnAnother:
    """A workload where `auto` must not lose to whichever fixed policy is best there."""

    name: str
    fast_blocks: int
    budgets: Sequence[Budget]

    def jobs(self) -> list[Job]:
        return [
            Job(self.name, tiering)
            for budget in self.budgets
            for tiering in (*fixed(self.fast_blocks, budget), auto(self.fast_blocks, budget))
        ]

    def figures(self, outcomes: Outcomes, note: str) -> Iterator[Figure]:
        for budget in self.budgets:
            own = outcomes.get(Job(self.name, auto(self.fast_blocks, budget)))
            others = {
                tiering: outcomes[job]
                for tiering in fixed(self.fast_blocks, budget)
                if (job := Job(self.name, tiering)) in outcomes
            }
            name, gain = f"{self.name} at {budget_text(budget)}", None
            if own and others:
                best = max(others, key=lambda tiering: others[tiering].share)
                gain = own.share - others[best].share
                name = f"{name}: auto {own.share:.3f} less {best.admission}"
            else:
                name = f"{name}: auto less the best fixed"
            yield at_least(name, gain, "", -OTHER_TOLERANCE, note)


@dataclass(frozen=True, slots=True)
class OnSignals:
    """What priorities, and a session's turn, add to hashes, on the second half."""

    name: str
    fast_blocks: int
    budgets: Sequence[Budget]

    def jobs(self) -> list[Job]:
        return [self._job(budget, told) for budget in self.budgets for told in (BY_HASHES, BY_PRIORITY, BY_TURN)]

    def figures(self, outcomes: Outcomes) -> Iterator[Figure]:
        for budget in self.budgets:
            plain = outcomes[self._job(budget, BY_HASHES)].share
            yield Figure(f"{self.name} at {budget_text(budget)}: auto by hashes alone, second half", plain, "")
            for told in (BY_PRIORITY, BY_TURN):
                gain = outcomes[self._job(budget, told)].share - plain
                yield Figure(f"{self.name} at {budget_text(budget)}: a request's {told} adds", gain, "")

    def _job(self, budget: Budget, told: str) -> Job:
        return Job(self.name, auto(self.fast_blocks, budget), "second half", told)


def budget_text(budget: Budget) -> str:
    return "no limit" if budget is None else f"{budget:.2f}"
