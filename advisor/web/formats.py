"""How figures are written on the pages: three figures and a unit, the exact value for the hover.

Pure functions, each also a Jinja filter of the same name (see `advisor.web.pages`).
"""

from __future__ import annotations

from datetime import UTC, datetime

from advisor.wording import duration_text, moment_text

NOTHING = "–"
"""Written where there is no value yet."""

SIZE_NOT_TOLD = "size not told"

NAME_CHARACTERS_SHOWN = 64
NAME_CHARACTERS_ON_HOVER = 1_000
"""Names of publishers, tenants, models and adapters come from outside, and are as long as whoever gave them likes."""

NARROW_SPACE = "\u202f"
"""Between groups of three digits: does not break, and cannot be taken for a decimal sign."""

_COUNT_PREFIXES = ("", "k", "M", "G", "T", "P", "E")
_SINGULARS = {"ies": "y", "ches": "ch", "s": ""}
"""By the ending of the plural. Words without one, as *refused*, are of one and of many."""
_BYTE_UNITS = ("B", "kB", "MB", "GB", "TB", "PB", "EB")


def _three_figures(value: float) -> str:
    """A value below 1000, rounded to three figures, in plain digits."""
    magnitude = abs(value)
    if magnitude >= 100:
        return f"{value:.0f}"
    if magnitude >= 10:
        return f"{value:.1f}"
    if magnitude >= 1:
        return f"{value:.2f}"
    return f"{value:.3g}"


def _scaled(value: float, steps: tuple[str, ...]) -> tuple[str, str]:
    """Digits and the step's name. Rounding comes first, so that 999 999 is 1.00 M and never 1000 k."""
    rounded = float(f"{value:.2e}")
    step = 0
    while abs(rounded) >= 1000 and step < len(steps) - 1:
        rounded /= 1000
        step += 1
    return _three_figures(rounded), steps[step]


def count(value: int) -> str:
    """`812`, `1.20 k`, `8.41 M`."""
    if abs(value) < 1000:
        return str(value)
    digits, prefix = _scaled(value, _COUNT_PREFIXES)
    return f"{digits} {prefix}"


def noun(number: int, plural: str) -> str:
    """`plural`, or its last word in the singular where there is one: `uses`, `use`; `closed epochs`, `closed epoch`."""
    if number != 1:
        return plural
    for ending, singular in _SINGULARS.items():
        if plural.endswith(ending):
            return plural.removesuffix(ending) + singular
    return plural


def counted(number: int, plural: str) -> str:
    """`1 use`, `8.41 M blocks`."""
    return f"{count(number)} {noun(number, plural)}"


def exactly(number: int, plural: str) -> str:
    """`1 use`, and every digit of more."""
    return f"{exact(number)} {noun(number, plural)}"


def rate(value: float | None) -> str:
    """A number a second, without its unit: `0`, `0.25`, `212 k`."""
    if value is None:
        return NOTHING
    if value == 0:
        return "0"
    digits, prefix = _scaled(value, _COUNT_PREFIXES)
    return f"{digits} {prefix}".rstrip()


def size(value: float | None) -> str:
    """Bytes in decimal units: `512 B`, `16.4 kB`, `228 TB`."""
    if value is None:
        return NOTHING
    if abs(value) < 1000:
        return f"{value:.0f} B"
    digits, unit = _scaled(value, _BYTE_UNITS)
    return f"{digits} {unit}"


def told_size(block_bytes: int, blocks: int) -> str:
    """Bytes of so many blocks. An engine may place blocks without saying how large they are: that is not 0 bytes."""
    return SIZE_NOT_TOLD if blocks and not block_bytes else size(block_bytes)


def percent(share: float | None) -> str:
    """A share of one: `62.4 %`; `–` where nothing was counted yet."""
    return NOTHING if share is None else f"{_three_figures(share * 100)} %"


def points(share: float | None, than: float | None) -> str:
    """How much more a share is than another: `+4.1 points`; empty where one of them is not known."""
    if share is None or than is None:
        return ""
    return f"{(share - than) * 100:+.1f} points".replace("-", "−")


def seconds(value: float | None) -> str:
    """A short time: `0.4 s`, `41 s`, `12 min`, `3 h 5 min`, `2 d 4 h`."""
    if value is None:
        return NOTHING
    if value < 0.05:
        return "0 s"
    if value < 9.95:
        return f"{value:.1f} s"
    whole = round(value)
    if whole < 120:
        return f"{whole} s"
    minutes = whole // 60
    if minutes < 60:
        return f"{minutes} min"
    hours, minutes = divmod(minutes, 60)
    if hours < 24:
        return f"{hours} h {minutes} min"
    days, hours = divmod(hours, 24)
    return f"{days} d {hours} h"


def gain(value_s: float | None) -> str:
    """A time that was saved, or lost: `210 ms`, `−3 s`."""
    if value_s is None:
        return NOTHING
    return f"{'−' if value_s < 0 else ''}{duration_text(abs(value_s))}"


def exact(value: int) -> str:
    """Every digit, in groups of three."""
    return f"{value:,}".replace(",", NARROW_SPACE)


def moment(time_us: int) -> str:
    """UTC date and time of µs since the epoch: `2026-03-04 18:04:11`."""
    return moment_text(time_us) if time_us else NOTHING


def timestamp(time_us: int) -> str:
    """ISO 8601 in UTC with milliseconds, for `<time>` and the hover."""
    if not time_us:
        return ""
    return datetime.fromtimestamp(time_us / 1e6, UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")


def short_hash(text: str) -> str:
    """First and last four digits of a hash: `a41f…09c2`."""
    return text if len(text) <= 9 else f"{text[:4]}…{text[-4:]}"


def short_name(text: str) -> str:
    """A name that somebody else chose, of any length, cut to be shown."""
    return _cut(text, NAME_CHARACTERS_SHOWN)


def whole_name(text: str) -> str:
    """The same for the hover: whole, up to a bound."""
    return _cut(text, NAME_CHARACTERS_ON_HOVER)


def _cut(text: str, characters: int) -> str:
    return text if len(text) <= characters else f"{text[:characters]}…"


FILTERS = {
    "count": count,
    "noun": noun,
    "counted": counted,
    "exactly": exactly,
    "rate": rate,
    "size": size,
    "told_size": told_size,
    "percent": percent,
    "points": points,
    "seconds": seconds,
    "gain": gain,
    "exact": exact,
    "moment": moment,
    "timestamp": timestamp,
    "short_hash": short_hash,
    "short_name": short_name,
    "whole_name": whole_name,
}
