"""How often blocks were used lately, in little memory: a count-min sketch that ages, as TinyLFU has it.

After Einziger, Friedman and Manes, "TinyLFU: a highly efficient cache admission policy" (2017). Pure; not thread-safe.
"""

from __future__ import annotations

from storage_agent.port import BlockKey

COUNT_MAX = 15
"""A counter has four bits' range and stays at its top."""
AGE_AFTER = 10
"""All counters are halved after capacity × this many uses."""
_ROW_BITS = 32
"""A sequence hash is uniform in all its bits: each row takes a part of it, and nothing is hashed again."""
COUNTERS_OF_BLOCK = 16
"""In each row. Between two ageings `AGE_AFTER` blocks for each of the capacity may pass that are used once; with one
counter for each, nine of ten of them would seem to have been used before, with sixteen one of a hundred."""
_HALVED = bytes(count >> 1 for count in range(256))


class FrequencySketch:
    """Counts from 0 to 15 for any number of keys: never too low, but for ageing, and rarely too high.

    A row has `COUNTERS_OF_BLOCK` counters, of one byte, for each block of `capacity_blocks`, or up to twice as many.
    """

    def __init__(self, capacity_blocks: int) -> None:
        width = 1 << (COUNTERS_OF_BLOCK * capacity_blocks - 1).bit_length()
        self._mask = width - 1
        self._rows = tuple(bytearray(width) for _ in range(4))
        self._age_after = AGE_AFTER * capacity_blocks
        self._uses = 0

    def use(self, key: BlockKey) -> None:
        """Count one use. Only the counters that are lowest rise, which keeps the others' keys from rising with them."""
        lowest = self.count(key)
        if lowest < COUNT_MAX:
            bits, mask = key.sequence_hash, self._mask
            for row in self._rows:
                place = bits & mask
                if row[place] == lowest:
                    row[place] = lowest + 1
                bits >>= _ROW_BITS
        self._uses += 1
        if self._uses >= self._age_after:
            self._age()

    def count(self, key: BlockKey) -> int:
        """Uses of late, 0 to 15."""
        bits, mask = key.sequence_hash, self._mask
        lowest = COUNT_MAX
        for row in self._rows:
            count = row[bits & mask]
            if count < lowest:
                lowest = count
            bits >>= _ROW_BITS
        return lowest

    def _age(self) -> None:
        self._rows = tuple(row.translate(_HALVED) for row in self._rows)
        self._uses = 0
