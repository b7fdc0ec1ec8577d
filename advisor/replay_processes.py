"""The jobs of a replay, spread over processes: Ctrl-C ends them at once, where a thread would end its kernel first."""

from __future__ import annotations

import os
import pickle
import signal
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from multiprocessing import get_context, parent_process
from multiprocessing.connection import wait
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, TypeVar

from advisor.errors import AdvisorError

WORTH_A_PROCESS_S = 3.0
"""Of work, below which another process, which takes a second to begin, brings little."""


class ProcessError(AdvisorError):
    """A process that did not bring what it was asked for."""


_Shared = TypeVar("_Shared")
_Job = TypeVar("_Job")
_Done = TypeVar("_Done")

_shared: Any = None
"""In a process begun by `spread`: what its jobs have in common."""


def spread(
    work: Callable[[_Shared, _Job], _Done], shared: _Shared, jobs: Sequence[_Job], about_s: float
) -> Iterator[tuple[_Job, _Done]]:
    """`work(shared, job)` of each job as it ends, in no order. `about_s`: processor time of all, as far as is known.

    `work` is a function of a module, and all that it takes and returns can be pickled. Little work is done in this
    process. Raises `ProcessError` where a process is killed, and what `work` raises.
    """
    processes = min(len(jobs), len(os.sched_getaffinity(0)), int(about_s / WORTH_A_PROCESS_S))
    if processes < 2:
        yield from ((job, work(shared, job)) for job in jobs)
        return
    with TemporaryDirectory(prefix="kvadvisor-replay-") as folder:
        # By a file: who dies before it has read what fits into no pipe would be waited for for ever.
        place = Path(folder) / "shared"
        place.write_bytes(pickle.dumps(shared))
        # A process made by spawn inherits no lock that another thread of this one holds.
        pool = ProcessPoolExecutor(processes, get_context("spawn"), _begin, (place,))
        try:
            waiting = {pool.submit(_run, work, job): job for job in jobs}
            for ended in as_completed(waiting):
                yield waiting[ended], ended.result()
        except BrokenProcessPool as error:
            raise ProcessError(
                "a process of this replay was killed, perhaps for want of memory: ask for less at once; with --resume"
                " what has ended is kept"
            ) from error
        finally:
            pool.shutdown(cancel_futures=True)


def _begin(place: Path) -> None:
    global _shared
    _shared = pickle.loads(place.read_bytes())
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    threading.Thread(target=_end_with_parent, daemon=True).start()


def _end_with_parent() -> None:
    """Who is killed cannot tell its processes to end."""
    parent = parent_process()
    if parent is not None:
        wait([parent.sentinel])
        os._exit(1)


def _run(work: Callable[[Any, Any], Any], job: Any) -> Any:
    return work(_shared, job)
