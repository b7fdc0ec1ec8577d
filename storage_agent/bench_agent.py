"""`kvadvisor bench agent`: volumes beside raw I/O on the same file, device or bucket, in one run, like with like.

A depth is the number of blocks of one call: they are under way together. Every put ends with its fdatasync, and so does
every raw write; reads find a cold cache where the mode has one. GB/s count payloads alone.

Payloads and raw blocks lie in the same kind of memory: at page boundaries, in pages of 4 KiB. Shown beside, without a
goal: raw I/O from huge pages, which a slab moves its bytes through, and a slab whose payloads lie anywhere.
"""

from __future__ import annotations

import os
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from itertools import product
from pathlib import Path

from event_plane.figures import Figure, at_least, at_most
from event_plane.schema import Namespace
from storage_agent.agent import StorageAgent
from storage_agent.bench_endurance import flat_memory, recovery_figures
from storage_agent.bench_lookup import lookup_us
from storage_agent.bench_media import HUGE_PAGES, MEDIA, Medium, MediumAbsent, RawWay, medium
from storage_agent.errors import StorageAgentError, VolumeError
from storage_agent.files import whole_pages
from storage_agent.port import BlockKey, Outcome, PutBlock, Result

KIB = 1024
MIB = 1024 * KIB
SIZES = (64 * KIB, 256 * KIB, MIB, 4 * MIB)
SIZES_QUICK = (64 * KIB, MIB)
DEPTHS = (1, 16, 256)
DEPTHS_QUICK = (16,)
CELL_S = 6.0
CELL_S_QUICK = 1.5
ROUNDS_MIN = 3
ROUNDS_MAX = 200
WITH_GOAL = ("slab", "block device")
GOAL_DEPTH_MIN = 16
ANYWHERE_DEPTH = 16
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
    """About half an hour, ten minutes of it mixed load; `quick` measures one size of most, and less of everything."""
    figures: list[Figure] = []
    with tempfile.TemporaryDirectory(prefix="kvadvisor-bench-", dir=os.environ.get(FOLDER_VARIABLE)) as made:
        folder = Path(made)
        for name in MEDIA:
            for block_bytes, depth in product(SIZES, DEPTHS):
                if not quick:
                    figures += _cell(folder, name, block_bytes, depth, CELL_S)
                elif _is_quick(name, block_bytes, depth):
                    figures += _cell(folder, name, block_bytes, depth, CELL_S_QUICK)
                else:
                    figures += _goals(name, block_bytes, depth)
        figures += _cell(folder, "slab", MIB, ANYWHERE_DEPTH, CELL_S_QUICK if quick else CELL_S, is_anywhere=True)
        figures.append(at_most("get, metadata of a block", lookup_us(), "µs of the processor", 5))
        figures += recovery_figures(folder, quick)
        figures += flat_memory(folder, quick)
    return figures


def _is_quick(name: str, block_bytes: int, depth: int) -> bool:
    return depth in DEPTHS_QUICK and block_bytes in (SIZES_QUICK if name == "slab" else SIZES_QUICK[:1])


def _cell(
    folder: Path, name: str, block_bytes: int, depth: int, budget_s: float, *, is_anywhere: bool = False
) -> list[Figure]:
    """Puts and gets of `depth` blocks of one size on one medium; `is_anywhere`: payloads at no page boundary."""
    has_goal = _has_goal(name, depth) and not is_anywhere
    row = _row(name, block_bytes, depth) + (", anywhere" if is_anywhere else "")
    payloads = _anywhere(block_bytes, depth) if is_anywhere else _at_page_boundaries(block_bytes, depth)
    try:
        with ExitStack() as closing:
            place = medium(name, folder, block_bytes, depth, closing)
            mode, times = _measure(place, payloads, budget_s, closing)
    except (MediumAbsent, StorageAgentError) as error:
        missing = Figure(row, None, "", note=str(error)).placed(row, "mode")
        return [missing, *(_goals(name, block_bytes, depth) if has_goal else [])]
    busy = sum(times.cpu) / (sum(times.put) + sum(times.get))
    return [
        *_figures(row, "put", times.put, times.raw_put, block_bytes * depth, has_goal=has_goal),
        *_figures(row, "get", times.get, times.raw_get, block_bytes * depth, has_goal=has_goal),
        Figure(f"{row}, processor", busy * 100, "% of one core").placed(row, "CPU %"),
        Figure(f"{row}, mode", None, "", note=mode).placed(row, "mode"),
    ]


