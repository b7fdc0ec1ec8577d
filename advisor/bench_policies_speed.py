"""How fast traces are replayed, for `kvadvisor bench policies`: beside libCacheSim's Python package in the same run."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from importlib import import_module
from importlib.util import find_spec
from statistics import median
from tempfile import NamedTemporaryFile
from typing import Any

import numpy as np

from advisor.caches import POLICIES, RequestTrace, replay_cache
from advisor.tiers import ADMISSIONS, Costs, Tiering, TimedTrace, own_eviction, replay_tiers
from event_plane.figures import Figure, at_least, at_most

BLOCKS = 5_859
FLAT = ("2q", "arc", "fifo", "gdsf", "length-aware", "lfu", "lru", "lru-tail", "s3-fifo", "s3-fifo-lcs", "sieve")
FLAT_CAPACITIES = (1_000, 5_859, 30_000, 100_000)
FLAT_ACCESSES = 122_000
FLAT_S_MAX = 45.0
SWEEP_CAPACITIES = (1_000, 5_859, 10_000, 30_000, 50_000, 100_000)
LEARNING = ("hazard", "duel", "auto")
ROUNDS = 3
PEER_ACCESS = np.dtype([("time", "<u4"), ("id", "<u8"), ("size", "<u4"), ("next", "<i8")])

_OVER_PEER = "replay lru over libCacheSim's process_trace"
_OVER_PEER_LEAST = 0.5
_FLAT_SWEEP = f"{len(FLAT)} flat policies × {len(FLAT_CAPACITIES)} capacities × {FLAT_ACCESSES:,} accesses"


def speeds(requests: RequestTrace, timed_requests: TimedTrace, quick: bool) -> Iterator[Figure]:
    """Nothing else may run meanwhile. Everything is compiled before it is timed. `quick`: nothing that learns."""
    accesses = len(requests.ids)
    for policy in sorted(POLICIES):
        took_s = _compiled_then_timed(partial(replay_cache, requests, policy, BLOCKS))
        yield Figure(f"replay {policy}", accesses / took_s, "accesses/s")
    yield from _beside_peer(requests)
    for admission in ADMISSIONS:
        if not (quick and admission in LEARNING):
            tiering = Tiering(admission, own_eviction(admission), BLOCKS, None)
            took_s = _compiled_then_timed(partial(replay_tiers, timed_requests, tiering, Costs()))
            yield Figure(f"replay --fast, {admission}", accesses / took_s, "accesses/s")
    yield at_most(_FLAT_SWEEP, _sweep_s(beginning(requests), FLAT, FLAT_CAPACITIES), "s", FLAT_S_MAX)
    name = f"the reference's sweep, {len(POLICIES)} policies × {len(SWEEP_CAPACITIES)} capacities"
    yield Figure(name, _sweep_s(requests, tuple(POLICIES), SWEEP_CAPACITIES), "s")


def unmeasured(note: str) -> Iterator[Figure]:
    """The goals of `speeds` where there is no trace to replay."""
    yield at_least(_OVER_PEER, None, "×", _OVER_PEER_LEAST, note)
    yield at_most(_FLAT_SWEEP, None, "s", FLAT_S_MAX, note)


def beginning(requests: RequestTrace) -> RequestTrace:
    """The first requests, of `FLAT_ACCESSES` block accesses at most."""
    last = int((requests.ends <= FLAT_ACCESSES).sum())
    return RequestTrace(
        requests.ids[: requests.ends[last - 1] if last else 0],
        requests.ends[:last],
        requests.input_tokens[:last],
        requests.block_tokens[:last],
        requests.depths,
        requests.parents,
    )


def _beside_peer(requests: RequestTrace) -> Iterator[Figure]:
    """LRU, theirs from a file of their own format, round by round."""
    if find_spec("libcachesim") is None:
        yield at_least(_OVER_PEER, None, "×", _OVER_PEER_LEAST, "pip install libcachesim to compare")
        return
    peer = import_module("libcachesim")
    accesses = np.zeros(len(requests.ids), PEER_ACCESS)
    accesses["id"], accesses["size"], accesses["next"] = requests.ids, 1, -1
    with NamedTemporaryFile(suffix=".oracleGeneral") as file:
        accesses.tofile(file.name)
        ours_s, theirs_s = [], []
        for _ in range(ROUNDS):
            ours_s.append(_timed(partial(replay_cache, requests, "lru", BLOCKS)))
            reader = peer.TraceReader(file.name, peer.TraceType.ORACLE_GENERAL_TRACE)
            theirs_s.append(_timed(partial(peer.LRU(BLOCKS).process_trace, reader)))
    yield Figure("libCacheSim's process_trace, LRU", len(accesses) / median(theirs_s), "accesses/s")
    yield at_least(_OVER_PEER, median(theirs_s) / median(ours_s), "×", _OVER_PEER_LEAST)


def _sweep_s(requests: RequestTrace, policies: tuple[str, ...], capacities: tuple[int, ...]) -> float:
    def sweep() -> None:
        with ThreadPoolExecutor(os.cpu_count()) as pool:
            jobs = [pool.submit(replay_cache, requests, name, blocks) for name in policies for blocks in capacities]
            for job in jobs:
                job.result()

    return _timed(sweep)


def _compiled_then_timed(replay: Callable[[], Any]) -> float:
    replay()
    return _timed(replay)


def _timed(replay: Callable[[], Any]) -> float:
    start_s = time.perf_counter()
    replay()
    return time.perf_counter() - start_s
