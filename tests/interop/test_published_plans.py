"""A stranger's process, the example array, obeys published plans, through a kill of it too."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from advisor.moves import MoveKind, MoveState
from advisor.service import AdvisorService
from advisor.settings import AdvisorSettings, AgentSettings, PolicySettings, SourceSettings
from tests.ports import free_ports

EXAMPLE = Path(__file__).parents[2] / "examples" / "array_mover.py"


def eventually(holds: Callable[[], bool], what: str, seconds: float = 60.0) -> None:
    deadline = time.monotonic() + seconds
    while not holds():
        assert time.monotonic() < deadline, f"not within {seconds} s: {what}"
        time.sleep(0.02)


@contextmanager
def running_array(plans: str, events: str) -> Iterator[subprocess.Popen[str]]:
    command = [sys.executable, str(EXAMPLE), plans, events]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as array:
        try:
            yield array
        finally:
            array.kill()


def held(service: AdvisorService, volume: str) -> set[int]:
    with service.lock:
        if volume not in service.fold.volumes:
            return set()
        place = service.fold.volumes[volume].place
        return {block.key.sequence_hash for block in service.fold.index.page(limit=100, place=place)[0]}


def test_the_example_array_moves_what_is_read_and_goes_on_after_a_kill(tmp_path: Path) -> None:
    port, _ = free_ports(2)
    plans, events = f"ipc://{tmp_path}/plans", f"zmq+tcp://127.0.0.1:{port}"
    settings = AdvisorSettings(
        directory=tmp_path / "state",
        tick_interval_s=0.2,
        sources=(SourceSettings(name="array", url=events),),
        agents=(AgentSettings(name="array", mover="published", command_url=plans),),
        policy=PolicySettings(admission="touch-2"),
    )

    def kept(service: AdvisorService) -> int:
        with service.lock:
            return service.fold.moves.counts[MoveKind.PROMOTE, MoveState.KEPT]

    with AdvisorService(settings) as service:
        assert service.fold.volumes == {}
        with running_array(plans, events) as array:
            assert array.stdout is not None
            eventually(lambda: held(service, "array-fast") == {1, 2, 3, 4}, "its blocks that are read, promoted")
            eventually(lambda: kept(service) == 4, "all four moves at their end")
            assert array.stdout.readline().startswith("promote copy copied")
        assert held(service, "array-slow") == set(range(1, 9)), "promotion keeps the slower copy"
        # Its next life has lost its fast copies; what it says of itself is what counts.
        with running_array(plans, events):
            eventually(lambda: kept(service) > 4 and held(service, "array-fast") == {1, 2, 3, 4}, "promoted again")
            assert service.fold.skipped["illegal move step"] == 0
