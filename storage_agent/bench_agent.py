"""`kvadvisor bench agent`: volumes beside raw I/O on the same file, in one run, like with like.

A depth is the number of blocks of one call: they are under way together. Every put ends with its fdatasync, and so does
every raw write; reads find a cold cache where the mode has one. GB/s count payloads alone.
"""

from __future__ import annotations

import os
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass, field
from pathlib import Path

from event_plane.figures import Figure, at_least, at_most
from event_plane.schema import Namespace
from storage_agent.agent import StorageAgent
from storage_agent.bench_endurance import flat_memory, recovery_figures
from storage_agent.bench_lookup import lookup_us
from storage_agent.bench_raw import Mode, RawFile
from storage_agent.block_header import PAGE_BYTES
from storage_agent.descriptor import VolumeDescriptor
from storage_agent.errors import VolumeError
from storage_agent.port import BlockKey, Outcome, PutBlock, Result
from storage_agent.slab_format import Superblock

KIB = 1024
SIZES = (64 * KIB, 256 * KIB, 1024 * KIB, 4096 * KIB)
SIZES_QUICK = (64 * KIB, 1024 * KIB)
DEPTHS = (1, 16, 256)
DEPTHS_QUICK = (16,)
CELL_S = 6.0
CELL_S_QUICK = 1.5
ROUNDS_MIN = 3
ROUNDS_MAX = 200
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
    """About twenty minutes, ten of them mixed load; `quick` measures fewer sizes and only the local kinds."""
    figures: list[Figure] = []
    with tempfile.TemporaryDirectory(prefix="kvadvisor-bench-", dir=os.environ.get(FOLDER_VARIABLE)) as made:
        folder = Path(made)
        for kind in ("slab", "directory", "memory"):
            for block_bytes in SIZES_QUICK if quick else SIZES:
                for depth in DEPTHS_QUICK if quick else DEPTHS:
                    figures += _cell(folder, kind, block_bytes, depth, CELL_S_QUICK if quick else CELL_S)
        figures.append(at_most("get, metadata of a block", lookup_us(), "µs", 5))
        figures += recovery_figures(folder, quick)
        figures += flat_memory(folder, quick)
    return figures


def _cell(folder: Path, kind: str, block_bytes: int, depth: int, budget_s: float) -> list[Figure]:
    """Puts and gets of `depth` blocks of one size on one kind of volume."""
    what = f"{kind} {_size(block_bytes)} depth {depth}"
    path = folder / f"{kind}-{block_bytes}-{depth}"
    descriptor = VolumeDescriptor(
        id="bench",
        kind=kind,
        path="" if kind == "memory" else str(path),
        capacity_blocks=depth,
        block_bytes_max=block_bytes,
    )
    with ExitStack() as stack:
        agent = stack.enter_context(
            StorageAgent("bench", publisher=None, allowed_roots=[folder], mend_interval_s=3600.0)
        )
        try:
            mode = agent.register_volume(descriptor).mode
        except VolumeError as error:
            return [Figure(f"{what}, put", None, "GB/s", note=str(error))]
        raws = dict(_raws(stack, kind, path, mode, block_bytes, depth))
        times = _measure(agent, raws, block_bytes, depth, budget_s)
    path.unlink(missing_ok=True) if path.is_file() else None
    return _figures(what, kind, times, block_bytes * depth, depth)


def _raws(
    stack: ExitStack, kind: str, path: Path, mode: str, block_bytes: int, depth: int
) -> Iterator[tuple[str, RawFile]]:
    """Raw files by how they are opened: a slab's own, for other kinds one beside."""
    if kind == "memory":
        return
    if kind == "slab":
        superblock = Superblock("bench", depth, block_bytes)
        offsets = [superblock.slot_offset(slot) + PAGE_BYTES for slot in range(depth)]
        file = path
    else:
        file = path.with_name(f"{path.name}.raw")
        offsets = [number * block_bytes for number in range(depth)]
        with file.open("wb") as made:
            os.posix_fallocate(made.fileno(), 0, depth * block_bytes)
        stack.callback(file.unlink)
    modes: tuple[Mode, ...] = ("O_DIRECT", "buffered") if mode.startswith("O_DIRECT") else ("buffered",)
    for each in modes:
        yield each, stack.enter_context(closing(RawFile(file, each, offsets, block_bytes)))


def _measure(
    agent: StorageAgent, raws: dict[str, RawFile], block_bytes: int, depth: int, budget_s: float
) -> _Times:
    """Rounds of a put, a get, and each raw way, one after another, until `budget_s` is over."""
    times = _Times()
    content = os.urandom(block_bytes)
    keys = [BlockKey(NAMESPACE.namespace_id, 0, number + 1) for number in range(depth)]
    payloads = [memoryview(bytearray(content)) for _ in range(depth)]
    blocks = [PutBlock(key, NAMESPACE, payload) for key, payload in zip(keys, payloads, strict=True)]
    threads = {"one thread": 1, f"{os.cpu_count()} threads": os.cpu_count() or 1}
    ends_s = time.monotonic() + budget_s
    while len(times.put) < ROUNDS_MIN or (time.monotonic() < ends_s and len(times.put) < ROUNDS_MAX):
        cpu_s = time.process_time()
        times.put.append(_seconds(lambda: _require(agent.put("bench", blocks), Result.STORED)))
        times.get.append(_seconds(lambda: _require(agent.get(keys, payloads), Result.HIT)))
        times.cpu.append(time.process_time() - cpu_s)
        _require(agent.delete("", "bench", keys).outcomes, Result.DELETED)
        for mode, raw in raws.items():
            for name, count in threads.items():
                way = f"{mode}, {name}"
                times.raw_put.setdefault(way, []).append(_seconds(lambda: raw.write(count)))  # noqa: B023
                raw.forget_cached()
                times.raw_get.setdefault(way, []).append(_seconds(lambda: raw.read(count)))  # noqa: B023
    return times


def _figures(what: str, kind: str, times: _Times, round_bytes: int, depth: int) -> list[Figure]:
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
        has_goal = kind == "slab" and depth >= GOAL_DEPTH_MIN
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
