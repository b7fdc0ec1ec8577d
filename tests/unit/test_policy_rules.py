"""The rules that replay and the live planner share, by their values."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from advisor.policies.rules import hazard
from advisor.policies.rules.admission import remembered
from advisor.policies.rules.duel import HOME_TURNS, duel_score, leader_of, may_turn
from advisor.policies.rules.eviction import LFUDA_LEAF, LRU, VALUE, eviction_key, inflation_of
from advisor.policies.rules.reading import first_token_s
from advisor.policies.rules.score import NO_SCORE, score_with_touch
from advisor.policies.rules.worth import price_after, protected
from tests.examples import examples


@pytest.mark.parametrize(
    ("touches", "gap_s", "expected"),
    [(2, 5.0, 3), (2, 2_000.0, 7), (3, 5.0, 8), (4, 29.0, 14), (5, 29.0, 14), (8, 60.0, 20), (16, 5.0, 28)],
)
def test_class_is_by_touches_and_last_gap(touches: int, gap_s: float, expected: int) -> None:
    assert hazard.block_class(touches, hazard.PARTIAL, gap_s, 0, 0) == expected


def test_block_used_once_is_of_the_class_of_its_kind() -> None:
    assert [hazard.block_class(1, kind, 0.0, 0, 0) for kind in range(hazard.KINDS)] == [0, 1, 2]


@settings(max_examples=examples(50), deadline=None)
@given(st.floats(0, 10_000), st.floats(0, 10_000))
def test_places_of_ages_grow_with_age_and_agree_with_bins(a: float, b: float) -> None:
    low, high = sorted((a, b))
    assert hazard.bin_place(low) <= hazard.bin_place(high)
    number = hazard.age_bin(low)
    assert hazard.bin_start_s(number) <= low
    assert number == hazard.BINS - 1 or low < hazard.bin_start_s(number + 1)


def test_exposure_is_the_share_of_each_bin_that_was_lived_through() -> None:
    exposure = np.zeros((hazard.CLASSES, hazard.BINS))
    hazard.expose(exposure, 4, 2.5, 5.0)
    assert exposure[4, 2:5].tolist() == pytest.approx([0.5, 1.0, 0.5])
    assert exposure.sum() == pytest.approx(2.0)


def test_what_is_used_again_is_worth_more_and_less_as_it_ages() -> None:
    table = (hazard.CLASSES, hazard.BINS)
    hits, exposure = np.zeros(table), np.zeros(table)
    values = np.zeros((hazard.CLASSES, hazard.BINS + 1))
    hits[1, 5], exposure[1, :6] = 80.0, 100.0
    exposure[0, :] = 100.0
    for _ in range(3):
        hazard.revalue(hits, exposure, values, 300.0)
    assert hazard.value_at(values, 1, 0.0) > 0.5 > hazard.value_at(values, 1, 60.0)
    assert hazard.value_at(values, 1, 0.0) > hazard.value_at(values, 0, 0.0)


def test_horizon_is_a_quarter_of_the_stay_between_its_bounds() -> None:
    assert hazard.horizon_s(4_000, 10.0, 900.0) == 100.0
    assert hazard.horizon_s(4_000, 0.0, 900.0) == 900.0
    assert hazard.horizon_s(4, 10.0, 900.0) == hazard.HORIZON_MIN_S


def test_key_of_ageing_lfu_is_inflation_and_touches_then_the_older_use() -> None:
    assert inflation_of(LFUDA_LEAF, eviction_key(LFUDA_LEAF, 3.0, 4, 17, 0.0)) == 7.0
    assert eviction_key(LFUDA_LEAF, 0.0, 2, 9, 0.0) < eviction_key(LFUDA_LEAF, 0.0, 2, 10, 0.0)
    assert eviction_key(LRU, 3.0, 4, 17, 0.5) == 17.0
    assert eviction_key(VALUE, 3.0, 4, 17, 0.5) == 0.5


def test_score_halves_in_its_half_life_and_sums_touches() -> None:
    once = score_with_touch(NO_SCORE, 900.0)
    assert once == 1.0
    assert score_with_touch(once, 900.0) == pytest.approx(2.0)
    assert score_with_touch(once, 9_000_000.0) == 10_000.0


@pytest.mark.parametrize(
    ("blocks", "stored", "shape"), [(1, 1, 0), (32, 0, 0), (33, 1, 1), (5, 4, 2), (64, 5, 5), (12, 12, 4), (200, 13, 7)]
)
def test_shape_of_a_request_is_by_what_was_new_and_whether_it_was_long(blocks: int, stored: int, shape: int) -> None:
    assert hazard.request_shape(blocks, stored) == shape
    assert shape < hazard.SHAPES


def test_shape_that_is_used_more_than_others_of_its_class_is_worth_more() -> None:
    hits, exposure = np.zeros((2, hazard.CLASSES, hazard.BINS))
    values = np.zeros((hazard.CLASSES, hazard.BINS + 1))
    seldom, often, unknown = (hazard.block_class(1, hazard.NEW_CHAIN, 0.0, shape, 0) for shape in range(3))
    exposure[[seldom, often], :] = 1_000.0
    hits[often, :] = 200.0
    hazard.revalue(hits, exposure, values, 300.0)
    assert values[seldom, 0] < values[unknown, 0] < values[often, 0]


def test_ghost_is_forgotten_after_its_span() -> None:
    assert remembered(100, 91, 10)
    assert not remembered(101, 91, 10)
    assert not remembered(5, 0, 10)


def test_leader_changes_only_for_a_clear_lead_among_those_allowed() -> None:
    assert leader_of(np.array([0.0, 100.0, 100.5, 0.0]), 0b0110, 1) == 1
    assert leader_of(np.array([0.0, 100.0, 104.0, 0.0]), 0b0110, 1) == 2
    assert leader_of(np.array([0.0, 100.0, 104.0, 900.0]), 0b0110, 1) == 2
    assert leader_of(np.array([99.0, 100.0, 0.0, 0.0]), 0b0011, 0) == 0


def test_first_arm_keeps_its_lead_for_the_first_turns() -> None:
    assert not may_turn(HOME_TURNS - 1, 0)
    assert may_turn(HOME_TURNS, 0)
    assert may_turn(1, 1)


def test_turns_fade_and_moves_cost_hits() -> None:
    assert duel_score(100.0, 50, 10, 0.2) == pytest.approx(0.85 * 100 + 50 - 2)


def test_block_used_once_drives_out_nothing_of_promise_that_was_used_twice() -> None:
    assert protected(1, 1.0, 2, 0.6)
    assert not protected(1, 1.0, 2, 0.4)
    assert not protected(1, 1.0, 1, 0.6)
    assert not protected(2, 1.0, 2, 0.6)


def test_price_of_a_move_begins_with_the_first_seen_and_follows() -> None:
    assert price_after(0.0, 0.5) == 0.5
    assert price_after(0.5, 1.0) == pytest.approx(0.6)


def test_first_token_waits_for_the_slower_of_both_tiers_then_computes() -> None:
    assert first_token_s(6e9, 2e9, 5_000, 6e9, 1e9, 10_000.0) == pytest.approx(2.5)
