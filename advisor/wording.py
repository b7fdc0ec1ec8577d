"""Quantities in words, for reasons and sentences: three figures, a unit, no more."""

from __future__ import annotations

from datetime import UTC, datetime


def bytes_text(count: float) -> str:
    """1536 → `1.54 kB`; decimal, as storage is sold and as the pages show it."""
    for unit in ("B", "kB", "MB", "GB"):
        if abs(count) < 1000:
            return f"{_figures(count)} {unit}"
        count /= 1000
    return f"{_figures(count)} TB"


def duration_text(seconds: float) -> str:
    """0.0000046 → `4.6 µs`; 0.00021 → `0.21 ms`; 90 → `1.5 min`."""
    if 0 < seconds < 0.0001:
        return f"{_figures(seconds * 1_000_000)} µs"
    if seconds < 1:
        return f"{_figures(seconds * 1000)} ms"
    for unit, size in (("s", 120), ("min", 120)):
        if seconds < size:
            return f"{_figures(seconds)} {unit}"
        seconds /= 60
    return f"{_figures(seconds)} h"


def moment_text(time_us: int) -> str:
    """UTC date and time of µs since the epoch: `2026-03-04 18:04:11`."""
    return datetime.fromtimestamp(time_us / 1e6, UTC).strftime("%Y-%m-%d %H:%M:%S")


def ordinal(number: int) -> str:
    """3 → `3rd`."""
    if number % 100 in (11, 12, 13):
        return f"{number}th"
    return f"{number}{ {1: 'st', 2: 'nd', 3: 'rd'}.get(number % 10, 'th') }"


def _figures(value: float) -> str:
    return f"{value:.3g}" if abs(value) < 1000 else f"{value:.0f}"
