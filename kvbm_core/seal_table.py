"""The seals of a registration, in memory that peers read."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable

import numpy as np

from kvbm_core.errors import RemoteSealsExhaustedError
from kvbm_core.remote_seal import Seal, pack_seal, seal_bytes
from kvbm_core.storage import allocate


class SealTable:
    """`seals` places for seals of blocks with `heads` heads. Not thread-safe. Owns `memory`."""

    def __init__(self, seals: int, heads: int) -> None:
        """Raises `TensorAllocationError`."""
        self._each_bytes = seal_bytes(heads)
        self.memory = allocate("system", seals * self._each_bytes, setting=f"seals, now {seals}")
        self._bytes = self.memory.flat.numpy()
        self._seals = seals
        # The longest free goes first: what a seal says last stays to be read for a while.
        self._free = deque(range(seals))

    def take(self, count: int) -> list[int]:
        """Numbers of free places, all `count` or none: `RemoteSealsExhaustedError`."""
        if count > len(self._free):
            raise RemoteSealsExhaustedError(
                f"{count} blocks cannot be offered: {len(self._free)} of {self._seals} seals are free; drop block sets "
                "that are not needed, or register with more seals"
            )
        return [self._free.popleft() for _ in range(count)]

    def give_back(self, numbers: Iterable[int]) -> None:
        self._free.extend(numbers)

    def write(self, number: int, seal: Seal) -> None:
        self._place(number)[:] = np.frombuffer(pack_seal(seal), dtype=np.uint8)

    def wipe(self, number: int) -> None:
        """No peer may read or write the block from now on."""
        self._place(number)[:] = 0

    def _place(self, number: int) -> np.ndarray[tuple[int], np.dtype[np.uint8]]:
        place: np.ndarray[tuple[int], np.dtype[np.uint8]] = self._bytes[
            number * self._each_bytes : (number + 1) * self._each_bytes
        ]
        return place
