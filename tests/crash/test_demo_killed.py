"""kill -9 of the demo's parent, engine and advisor: nothing is lost, and the demo goes on from what it left."""

from __future__ import annotations

import random
import signal
import time
from pathlib import Path

import pytest

from tests.crash.killed_demo import ADVISOR, ENGINE, PARENT, RunningDemo, verified


def require_clean(folder: Path) -> str:
    done = verified(folder)
    assert (done.returncode, done.stderr) == (0, ""), done.stdout
    return done.stdout


@pytest.mark.crash
def test_demo_killed_while_it_starts_leaves_nothing_running_and_nothing_lost(tmp_path: Path) -> None:
    folder = tmp_path / "demo"
    seed = time.time_ns()
    print(f"seed {seed}")
    moments = random.Random(seed)
    for earliest_s, latest_s in ((0.0, 0.6), (0.6, 2.0), (2.0, 5.0)):
        with RunningDemo(folder) as demo:
            time.sleep(moments.uniform(earliest_s, latest_s))
            demo.kill(PARENT)
        if folder.is_dir():
            require_clean(folder)


@pytest.mark.crash
@pytest.mark.timeout(300)
def test_demo_killed_during_moves_loses_nothing_and_starts_again_on_what_it_left(tmp_path: Path) -> None:
    folder = tmp_path / "demo"
    seed = time.time_ns()
    print(f"seed {seed}")
    moments = random.Random(seed)
    for victim in (PARENT, ENGINE, ADVISOR):
        with RunningDemo(folder) as demo:
            demo.wait_for_moves(moments.randrange(1, 100))
            time.sleep(moments.uniform(0.0, 0.5))
            demo.kill(victim)
            if victim == PARENT:
                assert demo.process.returncode == -signal.SIGKILL
            else:
                assert demo.process.returncode == 2
                assert demo.err == f"kvadvisor: the {victim} was ended by SIGKILL: start the demo again\n"
        require_clean(folder)
    with RunningDemo(folder, "--seconds", "1") as demo:
        assert demo.process.wait(120) == 0, demo.err
        assert "nothing lost, nothing doubled, nothing leaked" in demo.out
    require_clean(folder)
