"""`kvadvisor bench agent`: volumes beside raw I/O on the same file, device or bucket, in one run, like with like.

A depth is the number of blocks of one call: they are under way together. Every put ends with its fdatasync, and so does
every raw write; reads find a cold cache where the mode has one. GB/s count payloads alone.
"""

from __future__ import annotations

import os
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path

from event_plane.figures import Figure, at_least, at_most
from event_plane.schema import Namespace
from storage_agent.agent import StorageAgent
from storage_agent.bench_endurance import flat_memory, recovery_figures
from storage_agent.bench_lookup import lookup_us
from storage_agent.bench_media import MEDIA, Medium, MediumAbsent, RawWay, medium
from storage_agent.errors import VolumeError
from storage_agent.port import BlockKey, Outcome, PutBlock, Result

KIB = 1024
SIZES = (64 * KIB, 256 * KIB, 1024 * KIB, 4096 * KIB)
SIZES_QUICK = (64 * KIB, 1024 * KIB)
DEPTHS = (1, 16, 256)
DEPTHS_QUICK = (16,)
CELL_S = 6.0
CELL_S_QUICK = 1.5
ROUNDS_MIN = 3
ROUNDS_MAX = 200
WITH_GOAL = ("slab", "block device")
GOAL_DEPTH_MIN = 16
GOAL_RATIO = 0.95
NAMESPACE = Namespace(tenant="bench")
FOLDER_VARIABLE = "KVADVISOR_BENCH_FOLDER"
"""Names the folder that is measured; a fresh one of the system's own is taken where it is not set."""


@dataclass
class _Times:
    """Seconds of each round."""

    put: list[float] = field(default_factory=list)
    get: list[float] = field(default_factory=list)
    cpu: list[float] = field(default_factory=list)
    raw_put: dict[str, list[float]] = field(default_factory=dict)
    raw_get: dict[str, list[float]] = field(default_factory=dict)


def run(quick: bool) -> list[Figure]:
    """About twenty minutes, ten of them mixed load; `quick` measures one size of most, and less of everything."""
    figures: list[Figure] = []
    with tempfile.TemporaryDirectory(prefix="kvadvisor-bench-", dir=os.environ.get(FOLDER_VARIABLE)) as made:
        folder = Path(made)
        for name in MEDIA:
            sizes = SIZES if not quick else SIZES_QUICK if name == "slab" else SIZES_QUICK[:1]
            for block_bytes in sizes:
                for depth in DEPTHS_QUICK if quick else DEPTHS:
                    figures += _cell(folder, name, block_bytes, depth, CELL_S_QUICK if quick else CELL_S)
        figures.append(at_most("get, metadata of a block", lookup_us(), "µs of the processor", 5))
        figures += recovery_figures(folder, quick)
        figures += flat_memory(folder, quick)
    return figures


def _cell(folder: Path, name: str, block_bytes: int, depth: int, budget_s: float) -> list[Figure]:
    """Puts and gets of `depth` blocks of one size on one medium."""
    what = f"{name} {_size(block_bytes)} depth {depth}"
    try:
        with ExitStack() as closing:
            place = medium(name, folder, block_bytes, depth, closing)
            times = _measure(place, block_bytes, depth, budget_s, closing)
    except MediumAbsent as absent:
        return [Figure(f"{what}, put", None, "GB/s", note=str(absent))]
    except VolumeError as error:
        return [Figure(f"{what}, put", None, "GB/s", note=str(error))]
    return _figures(what, times, block_bytes * depth, has_goal=name in WITH_GOAL and depth >= GOAL_DEPTH_MIN)


def _measure(place: Medium, block_bytes: int, depth: int, budget_s: float, closing: ExitStack) -> _Times:
    """Rounds of a put, a get, and each raw way, one after another, until `budget_s` is over. Raises `VolumeError`."""
    agent = closing.enter_context(
        StorageAgent(
            "bench",
            publisher=None,
            allowed_roots=place.allowed_roots,
            endpoints=place.endpoints,
            mend_interval_s=3600.0,
        )
    )
    mode = agent.register_volume(place.descriptor).mode
    ways: list[RawWay] = place.raw_ways(mode, closing)
    times = _Times()
    content = os.urandom(block_bytes)
    keys = [BlockKey(NAMESPACE.namespace_id, 0, number + 1) for number in range(depth)]
    payloads = [memoryview(bytearray(content)) for _ in range(depth)]
    blocks = [PutBlock(key, NAMESPACE, payload) for key, payload in zip(keys, payloads, strict=True)]
    ends_s = time.monotonic() + budget_s
    while len(times.put) < ROUNDS_MIN or (time.monotonic() < ends_s and len(times.put) < ROUNDS_MAX):
        cpu_s = time.process_time()
        times.put.append(_seconds(lambda: _require(agent.put("bench", blocks), Result.STORED)))
        times.get.append(_seconds(lambda: _require(agent.get(keys, payloads), Result.HIT)))
        times.cpu.append(time.process_time() - cpu_s)
        _require(agent.delete("", "bench", keys).outcomes, Result.DELETED)
        for way in ways:
            times.raw_put.setdefault(way.name, []).append(_seconds(way.write))
            way.forget_cached()
            times.raw_get.setdefault(way.name, []).append(_seconds(way.read))
    return times


def _figures(what: str, times: _Times, round_bytes: int, *, has_goal: bool) -> list[Figure]:
    figures: list[Figure] = []
    for verb, ours, raw in (("put", times.put, times.raw_put), ("get", times.get, times.raw_get)):
        figures.append(Figure(f"{what}, {verb}", round_bytes / statistics.median(ours) / 1e9, "GB/s"))
        figures.append(Figure(f"{what}, {verb} p50", statistics.median(ours) * 1e3, "ms"))
        figures.append(Figure(f"{what}, {verb} p99", _p99(ours) * 1e3, "ms"))
        for way, seconds in raw.items():
            figures.append(
                Figure(f"{what}, raw {verb} {way}", round_bytes / statistics.median(seconds) / 1e9, "GB/s")
            )
        if not raw:
            continue
        # Of the mode that the volume uses, which is the first.
        mode = next(iter(raw)).partition(",")[0]
        best = min((seconds for way, seconds in raw.items() if way.startswith(mode)), key=statistics.median)
        ratio = statistics.median(b / o for b, o in zip(best, ours, strict=True))
        name = f"{what}, {verb} against the best raw of {mode}"
        figures.append(at_least(name, ratio, "×", GOAL_RATIO) if has_goal else Figure(name, ratio, "×"))
    busy = sum(times.cpu) / (sum(times.put) + sum(times.get))
    figures.append(Figure(f"{what}, processor", busy * 100, "% of one core"))
    return figures


def _require(outcomes: Sequence[Outcome], wanted: Result) -> None:
    for outcome in outcomes:
        if outcome.result is not wanted:
            raise VolumeError(f"volume 'bench' answered {outcome.result}: {outcome.reason}; mend that, then try again")


def _seconds(work: Callable[[], object]) -> float:
    started_s = time.perf_counter()
    work()
    return time.perf_counter() - started_s


def _p99(seconds: list[float]) -> float:
    return sorted(seconds)[min(len(seconds) - 1, int(len(seconds) * 0.99))]


def _size(size_bytes: int) -> str:
    return f"{size_bytes // KIB} KiB" if size_bytes < 1024 * KIB else f"{size_bytes // KIB // KIB} MiB"
