"""A service that is stuck still ends when it is told to, and what it had logged is there."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path

import pytest

from advisor.entries import EntryKind
from advisor.log import SqlLog

CONFIG = """
directory = "state"
tick_interval_s = 0.05
stop_within_s = 1.0
[api]
port = 0
"""


@pytest.mark.crash
def test_a_stuck_plan_does_not_keep_the_service_from_its_end(tmp_path: Path) -> None:
    config = tmp_path / "advisor.toml"
    config.write_text(CONFIG)
    command = [sys.executable, str(Path(__file__).with_name("stuck_serve.py")), "serve", "--config", str(config)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as service:
        assert service.stdout is not None
        assert service.stdout.readline().startswith("kvadvisor serve: admin view at ")
        (tmp_path / "stuck").touch()
        assert service.stdout.readline() == "stuck\n"
        service.send_signal(signal.SIGTERM)
        _, errors = service.communicate(timeout=150)
    assert service.returncode == 1
    assert "in tick_or_never" in errors, "standard error says where it was stuck"
    log = SqlLog(tmp_path / "state" / "log.db", read_only=True)
    assert [entry.kind for entry in log.read()][-1] is EntryKind.TICK
    log.close()
