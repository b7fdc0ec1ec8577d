"""An agent's process with a fault of its own in one thread: it ends in order and says so, and is never deaf in part."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from storage_agent.client import AgentClient
from storage_agent.config import load_settings, was_closed_in_order
from storage_agent.errors import AgentUnreachable
from tests.ports import free_ports

FAULTY = """
import sys
from advisor.cli import main
from storage_agent.agent import StorageAgent

def compact(self, command_id, volume, keys=(), *, term=0):
    raise KeyError("a fault")

StorageAgent.compact = compact
main(["agent", "--config", sys.argv[1]])
"""


def test_a_thread_that_ends_by_a_fault_stops_the_agent_in_order(tmp_path: Path) -> None:
    commands, events = free_ports(2)
    config = tmp_path / "agent.toml"
    config.write_text(f"""
name = "faulty"
command_url = "tcp://127.0.0.1:{commands}"
event_url = "zmq+tcp://127.0.0.1:{events}"
allowed_roots = ["."]
[[volumes]]
id = "slab"
path = "slab"
capacity_blocks = 8
block_bytes_max = 4096
""")
    command = [sys.executable, "-c", FAULTY, str(config)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert "commands at" in process.stdout.readline()
        with AgentClient(f"tcp://127.0.0.1:{commands}", 60.0) as client:
            assert client.stat().agent == "faulty"
            with pytest.raises(AgentUnreachable), AgentClient(client.command_url, 1.0) as asking:
                asking.compact("c", "slab")
        _, said = process.communicate(timeout=150)
    assert process.returncode == 2
    assert "stopped at a fault of its own, scrubs-faulty: KeyError('a fault')" in said.splitlines()[-1]
    assert "thread ended by a fault" in said
    settings = load_settings(config)
    assert was_closed_in_order(settings.volumes[0], settings)
