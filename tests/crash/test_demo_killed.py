"""kill -9 of the demo's parent, engine and advisor: nothing is lost, and the demo goes on from what it left."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.crash.killed_demo import ADVISOR, ENGINE, PARENT, RunningDemo, is_running, verified


def require_clean(folder: Path) -> str:
    done = verified(folder)
    assert (done.returncode, done.stderr) == (0, ""), done.stdout
    return done.stdout


FOLD = """
import sys
from pathlib import Path
from advisor.fold import Fold
from advisor.log import SqlLog, read_decoded

path, fold = Path(sys.argv[1]), Fold()
log = SqlLog(path, read_only=True)
for entry, batch in read_decoded(log, path):
    fold.apply(entry, batch)
log.close()
fold.index.check()
finished = sum(count for (_, state), count in fold.moves.counts.items() if state != "aborted")
print(fold.digest(), finished, fold.skipped["illegal move step"])
"""


def folded(folder: Path, hash_seed: int) -> list[str]:
    """Digest of state and plans, moves done, steps that made no sense: the log folded by a process of its own."""
    done = subprocess.run(
        [sys.executable, "-c", FOLD, str(folder / "advisor" / "log.db")],
        env=os.environ | {"PYTHONHASHSEED": str(hash_seed)}, capture_output=True, text=True, check=True,
    )  # fmt: skip
    return done.stdout.split()


@pytest.mark.crash
def test_demo_killed_while_it_starts_leaves_nothing_running_and_nothing_lost(tmp_path: Path) -> None:
    folder = tmp_path / "demo"
    seed = time.time_ns()
    print(f"seed {seed}")
    moments = random.Random(seed)
    with RunningDemo(folder) as demo:
        time.sleep(moments.uniform(*moments.choice(((0.0, 1.0), (1.0, 4.0)))))
        demo.kill(PARENT)
    if folder.is_dir():
        require_clean(folder)


@pytest.mark.crash
@pytest.mark.long
@pytest.mark.timeout(300)
def test_demo_killed_during_moves_loses_nothing_and_goes_on_from_what_it_left_until_sigterm(tmp_path: Path) -> None:
    folder = tmp_path / "demo"
    seed = time.time_ns()
    print(f"seed {seed}")
    moments = random.Random(seed)
    victim = moments.choice((PARENT, ENGINE, ADVISOR))
    with RunningDemo(folder) as demo:
        demo.wait_for_moves(moments.randrange(1, 100))
        time.sleep(moments.uniform(0.0, 0.5))
        demo.kill(victim)
        if victim == PARENT:
            assert demo.process.returncode == -signal.SIGKILL
        else:
            assert demo.process.returncode == 2
            assert demo.err == f"kvadvisor: the {victim} was ended by SIGKILL: start the demo again\n"
    with RunningDemo(folder) as demo:
        demo.wait_for_moves(1)
        children = demo.children()
        demo.process.send_signal(signal.SIGTERM)
        assert demo.process.wait(120) == 0, demo.err
        assert demo.err == ""
        assert not any(is_running(pid) for pid in children.values())
        assert "nothing lost, nothing doubled, nothing leaked" in demo.out
    require_clean(folder)
    first, again = folded(folder, 1), folded(folder, 2)
    assert first == again
    assert int(first[1]) > 0
    assert first[2] == "0"
