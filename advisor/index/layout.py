"""The tables of the index: row formats, sizes, memory.

Row numbers are signed 32-bit; -1 is none. All memory is reserved at the start and costs nothing until it is first used:
rows never move, growth is a page at a time, and the memory limit is a number of rows.
"""

from __future__ import annotations

import errno
import mmap
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from advisor.index.errors import IndexFull

Array = npt.NDArray[Any]
Row = Any
"""A row of one of the tables below, or a wire record: reads and writes go to the table."""
int64: Any = np.int64
uint64: Any = np.uint64
"""In kernels all numbers but hashes are int64 and hashes are uint64: mixing the two gives a float64 without a word."""

NONE = -1
LOW_32 = 0xFFFF_FFFF
LOW_16 = 0xFFFF
LOW_31 = 0x7FFF_FFFF
DEPTH_UNKNOWN = 0xFFFF_FFFF

BLOCK_DTYPE = np.dtype(
    (
        np.record,
        [
            ("hash_lo", "u8"),
            ("hash_hi", "u8"),
            ("parent", "i4"),
            ("first_child", "i4"),
            # Of a root these three hold its group's figures instead: see tree.py.
            ("next_sibling", "i4"),
            ("prev_sibling", "i4"),
            ("root", "i4"),
            ("placed", "i4"),  # first placement
            ("depth", "u4"),
            ("touches", "u4"),
            ("realm", "u2"),
            ("block_tokens", "u2"),
            ("first_touch", "u4"),  # low halves; the high ones are in marks
            ("last_touch", "u4"),
            ("marks", "u4"),
        ],
    )
)
"""One cache line. Times are milliseconds since 1970 in 42 bits, good until the year 2109."""

assert BLOCK_DTYPE.itemsize == 64

FIRST_HIGH = 0x3FF
LAST_SHIFT = 10
FREE = 1 << 20
TOUCHED = 1 << 21
TIME_MS_MAX = (1 << 42) - 1

PLACEMENT_DTYPE = np.dtype(
    (
        np.record,
        [
            ("block", "i4"),
            ("next_placed", "i4"),  # of the same block
            ("older", "i4"),
            ("newer", "i4"),
            ("block_bytes", "u4"),
            ("uses", "u4"),
            ("last_use", "u4"),  # seconds since 1970; when it came, before its first use
            ("references", "u2"),
            ("place", "u2"),
        ],
    )
)
"""A block in one place: half a cache line, in the place's recency list. A free one has no block."""

assert PLACEMENT_DTYPE.itemsize == 32

ENTRY_DTYPE = np.dtype((np.record, [("tag", "u4"), ("slot", "u4")]))
"""Hash entry. `slot` is a block row + 1, 0 is empty: fresh memory is an empty table."""

PLACE_DTYPE = np.dtype(
    (
        np.record,
        [
            ("oldest", "i4"),
            ("newest", "i4"),
            ("lowest", "i4"),  # frequency step
            ("tier", "u1"),
            ("volume", "u1"),
            ("by_frequency", "u1"),
            ("spare", "u1"),
            ("placements", "i8"),
            ("placed_bytes", "i8"),
            ("reads", "i8"),
        ],
    )
)

REALM_DTYPE = np.dtype(
    (np.record, [("namespace_id", "u8"), ("group", "i8"), ("rows", "i8"), ("blocks", "i8"), ("placed_bytes", "i8")])
)
"""A namespace and cache group in use. `rows` counts ghosts too; a realm without rows can be given to another."""

REALMS_MAX = 1 << 16
PLACES_MAX = 1 << 16

RANK_DTYPE = np.dtype((np.record, [("older", "i4"), ("newer", "i4"), ("step", "i4")]))
"""A placement's links in its frequency step. Used only in places that evict by frequency."""

STEP_DTYPE = np.dtype(
    (np.record, [("uses", "i8"), ("oldest", "i4"), ("newest", "i4"), ("lower", "i4"), ("higher", "i4")])
)
"""All placements of one place that have one count of uses, the least recently promoted first."""

KEPT_BLOCK_DTYPE = np.dtype((np.record, [("row", "i8"), *[(n, BLOCK_DTYPE[n]) for n in BLOCK_DTYPE.names or ()]]))
KEPT_PLACEMENT_DTYPE = np.dtype(
    (np.record, [("row", "i8"), *[(n, PLACEMENT_DTYPE[n]) for n in PLACEMENT_DTYPE.names or ()]])
)
"""Rows as they were when a save began, kept before their first change (see keep.py)."""