def _at_page_boundaries(block_bytes: int, depth: int) -> list[memoryview]:
    memory = whole_pages(block_bytes * depth)
    memory[:] = os.urandom(block_bytes) * depth
    return [memory[number * block_bytes : (number + 1) * block_bytes] for number in range(depth)]


def _anywhere(block_bytes: int, depth: int) -> list[memoryview]:
    return [memoryview(bytearray(os.urandom(block_bytes + 1)))[1:] for _ in range(depth)]


def _measure(
    place: Medium, payloads: Sequence[memoryview], budget_s: float, closing: ExitStack
) -> tuple[str, _Times]:
    """The volume's mode. Rounds of a put, a get, and each raw way, one after another, until `budget_s` is over.

    Raises `VolumeError`.
    """
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
    keys = [BlockKey(NAMESPACE.namespace_id, 0, number + 1) for number in range(len(payloads))]
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
    return mode, times


def _figures(
    row: str, verb: str, ours: list[float], raw: dict[str, list[float]], round_bytes: int, *, has_goal: bool
) -> list[Figure]:
    figures = [
        Figure(f"{row}, {verb}", round_bytes / statistics.median(ours) / 1e9, "GB/s").placed(row, f"{verb} GB/s"),
        Figure(f"{row}, {verb} p50", statistics.median(ours) * 1e3, "ms").placed(row, f"{verb} p50 ms"),
        Figure(f"{row}, {verb} p99", _p99(ours) * 1e3, "ms").placed(row, f"{verb} p99 ms"),
    ]
    if not raw:
        return figures
    # Of the mode that the volume uses, which is the first.
    mode = next(iter(raw)).partition(",")[0]
    best = min((way for way in raw if way.startswith(mode)), key=lambda way: statistics.median(raw[way]))
    in_huge_pages = [statistics.median(raw[way]) for way in raw if way.startswith(HUGE_PAGES)]
    ratio = statistics.median(theirs / our for theirs, our in zip(raw[best], ours, strict=True))
    speed = round_bytes / statistics.median(raw[best]) / 1e9
    return [
        *figures,
        Figure(f"{row}, raw {verb}", speed, "GB/s").placed(row, f"raw {verb} GB/s"),
        Figure(f"{row}, raw {verb} by", None, "", note=best).placed(row, f"raw {verb} by"),
        *(
            Figure(f"{row}, raw {verb} from huge pages", round_bytes / seconds / 1e9, "GB/s").placed(
                row, f"huge raw {verb} GB/s"
            )
            for seconds in in_huge_pages
        ),
        _ratio(row, verb, ratio, has_goal=has_goal),
    ]


def _ratio(row: str, verb: str, ratio: float | None, *, has_goal: bool) -> Figure:
    name = f"{row}, {verb} against the best raw"
    figure = at_least(name, ratio, "×", GOAL_RATIO) if has_goal else Figure(name, ratio, "×")
    return figure.placed(row, f"{verb} ×")


def _goals(name: str, block_bytes: int, depth: int) -> list[Figure]:
    """Of a cell that was not measured."""
    row = _row(name, block_bytes, depth)
    return [_ratio(row, verb, None, has_goal=True) for verb in ("put", "get") if _has_goal(name, depth)]


def _has_goal(name: str, depth: int) -> bool:
    return name in WITH_GOAL and depth >= GOAL_DEPTH_MIN


def _row(name: str, block_bytes: int, depth: int) -> str:
    return f"{name} {_size(block_bytes)} depth {depth}"


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
