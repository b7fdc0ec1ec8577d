"""What an admission policy is: ours and a vendor's, who names theirs under the entry point `kvadvisor.policies`.

A policy says what a block is worth on a faster volume. The planner (`tiering.plan_moves`) keeps the laws whatever it
says: room, budgets, tenants, quotas, no move at a loss, ancestors before descendants. So a policy is a pure function of
what it is given: the same candidate and scene, the same verdict. `policy_contract` holds one to that.
"""

from __future__ import annotations

import math
from typing import NamedTuple, Protocol, runtime_checkable

from advisor.index import BlockRow
from advisor.policies.rules.worth import MARGIN


class Scene(NamedTuple):
    """The moment of a plan, as policies see it."""

    now_s: float
    turn: int
    """Uses of blocks so far."""
    fast_blocks: int
    """Below the high watermark of the volume that is asked for."""
    is_full: bool
    """It takes a block only for another."""
    is_tight: bool
    """A budget is nearly spent."""
    leading_touches: int = 2
    """The threshold that leads the duel, for a policy that duels."""
    leader: int = 0
    """The arm that leads, by `admission.ARMS`, for a policy of several."""
    least: float = MARGIN
    """What a block must be worth to come."""


class Candidate(NamedTuple):
    """A block used lately, on a slower volume than it could be, and what is remembered of it."""

    block: BlockRow
    tenant: str
    source: str
    target: str
    block_bytes: int
    saved_s: float | None
    """Seconds a hit would save a reader; None where a rate is not known."""
    score: float
    """log2 of its touches, each weighed 2^(t / 900 s), t from the same origin as the scene's `now_s`."""
    expected_hits: float
    """In the next 10 minutes, at the rate its score says."""
    gap_s: float
    """Between its last two touches; 0 before the second."""
    out_turn: int
    """The turn at which it was last kept out; 0 never."""
    worth: float = 0.0
    """Uses to come, each less by e for each horizon, a quarter of the time that blocks stay; 0: nothing is learned."""


class Verdict(NamedTuple):
    """Whether a block may come, what it is worth (higher comes first), and why in a few words."""

    admitted: bool
    value: float
    reason: str


@runtime_checkable
class Policy(Protocol):
    """An admission by name, and the eviction that goes with it."""

    @property
    def eviction(self) -> str:
        """One of `eviction.EVICTIONS`."""

    @property
    def period_s(self) -> float:
        """Candidates wait so long for each other, and come best first; 0: every plan."""

    @property
    def hurries(self) -> bool:
        """They do not wait as long as no budget is nearly spent."""

    @property
    def duels(self) -> bool:
        """Thresholds of touches are tried on shadows of the fast volume, and `Scene.leading_touches` is the best."""

    @property
    def replaces_better(self) -> bool:
        """Where the volume is full, a block comes for the first that leaves; else only for one of a lower score."""

    def admit(self, candidate: Candidate, scene: Scene) -> Verdict:
        """What the block is worth. The same candidate and scene, the same verdict."""


REASON_CHARACTERS_MAX = 200


def verdict_of(policy: Policy, candidate: Candidate, scene: Scene) -> Verdict:
    """What `policy` says; where it fails, or says what no plan can use, a refusal with that as its reason.

    A plan is made while an entry is folded, and folded again at each start: what escaped here would end them all.
    """
    try:
        said = policy.admit(candidate, scene)
        admitted, value, reason = bool(said.admitted), float(said.value), _line(said.reason)
    except (Exception, SystemExit) as fault:  # noqa: BLE001 -- another's code: its faults are refusals and never ours
        return Verdict(False, 0.0, _line(f"the policy failed: {type(fault).__name__}: {fault}"))
    if not math.isfinite(value):
        return Verdict(False, 0.0, f"the policy failed: its value is {value}")
    return Verdict(admitted, value, reason or "the policy gives no reason")


def _line(text: str) -> str:
    """One short line that can be logged and shown."""
    return " ".join(text.split())[:REASON_CHARACTERS_MAX].encode(errors="replace").decode()
