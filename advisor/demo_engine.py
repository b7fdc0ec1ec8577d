"""The demo's engine process: a block manager, its storage agent, and a workload that keeps both busy.

`python -m advisor.demo_engine --config FILE --parent PID --seed N`. It reports one JSON line (`EngineReport`) a second
on standard output and dies with its parent. Ctrl-C is the parent's to handle; SIGTERM stops it in order.
"""

from __future__ import annotations

import signal
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Annotated

import msgspec
import torch
import typer

from advisor.demo_config import EngineReport, EngineSettings, EngineSettingsError, load_engine_settings
from advisor.demo_workload import Request, Workload, trace_requests
from advisor.errors import AdvisorError
from advisor.process import die_with_parent
from event_plane.connect import open_publisher
from event_plane.errors import EventPlaneError
from event_plane.recording import read_trace
from event_plane.schema import producer_id
from kvbm_core.config import KvbmConfig
from kvbm_core.errors import KvbmError
from kvbm_core.manager import KvBlockManager
from kvbm_core.onboard import HOST
from kvbm_core.pattern import compute_pattern, wrong_patterns
from kvbm_core.sequence import TokenBlockSequence
from storage_agent.agent import StorageAgent
from storage_agent.config import AgentSettings, load_settings
from storage_agent.errors import StorageAgentError
from storage_agent.port import Result
from storage_agent.service import AgentService

CORE_NAME = "demo-core"
REPORT_INTERVAL_S = 1.0
_RESULTS = frozenset(Result)
BEHIND_S_MAX = 1.0
"""How much of a delay is caught up with; the rest is given up, so that a slow disk makes no burst."""
_EXPECTED = (AdvisorError, EventPlaneError, KvbmError, StorageAgentError)


class DemoEngine:
    """Serves requests as an engine would, with a pattern in the place of a model's keys and values."""

    def __init__(self, manager: KvBlockManager) -> None:
        self._manager = manager
        self._config = manager.config
        self._requests = 0
        self._requests_cut = 0
        self._tokens_prompt = 0
        self._blocks_recomputed = 0
        self._wrong_blocks = 0

    def serve(self, request: Request) -> None:
        """Find the prompt's blocks, compute the missing ones and the answer's, then let go of all and offload."""
        sequence = TokenBlockSequence(self._config, request.tenant, request.prompt)
        prompt = sequence.blocks[: self._config.device_blocks]
        answer = sequence.extend(request.answer)[: self._config.device_blocks - len(prompt)]
        self._requests += 1
        self._requests_cut += len(prompt) + len(answer) < len(sequence.blocks)
        self._tokens_prompt += len(request.prompt)

        held = self._manager.onboard(prompt).blocks
        # Every block found, wherever it came from.
        self._wrong_blocks += wrong_patterns(self._manager, held)
        missing = prompt[len(held) :]
        self._blocks_recomputed += len(missing)
        held += compute_pattern(self._manager, [*missing, *answer])
        # The root goes last, so that the tails of conversations are evicted before what many share.
        for block in reversed(held):
            block.release()
        self._manager.offload(self._config.offload_queue_blocks)

    def report(self, elapsed_s: float, *, done: bool) -> EngineReport:
        totals, occupancy = self._manager.totals(), self._manager.occupancy()
        requests, volumes = totals.requests, dict(totals.requests.loaded)
        not_loaded = requests.not_loaded
        return EngineReport(
            elapsed_s=round(elapsed_s, 3),
            done=done,
            requests=self._requests,
            requests_cut=self._requests_cut,
            tokens_prompt=self._tokens_prompt,
            blocks_device=requests.ready,
            blocks_host=volumes.pop(HOST, 0),
            blocks_volume=volumes,
            blocks_recomputed=self._blocks_recomputed,
            blocks_computed=totals.registered,
            wrong_blocks=self._wrong_blocks,
            gets_missed=requests.absent,
            gets_failed={reason: n for reason, n in not_loaded.items() if reason in _RESULTS},
            gets_unused={reason: n for reason, n in not_loaded.items() if reason not in _RESULTS},
            puts=dict(totals.put),
            puts_fell_back=dict(totals.put_fell_back),
            puts_refused=dict(totals.put_refused),
            offload_skipped={"_".join(filter(None, skip)): n for skip, n in totals.offload_skipped.items()},
            offload_waiting=occupancy.offload_waiting,
            device_blocks_used=occupancy.device.active + occupancy.device.inactive,
            host_blocks_used=occupancy.host.active + occupancy.host.inactive,
        )


