"""Starts real demos and kills them. `python -m tests.crash.killed_demo` does so for many rounds (`make soak`)."""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Callable
from pathlib import Path

PARENT, ADVISOR, ENGINE = "parent", "advisor", "engine"
VICTIMS = (PARENT, ADVISOR, ENGINE)
START_S_MAX = 150.0
GONE_S_MAX = 60.0


class RunningDemo:
    """`kvadvisor demo --dir FOLDER` as a user starts it, in a process group of its own. Kills what it started."""

    def __init__(self, folder: Path, *arguments: str) -> None:
        self.folder = folder
        self._out, self._err = (folder.with_name(f"{folder.name}.{name}") for name in ("out", "err"))
        command = [sys.executable, "-m", "advisor.cli", "demo", "--dir", str(folder), "--port", "0", *arguments]
        with self._out.open("w") as out, self._err.open("w") as err:
            self.process = subprocess.Popen(command, stdout=out, stderr=err, process_group=0)
        self._seen: dict[int, str] = {}

    def __enter__(self) -> RunningDemo:
        return self

    def __exit__(self, *_: object) -> None:
        self.children()
        for pid in [self.process.pid, *self._seen]:
            if is_running(pid):
                os.kill(pid, signal.SIGKILL)
        self.process.wait()

    @property
    def out(self) -> str:
        return self._out.read_text()

    @property
    def err(self) -> str:
        return self._err.read_text()

    def children(self) -> dict[str, int]:
        """The running children's process ids, by which half they are."""
        found: dict[str, int] = {}
        for status in Path("/proc").glob("[0-9]*/stat"):
            with contextlib.suppress(OSError):
                if int(status.read_text().rpartition(")")[2].split()[1]) == self.process.pid:
                    command = (status.parent / "cmdline").read_text()
                    found[ENGINE if "advisor.demo_engine" in command else ADVISOR] = int(status.parent.name)
        self._seen |= {pid: name for name, pid in found.items()}
        return found

    def wait_for(self, holds: Callable[[], bool], what: str, seconds: float = START_S_MAX) -> None:
        deadline = time.monotonic() + seconds
        while not holds():
            assert self.process.poll() is None, f"the demo ended before {what}: {self.err}"
            assert time.monotonic() < deadline, f"not within {seconds} s: {what}"
            time.sleep(0.05)

    def wait_for_moves(self, count: int) -> None:
        """Until so many moves are done, and some are open."""
        self.wait_for(lambda: "http://" in self.out, "its address is printed")
        url = next(word for word in self.out.split() if word.startswith("http://"))

        def moving() -> bool:
            with contextlib.suppress(OSError), urllib.request.urlopen(f"{url}api/v1/summary", timeout=60) as answer:
                summary = json.load(answer)
                return int(summary["moves_total"]) >= count and int(summary["moves_open"]) > 0
            return False

        self.wait_for(moving, f"{count} moves are done and some are open")

    def kill(self, victim: str) -> None:
        """kill -9 of the whole demo's parent or of one child. Returns when every process of the demo is gone."""
        children = self.children()
        pid = self.process.pid if victim == PARENT else children[victim]
        os.kill(pid, signal.SIGKILL)
        self.process.wait(GONE_S_MAX)
        # A child may have been started between the look and the kill.
        self.children()
        deadline = time.monotonic() + GONE_S_MAX
        while left := [(name, pid) for pid, name in self._seen.items() if is_running(pid)]:
            assert time.monotonic() < deadline, f"{left} outlive the demo"
            time.sleep(0.02)


def is_running(pid: int) -> bool:
    try:
        status = Path(f"/proc/{pid}/stat").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return False
    return status.rpartition(")")[2].split()[0] != "Z"


def verified(folder: Path) -> subprocess.CompletedProcess[str]:
    """`kvadvisor verify FOLDER`."""
    command = [sys.executable, "-m", "advisor.cli", "verify", str(folder)]
    return subprocess.run(command, capture_output=True, text=True, check=False, env=os.environ | {"COLUMNS": "160"})


def main() -> None:
    parser = argparse.ArgumentParser(description="Kill demos on one folder and verify it after each.")
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--seed", type=int, default=int(time.time()))
    parser.add_argument("--dir", type=Path, help="keep everything in this folder")
    arguments = parser.parse_args()
    moments = random.Random(arguments.seed)
    with tempfile.TemporaryDirectory(prefix="kvadvisor-soak-") as made:
        folder = (arguments.dir or Path(made)) / "demo"
        folder.parent.mkdir(parents=True, exist_ok=True)
        print(f"seed {arguments.seed}, folder {folder}", flush=True)
        for number in range(arguments.rounds):
            victim = moments.choice(VICTIMS)
            moves = moments.choice((None, 1, 50, 200, 400))
            pause_s = moments.uniform(0.0, 3.0)
            with RunningDemo(folder, "--seed", str(number)) as demo:
                if moves is not None:
                    demo.wait_for_moves(moves)
                elif victim != PARENT:
                    demo.wait_for(lambda: victim in demo.children(), f"the {victim} runs")  # noqa: B023
                time.sleep(pause_s)
                demo.kill(victim)
                said = demo.err.strip()
            done = verified(folder)
            print(f"{number + 1}: {victim} killed {pause_s:.2f} s after {moves} moves; it said {said!r}", flush=True)
            if done.returncode:
                print(done.stdout, done.stderr)
                raise SystemExit(f"round {number + 1} of seed {arguments.seed}: verify ended with {done.returncode}")
        print(f"{arguments.rounds} kills, nothing lost, nothing doubled, nothing leaked")


if __name__ == "__main__":
    main()
