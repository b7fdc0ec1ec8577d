"""Load or recompute: the fit of measured rates, and how many leading blocks are worth loading."""

from __future__ import annotations

from itertools import accumulate
from math import inf

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvbm_core.estimate import STALE_S, PathRate, RateLine, Verdict, plan_load
from kvbm_core.paths import TransferPath

HOST, DISK = TransferPath.HOST_TO_DEVICE, TransferPath.DISK_TO_DEVICE
MIB = 1 << 20


def test_a_fit_tells_the_cost_of_a_call_from_that_of_its_bytes() -> None:
    rate = PathRate()
    for blocks in (1, 8, 32, 2, 16, 4):
        rate.add(blocks * MIB, 0.003 + blocks * 0.001, now_s=10.0)
    line = rate.line(now_s=10.0)
    assert line is not None
    assert line.call_s == pytest.approx(0.003)
    assert line.seconds(MIB) == pytest.approx(0.004)


def test_calls_of_one_size_cost_by_the_byte() -> None:
    rate = PathRate()
    rate.add(4 * MIB, 0.008, now_s=0.0)
    assert rate.line(now_s=0.0) == RateLine(call_s=0.0, byte_s=0.002 / MIB)


def test_later_measurements_outweigh_earlier_ones() -> None:
    rate = PathRate()
    for _ in range(200):
        rate.add(MIB, 1.0, now_s=0.0)
    for _ in range(200):
        rate.add(MIB, 0.001, now_s=0.0)
    line = rate.line(now_s=0.0)
    assert line is not None
    assert line.seconds(MIB) < 0.03


def test_a_path_that_carried_nothing_lately_is_not_known() -> None:
    rate = PathRate()
    assert rate.line(now_s=0.0) is None
    rate.add(MIB, 1.0, now_s=5.0)
    assert rate.line(now_s=5.0 + STALE_S) is not None
    assert rate.line(now_s=5.1 + STALE_S) is None


@given(st.lists(st.tuples(st.integers(1, 1 << 30), st.floats(0, 10)), min_size=1, max_size=40))
def test_no_estimate_is_negative(measured: list[tuple[int, float]]) -> None:
    rate = PathRate()
    for moved_bytes, seconds in measured:
        rate.add(moved_bytes, seconds, now_s=0.0)
    line = rate.line(now_s=0.0)
    assert line is not None
    assert line.byte_s >= 0
    assert line.call_s >= -1e-9


def test_a_slow_disk_is_left_alone_and_a_fast_host_is_used() -> None:
    """40 s of disk against 0.9 s of prefill, which users of the reference system waited for."""
    rates = {HOST: RateLine(0.0, 1e-4 / MIB), DISK: RateLine(0.0, 0.4 / MIB)}
    plan = plan_load(
        [(HOST,)] * 20 + [(DISK, HOST)] * 100,
        rates,
        block_bytes=MIB,
        block_tokens=16,
        prefill_tokens_per_s=16 * 120 / 0.9,
    )
    assert plan.blocks == 20
    assert plan.verdict is Verdict.RECOMPUTE_IS_SOONER
    assert plan.load_s == pytest.approx(0.002)
    assert plan.recompute_s == pytest.approx(0.15)
    assert plan.reason == "load 20: 2.0 ms against 150.0 ms of prefill (recompute_is_sooner)"


def test_a_slow_stretch_is_loaded_for_a_long_fast_one_behind_it() -> None:
    rates = {HOST: RateLine(0.0, 0.001 / MIB), DISK: RateLine(0.0, 0.02 / MIB)}
    places = [(DISK,)] * 2 + [(HOST,)] * 50
    plan = plan_load(places, rates, block_bytes=MIB, block_tokens=16, prefill_tokens_per_s=1_600)
    assert (plan.blocks, plan.verdict) == (52, Verdict.ALL)
    alone = plan_load(places[:2], rates, block_bytes=MIB, block_tokens=16, prefill_tokens_per_s=1_600)
    assert alone.blocks == 0


def test_a_budget_ends_the_load_where_it_is_spent() -> None:
    rates = {HOST: RateLine(0.010, 0.001 / MIB)}
    plan = plan_load([(HOST,)] * 32, rates, block_bytes=MIB, block_tokens=16, budget_s=0.0305, batch_blocks=8)
    assert (plan.blocks, plan.verdict) == (10, Verdict.OVER_BUDGET)  # two calls and ten blocks


def test_what_was_never_measured_is_loaded_so_that_it_is() -> None:
    plan = plan_load([(DISK,)] * 3, {}, block_bytes=MIB, block_tokens=16, prefill_tokens_per_s=1e9, budget_s=1e-9)
    assert plan == (3, Verdict.ALL, 0.0, pytest.approx(48e-9), (DISK,))
    assert plan.reason.endswith("not measured lately: disk_to_device")


def test_blocks_on_the_device_cost_nothing() -> None:
    plan = plan_load([(), ()], {}, block_bytes=MIB, block_tokens=16, budget_s=0.0)
    assert (plan.blocks, plan.load_s) == (2, 0.0)
    assert plan_load([], {}, block_bytes=MIB, block_tokens=16).verdict is Verdict.NOTHING_THERE


@given(
    costs_ms=st.lists(st.integers(0, 50), max_size=12),
    prefill_ms=st.integers(1, 50),
    budget_ms=st.one_of(st.just(inf), st.integers(0, 200)),
)
def test_no_other_number_of_blocks_would_be_sooner(costs_ms: list[int], prefill_ms: int, budget_ms: float) -> None:
    paths = list(TransferPath)
    rates = {path: RateLine(0.0, cost / 1e3 / MIB) for path, cost in zip(paths, costs_ms, strict=False)}
    places = [(path,) for path in paths[: len(costs_ms)]]
    plan = plan_load(
        places,
        rates,
        block_bytes=MIB,
        block_tokens=1,
        prefill_tokens_per_s=1e3 / prefill_ms,
        budget_s=budget_ms / 1e3 + 1e-9,
    )
    load_ms = [0, *accumulate(costs_ms[: len(places)])]
    allowed = [k for k in range(len(places) + 1) if load_ms[k] <= budget_ms]
    totals = {k: load_ms[k] + (len(places) - k) * prefill_ms for k in allowed}
    assert totals[plan.blocks] == min(totals.values())
