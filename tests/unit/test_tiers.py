"""Two-tier replay on traces small enough to follow by hand."""

from __future__ import annotations

import numpy as np
import pytest

from advisor.caches import RequestTrace
from advisor.replay_tiers import CostError, require_costs
from advisor.tiers import ADMISSIONS, Costs, Tiering, TimedTrace, UnknownTiering, replay_tiers, scan_survival, timed
from advisor.tiers.sorting import heap_up, take_best

BLOCK_TOKENS = 100


def trace_of(*paths: str, every_s: float = 1.0) -> TimedTrace:
    """A request for each path of letters; a block is named by the path that leads to it."""
    names = [path[: at + 1] for path in paths for at in range(len(path))]
    hashes = np.zeros((len(names), 2), np.uint64)
    order = {name: number for number, name in enumerate(dict.fromkeys(names), 1)}
    hashes[:, 0] = [order[name] for name in names]
    lengths = [len(path) for path in paths]
    requests = RequestTrace.of(
        hashes,
        np.cumsum(lengths),
        [len(name) - 1 for name in names],
        [length * BLOCK_TOKENS for length in lengths],
        [BLOCK_TOKENS] * len(paths),
    )
    return timed(requests, np.arange(len(paths)) * every_s)


def test_second_touch_moves_a_block_and_the_third_finds_it() -> None:
    figures = replay_tiers(trace_of("ab", "ab", "ab"), Tiering("touch-2", "lru-leaf", 10, None), Costs())
    assert figures.moves == 2
    assert figures.fhit == pytest.approx(2 / 6)
    assert (figures.precision, figures.full, figures.write_amplification) == (1.0, 0.5, 1.0)
    assert figures.moves_per_block == 1.0


def test_child_stays_out_while_its_parent_is_out() -> None:
    figures = replay_tiers(trace_of("a", "xy", "xy", "xy"), Tiering("touch-2", "lru-leaf", 1, None), Costs())
    assert figures.moves == 1
    assert figures.fhit == pytest.approx(1 / 7)


def test_block_that_comes_back_within_ten_minutes_bounced() -> None:
    there_and_back = trace_of("a", "b", "a")
    assert replay_tiers(there_and_back, Tiering("always", "lru", 1, None), Costs()).ping_pong == pytest.approx(1 / 3)
    slow = trace_of("a", "b", "a", every_s=700.0)
    assert replay_tiers(slow, Tiering("always", "lru", 1, None), Costs()).ping_pong == 0.0


def test_budget_pays_two_hundred_moves_and_a_fraction_of_each_block() -> None:
    one_each = trace_of(*(chr(0x4E00 + number) for number in range(1_000)))
    assert replay_tiers(one_each, Tiering("always", "lru", 5_000, 0.1), Costs()).moves == pytest.approx(300, abs=1)


def test_scan_empties_first_touch_admission_only() -> None:
    often = trace_of(*["abcd", "efgh"] * 20)
    assert scan_survival(often, Tiering("always", "lru", 8, None), Costs()) == 0.0
    assert scan_survival(often, Tiering("touch-2", "lru-leaf", 8, None), Costs()) == 1.0


@pytest.mark.parametrize("admission", ["hazard", "duel", "auto"])
def test_what_learns_keeps_what_is_used_through_a_scan(admission: str) -> None:
    often = trace_of(*["abcd", "efgh"] * 200)
    tiering = Tiering(admission, ADMISSIONS[admission].eviction, 8, None)
    assert replay_tiers(often, tiering, Costs()).fhit > 0.8
    assert scan_survival(often, tiering, Costs()) == 1.0


def test_choosing_recomputes_what_is_slower_to_load() -> None:
    slow = Costs(token_bytes=1_000_000, slow_bytes_per_s=1e9, prefill_tokens_per_s=10_000.0)
    figures = replay_tiers(trace_of("ab", "ab"), Tiering("touch-3", "lru-leaf", 10, None), slow)
    assert figures.first_token_s.mean == pytest.approx(0.02)
    assert figures.first_token_s_always_load.mean == pytest.approx((0.02 + 0.2) / 2)
    assert figures.recomputed_tokens == 400


def test_trace_without_requests_finds_nothing_and_fails_nothing() -> None:
    empty = trace_of()
    tiering = Tiering("auto", "value", 8, None)
    assert replay_tiers(empty, tiering, Costs()).fhit == 0.0
    assert scan_survival(empty, tiering, Costs()) == 1.0


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (("sometimes", "lru", 8, None), "'sometimes' is not known: choose one of always"),
        (("touch-2", "mru", 8, None), "no eviction 'mru': choose one of lru"),
        (("touch-2", "value", 8, None), "touch-2 has no eviction 'value'"),
        (("auto", "value", 0, None), "a fast tier of 0"),
        (("auto", "value", 8, -1.0), "budget -1.0"),
        (("auto", "value", 8, float("nan")), "budget nan"),
    ],
)
def test_what_there_is_not_is_refused_by_name(arguments: tuple[str, str, int, float | None], named: str) -> None:
    with pytest.raises(UnknownTiering, match=named):
        Tiering(*arguments)


def test_rate_of_nothing_is_refused() -> None:
    with pytest.raises(CostError, match="slow_bytes_per_s of 0"):
        require_costs(Costs(slow_bytes_per_s=0))


def test_best_comes_first_then_nearer_to_the_root() -> None:
    values, depths = np.array([1.0, 5.0, 3.0, 5.0, 2.0]), np.array([0, 2, 0, 1, 0])
    blocks = np.arange(5)
    heap_up(blocks, 5, values, depths)
    assert [take_best(blocks, left, values, depths) for left in range(5, 0, -1)] == [3, 1, 2, 4, 0]
