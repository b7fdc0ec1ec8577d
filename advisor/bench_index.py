"""`kvadvisor bench index`: the array index beside a plain-Python one and NVIDIA's RadixTree, on one stream."""

from __future__ import annotations

import gc
import json
import os
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np

from advisor.bench_floor import random_access_ns
from advisor.bench_stream import CHAIN_BLOCKS_MAX, ChainStream
from advisor.index import ArrayIndex, IndexSize, PlaceKey
from advisor.index.warm import warm
from event_plane.figures import Figure, at_least, at_most
from event_plane.schema import EventType, Records, Tier

BATCH = 512
NAMESPACE = 7
PRODUCER = 1
MILLION = 1_000_000
ROUNDS = 9
ROUNDS_QUICK = 4
LINES_PER_EVENT = 1.3
"""Random cache lines an event misses, beyond what prefetching overlaps (reference: index.md)."""
MATCH_HASHES = 64


def run(quick: bool) -> list[Figure]:
    """About four minutes and 4 GB at 10 M blocks; `quick` measures at 1 M alone."""
    warm()
    figures = _compile_times(quick)
    small = _Loaded(MILLION, 2 * MILLION if quick else 3 * MILLION)
    large = None if quick else _Loaded(10 * MILLION, 7 * MILLION)
    figures += _ingest(small, large)
    figures += _questions(large if large is not None else small, "1 M" if quick else "10 M", goal=not quick)
    figures += _files(large if large is not None else small, goal=not quick)
    figures += _shards(small)
    return figures


class _Loaded:
    """An index with `blocks` live blocks, memory touched first, and batches of the mix to go on with."""

    def __init__(self, blocks: int, events: int) -> None:
        self.stream = ChainStream()
        self.stream.grow(blocks + events + 2 * CHAIN_BLOCKS_MAX)
        self.blocks = blocks
        self.index = ArrayIndex(IndexSize.for_blocks(self.stream.blocks))
        self.index.touch_ahead(self.stream.blocks)
        self.worst_ms = 0.0
        for first in range(0, blocks, 200 * BATCH):
            for batch in _batches(self.stream.stores(first, min(first + 200 * BATCH, blocks))):
                self.worst_ms = max(self.worst_ms, _seconds(lambda: self.apply(batch)) * 1e3)  # noqa: B023
        self.mix = self.stream.mixed(blocks, events, seed=5)
        self.at = 0
        self.place = self.index.place(PlaceKey(PRODUCER, Tier.G3, "volume"))
        self.other = self.index.place(PlaceKey(PRODUCER, Tier.G3, "other"))

    def apply(self, batch: Records) -> None:
        self.index.apply(batch, producer=PRODUCER, namespace_ids=(NAMESPACE,), locations=("volume",), now_us=0)

    def next_batches(self, events: int) -> list[Records]:
        """The next part of the mix, in batches; each part is applied once."""
        part = self.mix[self.at : self.at + events]
        self.at += events
        return _batches(part)


def _batches(records: Records) -> list[Records]:
    records.flags.writeable = False
    return [records[i : i + BATCH] for i in range(0, len(records), BATCH)]


def _seconds(call: Callable[[], object]) -> float:
    started = time.perf_counter()
    call()
    return time.perf_counter() - started


class PlainIndex:
    """What one would write first: a dict of blocks and an OrderedDict for recency, record by record."""

    def __init__(self) -> None:
        self.blocks: dict[tuple[int, int], list[Any]] = {}
        self.recency: OrderedDict[tuple[int, int], int] = OrderedDict()

    def apply(self, records: Records) -> None:
        names = ("event_type", "sequence_hash_lo", "sequence_hash_hi", "parent_hash_lo", "parent_hash_hi", "block_size")
        for kind, lo, hi, parent_lo, parent_hi, size in records[list(names)].tolist():
            key = (lo, hi)
            if kind == EventType.STORE:
                block = self.blocks.get(key)
                if block is None:
                    parent_key = (parent_lo, parent_hi)
                    parent = self.blocks.get(parent_key) if parent_key != (0, 0) else None
                    block = self.blocks[key] = [parent, {}, 0, size]
                    if parent is not None:
                        parent[1][key] = block
                    self.recency[key] = size
                else:
                    self.recency.move_to_end(key)
                block[2] += 1
            else:
                block = self.blocks.pop(key, None)
                if block is not None:
                    del self.recency[key]
                    if block[0] is not None:
                        block[0][1].pop(key, None)


