"""When what was recorded is due."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from event_plane.pacing import Pace


def test_without_a_speed_everything_is_due_at_once() -> None:
    pace = Pace(None)
    assert [pace.wait_s(at_us, 0.0) for at_us in (5, 9_000_000, 1)] == [0.0, 0.0, 0.0]


def test_twice_the_speed_halves_the_recorded_distance() -> None:
    pace = Pace(2.0)
    assert pace.wait_s(1_000_000, 100.0) == 0.0
    assert pace.wait_s(5_000_000, 100.0) == 2.0
    assert pace.wait_s(5_000_000, 101.5) == 0.5
    assert pace.wait_s(5_000_000, 103.0) == 0.0


def test_a_time_unknown_or_before_the_first_is_due_at_once() -> None:
    pace = Pace(1.0)
    assert pace.wait_s(0, 50.0) == 0.0
    assert pace.wait_s(9_000_000, 60.0) == 0.0
    assert pace.wait_s(8_000_000, 60.0) == 0.0
    assert pace.wait_s(10_000_000, 60.0) == 1.0


@pytest.mark.parametrize("speed", [0.0, -1.0, float("inf"), float("nan")])
def test_a_speed_that_is_none_is_refused(speed: float) -> None:
    with pytest.raises(ValueError, match="give a number above 0"):
        Pace(speed)


@given(st.lists(st.integers(1, 2**53), min_size=1), st.floats(0.01, 1000))
def test_waiting_as_told_keeps_the_order_and_never_ends_before_it_is_due(times_us: list[int], speed: float) -> None:
    pace = Pace(speed)
    now_s = 0.0
    for at_us in times_us:
        now_s += pace.wait_s(at_us, now_s)
        assert now_s >= (at_us - times_us[0]) / 1e6 / speed * (1 - 1e-9)
