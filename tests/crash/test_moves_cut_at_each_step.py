"""The advisor dies before and after each step and command of its moves; the next one ends them, no block is lost."""

from __future__ import annotations

import itertools
import shutil
import threading
from concurrent.futures import Future
from pathlib import Path

import pytest

from advisor.entries import Control, MoveStep
from advisor.fold import Fold
from advisor.log import SqlLog, read_decoded
from advisor.movers.agent import AgentMover
from advisor.movers.port import MoveCommand
from advisor.moves import MoveKind
from advisor.pipeline import StoppedError
from advisor.service import AdvisorService
from storage_agent.port import CommandOutcome
from tests.moving import Storage, agrees, eventually, plan, running, settings_for, settle, used


class Death:
    """Comes when `left` things were done; a thing is a step into the log or a command to the agent."""

    def __init__(self, left: int) -> None:
        self.came = threading.Event()
        self._left = left
        self._lock = threading.Lock()

    def before(self) -> None:
        with self._lock:
            if self._left == 0:
                self.came.set()
                raise StoppedError("the advisor was killed")
            self._left -= 1


class DyingMover(AgentMover):
    def __init__(self, storage: Storage, death: Death) -> None:
        super().__init__(storage.agent)
        self._death = death

    def carry_out(self, command: MoveCommand) -> CommandOutcome:
        self._death.before()
        return super().carry_out(command)


class DyingService(AdvisorService):
    def __init__(self, folder: Path, storage: Storage, death: Death, **policy: object) -> None:
        super().__init__(
            settings_for(folder, [storage], **policy), movers={storage.name: DyingMover(storage, death)}
        )
        self._death = death

    def submit(self, control: Control) -> Future[int]:
        if isinstance(control, MoveStep):
            self._death.before()
        return super().submit(control)


def refolded(folder: Path) -> Fold:
    path = folder / "state" / "log.db"
    log, fold = SqlLog(path, read_only=True), Fold()
    for entry, batch in read_decoded(log, path):
        fold.apply(entry, batch)
    log.close()
    return fold


SMALL = {"capacity_blocks": 8, "high_watermark": 0.5, "low_watermark": 0.4}
TWO = {"fast": SMALL, "slow": {"capacity_blocks": 64}}


@pytest.mark.parametrize(
    ("volumes", "kinds", "put_on"),
    [
        (TWO, {MoveKind.PROMOTE, MoveKind.DROP}, "slow"),
        (TWO, {MoveKind.DEMOTE}, "fast"),
        ({"only": SMALL}, {MoveKind.DELETE}, "only"),
    ],
    ids=["promote and drop", "demote", "delete"],
)
def test_an_advisor_killed_anywhere_in_its_moves_is_followed_by_one_that_ends_them(
    tmp_path: Path, volumes: dict[str, dict[str, object]], kinds: set[MoveKind], put_on: str
) -> None:
    storage = Storage(tmp_path, volumes)
    numbers = itertools.count(1)
    stored: set[int] = set()
    seen: set[MoveKind] = set()
    try:
        for things in itertools.count():
            death = Death(10_000)
            service = DyingService(tmp_path, storage, death)
            with running(service):
                settle(service)  # what the one before left open
                assert service.fold.skipped["illegal move step"] == 0
                eventually(lambda: agrees(service, storage), "slots and index agree")  # noqa: B023
                fresh = [next(numbers) for _ in range(4)]
                storage.put(put_on, *fresh)
                stored.update(fresh)
                if put_on == "slow":
                    storage.get(*fresh)
                    eventually(lambda: used(service) >= set(fresh), "what was read is known")  # noqa: B023
                eventually(lambda: agrees(service, storage), "what was put is known")  # noqa: B023
                death._left = things
                seen |= {move.kind for move in plan(service)}
                eventually(lambda: death.came.is_set() or not service.fold.moves.open, "death or the end")  # noqa: B023
                ended = not death.came.is_set()
            if things % 2:  # and without what an orderly stop would have written
                shutil.rmtree(tmp_path / "state" / "checkpoints")
            if things % 3 == 2:
                storage.close()
                storage.open()
            everywhere = set().union(*(storage.held(volume) for volume in volumes))
            if put_on != "only":
                assert everywhere == stored, "a block is in no volume"
            if ended:
                break
        assert seen >= kinds
        assert things > 2
        assert refolded(tmp_path).digest() == service.fold.digest()
    finally:
        storage.close()
