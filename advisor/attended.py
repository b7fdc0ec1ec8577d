"""Commands of the command line as children of the service: at low priority, with an end that the service can set.

`python -m advisor.attended PARENT NICE COMMAND …` is such a child: it ends with the process PARENT, however that ends.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from advisor.cli import main as command_line
from advisor.process import die_with_parent

NICE: Final = 10
SAID_BYTES_MAX: Final = 16 * 1024
"""Of standard error that are kept, the last ones."""

_LOOK_S: Final = 0.1
_OOM_SCORE: Final = 900
"""When memory runs out, the kernel ends these before the service (proc(5), oom_score_adj)."""
_PREFIX: Final = "kvadvisor: "


@dataclass(frozen=True, slots=True)
class Ended:
    """How a command ended. `fault`: a sentence, empty where it did its work. `is_unwanted`: it was ended on request."""

    fault: str
    is_unwanted: bool = False


def run_command(
    arguments: Sequence[str], *, deadline_s: float, is_unwanted: Callable[[], bool], nice: int = NICE
) -> Ended:
    """Run `kvadvisor ARGUMENTS` and wait for its end. What it prints is dropped; its processes end with it.

    `is_unwanted` is asked ten times a second: once it is true the command is killed. On the thread that calls it, which
    must live as long.
    """
    try:
        process = subprocess.Popen(
            [sys.executable, "-m", "advisor.attended", str(os.getpid()), str(nice), *arguments],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            start_new_session=True,
        )
    except OSError as error:
        return Ended(f"kvadvisor {arguments[0]} could not be begun ({error.strerror}): free memory or processes")
    assert process.stderr is not None
    deadline_at_s = time.monotonic() + deadline_s
    said = b""
    try:
        while process.poll() is None:
            if is_unwanted():
                return Ended("", is_unwanted=True)
            if time.monotonic() >= deadline_at_s:
                return Ended(
                    f"kvadvisor {arguments[0]} was ended after {deadline_s:,.0f} s: ask for less, or run it by hand"
                )
            said = _more(process.stderr.fileno(), said, _LOOK_S)
        said = _more(process.stderr.fileno(), said, 0.0)
        return Ended(_fault(arguments[0], process.returncode, said))
    finally:
        _kill(process)
        process.stderr.close()


def _more(descriptor: int, said: bytes, wait_s: float) -> bytes:
    """What stands on standard error by now, after what was `said`; waits so long for something."""
    while select.select([descriptor], [], [], wait_s)[0]:
        read = os.read(descriptor, SAID_BYTES_MAX)
        if not read:
            time.sleep(wait_s)  # closed: only its end is to be waited for
            break
        said, wait_s = (said + read)[-SAID_BYTES_MAX:], 0.0
    return said


def _fault(command: str, status: int, said: bytes) -> str:
    if status == 0:
        return ""
    if status == -signal.SIGKILL:
        return f"kvadvisor {command} was killed, perhaps for want of memory: ask for less, or free memory"
    lines = [line.strip() for line in said.decode("utf-8", "replace").splitlines() if line.strip()]
    told = [line.removeprefix(_PREFIX) for line in lines if line.startswith(_PREFIX)]
    if told:
        return " ".join(told)
    return f"kvadvisor {command} failed ({lines[-1] if lines else f'status {status}'}): report it"


def _kill(process: subprocess.Popen[bytes]) -> None:
    """It and the processes that it began, in its session."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def main(arguments: Sequence[str]) -> None:
    """The child. Ends with `SystemExit`."""
    die_with_parent(int(arguments[0]))
    os.nice(int(arguments[1]))
    with contextlib.suppress(OSError):  # a kernel or container that has no such file, or forbids it
        Path("/proc/self/oom_score_adj").write_text(str(_OOM_SCORE))
    command_line(arguments[2:])


if __name__ == "__main__":
    main(sys.argv[1:])
