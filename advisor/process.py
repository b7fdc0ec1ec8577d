"""Processes: children that do not outlive their parent, and an end that is asked for by a signal."""

from __future__ import annotations

import ctypes
import faulthandler
import gc
import os
import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

_PR_SET_PDEATHSIG = 1
_STANDARD_ERROR = 2
_ending = threading.Event()


def die_with_parent(parent_pid: int) -> None:
    """Have the kernel kill this process when its parent ends, however it ends (Linux, prctl(2)).

    Ends at once if the parent is gone already. The parent's starting thread must live as long as it does.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_PDEATHSIG) failed")
    if os.getppid() != parent_pid:
        raise SystemExit(0)


def answer_soon() -> None:
    """Call when all is made that this process keeps to its end, before it serves requests beside threads that compute.

    The collector is spared all that there is, modules and compiled functions: looking through it took 0.1 s each time,
    and all threads wait meanwhile. A thread that computes hands Python's lock over after 1 ms instead of 5: an answer
    asks for it several times, and its p99 came down by a third (`kvadvisor bench api`).
    """
    gc.collect()
    gc.freeze()
    sys.setswitchinterval(0.001)


def end_within(seconds: float) -> None:
    """Give this process so long to end in order. Then it ends with status 1, however stuck its threads are, and says on
    standard error where each of them stands. A second call changes nothing. May be called by a signal's handler."""
    if not _ending.is_set():
        _ending.set()
        # It needs neither a thread of Python's nor its lock, which what is stuck may hold.
        faulthandler.dump_traceback_later(seconds, exit=True, file=_STANDARD_ERROR)


@contextmanager
def stopped_by_signals() -> Iterator[threading.Event]:
    """Ctrl-C and SIGTERM ask for an end in order, by the event that is given; a second one ends as ever."""
    stopping = threading.Event()
    former = {int(number): signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}

    def stop(number: int, _frame: FrameType | None) -> None:
        stopping.set()
        signal.signal(number, former[number])

    for number in former:
        signal.signal(number, stop)
    try:
        yield stopping
    finally:
        for number, handler in former.items():
            signal.signal(number, handler)