# -- figures


def _ingest(small: _Loaded, large: _Loaded | None) -> list[Figure]:
    rounds = ROUNDS if large is not None else ROUNDS_QUICK
    plain = PlainIndex()
    for batch in _batches(small.stream.stores(0, small.blocks)):
        plain.apply(batch)
    radix = _Radix.make(small.stream, small.blocks)
    # What is built stays: the collector need not look at millions of its objects while others are measured.
    gc.collect()
    gc.freeze()
    ns: dict[str, list[float]] = {"small": [], "large": [], "plain": [], "radix16": [], "radix512": []}
    for _ in range(rounds):
        batches = small.next_batches(200 * BATCH)
        ns["small"].append(_ns(small.apply, batches))
        ns["plain"].append(_ns(plain.apply, batches[:40]))
        if large is not None:
            ns["large"].append(_ns(large.apply, large.next_batches(500 * BATCH)))
        if radix is not None:
            ns["radix16"].append(radix.ns_per_block(16))
            ns["radix512"].append(radix.ns_per_block(512))
    fast, slow = statistics.median(ns["small"]), statistics.median(ns["plain"])
    tenth = statistics.median(ns["large"]) if large is not None else None
    line_ns = random_access_ns(256 << 20 if large is None else 1 << 30)
    figures = [
        Figure("ingest at 1 M blocks", fast, "ns/event"),
        Figure("ingest at 1 M blocks", 1e3 / fast, "M events/s"),
        Figure("ingest at 10 M blocks", tenth, "ns/event", note="not in --quick"),
        at_least(
            "events/s at 10 M blocks, one thread",
            1e3 / tenth if tenth is not None else None,
            "M events/s",
            7,
            "not in --quick",
        ),
        Figure("floor: independent random line reads × lines an event", line_ns * LINES_PER_EVENT, "ns/event"),
        Figure("plain Python at 1 M blocks", slow, "ns/event"),
        at_least("ratio to plain Python, 1 M blocks", slow / fast, "×", 25),
    ]
    for size, goal in ((16, 15), (512, 5)):
        theirs = statistics.median(ns[f"radix{size}"]) if radix is not None else None
        ratio = theirs / fast if theirs is not None else None
        absent = "ai-dynamo-runtime is not installed"
        figures.append(Figure(f"NVIDIA RadixTree, {size} blocks an event", theirs, "ns/block", note=absent))
        figures.append(at_least(f"ratio to RadixTree at {size} blocks an event", ratio, "×", goal, absent))
    loaded = large if large is not None else small
    per_block = loaded.index.memory_bytes() / max(1, len(loaded.index))
    figures.append(at_most("bytes per block: block, one placement, hash entry", per_block, "bytes", 120))
    figures.append(
        at_most(
            "longest batch while growing to 10 M blocks",
            large.worst_ms if large is not None else None,
            "ms",
            50,
            "not in --quick",
        )
    )
    return figures


def _ns(apply: Callable[[Records], None], batches: list[Records]) -> float:
    events = sum(len(batch) for batch in batches)
    started = time.perf_counter()
    for batch in batches:
        apply(batch)
    return (time.perf_counter() - started) / events * 1e9


