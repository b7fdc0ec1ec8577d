"""How good and how fast the policies are in replay, for `kvadvisor bench policies` (docs/benchmarks.md)."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import chain
from pathlib import Path

import msgspec
import numpy as np

from advisor.bench_policies_goals import (
    BUDGETS,
    BY_HASHES,
    BY_PRIORITY,
    BY_TURN,
    CONVERSATION,
    CONVERSATION_FAST_BLOCKS,
    OTHER_BUDGETS,
    SECOND_TOUCH,
    SIGNAL_BUDGETS,
    Job,
    OnAnother,
    OnConversation,
    OnSignals,
    Outcome,
    Workload,
    outcome_of,
)
from advisor.bench_policies_speed import speeds, unmeasured
from advisor.caches import RequestTrace
from advisor.policies.rules.admission import BUCKET_START_BLOCKS
from advisor.progress import progress_of
from advisor.replay_processes import spread
from advisor.replay_tiers import about_s
from advisor.simulation import load_preset, simulate_requests
from advisor.tiers import Costs, replay_tiers, timed
from advisor.traces import Trace, load_trace
from event_plane.figures import Figure
from event_plane.recording import TRACE_BLOCK_TOKENS

TRACES = {CONVERSATION: "mooncake_conversation_trace.jsonl.gz", "ragpulse": "ragpulse_0_trace.jsonl.gz"}
FURTHER = ("mooncake_toolagent_trace.jsonl.gz", "mooncake_synthetic_trace.jsonl.gz")
"""Taken along where they are there."""
MIXES = ("chat", "agents", "rag", "scan", "mixed")
SIGNALS = "signals"
SEED = 2
"""Nothing was tuned on it."""
MINUTES, QUICK_MINUTES = 60.0, 10.0
FAST_BLOCKS_A_MINUTE = 50
"""Of a simulated workload: 3,000 for the hour."""
FAST_SHARE = 1 / 32
"""Of a trace's different blocks, where nobody has said otherwise; about what 5,859 are of conversation's."""


@dataclass(frozen=True, slots=True)
class Size:
    """How much of it is run."""

    minutes: float
    budgets: tuple[float | None, ...]
    other_budgets: tuple[float | None, ...]
    signal_budgets: tuple[float | None, ...]


WHOLE = Size(MINUTES, BUDGETS, OTHER_BUDGETS, SIGNAL_BUDGETS)
QUICK = Size(QUICK_MINUTES, (0.02, 0.25, None), (0.10, None), (0.10,))


def run(quick: bool, shared_data: Path | None = None) -> list[Figure]:
    """`shared_data`: the folder that holds the traces, or whose `traces` does; None: as the environment says.

    `quick`: fewer budgets, simulated workloads of ten minutes, no speed of what learns.
    """
    size = QUICK if quick else WHOLE
    traces = _traces(_folder(shared_data))
    note = "" if CONVERSATION in traces else "no trace: name the folder with --shared-data, or in SHARED_DATA"
    figures = list(unmeasured(note))
    workloads = {name: _of_trace(name, trace) for name, trace in traces.items()}
    if CONVERSATION in traces:
        requests = traces[CONVERSATION].as_requests()
        figures = list(speeds(requests, workloads[CONVERSATION].told[BY_HASHES], quick))
    workloads |= {preset: simulated(preset, size.minutes) for preset in (*MIXES, SIGNALS)}
    conversation = OnConversation(size.budgets, _equal_budget(workloads))
    others = [
        OnAnother(name, workloads[name].fast_blocks if name in workloads else 1, size.other_budgets)
        for name in dict.fromkeys((*TRACES, *traces, *MIXES))
        if name != CONVERSATION
    ]
    signals = OnSignals(SIGNALS, workloads[SIGNALS].fast_blocks, size.signal_budgets)
    jobs = [*conversation.jobs(), *chain.from_iterable(other.jobs() for other in others), *signals.jobs()]
    outcomes = _outcomes(workloads, [job for job in jobs if job.workload in workloads])
    return [
        *figures,
        *conversation.figures(outcomes, note),
        *chain.from_iterable(other.figures(outcomes, note) for other in others),
        *signals.figures(outcomes),
    ]


def simulated(preset: str, minutes: float) -> Workload:
    """Of `SEED`; also with priorities, and with the turn of its session: 1st, 2nd or 3rd, later."""
    requests = list(simulate_requests(msgspec.structs.replace(load_preset(preset), minutes=minutes), SEED))
    lengths = np.array([len(request.block_ids) for request in requests], np.int64)
    ids = np.concatenate([np.array(request.block_ids, np.uint64) for request in requests])
    ends = np.cumsum(lengths)
    trace = RequestTrace.of(
        np.column_stack((ids, np.zeros_like(ids))),
        ends,
        np.arange(len(ids)) - np.repeat(ends - lengths, lengths),
        [request.input_tokens for request in requests],
        np.full(len(requests), TRACE_BLOCK_TOKENS),
    )
    arrivals_s = [request.timestamp_ms / 1000.0 for request in requests]
    turns = Counter[str]()
    kinds = []
    for request in requests:
        turns[request.session_id] += 1
        kinds.append(min(turns[request.session_id] // 2, 2))
    told = {
        BY_HASHES: timed(trace, arrivals_s),
        BY_PRIORITY: timed(trace, arrivals_s, [request.priority for request in requests]),
        BY_TURN: timed(trace, arrivals_s, kinds),
    }
    return Workload(told, int(FAST_BLOCKS_A_MINUTE * minutes))


def _folder(shared_data: Path | None) -> Path:
    named = shared_data or Path(os.environ.get("SHARED_DATA", "shared/data"))
    return named / "traces" if (named / "traces").is_dir() else named


def _traces(folder: Path) -> dict[str, Trace]:
    """Those that are there, by name."""
    files = TRACES | {name.removesuffix("_trace.jsonl.gz").removeprefix("mooncake_"): name for name in FURTHER}
    return {name: load_trace(folder / file) for name, file in files.items() if (folder / file).is_file()}


def _of_trace(name: str, trace: Trace) -> Workload:
    requests = trace.as_requests()
    fast_blocks = CONVERSATION_FAST_BLOCKS if name == CONVERSATION else max(1, round(requests.blocks * FAST_SHARE))
    return Workload({BY_HASHES: timed(requests, [ms / 1000.0 for ms in trace.timestamps_ms])}, fast_blocks)


def _equal_budget(workloads: Mapping[str, Workload]) -> float:
    """The second touch's moves without a limit, less those that every bucket begins with."""
    if CONVERSATION not in workloads:
        return 0.0
    trace = workloads[CONVERSATION].told[BY_HASHES]
    found = replay_tiers(trace, SECOND_TOUCH, Costs())
    return max(0.0, (found.moves - BUCKET_START_BLOCKS) / len(trace.depths))


def _outcomes(workloads: Mapping[str, Workload], jobs: list[Job]) -> dict[Job, Outcome]:
    def expected_s() -> Iterator[float]:
        for job in jobs:
            yield about_s(len(workloads[job.workload].told[BY_HASHES].ids), [job.tiering])

    with progress_of("policies", len(jobs)) as advance:
        outcomes = {}
        for job, outcome in spread(outcome_of, workloads, jobs, sum(expected_s())):
            outcomes[job] = outcome
            advance(1)
        return outcomes
