"""kill -9 of the engine with its agent, then of the advisor, each while the other half goes on and moves are open."""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest

from advisor.demo import free_ports
from advisor.demo_config import demo_agent_toml, demo_engine_toml
from tests.crash.killed_demo import verified

ADVISOR = """
directory = "advisor"
tick_interval_s = 0.5
[api]
port = 0
[[sources]]
name = "core"
url = "zmq+tcp://127.0.0.1:{core}"
[[sources]]
name = "agent"
url = "zmq+tcp://127.0.0.1:{agent}"
[[agents]]
name = "demo-agent"
command_url = "tcp://127.0.0.1:{command}"
[policy]
admission = "touch-2"
promote_moves_max = 256
demote_moves_max = 2048
moves_open_max = 4096
"""


@contextmanager
def process(*arguments: str) -> Iterator[subprocess.Popen[str]]:
    with subprocess.Popen(
        [sys.executable, "-m", *arguments], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as started:
        try:
            yield started
        finally:
            started.kill()


class Halves:
    """Both halves of a system in `folder`, each started and killed by itself."""

    def __init__(self, folder: Path, running: ExitStack) -> None:
        self._folder = folder
        self._running = running
        self.url = ""

    def start_advisor(self) -> subprocess.Popen[str]:
        advisor = self._running.enter_context(
            process("advisor.cli", "serve", "--config", str(self._folder / "advisor.toml"))
        )
        assert advisor.stdout is not None
        self.url = next(word for word in advisor.stdout.readline().split() if word.startswith("http://"))
        return advisor

    def start_engine(self, seed: int) -> subprocess.Popen[str]:
        arguments = ["--config", str(self._folder / "engine.toml"), "--parent", str(os.getpid()), "--seed", str(seed)]
        return self._running.enter_context(process("advisor.demo_engine", *arguments))

    def wait_for_moves(self, more: int) -> None:
        """Until so many more moves are done and some are open."""
        before = self._summary()["moves_total"]
        deadline = time.monotonic() + 150
        while not ((now := self._summary())["moves_total"] >= before + more and now["moves_open"]):
            assert time.monotonic() < deadline, f"no moves: {now}"
            time.sleep(0.05)

    def _summary(self) -> dict[str, int]:
        with urllib.request.urlopen(f"{self.url}api/v1/summary", timeout=60) as answer:
            return dict(json.load(answer))


@pytest.mark.crash
@pytest.mark.timeout(600)
def test_moves_go_on_when_either_half_was_killed_and_nothing_is_lost(tmp_path: Path) -> None:
    core, agent, command = free_ports()
    agent_toml = demo_agent_toml(
        agent_events_url=f"zmq+tcp://127.0.0.1:{agent}", command_url=f"tcp://127.0.0.1:{command}"
    )
    (tmp_path / "agent.toml").write_text(agent_toml)
    (tmp_path / "engine.toml").write_text(demo_engine_toml(core_events_url=f"zmq+tcp://127.0.0.1:{core}"))
    (tmp_path / "advisor.toml").write_text(ADVISOR.format(core=core, agent=agent, command=command))
    seed = time.time_ns()
    print(f"seed {seed}")
    moments = random.Random(seed)
    with ExitStack() as running:
        halves = Halves(tmp_path, running)
        advisor, engine = halves.start_advisor(), halves.start_engine(1)
        halves.wait_for_moves(moments.randrange(1, 60))
        engine.kill()
        engine.communicate()
        engine = halves.start_engine(2)
        halves.wait_for_moves(moments.randrange(1, 60))
        advisor.kill()
        advisor.communicate()
        advisor = halves.start_advisor()
        halves.wait_for_moves(moments.randrange(1, 60))
        # The engine first: what its agent says last is logged.
        engine.terminate()
        assert (engine.communicate()[1], engine.returncode) == ("", 0)
        advisor.terminate()
        advisor.communicate()
        assert advisor.returncode == 0
    done = verified(tmp_path)
    assert (done.returncode, done.stderr) == (0, ""), done.stdout
