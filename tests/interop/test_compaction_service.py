"""Compactions by a running service on a real agent: planned, logged, carried out, resumed, cancelled, paused."""

from __future__ import annotations

import itertools
import shutil
import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from advisor.actions import ServiceActions
from advisor.compactions import Compaction, CompactionState
from advisor.entries import CompactionStep, Control, EntryKind, LayoutEntry, OperatorEntry, Tick, VolumeEntry
from advisor.exposition import render_metrics
from advisor.fold import Fold
from advisor.log import SqlLog, read_decoded
from advisor.pipeline import StoppedError
from advisor.reader import ServiceReader, event_view
from advisor.service import AdvisorService
from storage_agent.agent import StorageAgent
from storage_agent.errors import VolumeError
from storage_agent.port import BlockKey, CompactReport, PutBlock, Result
from tests.moving import NAMESPACE, Storage, agrees, eventually, key, payload, settings_for

CHAINS, LENGTH = 34, 8
NUMBERS = range(1, CHAINS * LENGTH + 1)
MINUTE_US = 61_000_000


@pytest.fixture
def storage(tmp_path: Path) -> Iterator[Storage]:
    opened = Storage(tmp_path, {"v": {"capacity_blocks": 1000}})
    put_turn_by_turn(opened)
    yield opened
    opened.close()


def put_turn_by_turn(storage: Storage) -> None:
    """Chain c is the blocks c, c + CHAINS, …: no two of it lie side by side."""
    for depth in range(LENGTH):
        blocks = [
            PutBlock(key(n), NAMESPACE, memoryview(payload(n)), max(0, n - CHAINS), depth, block_tokens=16)
            for n in range(depth * CHAINS + 1, (depth + 1) * CHAINS + 1)
        ]
        assert {outcome.result for outcome in storage.agent.put("v", blocks)} == {Result.STORED}


def service_for(folder: Path, storage: Storage, **policy: Any) -> AdvisorService:
    return AdvisorService(settings_for(folder, [storage], **policy), agents={storage.name: storage.agent})


def extents(storage: Storage) -> int:
    """Of all chains; nothing is moved by asking."""
    with storage.agent.use_volume("v") as opened:
        slots = {header.key.sequence_hash: header.slot for header in opened.live_headers()}
    return CHAINS + sum(slots[n] != slots[n - CHAINS] + 1 for n in NUMBERS if n > CHAINS)


