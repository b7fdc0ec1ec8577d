"""The processes of `kvadvisor bench vllm`: engines, an agent with a fast and a slow volume, and their advisor."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from kvbm_core.bench_vllm_model import BenchModel
from kvbm_core.errors import BenchError

PYTHON_VARIABLE = "KVADVISOR_VLLM_PYTHON"
"""Names the Python that has vLLM; without it this one is taken if it has, else that of `make vllm-env`."""
_MADE = Path(".venv-vllm/bin/python")
_LAST_WORDS = 6_000
ANSWER = ">> "
"""Before each answer of an engine, among what else it prints."""


def vllm_python() -> Path | None:
    """A Python that has vLLM, if there is one. Raises `BenchError` where the one that is named has not."""
    named = os.environ.get(PYTHON_VARIABLE)
    if named:
        _require_vllm(named)
        return Path(named)
    if find_spec("vllm") is not None:
        return Path(sys.executable)
    return _MADE.absolute() if _MADE.exists() else None


def _require_vllm(python: str) -> None:
    ask = "import importlib.util, sys; sys.exit(importlib.util.find_spec('vllm') is None)"
    try:
        has_it = subprocess.run([python, "-c", ask], check=False, capture_output=True).returncode == 0
    except OSError as error:
        sentence = f"{PYTHON_VARIABLE} is {python!r}, which cannot be run ({error.strerror}): name a Python"
        raise BenchError(sentence) from error
    if not has_it:
        raise BenchError(f"{PYTHON_VARIABLE} is {python!r}, which has no vLLM: name one that has, or leave it out")


def engine_command(
    python: Path, model: BenchModel, *, blocks: int, length: int, transfer: dict[str, Any] | None = None
) -> list[str]:
    """An engine with `blocks` on its GPU for prompts of up to `length` tokens. `transfer`: of a `KVTransferConfig`."""
    config: dict[str, Any] = {"layers": model.layers, "hidden": model.hidden, "blocks": blocks, "length": length}
    if transfer is not None:
        config["transfer"] = transfer
    return [str(python), "-m", "kvbm_core.bench_vllm_engine", json.dumps(config)]


def connected(model: BenchModel, folder: Path, *, host_blocks: int, volumes: Sequence[str]) -> dict[str, Any]:
    """vLLM's settings for our connector, with the agent of `folder`; its events go to `engine_events_url`."""
    return {
        "kv_connector": "KvAdvisorConnector",
        "kv_connector_module_path": "kvbm_core.connectors.vllm",
        "kv_role": "kv_both",
        "kv_load_failure_policy": "recompute",
        "kv_connector_extra_config": {
            "host_bytes": host_blocks * model.block_bytes,
            "agent_url": command_url(folder),
            "disk": {"volumes": list(volumes), "retention_s": 1.0},
            "event_url": engine_events_url(folder),
            "model": "bench",
        },
    }


class EngineProcess:
    """An engine that answers one command at a time. What it prints beside goes to `log`."""

    def __init__(self, command: list[str], log: Path) -> None:
        self._log = log
        self._errors = log.open("a")
        self.process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self._errors, text=True
        )

    def wait_until_ready(self) -> None:
        """Raises `BenchError` with the engine's last words if it ends first."""
        answer = self._answer()
        if answer != "ready":
            raise BenchError(f"the engine answered {answer!r} before it was asked: see {self._log}")

    def ask(self, do: str, **what: Any) -> Any:
        """The answer to one command. Raises `BenchError` with the engine's last words if it ends instead."""
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps({"do": do, **what}) + "\n")
        self.process.stdin.flush()
        return self._answer()

    def kill(self) -> None:
        self.process.kill()
        self.process.communicate()
        self._errors.close()

    def stop(self) -> int:
        """End in order; its exit status."""
        self.process.communicate()
        self._errors.close()
        return self.process.returncode

    def _answer(self) -> Any:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            if line.startswith(ANSWER):
                return json.loads(line.removeprefix(ANSWER))
        raise BenchError(f"the engine ended: {self._log.read_text()[-_LAST_WORDS:]}")


@contextmanager
def engine(command: list[str], log: Path) -> Iterator[EngineProcess]:
    """Not ready yet, so that several can start beside each other; killed at the end if it was not stopped."""
    opened = EngineProcess(command, log)
    try:
        yield opened
    finally:
        if opened.process.poll() is None:
            opened.kill()


@dataclass(frozen=True, slots=True)
class VolumePlan:
    """A fast and a slow volume. `slow_call_s`: what each call to the slow one's medium takes longer."""

    block_bytes: int
    fast_blocks: int
    slow_blocks: int
    slow_call_s: float


@contextmanager
def agent(folder: Path, plan: VolumePlan) -> Iterator[str]:
    """A storage agent with its volumes in `folder`; its command URL."""
    config = folder / "agent.toml"
    config.write_text(f"""\
name = "bench"
command_url = "{command_url(folder)}"
event_url = "{_events_url(folder, "agent")}"
allowed_roots = ["."]

[[volumes]]
id = "fast"
kind = "slab"
path = "fast.slab"
tier = 3
speed_rank = 0
capacity_blocks = {plan.fast_blocks}
block_bytes_max = {plan.block_bytes}

[[volumes]]
id = "slow"
kind = "faulty"
path = "slow"
tier = 4
speed_rank = 1
capacity_blocks = {plan.slow_blocks}
block_bytes_max = {plan.block_bytes}
options.inner = "directory"
options.slow = 1.0
options.slow_s = {plan.slow_call_s}
""")
    with _running(folder, "agent", ["agent", "--config", str(config)]):
        yield command_url(folder)


@contextmanager
def advisor(folder: Path, tick_interval_s: float) -> Iterator[None]:
    """An advisor with its default policy over the agent and the engine of `folder`."""
    config = folder / "advisor.toml"
    config.write_text(f"""\
directory = "advisor"
tick_interval_s = {tick_interval_s}

[api]
port = 0

[[sources]]
name = "engine"
url = "{engine_events_url(folder)}"
dialect = "kvadvisor"

[[sources]]
name = "agent"
url = "{_events_url(folder, "agent")}"
dialect = "kvadvisor"

[[agents]]
name = "bench"
command_url = "{command_url(folder)}"
""")
    with _running(folder, "advisor", ["serve", "--config", str(config), "--parent", str(os.getpid())]):
        yield


def command_url(folder: Path) -> str:
    """Where the agent of `folder` takes commands."""
    return f"ipc://{folder}/commands"


def engine_events_url(folder: Path) -> str:
    """Where the engine of `folder` publishes."""
    return _events_url(folder, "engine")


def _events_url(folder: Path, name: str) -> str:
    return f"zmq+ipc://{folder}/{name}.events"


@contextmanager
def _running(folder: Path, name: str, arguments: list[str]) -> Iterator[None]:
    """A process of ours, from the moment it says that it serves until the end of the block."""
    log = folder / f"{name}.log"
    command = [sys.executable, "-m", "advisor.cli", *arguments]
    with (
        log.open("a") as errors,
        subprocess.Popen(command, stdout=subprocess.PIPE, stderr=errors, text=True) as process,
    ):
        try:
            assert process.stdout is not None
            if not process.stdout.readline():
                raise BenchError(f"the {name} did not start: {log.read_text()[-_LAST_WORDS:]}")
            yield
        finally:
            process.terminate()
