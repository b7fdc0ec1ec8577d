"""How good and how fast the policies are in replay, for `kvadvisor bench policies`.

On the conversation trace of the `SHARED_DATA` folder. docs/policies.md says what `auto` was tuned on.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from tempfile import NamedTemporaryFile

import numpy as np

from advisor.caches import RequestTrace, replay_cache
from advisor.tiers import Costs, Tiering, TimedTrace, own_eviction, replay_tiers, scan_survival, timed
from advisor.traces import load_trace
from event_plane.figures import Figure, at_least, at_most

TRACE = "traces/mooncake_conversation_trace.jsonl.gz"
FAST_BLOCKS = 5_859
BUDGETS = (0.02, 0.05, 0.10, 0.25, 0.50, None)
BEST_FIXED = (0.089, 0.120, 0.153, 0.183, 0.186, 0.189)
"""The best line of the reference's table at each budget; the goal is within .005 of it."""
SECOND_HALF = (0.10, 0.138, 0.171, 0.205, 0.21, 0.21)
FIXED = ("always", "touch-2", "touch-3", "ghost", "ranked")
FLAT = ("2q", "arc", "fifo", "gdsf", "length-aware", "lfu", "lru", "lru-tail", "s3-fifo", "s3-fifo-lcs", "sieve")
FLAT_CAPACITIES = (1_000, 5_859, 30_000, 100_000)
FLAT_ACCESSES = 122_000
SWEEP_CAPACITIES = (1_000, 5_859, 10_000, 30_000, 50_000, 100_000)
PEER_ACCESS = np.dtype([("time", "<u4"), ("id", "<u8"), ("size", "<u4"), ("next", "<i8")])
TREE = ("arc-leaf", "belady-leaf", "gdsf-leaf", "lru-leaf", "min")


def run(quick: bool) -> list[Figure]:
    """`quick`: three budgets, no sweep of capacities."""
    folder = Path(os.environ.get("SHARED_DATA", "shared/data"))
    if not (folder / TRACE).exists():
        note = "set SHARED_DATA to the folder that holds traces/"
        return [Figure("policies on the conversation trace", None, "", "a trace", note=note)]
    trace = load_trace(folder / TRACE)
    requests = trace.as_requests()
    two_tier = timed(requests, [ms / 1000.0 for ms in trace.timestamps_ms])
    figures = [*_speed(requests), *_flat(requests), *_auto(two_tier, quick)]
    return figures if quick else [*figures, *_saving(two_tier), _sweep(requests)]


def _speed(requests: RequestTrace) -> Iterator[Figure]:
    """Accesses/s at one capacity, after a run that compiles."""
    peer = _peer_accesses_s(requests)
    for policy in ("lru", "lru-leaf", "s3-fifo", "arc"):
        replay_cache(requests, policy, FAST_BLOCKS)
        start_s = time.perf_counter()
        replay_cache(requests, policy, FAST_BLOCKS)
        rate = len(requests.ids) / (time.perf_counter() - start_s)
        yield Figure(f"replay {policy}", rate, "accesses/s")
        if policy == "lru":
            note = "" if peer else "pip install libcachesim"
            yield at_least("replay lru over libCacheSim's", rate / peer if peer else None, "×", 0.5, note)


def _peer_accesses_s(requests: RequestTrace) -> float | None:
    """Of libCacheSim's LRU by its Python package's `process_trace`, from a file of its own format; None without it."""
    if find_spec("libcachesim") is None:
        return None
    peer = import_module("libcachesim")
    accesses = np.zeros(len(requests.ids), PEER_ACCESS)
    accesses["id"], accesses["size"], accesses["next"] = requests.ids, 1, -1
    with NamedTemporaryFile(suffix=".oracleGeneral") as file:
        accesses.tofile(file.name)
        reader = peer.TraceReader(file.name, peer.TraceType.ORACLE_GENERAL_TRACE)
        start_s = time.perf_counter()
        peer.LRU(FAST_BLOCKS).process_trace(reader)
        return len(accesses) / (time.perf_counter() - start_s)


def _flat(requests: RequestTrace) -> Iterator[Figure]:
    """Eleven flat policies at four capacities on so many accesses, in threads, compiled before or not."""
    last = int((requests.ends <= FLAT_ACCESSES).sum())
    part = RequestTrace(
        requests.ids[: requests.ends[last - 1]],
        requests.ends[:last],
        requests.input_tokens[:last],
        requests.block_tokens[:last],
        requests.depths,
        requests.parents,
    )
    start_s = time.perf_counter()
    _replay_each(part, FLAT, FLAT_CAPACITIES)
    yield at_most("11 flat policies × 4 capacities × 122,000", time.perf_counter() - start_s, "s", 45.0)


def _replay_each(requests: RequestTrace, policies: tuple[str, ...], capacities: tuple[int, ...]) -> None:
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        for job in [pool.submit(replay_cache, requests, name, blocks) for name in policies for blocks in capacities]:
            job.result()


def _sweep(requests: RequestTrace) -> Figure:
    start_s = time.perf_counter()
    _replay_each(requests, (*FLAT, *TREE), SWEEP_CAPACITIES)
    return Figure("the reference sweep, 16 policies × 6 capacities", time.perf_counter() - start_s, "s")


def _auto(trace: TimedTrace, quick: bool) -> Iterator[Figure]:
    """`auto` on the whole trace and on its second half; fixed ones beside it."""
    half = len(trace.ends) // 2
    chosen = [at for at in range(len(BUDGETS)) if not quick or at in (0, 3, 5)]
    for at in chosen:
        budget, name = BUDGETS[at], _budget_text(BUDGETS[at])
        for admission in FIXED:
            tiering = Tiering(admission, own_eviction(admission), FAST_BLOCKS, budget)
            found = replay_tiers(trace, tiering, Costs())
            yield Figure(f"{admission} at {name}: fhit", found.fhit, "").placed(admission, name)
        tiering = Tiering("auto", own_eviction("auto"), FAST_BLOCKS, budget)
        whole = replay_tiers(trace, tiering, Costs())
        yield at_least(f"auto at {name}: fhit", whole.fhit, "", BEST_FIXED[at] - 0.005).placed("auto", name)
        yield Figure(f"auto at {name}: moves a block", whole.moves_per_block, "").placed("auto, moves", name)
        late = replay_tiers(trace, tiering, Costs(), counted_from=half)
        yield at_least(f"auto at {name}: second half", late.fhit, "", SECOND_HALF[at]).placed("auto, 2nd half", name)
    tiering = Tiering("auto", own_eviction("auto"), FAST_BLOCKS, None)
    yield at_least("auto: scan survival", scan_survival(trace, tiering, Costs()), "", 1.0)


def _saving(trace: TimedTrace) -> Iterator[Figure]:
    """Where moves are to be saved: the second-touch rule's hits for a third fewer moves."""
    second = replay_tiers(trace, Tiering("touch-2", "lfuda-leaf", FAST_BLOCKS, None), Costs())
    saving = Tiering("auto", own_eviction("auto"), FAST_BLOCKS, None, save_moves=True)
    found = replay_tiers(trace, saving, Costs())
    yield at_least("auto saving moves: fhit", found.fhit, "", second.fhit - 0.005)
    yield at_most("auto saving moves: moves over the 2nd touch's", found.moves / second.moves, "×", 0.67)


def _budget_text(budget: float | None) -> str:
    return "no limit" if budget is None else f"{budget:.2f}"