def core_config(settings: EngineSettings, file: Path) -> KvbmConfig:
    """The `[core]` table. Raises `EngineSettingsError` that names the key."""
    try:
        return msgspec.convert(settings.core, KvbmConfig)
    except msgspec.ValidationError as error:
        raise EngineSettingsError(f"{file}: [core] {error}; correct it there") from error


def open_engine(settings: EngineSettings, config: KvbmConfig, agent: AgentSettings, closing: ExitStack) -> DemoEngine:
    """Open sockets, volumes and pools; `closing` closes them, the last opened first."""
    publisher = open_publisher(settings.events_url, producer=producer_id(CORE_NAME), flush_interval_s=0.25)
    closing.callback(publisher.close)
    agent_publisher = open_publisher(
        agent.event_url, producer=producer_id(agent.name), credentials=agent.credentials, flush_interval_s=0.25
    )
    closing.callback(agent_publisher.close)
    storage = closing.enter_context(
        StorageAgent(
            agent.name,
            publisher=agent_publisher,
            allowed_roots=agent.allowed_roots,
            state_folder=agent.state_folder,
        )
    )
    storage.register_volumes(agent.volumes)
    closing.enter_context(AgentService(storage, agent.command_url))
    manager = KvBlockManager(config, publisher, storage)
    closing.callback(manager.close)
    return DemoEngine(manager)


def run(
    engine: DemoEngine, requests: Iterator[Request], requests_per_s: float, stop: threading.Event, seconds: float
) -> None:
    """Serve at a steady pace and report each second until `stop`, or for `seconds` where they are not 0."""
    started_s = time.monotonic()
    ends_s = started_s + seconds if seconds else float("inf")
    request_due_s = report_due_s = started_s
    done = False
    while not stop.is_set() and (now_s := time.monotonic()) < ends_s:
        if now_s >= report_due_s:
            _print(engine.report(now_s - started_s, done=done))
            report_due_s = max(report_due_s + REPORT_INTERVAL_S, now_s)
        if now_s >= request_due_s:
            request = next(requests, None)
            if request is None:
                done, request_due_s = True, float("inf")
                continue
            engine.serve(request)
            request_due_s = max(request_due_s + 1 / requests_per_s, time.monotonic() - BEHIND_S_MAX)
        stop.wait(max(0.0, min(request_due_s, report_due_s, ends_s) - time.monotonic()))
    _print(engine.report(time.monotonic() - started_s, done=done))


def _print(report: EngineReport) -> None:
    sys.stdout.write(msgspec.json.encode(report).decode() + "\n")
    sys.stdout.flush()


def main(
    config: Annotated[Path, typer.Option(help="The engine's settings, TOML.")],
    parent: Annotated[int, typer.Option(help="Process id of the parent, with which this process ends.")],
    seed: Annotated[int, typer.Option(help="Seed of the workload.")] = 0,
    seconds: Annotated[float, typer.Option(min=0.0, help="End after so many seconds; 0 is never.")] = 0.0,
    trace: Annotated[Path | None, typer.Option(help="A Mooncake trace to serve instead of the workload.")] = None,
) -> None:
    """Run the demo's engine side until SIGTERM."""
    die_with_parent(parent)
    stop = threading.Event()
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, lambda number, frame: stop.set())
    torch.set_num_threads(1)
    try:
        settings = load_engine_settings(config)
        core = core_config(settings, config)
        agent = load_settings(config.parent / settings.agent_file)
        if trace is None:
            requests = Workload(settings.workload.tenants, seed).requests()
        else:
            requests = trace_requests((line.block_ids for line in read_trace(trace)), core.page_tokens)
        with ExitStack() as closing:
            engine = open_engine(settings, core, agent, closing)
            run(engine, requests, settings.workload.requests_per_s, stop, seconds)
    except _EXPECTED as error:
        print(f"kvadvisor demo engine: {error}", file=sys.stderr)
        raise SystemExit(2) from None


if __name__ == "__main__":
    typer.run(main)
