"""Lists cut to a page, with the addresses of the first and the next one. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar
from urllib.parse import urlencode

from advisor.web import formats

Row = TypeVar("Row")

PAGE_ROWS = 100


@dataclass(frozen=True, slots=True)
class PageOfRows(Generic[Row]):
    """`first` and `next` are addresses, empty where there is no such page. `shown` says which rows these are."""

    rows: Sequence[Row]
    shown: str
    first: str
    next: str


def address(path: str, query: Mapping[str, object]) -> str:
    """`path` with what `query` says; what is empty, None or 0 is left out, since every filter takes it for nothing."""
    said = {name: value for name, value in query.items() if value}
    return f"{path}?{urlencode(said)}" if said else path


def page_of(rows: Sequence[Row], skip: int, path: str, query: Mapping[str, object]) -> PageOfRows[Row]:
    """`PAGE_ROWS` of all `rows`. `query` are the filters that made them, kept in the addresses beside `skip`."""
    shown = rows[skip : skip + PAGE_ROWS]
    last = skip + len(shown)
    return PageOfRows(
        rows=shown,
        shown=f"{formats.exact(skip + 1)} to {formats.exact(last)} of {formats.exact(len(rows))}" if shown else "none",
        first=address(path, query) if skip else "",
        next=address(path, {**query, "skip": last}) if last < len(rows) else "",
    )
