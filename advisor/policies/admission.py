"""Our admissions, each a few lines over `rules`: what a block must have done to come to a faster volume."""

from __future__ import annotations

import math
from dataclasses import dataclass

from advisor.policies.policy import Candidate, Policy, Scene, Verdict
from advisor.policies.rules.admission import remembered, touched_enough
from advisor.policies.rules.score import RANK_PERIOD_S, RANK_TOUCHES_MIN
from advisor.policies.rules.worth import MARGIN, protected, worth_swapping
from advisor.tiers.duelling import BY_WORTH, FIRST, GHOSTS, RANKED, SECOND, THIRD
from advisor.wording import duration_text, ordinal

KEEPS_USED_TWICE = "{} keeps blocks used twice from those used once"


def history_of(candidate: Candidate, scene: Scene) -> str:
    """`3rd touch in 40 s`; `3rd touch` where nobody told when the first one was."""
    block = candidate.block
    if block.first_touch_us == 0:
        return f"{ordinal(block.touches)} touch"
    since_s = max(0.0, scene.now_s - block.first_touch_us / 1e6)
    return f"{ordinal(block.touches)} touch in {duration_text(since_s)}"


@dataclass(frozen=True, slots=True)
class FromTouch:
    """From the `threshold`-th touch, most touched first; 1 is always."""

    threshold: int
    eviction: str
    period_s: float = 0.0
    hurries: bool = True
    duels: bool = False
    replaces_better: bool = True

    def admit(self, candidate: Candidate, scene: Scene) -> Verdict:
        touches = candidate.block.touches
        if not touched_enough(touches, self.threshold):
            return Verdict(False, 0.0, f"{ordinal(touches)} touch of {self.threshold} needed")
        return Verdict(True, float(touches), history_of(candidate, scene))


@dataclass(frozen=True, slots=True)
class Ghost:
    """The second time within as many uses as the volume has blocks."""

    eviction: str = "lru-leaf"
    period_s: float = 0.0
    hurries: bool = True
    duels: bool = False
    replaces_better: bool = True

    def admit(self, candidate: Candidate, scene: Scene) -> Verdict:
        if not remembered(scene.turn, candidate.out_turn, scene.fast_blocks):
            return Verdict(False, 0.0, f"not kept out within the last {scene.fast_blocks} uses: the next time it comes")
        uses = scene.turn - candidate.out_turn
        return Verdict(True, float(candidate.block.touches), f"{history_of(candidate, scene)}, again after {uses} uses")


@dataclass(frozen=True, slots=True)
class Ranked:
    """Every 30 s the best decayed scores of blocks touched twice, each for a block of a lower score."""

    eviction: str = "value"
    period_s: float = RANK_PERIOD_S
    hurries: bool = False
    duels: bool = False
    replaces_better: bool = False

    def admit(self, candidate: Candidate, scene: Scene) -> Verdict:
        if not touched_enough(candidate.block.touches, RANK_TOUCHES_MIN):
            return Verdict(False, candidate.score, f"{ordinal(candidate.block.touches)} touch of 2 needed")
        return Verdict(True, candidate.score, history_of(candidate, scene))


@dataclass(frozen=True, slots=True)
class ByWorth:
    """What is worth the price of a move, each for a block that is worth less by a margin."""

    eviction: str = "worth"
    period_s: float = 0.0
    hurries: bool = True
    duels: bool = False
    replaces_better: bool = False

    def admit(self, candidate: Candidate, scene: Scene) -> Verdict:
        expected = f"{candidate.worth:.2g} uses expected"
        if candidate.worth < scene.least:
            wanted = f"{scene.least:.2g} needed" if math.isfinite(scene.least) else "nothing is learned yet"
            return Verdict(False, candidate.worth, f"{expected}, {wanted}")
        return Verdict(True, candidate.worth, f"{history_of(candidate, scene)}, {expected}")

    def keeps(self, entering: Candidate, touches: int, worth: float) -> str:
        if worth_swapping(entering.worth, worth, MARGIN):
            return ""
        return f"{{}} is full of blocks worth {worth:.2g} uses and more, this one {entering.worth:.2g}"


@dataclass(frozen=True, slots=True)
class Guarded:
    """From the `threshold`-th touch; a block used once drives out no block of promise that was used twice."""

    threshold: int
    eviction: str = "worth"
    period_s: float = 0.0
    hurries: bool = True
    duels: bool = False
    replaces_better: bool = False

    def admit(self, candidate: Candidate, scene: Scene) -> Verdict:
        touches = candidate.block.touches
        if not touched_enough(touches, self.threshold):
            needed = f"{ordinal(touches)} touch of {self.threshold} needed, as duels go now"
            return Verdict(False, float(touches), needed)
        return Verdict(True, float(touches), history_of(candidate, scene))

    def keeps(self, entering: Candidate, touches: int, worth: float) -> str:
        if protected(entering.block.touches, entering.worth, touches, worth):
            return KEEPS_USED_TWICE
        return ""


ARMS: tuple[Policy, ...] = (ByWorth(), Guarded(1), Guarded(2), Guarded(3), Ghost(), Ranked())
"""By the numbers of `tiers.duelling`."""


@dataclass(frozen=True, slots=True)
class Learner:
    """What the arm does that leads: of `arms` the one that finds the most in its shadow, at first the first."""

    arms: tuple[int, ...]
    eviction: str = "worth"
    period_s: float = 0.0
    hurries: bool = True
    replaces_better: bool = False

    @property
    def duels(self) -> bool:
        return len(self.arms) > 1

    def admit(self, candidate: Candidate, scene: Scene) -> Verdict:
        return ARMS[scene.leader].admit(candidate, scene)


THRESHOLDS = {FIRST: 1, SECOND: 2, THIRD: 3}
"""From which touch on blocks come, where such an arm leads."""


def arms_of(policy: Policy) -> tuple[int, int]:
    """The arms that may lead, as bits, and the one that does at first; 0 bits where nothing is to be learned."""
    if isinstance(policy, Learner):
        return sum(1 << arm for arm in policy.arms), policy.arms[0]
    return (sum(1 << arm for arm in THRESHOLDS) if policy.duels else 0), SECOND


BUILT_IN: dict[str, Policy] = {
    "always": FromTouch(1, "lru"),
    "touch-2": FromTouch(2, "lfuda-leaf"),
    "touch-3": FromTouch(3, "lru-leaf"),
    "ghost": Ghost(),
    "ranked": Ranked(),
    "hazard": Learner((BY_WORTH,)),
    "duel": Learner((FIRST, SECOND, THIRD)),
    "auto": Learner((BY_WORTH, FIRST, SECOND, THIRD, GHOSTS, RANKED), period_s=RANK_PERIOD_S),
}