def _questions(loaded: _Loaded, size: str, *, goal: bool) -> list[Figure]:
    index, stream = loaded.index, loaded.stream
    rng = np.random.default_rng(3)
    paths: list[Any] = []
    while len(paths) < 2_000:
        path = stream.path(int(rng.integers(loaded.blocks // 2, loaded.blocks)))[:MATCH_HASHES]
        if len(path) == MATCH_HASHES:
            hashes = stream.hashes(path)
            hashes.flags.writeable = False
            paths.append(hashes)
    waits = [_seconds(lambda: index.match(NAMESPACE, 0, path)) for path in paths]  # noqa: B023
    median_us, p99_us = statistics.median(waits) * 1e6, float(np.percentile(waits, 99)) * 1e6
    theirs = _Radix.match_us(stream, loaded.blocks if not goal else MILLION)
    coldest = statistics.median(_seconds(lambda: index.leaves_first(loaded.place, 1_000)) for _ in range(7)) * 1e3
    hottest = statistics.median(_seconds(lambda: index.hottest(1_000, loaded.other)) for _ in range(7)) * 1e3
    under_ms = _match_under_ingest(loaded, paths)
    absent = "" if goal else "not in --quick"
    return [
        at_most(f"match of 64 hashes at {size} blocks, median", median_us, "µs", 4),
        Figure(f"match of 64 hashes at {size} blocks, p99", p99_us, "µs"),
        Figure(
            "RadixTree find_matches of 64 at 1 M blocks, ratio to match",
            theirs / median_us if theirs is not None else None,
            "×",
            note="ai-dynamo-runtime is not installed",
        ),
        at_most("match under flat-out ingest, p99", under_ms, "ms", 10),
        at_most(f"1,000 coldest evictable leaves at {size} blocks", coldest, "ms", 1, absent),
        at_most(f"1,000 hottest outside a volume at {size} blocks", hottest, "ms", 5, absent),
    ]


def _match_under_ingest(loaded: _Loaded, paths: list[Any]) -> float:
    """Wall time of a match while another thread applies batches without a pause, p99 in ms."""
    batches = loaded.next_batches(2_000 * BATCH)
    done = threading.Event()

    def ingest() -> None:
        for batch in batches:
            loaded.apply(batch)
        done.set()

    thread = threading.Thread(target=ingest)
    waits: list[float] = []
    thread.start()
    for number in range(1_000_000):
        if done.is_set():
            break
        waits.append(_seconds(lambda: loaded.index.match(NAMESPACE, 0, paths[number % len(paths)])))  # noqa: B023
    thread.join()
    return float(np.percentile(waits, 99)) * 1e3


def _files(loaded: _Loaded, *, goal: bool) -> list[Figure]:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "index.kvi"
        save_s = _seconds(lambda: loaded.index.save(path))
        size_mb = path.stat().st_size / 1e6
        loads = [_seconds(lambda: ArrayIndex.load(path, loaded.index.size)) for _ in range(4)]
    name = "recovery of 10 M blocks by bulk read, file in cache"
    return [
        Figure("checkpoint save", save_s, "s"),
        Figure("checkpoint size", size_mb, "MB"),
        Figure("recovery into memory that the machine has to find first", loads[0], "s"),
        Figure("recovery", statistics.median(loads[1:]), "s"),
        at_most(name, statistics.median(loads[1:]) if goal else None, "s", 3, "not in --quick"),
    ]


def _shards(small: _Loaded) -> list[Figure]:
    """Two indexes on two threads, half the namespaces each, at 1 M blocks."""
    halves = [_Loaded(MILLION // 2, MILLION), _Loaded(MILLION // 2, MILLION)]
    work = [half.next_batches(1_000 * BATCH) for half in halves]
    threads = [
        threading.Thread(target=lambda h=half, b=batches: [h.apply(batch) for batch in b])
        for half, batches in zip(halves, work, strict=True)
    ]
    started = time.perf_counter()
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    seconds = time.perf_counter() - started
    alone = small.next_batches(1_000 * BATCH)
    one_ns = _ns(small.apply, alone)
    both = 2 * 1_000 * BATCH / seconds / 1e6
    return [
        Figure("two shards on two threads", both, "M events/s"),
        Figure("two shards over one", both / (1e3 / one_ns), "×"),
    ]


def _compile_times(quick: bool) -> list[Figure]:
    """In processes of their own, with numba's cache empty and then filled."""
    program = (
        "import time; s = time.perf_counter(); from advisor.index.warm import warm; i = time.perf_counter(); warm(); "
        "print(i - s, time.perf_counter() - i)"
    )
    with tempfile.TemporaryDirectory() as folder:
        cold = None if quick else _process(program, folder)
        first = _process(program, folder) if quick is False else _process(program, None)
    note = "not in --quick"
    return [
        Figure("compile of every kernel, empty cache", cold[1] if cold is not None else None, "s", note=note),
        Figure("import, warm", first[0], "s"),
        Figure("kernels from the cache", first[1], "s"),
    ]


def _process(program: str, cache: str | None) -> tuple[float, float]:
    environment = {**os.environ, **({"NUMBA_CACHE_DIR": cache} if cache is not None else {})}
    command = [sys.executable, "-c", program]
    out = subprocess.run(command, env=environment, capture_output=True, text=True, check=True).stdout.split()
    return float(out[0]), float(out[1])


class _Radix:
    """NVIDIA's index, from `ai-dynamo-runtime` (extra `peers`), fed its own events in JSON."""

    def __init__(self, tree: Any, stream: ChainStream, blocks: int) -> None:
        self._tree = tree
        self._stream = stream
        self._next = int(np.searchsorted(stream.starts, blocks))
        self._event_id = 0
        for chain in range(self._next):
            self._store(chain, CHAIN_BLOCKS_MAX)

    @classmethod
    def make(cls, stream: ChainStream, blocks: int) -> _Radix | None:
        try:
            from dynamo._core import RadixTree
        except ImportError:
            return None
        return cls(RadixTree(), stream, blocks)

    def _events(self, chain: int, size: int) -> Iterator[tuple[int, bytes]]:
        first, end = int(self._stream.starts[chain]), int(self._stream.starts[chain + 1])
        ids = np.arange(first, end)
        hashes = self._stream.hashes(ids)[:, 0].tolist()
        parent = int(self._stream.parents[first])
        above = int(self._stream.hashes(np.array([parent]))[0, 0]) if parent >= 0 else None
        edges = [*range(0, len(ids), size), len(ids)]
        for start, stop in pairwise(edges):
            blocks = [{"block_hash": h, "tokens_hash": h} for h in hashes[start:stop]]
            self._event_id += 1
            stored = {"parent_hash": above, "blocks": blocks}
            yield stop - start, json.dumps({"event_id": self._event_id, "data": {"stored": stored}}).encode()
            above = hashes[stop - 1]

    def _store(self, chain: int, size: int) -> None:
        for _, event in self._events(chain, size):
            self._tree.apply_event(1, event)

    def ns_per_block(self, size: int) -> float:
        """New chains in events of up to `size` blocks."""
        events = [event for chain in range(self._next, self._next + 400) for event in self._events(chain, size)]
        self._next += 400
        blocks = sum(count for count, _ in events)
        started = time.perf_counter()
        for _, event in events:
            self._tree.apply_event(1, event)
        return (time.perf_counter() - started) / blocks * 1e9

    @classmethod
    def match_us(cls, stream: ChainStream, blocks: int) -> float | None:
        """Median of `find_matches` of 64 hashes, µs."""
        radix = cls.make(stream, min(blocks, MILLION))
        if radix is None:
            return None
        rng = np.random.default_rng(4)
        waits: list[float] = []
        while len(waits) < 1_000:
            path = stream.path(int(rng.integers(MILLION // 2, MILLION)))[:MATCH_HASHES]
            if len(path) == MATCH_HASHES:
                hashes = stream.hashes(path)[:, 0].tolist()
                waits.append(_seconds(lambda: radix._tree.find_matches(hashes)))  # noqa: B023
        return statistics.median(waits) * 1e6
