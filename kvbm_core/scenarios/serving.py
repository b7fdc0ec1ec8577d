"""Serves a scenario's steps in virtual time: what is found and moved is real, what it takes is the model's.

One prompt is prefilled at a time, in order of arrival; answers go on beside it and hold their blocks meanwhile. Offload
goes beside them too, and costs the worker no time.
"""

from __future__ import annotations

import heapq
import tempfile
from collections import Counter
from collections.abc import Sequence
from math import inf
from pathlib import Path
from typing import NamedTuple

from kvbm_core.block import ImmutableBlock
from kvbm_core.scenarios.machine_model import MachineModel, Source
from kvbm_core.scenarios.script import Request, Restart, Scenario, Setup, Step, TierReturns, TierVanishes
from kvbm_core.scenarios.worker import CoreTally, Worker
from kvbm_core.torch_threads import one_torch_thread
from storage_agent.port import BlockKey


class Served(NamedTuple):
    """One request. Blocks of its prompt: where they were found, and how many were computed. `ttft_s` is virtual."""

    kind: str
    ttft_s: float
    found: Counter[Source]
    computed: int
    lost: Counter[str]


class Run(NamedTuple):
    """A scenario with one setup. `wrong_blocks` must be 0."""

    setup: Setup
    served: list[Served]
    tally: CoreTally
    wrong_blocks: int


def run_setup(scenario: Scenario, setup: Setup, seed: int, model: MachineModel) -> Run:
    """All of a scenario's steps with one setup, in a folder that is there meanwhile."""
    steps = scenario.steps(seed)
    with (
        one_torch_thread(),
        tempfile.TemporaryDirectory(prefix="kvadvisor-scenario-") as folder,
        Worker(setup, Path(folder), model.page_tokens) as worker,
    ):
        serving = _Serving(worker, model)
        served = serving.serve_all([step for step in steps if isinstance(step, Request) or not setup.spared])
        return Run(setup, served, worker.tally(), worker.wrong_blocks)


class _Answer(NamedTuple):
    """An answer under way, and the blocks that it holds."""

    ends_s: float
    order: int
    held: list[ImmutableBlock]


class _Serving:
    """The worker's clock. `_free_s`: when the next prompt may begin."""

    def __init__(self, worker: Worker, model: MachineModel) -> None:
        self._worker = worker
        self._model = model
        self._free_s = 0.0
        self._answers: list[_Answer] = []
        self._uses: Counter[BlockKey] = Counter()
        """Answers under way that hold a block."""

    def serve_all(self, steps: Sequence[Step]) -> list[Served]:
        """One `Served` a request, in order."""
        served = []
        for order, step in enumerate(steps):
            match step:
                case Request():
                    served.append(self._serve(step, order))
                case Restart():
                    self._end_answers(until_s=inf)
                    self._worker.restart()
                    self._free_s = max(self._free_s, step.at_s + step.takes_s)
                case TierVanishes():
                    self._worker.vanish()
                case TierReturns():
                    self._worker.come_back()
        self._end_answers(until_s=inf)
        return served

    def _serve(self, request: Request, order: int) -> Served:
        worker, model = self._worker, self._model
        blocks = worker.blocks_of(request.prompt)
        begins_s = max(request.at_s, self._free_s)
        self._end_answers(until_s=begins_s)
        begins_s = max(begins_s, self._wait_for_room([block.key for block in blocks]))
        found = worker.find(blocks)
        missing = blocks[len(found.held) :]
        load_s = sum(model.load_s(*load) for load in found.loads)
        prefill_s = model.prefill_s(len(request.prompt) - len(found.held) * model.page_tokens)
        sources: Counter[Source] = Counter()
        for load in found.loads:
            sources[load.source] += load.blocks
        held = found.held + worker.compute(missing)
        self._free_s = begins_s + load_s + prefill_s
        self._uses.update(block.identity.key for block in held)
        heapq.heappush(self._answers, _Answer(self._free_s + model.answer_s(request.answer_tokens), order, held))
        worker.offload()
        return Served(request.kind, self._free_s - request.at_s, sources, len(missing), found.lost)

    def _wait_for_room(self, keys: Sequence[BlockKey]) -> float:
        """Until enough answers have ended for the device to take these blocks too; when that is."""
        at_s = 0.0
        capacity_blocks = self._worker.config.device_blocks
        while self._answers and len(self._uses) + sum(key not in self._uses for key in keys) > capacity_blocks:
            at_s = self._end_first_answer()
        return at_s

    def _end_answers(self, until_s: float) -> None:
        while self._answers and self._answers[0].ends_s <= until_s:
            self._end_first_answer()

    def _end_first_answer(self) -> float:
        answer = heapq.heappop(self._answers)
        # The root goes last, so that the tails of prompts are evicted before what many share.
        for block in reversed(answer.held):
            self._uses[block.identity.key] -= 1
            if not self._uses[block.identity.key]:
                del self._uses[block.identity.key]
            block.release()
        return answer.ends_s
