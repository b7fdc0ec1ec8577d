"""How often blocks were used lately, in little memory: a count-min sketch that ages, as TinyLFU has it.

After Einziger, Friedman and Manes, "TinyLFU: a highly efficient cache admission policy" (2017). Pure; not thread-safe.
"""

from __future__ import annotations

from storage_agent.port import BlockKey

COUNT_MAX = 15
"""A counter has four bits' range and stays at its top."""
AGE_AFTER = 10
"""All counters are halved after capacity × this many uses."""
_HALVED = bytes(count >> 1 for count in range(256))
_ROWS = 4


class FrequencySketch:
    """Counts from 0 to 15 for any number of keys: never too low, but for ageing, and rarely too high.

    A row has a counter, one byte, for each block of `capacity_blocks` or up to twice as many.
    """

    def __init__(self, capacity_blocks: int) -> None:
        width = 1 << max(capacity_blocks - 1, 15).bit_length()
        self._mask = width - 1
        self._counters = [bytearray(width) for _ in range(_ROWS)]
        self._age_after = AGE_AFTER * capacity_blocks
        self._uses = 0

    def use(self, key: BlockKey) -> None:
        """Count one use. Only the counters that are lowest rise, which keeps the others' keys from rising with them."""
        places = self._places(key)
        lowest = min(row[place] for row, place in zip(self._counters, places, strict=True))
        if lowest < COUNT_MAX:
            for row, place in zip(self._counters, places, strict=True):
                if row[place] == lowest:
                    row[place] = lowest + 1
        self._uses += 1
        if self._uses >= self._age_after:
            self._age()

    def count(self, key: BlockKey) -> int:
        """Uses of late, 0 to 15."""
        return min(row[place] for row, place in zip(self._counters, self._places(key), strict=True))

    def _places(self, key: BlockKey) -> tuple[int, int, int, int]:
        # A sequence hash is uniform in all its bits, so that each row takes a part of it and nothing is hashed again.
        bits, mask = key.sequence_hash, self._mask
        return bits & mask, bits >> 32 & mask, bits >> 64 & mask, bits >> 96 & mask

    def _age(self) -> None:
        self._counters = [bytearray(row.translate(_HALVED)) for row in self._counters]
        self._uses = 0
