"""What names a block and a place."""

from __future__ import annotations

from typing import NamedTuple


class Key(NamedTuple):
    """Identity of a block: u64 namespace id, cache group, 128-bit sequence hash."""

    namespace_id: int
    group: int
    sequence_hash: int


class PlaceKey(NamedTuple):
    """Where a producer says a block is: its own id, a tier, and its name for the location."""

    producer: int
    tier: int
    location: str
