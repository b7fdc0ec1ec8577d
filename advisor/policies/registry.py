"""Policies by name: ours, and those of other packages by the entry point `kvadvisor.policies`."""

from __future__ import annotations

from functools import cache
from importlib.metadata import entry_points
from typing import Any

from advisor.errors import AdvisorError
from advisor.policies.admission import BUILT_IN
from advisor.policies.eviction import EVICTIONS, Eviction
from advisor.policies.limits import Limits
from advisor.policies.policy import Policy

GROUP = "kvadvisor.policies"
FIELDS = ("eviction", "period_s", "hurries", "duels", "replaces_better", "admit")
POLICY_VERSION = "tiering-5"
"""Changes whenever the same state could give another plan."""


class PolicyUnknown(AdvisorError):
    """No policy of that name, or what its package offers is none."""


def known_names() -> list[str]:
    return sorted({*BUILT_IN, *(point.name for point in entry_points(group=GROUP))})


@cache
def policy_named(name: str) -> Policy:
    """Raises `PolicyUnknown`."""
    if name in BUILT_IN:
        return BUILT_IN[name]
    point = next(iter(entry_points(group=GROUP, name=name)), None)
    if point is None:
        raise PolicyUnknown(
            f"admission {name!r} is not known: choose one of {', '.join(known_names())}, or install the package that "
            f"names it under {GROUP}"
        )
    try:
        policy: Any = point.load()
    except Exception as fault:  # another package's code runs
        raise PolicyUnknown(f"admission {name!r} of {point.value} cannot be loaded: {fault}") from fault
    return checked(policy, name, point.value)


def eviction_of(limits: Limits) -> Eviction:
    """The one named, else the admission's own. Raises `PolicyUnknown`."""
    name = policy_named(limits.admission).eviction if limits.eviction == "auto" else limits.eviction
    if name not in EVICTIONS:
        raise PolicyUnknown(f"eviction {name!r} is not known: choose one of auto, {', '.join(EVICTIONS)}")
    return EVICTIONS[name]


def checked(policy: Any, name: str, where: str) -> Policy:
    """A policy of another package, or `PolicyUnknown` that says what it lacks."""
    if not isinstance(policy, Policy):
        lacking = [field for field in FIELDS if not hasattr(policy, field)]
        raise PolicyUnknown(f"admission {name!r} of {where} is no policy: it lacks {', '.join(lacking)}")
    if policy.eviction not in EVICTIONS:
        raise PolicyUnknown(
            f"admission {name!r} of {where} names the eviction {policy.eviction!r}: choose one of "
            f"{', '.join(EVICTIONS)}"
        )
    if not 0.0 <= policy.period_s <= 3_600.0:
        raise PolicyUnknown(f"admission {name!r} of {where} has the period {policy.period_s} s: set it from 0 to 3600")
    return policy


def policy_version(name: str) -> str:
    """The planner's, with that of the package that the policy named comes from."""
    if name in BUILT_IN:
        return POLICY_VERSION
    point = next(iter(entry_points(group=GROUP, name=name)), None)
    if point is None or point.dist is None:
        return f"{POLICY_VERSION} {name}"
    return f"{POLICY_VERSION} {name} {point.dist.name}-{point.dist.version}"
