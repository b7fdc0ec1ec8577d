"""Three figures and a unit; every digit on hover."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from advisor.web import formats


@pytest.mark.parametrize(
    ("value", "text"),
    [(0, "0"), (7, "7"), (999, "999"), (1000, "1.00 k"), (1204, "1.20 k"), (12_345, "12.3 k"), (999_499, "999 k"),
     (999_500, "1.00 M"), (8_412_345, "8.41 M"), (2**63, "9.22 E")],
)
def test_count(value: int, text: str) -> None:
    assert formats.count(value) == text


@pytest.mark.parametrize(
    ("value", "text"),
    [(None, "–"), (0, "0 B"), (512, "512 B"), (999, "999 B"), (1000, "1.00 kB"), (16_384, "16.4 kB"),
     (228e12, "228 TB"), (4.21e9, "4.21 GB")],
)
def test_size(value: float | None, text: str) -> None:
    assert formats.size(value) == text


def test_size_that_nobody_told_is_not_zero() -> None:
    assert formats.told_size(0, 0) == "0 B"
    assert formats.told_size(0, 3) == "size not told"
    assert formats.told_size(512, 3) == "512 B"


@pytest.mark.parametrize(
    ("value", "text"),
    [(None, "–"), (0.0, "0"), (0.25, "0.25"), (3.14159, "3.14"), (41.5, "41.5"), (212_345.0, "212 k"),
     (999.9, "1.00 k")],
)
def test_rate(value: float | None, text: str) -> None:
    assert formats.rate(value) == text


@pytest.mark.parametrize(
    ("value", "text"), [(None, "–"), (0.0, "0 %"), (0.6238, "62.4 %"), (1.0, "100 %"), (0.00123, "0.123 %")]
)
def test_percent(value: float | None, text: str) -> None:
    assert formats.percent(value) == text


@pytest.mark.parametrize(
    ("share", "than", "text"),
    [(0.66, 0.62, "+4.0 points"), (0.57, 0.62, "−5.0 points"), (0.5, 0.5, "+0.0 points"), (0.5, None, ""),
     (None, 0.5, "")],
)
def test_points(share: float | None, than: float | None, text: str) -> None:
    assert formats.points(share, than) == text


@pytest.mark.parametrize(
    ("value", "text"), [(None, "–"), (0.0, "0 ms"), (0.21, "210 ms"), (3.0, "3 s"), (-0.042, "−42 ms"), (-90, "−90 s")]
)
def test_gain(value: float | None, text: str) -> None:
    assert formats.gain(value) == text


@pytest.mark.parametrize(
    ("value", "text"),
    [(None, "–"), (0.0, "0 s"), (0.42, "0.4 s"), (9.96, "10 s"), (41.2, "41 s"), (119.4, "119 s"), (120, "2 min"),
     (11_130, "3 h 5 min"), (187_300, "2 d 4 h")],
)
def test_seconds(value: float | None, text: str) -> None:
    assert formats.seconds(value) == text


def test_times_are_utc_and_zero_is_no_time() -> None:
    assert formats.moment(1_764_440_651_250_000) == "2025-11-29 18:24:11"
    assert formats.timestamp(1_764_440_651_250_000) == "2025-11-29T18:24:11.250Z"
    assert formats.moment(0) == "–"
    assert formats.timestamp(0) == ""


def test_hash_is_shortened_in_the_middle() -> None:
    assert formats.short_hash("a41f000000000000000000000000" + "09c2") == "a41f…09c2"
    assert formats.short_hash("a41f09c2") == "a41f09c2"


@given(st.integers(min_value=0, max_value=2**64))
def test_rounded_count_is_within_half_a_percent_and_has_at_most_three_figures(value: int) -> None:
    digits, _, prefix = formats.count(value).partition(" ")
    shown = float(digits) * 1000 ** ["", "k", "M", "G", "T", "P", "E"].index(prefix)
    assert abs(shown - value) <= value * 0.005
    assert len(digits.replace(".", "").lstrip("0")) <= 3


@given(st.integers(min_value=0, max_value=2**128))
def test_exact_keeps_every_digit(value: int) -> None:
    assert int(formats.exact(value).replace(formats.NARROW_SPACE, "")) == value


def test_a_name_is_cut_where_it_is_shown_and_later_on_hover() -> None:
    assert formats.short_name("n" * 64) == formats.whole_name("n" * 64) == "n" * 64
    assert formats.short_name("n" * 20_000) == "n" * 64 + "…"
    assert formats.whole_name("n" * 20_000) == "n" * 1_000 + "…"