def plan_compaction(service: AdvisorService, storage: Storage, minutes: int = 1) -> None:
    """Readers come, a minute passes, and the agent says how blocks lie: the next tick plans."""
    eventually(lambda: agrees(service, storage), "what was put is known")
    now_us = max(service.fold.now_us, time.time_ns() // 1000)
    figures = storage.agent.compact("", "v", [key(1 << 30)]).fragmentation
    service.submit(LayoutEntry("v", figures)).result()
    service.submit(Tick(now_us)).result()
    place = service.fold.volumes["v"].place
    reads = service.fold.index.place_figures(place).reads
    assert set(storage.get(*NUMBERS)) == {"v"}
    eventually(lambda: service.fold.index.place_figures(place).reads > reads, "what was read is known")
    service.submit(Tick(now_us + minutes * MINUTE_US)).result()
    assert service.fold.compactions.layouts["v"].note == ""


def ended(service: AdvisorService) -> list[Compaction]:
    eventually(lambda: service.fold.compactions.finished and not service.fold.compactions.open, "the end of it")
    return list(service.fold.compactions.finished)


def refolded(folder: Path) -> Fold:
    path = folder / "state" / "log.db"
    log, fold = SqlLog(path, read_only=True), Fold()
    for entry, batch in read_decoded(log, path):
        fold.apply(entry, batch)
    log.close()
    return fold


def test_scattered_chains_are_compacted_and_what_it_came_to_is_shown(tmp_path: Path, storage: Storage) -> None:
    with service_for(tmp_path, storage) as service:
        plan_compaction(service, storage)
        (done,) = ended(service)
        assert (done.state, done.volume, done.commands) == (CompactionState.DONE, "v", 2)
        assert done.before.extents > 4 * done.before.extents_least
        assert done.after is not None
        assert done.after.extents == done.after.chains
        assert (done.moved_blocks, done.extents_after) == (len(NUMBERS), done.extents_before // LENGTH)
        assert extents(storage) == CHAINS
        assert set(storage.get(*NUMBERS)) == {"v"}
        (shown,) = ServiceReader(service).compactions().compactions
        assert (shown.id, shown.moved_blocks, shown.before.spread > 4) == (done.compaction_id, len(NUMBERS), True)
        assert shown.after is not None
        assert shown.after.spread == 1.0
        text = render_metrics(service, ServiceReader(service)).decode()
        assert 'kvadvisor_compactions_total{state="done"} 1.0' in text
        assert 'kvadvisor_volume_chain_spread{volume="v"} 1.0' in text
        assert service.fold.skipped == {}
    assert refolded(tmp_path).digest() == service.fold.digest()
    with closing(SqlLog(tmp_path / "state" / "log.db", read_only=True)) as log:
        said = [event_view(entry).text for entry in log.read() if entry.kind is EntryKind.MOVE]
    assert [text.split(" took ")[1] for text in said] == [
        "begin", "advance, 256 blocks rewritten", "advance, 16 blocks rewritten", "finish",
    ]  # fmt: skip


class DyingService(AdvisorService):
    """Ends before its step number `left`."""

    left = 10_000

    def submit(self, control: Control) -> Future[int]:
        if isinstance(control, CompactionStep):
            if self.left == 0:
                raise StoppedError("the advisor was killed")
            self.left -= 1
        return super().submit(control)


def test_an_advisor_that_dies_before_any_step_is_followed_by_one_that_ends_it(tmp_path: Path) -> None:
    for steps in itertools.count():
        folder = tmp_path / str(steps)
        folder.mkdir()
        storage = Storage(folder, {"v": {"capacity_blocks": 1000}})
        put_turn_by_turn(storage)
        settings = settings_for(folder, [storage])
        with DyingService(settings, agents={"agent": storage.agent}) as service:
            service.left = steps
            runner = next(thread for thread in threading.enumerate() if thread.name == "kvadvisor-compaction-agent")
            plan_compaction(service, storage)
            (compaction,) = [*service.fold.compactions.open.values(), *service.fold.compactions.finished]
            eventually(lambda: not runner.is_alive() or not compaction.is_open, "death or the end")  # noqa: B023
            survived = not compaction.is_open
        if steps % 2:  # and without what an orderly stop would have written
            shutil.rmtree(folder / "state" / "checkpoints")
        if steps % 3 == 2:  # the agent forgets what it was asked
            storage.close()
            storage.open()
        with service_for(folder, storage) as service:
            (done,) = ended(service)
            assert (done.state, done.after is not None) == (CompactionState.DONE, True)
            assert service.fold.skipped == {}
        assert extents(storage) == CHAINS
        assert set(storage.get(*NUMBERS)) == {"v"}
        storage.close()
        if survived:
            assert steps == 4
            return


class SlowAgent(StorageAgent):
    """A real agent whose compactions wait until they may go on, or are refused."""

    def __init__(self, agent: StorageAgent) -> None:
        self._agent = agent
        self.asked: list[str] = []
        self.answered = 0
        self.may_go_on = threading.Event()
        self.fault: VolumeError | None = None

    def __getattribute__(self, name: str) -> object:
        own = ("_agent", "asked", "answered", "may_go_on", "fault", "compact")
        return object.__getattribute__(self, name) if name in own else getattr(self._agent, name)

    def compact(
        self, command_id: str, volume: str, keys: Sequence[BlockKey] = (), *, term: int = 0
    ) -> CompactReport:
        self.asked.append(command_id)
        assert self.may_go_on.wait(60)
        if self.fault is not None:
            raise self.fault
        report = self._agent.compact(command_id, volume, keys, term=term)
        self.answered += 1
        return report


def test_cancel_pause_and_dry_run_are_heeded(tmp_path: Path, storage: Storage) -> None:
    slow = SlowAgent(storage.agent)
    settings = settings_for(tmp_path, [storage], compaction_spread=1.0)
    with AdvisorService(settings, agents={"agent": slow}) as service:
        actions = ServiceActions(service)
        plan_compaction(service, storage)
        (compaction,) = service.fold.compactions.open.values()
        eventually(lambda: slow.asked, "the first command")
        cancelled = actions.cancel_compaction("ann", compaction.compaction_id)
        assert cancelled.cancelled == [compaction.compaction_id]
        slow.may_go_on.set()
        assert [(each.state, each.note) for each in ended(service)] == [(CompactionState.ABORTED, "cancelled by ann")]
        eventually(lambda: slow.answered == 1, "the end of the command all the same")

        slow.may_go_on.clear()
        plan_compaction(service, storage, minutes=20)
        (compaction,) = service.fold.compactions.open.values()
        eventually(lambda: len(slow.asked) == 2, "the first command of the next one")
        actions.pause("ann", "v")
        slow.may_go_on.set()
        eventually(lambda: compaction.commands_done == 1, "the end of the command that was under way")
        assert compaction.is_open
        assert len(slow.asked) == 2
        actions.resume("ann", "v")
        assert ended(service)[-1].state is CompactionState.DONE
        assert service.fold.skipped == {}
        assert set(storage.get(*NUMBERS)) == {"v"}
    with service_for(tmp_path, storage, dry_run=True, compaction_spread=1.0) as service:
        before = extents(storage)
        service.fold.compactions.layouts["v"].settled = None
        plan_compaction(service, storage, minutes=60)
        assert service.fold.compactions.finished[-1].state is CompactionState.DRY
        assert extents(storage) == before


def test_a_refusal_aborts_it_with_the_reason_and_an_unregistered_volume_ends_it(
    tmp_path: Path, storage: Storage
) -> None:
    slow = SlowAgent(storage.agent)
    slow.fault = VolumeError("volume 'v' cannot be compacted: EIO")
    with AdvisorService(settings_for(tmp_path, [storage]), agents={"agent": slow}) as service:
        plan_compaction(service, storage)
        slow.may_go_on.set()
        (refused,) = ended(service)
        assert (refused.state, refused.note) == (CompactionState.ABORTED, "volume 'v' cannot be compacted: EIO")
        slow.may_go_on.clear()
        plan_compaction(service, storage, minutes=20)
        (compaction,) = service.fold.compactions.open.values()
        state = service.fold.volumes["v"]
        service.submit(VolumeEntry(state.descriptor, "agent", state.producer, away="unplugged")).result()
        assert (compaction.state, compaction.note) == (CompactionState.ABORTED, "unplugged")
        assert service.fold.compactions.open == {}
        slow.fault = None
        slow.may_go_on.set()
        service.submit(OperatorEntry("ann", "pause")).result()
        assert service.fold.skipped == {}
