"""How the demo ends when nothing goes wrong: Ctrl-C at a terminal, `--seconds`, and a trace's end."""

from __future__ import annotations

import contextlib
import gzip
import json
import os
import pty
import random
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.crash.killed_demo import RunningDemo, is_running, verified

AT_A_TERMINAL = """
import fcntl, os, sys, termios
os.setsid()
fcntl.ioctl(0, termios.TIOCSCTTY, 0)
os.execv(sys.executable, [sys.executable, "-m", "advisor.cli", "demo", *sys.argv[1:]])
"""
CLEAN = "nothing lost, nothing doubled, nothing leaked"


class TerminalDemo:
    """The demo with a terminal of its own, of which it is the foreground."""

    def __init__(self, *arguments: str) -> None:
        self._master, slave = pty.openpty()
        self.process = subprocess.Popen(
            [sys.executable, "-c", AT_A_TERMINAL, *arguments], stdin=slave, stdout=slave, stderr=slave,
            env=os.environ | {"TERM": "xterm", "COLUMNS": "160", "LINES": "50"},
        )  # fmt: skip
        os.close(slave)
        self.screen = ""
        self._reader = threading.Thread(target=self._read)
        self._reader.start()

    def _read(self) -> None:
        with contextlib.suppress(OSError):  # the last process that had the terminal is gone
            while some := os.read(self._master, 65_536):
                self.screen += some.decode(errors="replace")

    def press_ctrl_c(self) -> None:
        os.write(self._master, b"\x03")

    def children(self) -> list[int]:
        listed = subprocess.run(["ps", "-o", "pid=", "--ppid", str(self.process.pid)], capture_output=True, text=True)
        return [int(pid) for pid in listed.stdout.split()]

    def wait_for(self, holds: Callable[[], bool], what: str) -> None:
        deadline = time.monotonic() + 150
        while not holds():
            assert self.process.poll() is None, f"ended before {what}: {self.screen}"
            assert time.monotonic() < deadline, f"not in time: {what}: {self.screen}"
            time.sleep(0.05)

    def __enter__(self) -> TerminalDemo:
        return self

    def __exit__(self, *_: object) -> None:
        self.process.kill()
        self.process.wait()
        self._reader.join()
        os.close(self._master)


@pytest.mark.crash
@pytest.mark.timeout(400)
def test_ctrl_c_at_a_terminal_ends_with_the_summary_status_0_and_no_child(tmp_path: Path) -> None:
    with TerminalDemo("--dir", str(tmp_path / "demo"), "--port", "0") as demo:
        # The live view, redrawn in place, with moves done.
        demo.wait_for(lambda: re.search(r"[1-9]\d* done", demo.screen) is not None, "moves are shown")
        children = demo.children()
        assert len(children) == 2
        refused = verified(tmp_path / "demo")
        assert (refused.returncode, refused.stdout) == (2, "")
        sentence = rf"kvadvisor: .* is in use by process {demo.process.pid} on .*: stop that one first\n"
        assert re.fullmatch(sentence, refused.stderr)
        demo.press_ctrl_c()
        assert demo.process.wait(120) == 0, demo.screen
        assert not any(is_running(pid) for pid in children)
    assert "What happened" in demo.screen
    assert CLEAN in demo.screen
    assert "Traceback" not in demo.screen
    # The file is made with the first line.
    assert not (tmp_path / "demo" / "advisor.err").exists()


@pytest.mark.crash
@pytest.mark.timeout(400)
def test_ctrl_c_while_it_starts_leaves_no_child_and_no_traceback(tmp_path: Path) -> None:
    seed = time.time_ns()
    print(f"seed {seed}")
    moments = random.Random(seed)
    with TerminalDemo("--dir", str(tmp_path / "demo"), "--port", "0") as demo:
        demo.wait_for(lambda: "kvadvisor demo: engine" in demo.screen, "it has begun")
        time.sleep(moments.uniform(0, moments.choice((1.0, 4.0))))
        children = demo.children()
        demo.press_ctrl_c()
        assert demo.process.wait(120) == 0, demo.screen
        assert not any(is_running(pid) for pid in children)
    assert "Traceback" not in demo.screen


@pytest.mark.crash
@pytest.mark.timeout(400)
def test_a_closed_terminal_ends_it_in_order_and_takes_its_folder_along(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "advisor.cli", "demo", "--port", "0"]
    environment = os.environ | {"TMPDIR": str(tmp_path)}
    with subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as demo:
        assert demo.stdout is not None
        assert demo.stdout.readline().startswith("kvadvisor demo: engine")
        starting = iter(demo.stdout.readline, "")
        # A slow machine is told what it waits for.
        said = next(line for line in starting if not line.startswith("starting; "))
        assert said.startswith("admin page: http://127.0.0.1:")
        assert list(tmp_path.glob("kvadvisor-demo-*"))
        demo.send_signal(signal.SIGHUP)
        out, err = demo.communicate(timeout=120)
    assert (demo.returncode, err) == (0, "")
    assert "What happened" in out
    assert CLEAN in out
    assert list(tmp_path.iterdir()) == []


@pytest.mark.crash
@pytest.mark.long
def test_trace_is_served_to_its_end_and_the_demo_goes_on_until_its_seconds_are_over(tmp_path: Path) -> None:
    lines = [
        {"timestamp": n, "input_length": 512 * (n % 7), "output_length": 1, "hash_ids": [*range(n % 7)]}
        for n in range(20)
    ]
    trace = tmp_path / "trace.jsonl.gz"
    trace.write_bytes(gzip.compress("".join(json.dumps(line) + "\n" for line in lines).encode()))
    # Twenty requests a second are served: the trace ends well before the demo.
    with RunningDemo(tmp_path / "demo", "--trace", str(trace), "--seconds", "4") as demo:
        assert demo.process.wait(120) == 0, demo.err
        assert re.search(r"requests +│ 20 with", demo.out), demo.out
        assert CLEAN in demo.out
        assert demo.err == ""
