"""Which registered blocks are copied away from the device, with a reason for every one that is not. Pure."""

from __future__ import annotations

from enum import StrEnum
from typing import NamedTuple, Protocol

from kvbm_core.errors import ConfigError


class Skip(StrEnum):
    """Why a block was not offloaded: the values of the metric's label `reason`."""

    PRESENT = "present"
    """The target tier has it."""
    IN_FLIGHT = "in_flight"
    """It is on its way there."""
    TOO_RARELY_USED = "too_rarely_used"
    """Computed and matched fewer times than the policy's threshold."""
    NO_TARGET = "no_target"
    """No host tier, and no volume for its tenant."""
    OTHER_RANK = "other_rank"
    """Another worker holds the same heads, and puts them to volumes for both."""
    QUEUE_FULL = "queue_full"
    EVICTED_BEFORE_COPY = "evicted_before_copy"
    """It left the device before its turn came."""
    HOST_EXHAUSTED = "host_exhausted"
    """Every block of the host tier, or of the staging buffer, was in use."""


class Offered(NamedTuple):
    """What a policy may know of a block: what its target tier has, and how often it was computed or matched."""

    present: bool = False
    in_flight: bool = False
    uses: int = 1


class Decision(NamedTuple):
    """`skip` is None where the block is to be offloaded; `reason` is a sentence with the numbers."""

    skip: Skip | None
    reason: str


_TAKE = Decision(None, "the policy takes it")


class OffloadPolicy(Protocol):
    """Decides for one block at a time. Says no more than what it was asked of: it keeps nothing."""

    def decide(self, block: Offered) -> Decision: ...


class AllPolicy:
    """Everything; the target itself finds what it has."""

    def decide(self, block: Offered) -> Decision:
        return _TAKE


class PresencePolicy:
    """What the target neither has nor is about to get."""

    def decide(self, block: Offered) -> Decision:
        if block.present:
            return Decision(Skip.PRESENT, "the target has it")
        if block.in_flight:
            return Decision(Skip.IN_FLIGHT, "it is on its way to the target")
        return _TAKE


class PresenceFrequencyPolicy:
    """Likewise, and only blocks that were computed or matched `uses_min` times.

    2 keeps out what is asked for once. The reference system's 8 left its disk tier empty for most who tried it.
    """

    def __init__(self, uses_min: int = 2) -> None:
        self._uses_min = uses_min
        self._presence = PresencePolicy()

    def decide(self, block: Offered) -> Decision:
        decision = self._presence.decide(block)
        if decision.skip is None and block.uses < self._uses_min:
            return Decision(Skip.TOO_RARELY_USED, f"used {block.uses} times, and {self._uses_min} are wanted")
        return decision


def offload_policy(name: str, uses_min: int = 2) -> OffloadPolicy:
    """The policy that `KvbmConfig` names. Raises `ConfigError` for another name."""
    policies: dict[str, OffloadPolicy] = {
        "all": AllPolicy(),
        "presence": PresencePolicy(),
        "presence_frequency": PresenceFrequencyPolicy(uses_min),
    }
    if name not in policies:
        raise ConfigError(f"offload_policy = {name!r} is unknown: set one of {', '.join(policies)}")
    return policies[name]
