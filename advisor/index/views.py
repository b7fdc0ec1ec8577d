"""What the array index answers with."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

from advisor.index.keys import Key


class PlacedIn(NamedTuple):
    """A block in one place. `uses` counts its uses there since it came; `references` its physical copies.

    `last_use_us`: of its last use there, or when it came; whole seconds, in µs.
    """

    place: int
    block_bytes: int
    references: int
    uses: int
    last_use_us: int


class BlockRow(NamedTuple):
    """A block as it was when asked for. Its row is its own as long as it is placed or has children.

    Times are whole milliseconds, in µs. `parent` is a row, -1 for none. A ghost has no placements.
    """

    row: int
    key: Key
    parent: int
    depth: int
    block_tokens: int
    touches: int
    first_touch_us: int
    last_touch_us: int
    placements: tuple[PlacedIn, ...]

    def placed_in(self, place: int) -> PlacedIn | None:
        return next((placed for placed in self.placements if placed.place == place), None)


class Figures(NamedTuple):
    blocks: int
    block_bytes: int


class PlaceFigures(NamedTuple):
    blocks: int
    block_bytes: int
    reads: int
    """Accesses that named this place."""


@dataclass(frozen=True, slots=True)
class Totals:
    """Kept with every change, not counted. `by_tier` counts a block once for each place; the rest once."""

    blocks: int
    ghosts: int
    placements: int
    by_place: list[PlaceFigures]
    """By place id."""
    by_tier: dict[int, Figures]
    by_namespace: dict[int, Figures]
    """Blocks placed anywhere, and the bytes of all their placements."""


class Group(NamedTuple):
    """Blocks that share their first block."""

    root: int
    key: Key
    blocks: int
    block_bytes: int


class Matched(NamedTuple):
    """Leading blocks present, by place: only places that have the first."""

    by_place: dict[int, int]

    @property
    def longest(self) -> int:
        return max(self.by_place.values(), default=0)


@dataclass(slots=True)
class Applied:
    """What a batch came to."""

    events: int = 0
    recomputed: int = 0
    """Blocks stored in G1 that are no copy: computed by an engine."""
    touched: int = 0
    """Blocks of volumes that were not yet in `touched_since_drain`."""
    entered: int = 0
    """Placements that were not there before."""
    cleared_all: bool = False
    """It held a Clear of everything its producer had placed."""
    hits_by_tier: dict[int, int] = field(default_factory=dict)
    skipped: dict[str, int] = field(default_factory=dict)
    """Records that made no sense, by reason; those for which there was no room under `INDEX_FULL`."""
