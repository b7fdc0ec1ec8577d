"""Lives of an advisor that deletes a tenant: each but the last is killed after a few steps.

Prints a line for each life: how it ended, and after the last what became of the deletion.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
import traceback
from concurrent.futures import Future
from pathlib import Path

from advisor.command_log import log_to_standard_error
from advisor.deletion_desk import ServiceDeletions
from advisor.deletions import Scope
from advisor.entries import Control, DeletionStep, MoveStep
from advisor.index.warm import warm as warm_index
from advisor.movers.agent import ClientMover
from advisor.movers.port import MoveCommand
from advisor.policies.warm import warm as warm_policies
from advisor.service import AdvisorService
from advisor.settings import AdvisorSettings, SourceSettings
from storage_agent.client import AgentClient
from storage_agent.port import CommandOutcome

AGENT = "agent-1"
LIVES_MAX = 40
LIFE_S = 60.0


class Death:
    """Comes by SIGKILL, before the next of `left` things: a step into the log, or a command to the agent."""

    def __init__(self, left: int) -> None:
        self._left = left
        self._lock = threading.Lock()

    def before(self) -> None:
        with self._lock:
            if self._left == 0:
                os.kill(os.getpid(), signal.SIGKILL)
            self._left -= 1


class DyingMover(ClientMover):
    def __init__(self, command_url: str, death: Death) -> None:
        super().__init__(lambda: AgentClient(command_url, 10.0))
        self._death = death

    def carry_out(self, command: MoveCommand) -> CommandOutcome:
        self._death.before()
        return super().carry_out(command)


class DyingService(AdvisorService):
    def __init__(self, settings: AdvisorSettings, command_url: str, death: Death) -> None:
        super().__init__(settings, movers={AGENT: DyingMover(command_url, death)})
        self._death = death

    def submit(self, control: Control) -> Future[int]:
        if isinstance(control, MoveStep | DeletionStep):
            self._death.before()
        return super().submit(control)


def live(settings: AdvisorSettings, command_url: str, things: int, blocks: int) -> None:
    """Order the deletion if no life before did, and go on until death or its end."""
    until_s = time.monotonic() + LIFE_S
    with DyingService(settings, command_url, Death(things)) as service:
        desk = ServiceDeletions(service)
        while time.monotonic() < until_s:
            known = desk.page().deletions
            if known and known[0].state == "done":
                print(known[0].model_dump_json(), flush=True)
                return
            with service.lock:
                placed = sum(service.fold.index.place_figures(v.place).blocks for v in service.fold.volumes.values())
            if not known and placed == blocks:
                desk.order(Scope(tenant="p"), "ann")
            time.sleep(0.01)
    raise AssertionError(f"not done within {LIFE_S} s: {known}")


def main(folder: Path, command_url: str, event_url: str, blocks: int) -> None:
    """`blocks`: how many copies the agent's volumes hold."""
    log_to_standard_error()
    warm_index()
    warm_policies()
    source = SourceSettings(name=AGENT, url=event_url)
    settings = AdvisorSettings(directory=folder / "state", tick_interval_s=0.05, sources=(source,))
    for number in range(LIVES_MAX):
        child = os.fork()
        if child == 0:
            ended = 1
            try:
                live(settings, command_url, 1 + number % 4, blocks)
                ended = 0
            except Exception:  # noqa: BLE001 -- told to whoever reads
                traceback.print_exc()
            finally:
                os._exit(ended)
        _, status = os.waitpid(child, 0)
        print(os.waitstatus_to_exitcode(status), flush=True)
        if os.waitstatus_to_exitcode(status) >= 0:
            return


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2], sys.argv[3], int(sys.argv[4]))
