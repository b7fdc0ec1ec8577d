"""Volume descriptors: validated facts about a place for blocks. They come from configuration or the API only."""

from __future__ import annotations

from typing import Literal

import msgspec


class VolumeDescriptor(msgspec.Struct, frozen=True, kw_only=True):
    """A volume, as its owner describes it. Sizes in bytes, capacity in blocks (slots), watermarks as fractions."""

    id: str
    kind: str = "slab"
    path: str
    tier: int = 3
    capacity_blocks: int
    block_bytes_max: int
    speed_rank: int = 0
    """Order of speed among volumes: 0 is the fastest."""
    high_watermark: float = 0.90
    low_watermark: float = 0.75
    when_full: Literal["refuse"] = "refuse"
