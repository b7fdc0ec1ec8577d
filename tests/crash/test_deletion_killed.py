"""kill -9 at each step of a deletion, beside a real agent process: later lives go on until all is gone, and proven."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path

from advisor.deletion_views import DeletionView
from storage_agent.agent import StorageAgent
from storage_agent.config import load_settings
from tests.interop.test_agent_process import fill, running, stop, write_config

LIVES = Path(__file__).with_name("deletion_lives.py")


def test_a_deletion_killed_at_any_step_is_ended_by_a_later_life_and_nothing_is_left(tmp_path: Path) -> None:
    command_url, event_url = f"ipc://{tmp_path}/commands", f"zmq+ipc://{tmp_path}/events"
    config = write_config(tmp_path, command_url, event_url)
    fill(config, 1, 2, 3)
    fill(config, 1, 2, 3, 4, 5, volume="slow")
    with running(config) as agent:
        command = [sys.executable, str(LIVES), str(tmp_path), command_url, event_url, "8"]
        lived = subprocess.run(command, check=False, capture_output=True, text=True, timeout=300)
        stop(agent, signal.SIGTERM)
    *ends, view, last = lived.stdout.splitlines()
    assert last == "0", lived.stderr
    assert len(ends) >= 4
    assert set(ends) == {"-9"}
    deletion = DeletionView.model_validate_json(view)
    assert deletion.state == "done"
    assert {sweep.volume: (sweep.state, sweep.blocks, sweep.asked) for sweep in deletion.volumes} == {
        "fast": ("clear", 3, 3),
        "slow": ("clear", 5, 5),
    }
    settings = load_settings(config)
    with StorageAgent(settings.name, publisher=None, allowed_roots=settings.allowed_roots) as reopened:
        reopened.register_volumes(settings.volumes)
        assert [volume.blocks for volume in reopened.stat().volumes] == [0, 0]
