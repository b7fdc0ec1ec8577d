"""Our admissions, each a few lines over `rules`: what a block must have done to come to a faster volume."""

from __future__ import annotations

from dataclasses import dataclass

from advisor.policies.policy import Candidate, Policy, Scene, Verdict
from advisor.policies.rules.admission import remembered, touched_enough
from advisor.policies.rules.score import RANK_PERIOD_S, RANK_TOUCHES_MIN
from advisor.wording import duration_text, ordinal


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
class Duelling:
    """From the 1st, 2nd or 3rd touch, whichever finds the most in its shadow, for a block of a lower score.

    So a block that is used gives way to a better one alone, and a scan of blocks touched once to none.
    """

    eviction: str = "value"
    period_s: float = 0.0
    hurries: bool = True
    duels: bool = True
    replaces_better: bool = False

    def admit(self, candidate: Candidate, scene: Scene) -> Verdict:
        touches, threshold = candidate.block.touches, scene.leading_touches
        if not touched_enough(touches, threshold):
            return Verdict(False, candidate.score, f"{ordinal(touches)} touch of {threshold} needed, as duels go now")
        return Verdict(True, candidate.score, history_of(candidate, scene))


@dataclass(frozen=True, slots=True)
class Auto:
    """`Duelling`; where a budget is nearly spent `Ranked`, so that what is left of it goes to the best."""

    eviction: str = "value"
    period_s: float = RANK_PERIOD_S
    hurries: bool = True
    duels: bool = True
    replaces_better: bool = False

    def admit(self, candidate: Candidate, scene: Scene) -> Verdict:
        return BUILT_IN["ranked" if scene.is_tight else "duel"].admit(candidate, scene)


BUILT_IN: dict[str, Policy] = {
    "always": FromTouch(1, "lru"),
    "touch-2": FromTouch(2, "lfuda-leaf"),
    "touch-3": FromTouch(3, "lru-leaf"),
    "ghost": Ghost(),
    "ranked": Ranked(),
    "duel": Duelling(),
    "auto": Auto(),
}