LEVELS = 256
"""Levels of heat; 0 is not placed. See heat.py."""
HEAT_CHUNK_SHIFT = 8
"""Blocks whose highest heat is kept together: 256."""

# Numbers in `state`, a plain i8 array.
(
    BLOCK_TOP, BLOCK_FREE, BLOCKS_FREE, BLOCK_MAX, BLOCK_ROWS, GHOSTS,
    PLACEMENT_TOP, PLACEMENT_FREE, PLACEMENTS_FREE, PLACEMENT_MAX,
    SHIFT, OLD_SHIFT, FRONTIER, BITS, BITS_MAX, ENTRIES, GROW_AT, SEED, STEP_HOMES, FINISH_HOMES,
    TOUCHED_COUNT, LIMBO,
    STEP_TOP, STEP_FREE,
    KEEP_BLOCKS_FROM, KEEP_BLOCKS_BELOW, KEPT_BLOCKS,
    KEEP_PLACEMENTS_FROM, KEEP_PLACEMENTS_BELOW, KEPT_PLACEMENTS, KEPT_PLACEMENT_BITS,
    ANNOUNCED_UNTIL,
) = range(32)  # fmt: skip
STOP, FAULT, RECOMPUTED, NOTED, ENTERED, SKIPS = range(32, 38)
"""What Python reads after a batch, with `HITS`. `SKIPS`: how many records were skipped."""
HITS = 38
"""Five numbers: hits by tier of the batch."""
SKIPPED = 48
"""Sixteen: records that made no sense, by reason (see apply_kernel.py)."""
HISTOGRAM = 64
"""`LEVELS` numbers: placed blocks by level of heat."""
RING = HISTOGRAM + LEVELS
RING_RECORDS = 64
"""Each has three numbers in a ring: of a record ahead its hash tag, its parent's, its likely block row."""
STATE_NUMBERS = RING + 3 * RING_RECORDS


class Tables(NamedTuple):
    """Everything a kernel works on."""

    blocks: Array
    placements: Array
    entries: Array
    places: Array
    realms: Array
    state: Array
    heat: Array
    """u1 by block row: level of heat."""
    peaks: Array
    """u1 by chunk of block rows: no block there is hotter."""
    touched: Array
    """i4: blocks of volumes used since the last drain, in order."""
    ranks: Array
    steps: Array
    kept_blocks: Array
    kept_placements: Array
    kept_bits: Array
    """u1: which rows were kept, first blocks, then placements."""
    spare: Array
    """Hash entries on their way to their new homes."""


class Lookup(NamedTuple):
    """The tables that answer whether a block is there: each table costs a call from Python 0.2 µs."""

    blocks: Array
    placements: Array
    entries: Array
    state: Array


@dataclass(frozen=True, slots=True)
class IndexSize:
    """How much the index may hold. Memory for it is reserved, and used as blocks arrive."""

    blocks_max: int
    placements_max: int
    hash_bits_max: int
    hash_bits: int = 12
    """At the start. The hash table doubles in small steps from then on."""
    step_homes: int = 1024
    """Homes that move to the doubled table for each 64 entries that arrive meanwhile. Below 512 it gets crowded."""
    finish_homes: int = 16_384
    """With fewer homes left the rest moves at once."""

    @classmethod
    def for_bytes(cls, memory_bytes_max: int, placements_per_block: float = 1.25) -> IndexSize:
        """The most blocks whose tables stay below `memory_bytes_max`.

        Raises `ValueError` below 1 MiB.
        """
        if memory_bytes_max < 1 << 20:
            raise ValueError(f"an index of {memory_bytes_max} bytes holds next to nothing: give it 1 MiB or more")
        row_bytes = BLOCK_DTYPE.itemsize + PLACEMENT_DTYPE.itemsize * placements_per_block + 1
        best = (0, 0)
        for bits in range(12, 31):
            room = memory_bytes_max - (ENTRY_DTYPE.itemsize << bits)
            if room > 0:
                best = max(best, (min(int(room / row_bytes), int(HASH_LOAD_MAX * (1 << bits)), LOW_31 - 1), bits))
        blocks, bits = best
        return cls(blocks, int(blocks * placements_per_block), bits)

    @classmethod
    def for_blocks(cls, blocks_max: int, placements_max: int | None = None) -> IndexSize:
        """Room for exactly so many."""
        bits = 12
        while blocks_max > HASH_LOAD_MAX * (1 << bits):
            bits += 1
        return cls(blocks_max, blocks_max if placements_max is None else placements_max, bits)


