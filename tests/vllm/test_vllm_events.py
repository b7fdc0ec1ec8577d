"""`kvadvisor serve` beside a real vLLM: what it takes to be on the GPU is what the engine's own cache holds."""

from __future__ import annotations

import contextlib
import json
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.request import urlopen

import pytest

from tests.ports import free_ports
from tests.vllm.engines import BLOCK_BYTES, Engine, connected, engine, prompts_of

GPU_BLOCKS = 40
PATIENCE_S = 300.0
CONFIG = """
directory = "{directory}"
tick_interval_s = 0.2
[api]
port = {port}
[[sources]]
name = "vllm"
url = "zmq+tcp://127.0.0.1:{events}"
resend_url = "zmq+tcp://127.0.0.1:{resends}"
dialect = "vllm"
model = "tiny"
probe_interval_s = 0.5
"""
pytestmark = pytest.mark.timeout(900)


class Advisor:
    def __init__(self, folder: Path, events: int, resends: int) -> None:
        (self._port,) = free_ports(1)
        self._config = folder / "advisor.toml"
        self._config.write_text(
            CONFIG.format(directory=folder / "state", port=self._port, events=events, resends=resends)
        )
        self._log = folder / "advisor.log"
        self.start()

    def start(self) -> None:
        with self._log.open("a") as log:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "advisor.cli", "serve", "--config", str(self._config)], stdout=log, stderr=log
            )

    def kill(self) -> None:
        self._process.kill()
        self._process.wait()

    def placed(self, tier: int) -> set[str]:
        """Low 64 bits of the hashes of all blocks that the advisor has on a GPU (1) or in a host (2)."""
        found: set[str] = set()
        after = ""
        while True:
            url = f"http://127.0.0.1:{self._port}/api/v1/blocks?tier={tier}&limit=1000{after}"
            with urlopen(url, timeout=30) as answer:
                page = json.load(answer)
            found |= {block["hash"][16:] for block in page["blocks"]}
            if page["next_cursor"] is None:
                return found
            after = f"&after={page['next_cursor']}"

    def require(self, served: Engine) -> int:
        """Wait until it has exactly the blocks of the engine's GPU; how many."""
        return self.require_tier(1, set(served.ask("cached")))

    def require_tier(self, tier: int, own: set[str]) -> int:
        deadline_s = time.monotonic() + PATIENCE_S
        found: set[str] = set()
        while time.monotonic() < deadline_s:
            with contextlib.suppress(OSError):  # it is starting
                found = self.placed(tier)
            if found == own:
                return len(own)
            time.sleep(0.3)
        raise AssertionError(
            f"stale: {sorted(found - own)}, lacking: {sorted(own - found)}\n{self._log.read_text()[-3_000:]}"
        )


@contextmanager
def advising(folder: Path, events: int, resends: int) -> Iterator[Advisor]:
    advisor = Advisor(folder, events, resends)
    try:
        yield advisor
    finally:
        advisor.kill()


def test_blocks_on_the_gpu_are_the_engines_own_through_evictions_kills_and_restarts(tmp_path: Path) -> None:
    events, resends = free_ports(2)
    config: dict[str, Any] = {
        "blocks": GPU_BLOCKS,
        "events": {
            "publisher": "zmq",
            "endpoint": f"tcp://127.0.0.1:{events}",
            "replay_endpoint": f"tcp://127.0.0.1:{resends}",
        },
    }
    with advising(tmp_path, events, resends) as advisor:
        with engine(config, tmp_path / "first.log") as first:
            first.generate(prompts_of(seed=1, count=40))  # many times what the GPU holds
            assert advisor.require(first) > GPU_BLOCKS // 2
            advisor.kill()
            first.generate(prompts_of(seed=2, count=15))  # while nobody listens
            advisor.start()
            assert advisor.require(first) > GPU_BLOCKS // 2
            first.ask("reset")
            first.generate(prompts_of(seed=3, count=1))
            assert advisor.require(first) < GPU_BLOCKS // 2
            first.generate(prompts_of(seed=4, count=20))
            advisor.require(first)
            first.kill()
        # Its sequence begins at 0 again. The connector hands it the host's blocks to tell of.
        config["transfer"] = connected(host_bytes=20 * BLOCK_BYTES)
        with engine(config, tmp_path / "second.log") as second:
            second.generate(prompts_of(seed=5, count=2))
            assert advisor.require(second) > 0
            second.generate(prompts_of(seed=6, count=20))
            advisor.require(second)
            in_host = {f"{key[2] & 2**64 - 1:016x}" for key in second.ask("keys")}
            assert advisor.require_tier(2, in_host) > 10
