"""A replay that is interrupted, or killed, leaves no process of its own behind."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.moving import eventually

SCRIPT = """
import sys, time
from pathlib import Path
from advisor.replay_processes import spread

def work(folder, job):
    (folder / job).touch()
    time.sleep(600)

if __name__ == "__main__":
    list(spread(work, Path(sys.argv[1]), ["a", "b"], 100))
"""


@pytest.mark.parametrize("how", [signal.SIGINT, signal.SIGKILL])
def test_what_ends_a_replay_ends_its_processes(tmp_path: Path, how: signal.Signals) -> None:
    (tmp_path / "script.py").write_text(SCRIPT)
    replay = subprocess.Popen(
        [sys.executable, tmp_path / "script.py", tmp_path], start_new_session=True, stderr=subprocess.PIPE
    )
    eventually(lambda: (tmp_path / "a").exists() and (tmp_path / "b").exists(), "two processes at work")
    if how == signal.SIGINT:
        os.killpg(replay.pid, how)  # as a terminal does
    else:
        replay.kill()
    # The pipe is at its end when nobody who inherited it is left.
    replay.communicate(timeout=150)
    assert replay.returncode not in (0, None)