HASH_LOAD_MAX = 0.85
"""Of a hash table that may double no more. Below its greatest size it doubles at three quarters."""
HASH_SPILL = 1 << 16
"""Entries past the last home, so that probing never wraps around."""
_HUGE_PAGES_FROM_BYTES = 64 << 20
_MAP_NORESERVE = 0x4000
"""Linux's number; Python names it from 3.13 on."""


def reserve(rows: int, dtype: np.dtype[Any]) -> Array:
    """Zeroed rows whose memory is taken page by page when first used. Raises `IndexFull`."""
    size = max(1, rows) * dtype.itemsize
    try:
        memory = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _MAP_NORESERVE)
    except OSError as error:
        raise IndexFull(
            f"{size} bytes of address space for the index are refused ({error.strerror}): lower its memory limit, or "
            "let the process reserve more than it uses (vm.overcommit_memory, ulimit -v)"
        ) from error
    if size >= _HUGE_PAGES_FROM_BYTES:
        memory.madvise(mmap.MADV_HUGEPAGE)
    return np.frombuffer(memory, dtype)


def release(rows: Array) -> None:
    """Give back the memory of rows from `reserve`; they are zero again."""
    _memory_of(rows).madvise(mmap.MADV_DONTNEED)


def populate(rows: Array, first: int, end: int) -> None:
    """Have memory for rows `first` … `end` of `reserve` before they are used; their content stays as it is.

    A first use costs up to 20 µs a page. Does nothing where the kernel is older than Linux 5.14.
    """
    page = mmap.PAGESIZE
    start = first * rows.itemsize // page * page
    size = min(end, len(rows)) * rows.itemsize - start
    if size > 0:
        try:
            _memory_of(rows).madvise(_MADV_POPULATE_WRITE, start, size)
        except OSError as error:
            if error.errno not in (errno.EINVAL, errno.ENOMEM):
                raise


_MADV_POPULATE_WRITE = 23
"""madvise(2); Python has no name for it."""


def _memory_of(rows: Array) -> mmap.mmap:
    memory: Any = rows
    while not isinstance(memory, mmap.mmap):
        memory = memory.obj if isinstance(memory, memoryview) else memory.base
    return memory


def make_tables(size: IndexSize, seed: int) -> Tables:
    """Empty tables. `seed`, 62 bits, keeps whoever chooses hashes from choosing their homes. Raises `IndexFull`."""
    blocks, placements = size.blocks_max, size.placements_max
    bits = min(size.hash_bits, size.hash_bits_max)
    if blocks > HASH_LOAD_MAX * (1 << size.hash_bits_max):
        raise ValueError(f"{blocks} blocks overfill a hash table of 2^{size.hash_bits_max} entries: allow it more bits")
    state = np.zeros(STATE_NUMBERS, np.int64)
    state[[BLOCK_FREE, PLACEMENT_FREE, STEP_FREE]] = NONE
    state[BLOCK_MAX], state[PLACEMENT_MAX] = blocks, placements
    state[BITS], state[BITS_MAX], state[SHIFT], state[SEED] = bits, size.hash_bits_max, 32 - bits, seed
    state[STEP_HOMES], state[FINISH_HOMES] = size.step_homes, size.finish_homes
    state[KEPT_PLACEMENT_BITS] = (blocks >> 3) + 1
    state[GROW_AT] = 3 << bits >> 2 if bits < size.hash_bits_max else 1 << 62
    spill = min(HASH_SPILL, 16 << size.hash_bits_max)
    return Tables(
        blocks=reserve(blocks, BLOCK_DTYPE),
        placements=reserve(placements, PLACEMENT_DTYPE),
        entries=reserve((1 << size.hash_bits_max) + spill, ENTRY_DTYPE),
        places=reserve(PLACES_MAX, PLACE_DTYPE),
        realms=reserve(REALMS_MAX, REALM_DTYPE),
        state=state,
        heat=reserve(blocks, np.dtype(np.uint8)),
        peaks=reserve((blocks >> HEAT_CHUNK_SHIFT) + 1, np.dtype(np.uint8)),
        touched=reserve(blocks, np.dtype(np.int32)),
        ranks=reserve(placements, RANK_DTYPE),
        steps=reserve(placements, STEP_DTYPE),
        kept_blocks=reserve(blocks, KEPT_BLOCK_DTYPE),
        kept_placements=reserve(placements, KEPT_PLACEMENT_DTYPE),
        kept_bits=reserve((blocks >> 3) + (placements >> 3) + 2, np.dtype(np.uint8)),
        spare=reserve(4 * size.finish_homes + 4 * size.step_homes + HASH_SPILL, ENTRY_DTYPE),
    )
