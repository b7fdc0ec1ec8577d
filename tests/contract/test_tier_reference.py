"""Two-tier replay against the lines that an independent simulator gave (policies.md of the reference)."""

from __future__ import annotations

from pathlib import Path

import pytest

from advisor.tiers import Costs, Tiering, TimedTrace, replay_tiers, scan_survival, timed
from advisor.traces import load_trace

FAST_BLOCKS = 5_859
BUDGETS = (0.02, 0.05, 0.10, 0.25, 0.50, None)
LINES = {
    ("always", "lru"): (0.053, 0.067, 0.088, 0.121, 0.136, 0.139),
    ("touch-2", "lru-leaf"): (0.065, 0.095, 0.139, 0.177, 0.179, 0.179),
    ("touch-2", "lfuda-leaf"): (0.065, 0.095, 0.139, 0.183, 0.186, 0.186),
    ("touch-3", "lru-leaf"): (0.076, 0.118, 0.149, 0.149, 0.149, 0.149),
    ("ranked", "value"): (0.089, 0.120, 0.153, 0.173, 0.173, 0.173),
}
MOVES_UNLIMITED = {
    ("always", "lru"): 1.36,
    ("touch-2", "lru-leaf"): 0.30,
    ("touch-2", "lfuda-leaf"): 0.29,
    ("touch-3", "lru-leaf"): 0.11,
    ("ranked", "value"): 0.23,
}


@pytest.fixture(scope="module")
def conversation(shared_data: Path) -> TimedTrace:
    trace = load_trace(shared_data / "traces/mooncake_conversation_trace.jsonl.gz")
    return timed(trace.as_requests(), [ms / 1000.0 for ms in trace.timestamps_ms])


@pytest.mark.parametrize("line", LINES, ids="-".join)
def test_each_fixed_policy_finds_what_the_reference_does(line: tuple[str, str], conversation: TimedTrace) -> None:
    found = [replay_tiers(conversation, Tiering(*line, FAST_BLOCKS, budget), Costs()) for budget in BUDGETS]
    assert [figures.fhit for figures in found] == pytest.approx(LINES[line], abs=0.003)
    assert found[-1].moves_per_block == pytest.approx(MOVES_UNLIMITED[line], abs=0.006)


@pytest.mark.parametrize(("line", "survival"), [(("always", "lru"), 0.0), (("touch-2", "lru-leaf"), 1.0)])
def test_one_off_scan_empties_what_admits_always_and_nothing_else(
    line: tuple[str, str], survival: float, conversation: TimedTrace
) -> None:
    assert scan_survival(conversation, Tiering(*line, FAST_BLOCKS, None), Costs()) == survival


def test_choosing_for_each_read_beats_always_loading_and_never_loading(conversation: TimedTrace) -> None:
    figures = replay_tiers(conversation, Tiering("touch-2", "lfuda-leaf", FAST_BLOCKS, None), Costs())
    never_s = conversation.input_tokens.mean() / 10_000
    assert never_s == pytest.approx(1.2035, abs=0.001)
    assert figures.first_token_s.mean < never_s < figures.first_token_s_always_load.mean


def test_auto_is_near_the_best_fixed_policy(conversation: TimedTrace) -> None:
    figures = replay_tiers(conversation, Tiering("auto", "value", FAST_BLOCKS, 0.25), Costs())
    assert figures.fhit >= 0.183 - 0.005
    assert figures.moves_per_block <= 0.252


def test_auto_loses_nothing_that_is_used_to_a_scan(conversation: TimedTrace) -> None:
    assert scan_survival(conversation, Tiering("auto", "value", FAST_BLOCKS, None), Costs()) == 1.0
