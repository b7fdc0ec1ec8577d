"""The scenarios by name."""

from __future__ import annotations

from kvbm_core.errors import ScenarioError
from kvbm_core.scenarios import hot_set, long_bursts, vanishing_tier, worker_restart
from kvbm_core.scenarios.script import Scenario

SCENARIOS = {
    each.name: each
    for each in (hot_set.SCENARIO, long_bursts.SCENARIO, worker_restart.SCENARIO, vanishing_tier.SCENARIO)
}


def scenario_named(name: str) -> Scenario:
    """Raises `ScenarioError` for a name that there is not."""
    if name not in SCENARIOS:
        raise ScenarioError(f"there is no scenario {name!r}: choose one of {', '.join(SCENARIOS)}")
    return SCENARIOS[name]
