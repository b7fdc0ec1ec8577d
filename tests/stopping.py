"""Stop a process for a while, as a debugger or a frozen container would."""

from __future__ import annotations

import os
import signal


def stop(pid: int) -> None:
    """Returns when no thread of this child of ours runs any more: after the signal alone, on busy cores, they go on."""
    os.kill(pid, signal.SIGSTOP)
    os.waitid(os.P_PID, pid, os.WSTOPPED | os.WNOWAIT)
