"""Engines for tests: `engine.py` in a process of its own, and an agent with volumes beside it."""

from __future__ import annotations

import json
import random
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from kvbm_core.bench_vllm_processes import EngineProcess
from storage_agent.bench_seaweed import BUCKET, SeaweedServer
from storage_agent.endpoints import Endpoint

BLOCK_TOKENS = 32
WORDS = range(3, 1_000)
_SCRIPT = Path(__file__).with_name("engine.py")
TOKEN_BYTES = 4 * 2 * 2 * 32 * 4
"""Of one token of the tiny model: layers, keys and values, heads, width, bytes of a number."""
BLOCK_BYTES = BLOCK_TOKENS * TOKEN_BYTES


class Engine(EngineProcess):
    """A vLLM engine that answers one command at a time. `log` has what it printed, for a test that fails."""

    def __init__(self, config: dict[str, Any], log: Path) -> None:
        super().__init__([sys.executable, str(_SCRIPT), json.dumps(config)], log)

    def ready(self) -> Engine:
        self.wait_until_ready()
        return self

    def generate(self, prompts: Sequence[list[int]], tokens: int = 8) -> tuple[list[list[int]], list[int]]:
        """Greedy tokens of each prompt, and how many of its tokens were had without computing them."""
        answer = self.ask("generate", prompts=list(prompts), tokens=tokens)
        return answer["tokens"], answer["cached"]


class Agent:
    """A storage agent as a process, with volumes of four kinds, each with room for all."""

    def __init__(self, folder: Path, store: Endpoint) -> None:
        """`store`: the S3 server of the volume `far`."""
        self._config = folder / "agent.toml"
        self._config.write_text(agent_config(folder, store))
        self.url = f"ipc://{folder}/agent"
        self.start()

    def start(self) -> None:
        """Until it serves its volumes."""
        command = [sys.executable, "-m", "advisor.cli", "agent", "--config", str(self._config)]
        self._process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
        assert self._process.stdout is not None
        assert self._process.stdout.readline()

    def freeze(self) -> None:
        """It takes requests from now on and answers none."""
        self._process.send_signal(signal.SIGSTOP)

    def thaw(self) -> None:
        self._process.send_signal(signal.SIGCONT)

    def kill(self) -> None:
        self._process.kill()
        self._process.communicate()


def agent_config(folder: Path, store: Endpoint) -> str:
    volumes = [
        ("fast", "slab", 'path = "fast.slab"', 3),
        ("shared", "directory", 'path = "shared"', 4),
        ("far", "object", f'options = {{ endpoint = "store", bucket = "{BUCKET}" }}', 4),
        ("ram", "memory", "", 4),
    ]
    lines = [
        'name = "agent-1"',
        f'command_url = "ipc://{folder}/agent"',
        f'event_url = "zmq+ipc://{folder}/events"',
        'allowed_roots = ["."]',
        "[endpoints.store]",
        f'url = "{store.url}"',
        f'access_key_file = "{store.access_key_file}"',
        f'secret_key_file = "{store.secret_key_file}"',
    ]
    for rank, (name, kind, where, tier) in enumerate(volumes):
        lines += ["[[volumes]]", f'id = "{name}"', f'kind = "{kind}"', f"tier = {tier}", f"speed_rank = {rank}", where]
        lines += ["capacity_blocks = 4096", f"block_bytes_max = {BLOCK_BYTES}"]
    return "\n".join(lines)


@contextmanager
def agent(folder: Path) -> Iterator[Agent]:
    server = SeaweedServer(folder / "seaweed")
    try:
        server.start()
        started = Agent(folder, server.endpoint)
        try:
            yield started
        finally:
            started.kill()
    finally:
        server.kill()


@contextmanager
def engine(config: dict[str, Any], log: Path) -> Iterator[Engine]:
    opened = Engine(config, log)
    try:
        yield opened.ready()
    finally:
        if opened.process.poll() is None:
            opened.kill()


def connected(**extra: Any) -> dict[str, Any]:
    """vLLM's settings for our connector."""
    return {
        "kv_connector": "KvAdvisorConnector",
        "kv_connector_module_path": "kvbm_core.connectors.vllm",
        "kv_role": "kv_both",
        "kv_load_failure_policy": "recompute",
        "kv_connector_extra_config": extra,
    }


def prompts_of(seed: int, count: int, tokens_max: int = 480) -> list[list[int]]:
    """Random prompts, most of which share the beginning of some earlier one."""
    chosen = random.Random(seed)
    found: list[list[int]] = []
    for _ in range(count):
        shared = chosen.choice(found) if found and chosen.random() < 0.7 else []
        kept = shared[: chosen.randrange(len(shared) + 1)]
        more = chosen.randrange(1, tokens_max - len(kept)) if len(kept) < tokens_max - 1 else 1
        found.append(kept + [chosen.choice(WORDS) for _ in range(min(more, 200))])
    return found
