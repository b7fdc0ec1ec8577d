"""What a volume's transfers moved, and how long each took: totals that only grow in one life of the agent. Pure."""

from __future__ import annotations

from bisect import bisect_left
from typing import Final

TRANSFER_BOUNDS_S: Final = tuple(0.0001 * 2.0**n for n in range(18))
"""A transfer is counted under the first of these that it is not above, from 100 µs to 13 s, or after the last."""


class Transfers:
    """Of one volume, one way: what it did for one batch of a get or put is one transfer. Not thread-safe."""

    def __init__(self) -> None:
        self.payload_bytes = 0
        self.seconds = 0.0
        self.times = [0] * (len(TRANSFER_BOUNDS_S) + 1)

    def add(self, payload_bytes: int, seconds: float) -> None:
        """One more."""
        self.payload_bytes += payload_bytes
        self.seconds += seconds
        self.times[bisect_left(TRANSFER_BOUNDS_S, seconds)] += 1
