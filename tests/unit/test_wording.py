from __future__ import annotations

import time

import pytest

from advisor.wording import bytes_text, duration_text, moment_text, ordinal


@pytest.mark.parametrize(
    ("count", "text"),
    [(0, "0 B"), (999, "999 B"), (1536, "1.54 kB"), (2_500_000, "2.5 MB"), (3e12, "3 TB"), (4e15, "4000 TB")],
)
def test_bytes_are_three_decimal_figures(count: float, text: str) -> None:
    assert bytes_text(count) == text


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0, "0 ms"), (0.000_004_64, "4.64 µs"), (0.000_1, "0.1 ms"), (0.000_21, "0.21 ms"), (0.5, "500 ms"),
        (119, "119 s"), (150, "2.5 min"), (9_000, "2.5 h"),
    ],
)
def test_durations_take_the_unit_that_fits(seconds: float, text: str) -> None:
    assert duration_text(seconds) == text


@pytest.mark.parametrize(
    ("number", "text"),
    [(1, "1st"), (2, "2nd"), (3, "3rd"), (4, "4th"), (11, "11th"), (12, "12th"), (21, "21st"), (113, "113th")],
)
def test_ordinals(number: int, text: str) -> None:
    assert ordinal(number) == text


def test_a_moment_is_said_in_utc_with_its_date(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TZ", "Pacific/Auckland")
    time.tzset()
    try:
        assert moment_text(1_764_440_651_250_000) == "2025-11-29 18:24:11"
    finally:
        monkeypatch.undo()
        time.tzset()
