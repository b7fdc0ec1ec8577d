"""Hooks are told what was folded, and nothing that they do reaches the service."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable
from importlib.metadata import EntryPoint, EntryPoints
from pathlib import Path

import pytest

import advisor.hooks as hooks_room
from advisor.entries import Tick, VolumeEntry
from advisor.exposition import render_metrics
from advisor.hooks import BlockEvents, Hook, HookUnknown, PlanMade, hook_named
from advisor.plan_actions import ServicePlans
from advisor.reader import ServiceReader
from advisor.service import AdvisorService
from advisor.settings import AdvisorSettings, PolicySettings, SourceSettings
from event_plane.connect import open_publisher
from event_plane.schema import EventRecord, EventType, Namespace, RecordFlag

SPACE = Namespace(tenant="acme")
DESCRIPTOR = {
    "tier": 3, "capacity_blocks": 64, "high_watermark": 0.9, "low_watermark": 0.75, "block_bytes_max": 4096,
}  # fmt: skip


class Told(Hook):
    def __init__(self) -> None:
        self.stored: list[tuple[int, str]] = []
        self.removed: list[tuple[int, str]] = []
        self.plans: list[PlanMade] = []

    def on_store(self, events: BlockEvents) -> None:
        self.stored += [(event.sequence_hash, event.location) for event in events]
        assert {event.namespace.tenant for event in events} == {"acme"}

    def on_remove(self, events: BlockEvents) -> None:
        self.removed += [(event.sequence_hash, event.location) for event in events]

    def on_plan(self, plan: PlanMade) -> None:
        self.plans.append(plan)


class Failing(Hook):
    def on_store(self, events: BlockEvents) -> None:
        raise RuntimeError("the workflow engine is away")


class Leaving(Hook):
    def on_store(self, events: BlockEvents) -> None:
        sys.exit("a command's habit")


class Stuck(Hook):
    def __init__(self) -> None:
        self.ending = threading.Event()

    def on_store(self, events: BlockEvents) -> None:
        self.ending.wait(600)


def eventually(holds: Callable[[], bool], what: str) -> None:
    deadline = time.monotonic() + 60
    while not holds():
        assert time.monotonic() < deadline, f"not within 60 s: {what}"
        time.sleep(0.01)


def event(kind: EventType, volume: str, number: int, flags: int = 0) -> EventRecord:
    hits = int(kind is EventType.ACCESS)
    return EventRecord(kind, 3, number, SPACE, volume, block_size=4096, block_tokens=16, flags=flags, hits=hits)


def test_hooks_hear_of_stores_removes_and_plans_and_a_bad_one_harms_nobody(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(hooks_room, "QUEUE_MAX", 8)
    told, stuck = Told(), Stuck()
    settings = AdvisorSettings(
        directory=tmp_path,
        tick_interval_s=3_600,
        sources=(SourceSettings(name="array", url=f"zmq+ipc://{tmp_path}/events"),),
        policy=PolicySettings(admission="always", dry_run=True),
    )
    hooks = {"told": told, "failing": Failing(), "leaving": Leaving(), "stuck": stuck}
    publisher = open_publisher(settings.sources[0].url, producer=9, flush_interval_s=0.01)
    try:
        with AdvisorService(settings, hooks=hooks) as service:
            eventually(lambda: service.fold.now_us > 0, "the tick that every start begins with")
            for rank, volume in enumerate(("fast", "slow")):
                described = {**DESCRIPTOR, "id": volume, "speed_rank": rank}
                service.submit(VolumeEntry(described, "array", 9)).result()
            publisher.publish([event(EventType.STORE, "slow", n, RecordFlag.COPY) for n in (1, 2)], flush=True)
            publisher.publish([event(EventType.REMOVE, "slow", 2), event(EventType.ACCESS, "slow", 1)], flush=True)
            eventually(lambda: told.removed == [(2, "slow")], "what was published")
            assert told.stored == [(1, "slow"), (2, "slow")]
            tick = service.submit(Tick(time.time_ns() // 1000)).result()
            eventually(lambda: len(told.plans) == 1, "the plan")
            (plan,) = told.plans
            assert (plan.position, plan.dry, [m.sequence_hash for m in plan.moves]) == (tick, True, [1])
            assert (plan.moves[0].source, plan.moves[0].target) == ("slow", "fast")

            failing = service.hook_figures["failing"]
            for count in range(2, 22):
                publisher.publish([event(EventType.STORE, "slow", 1)], flush=True)
                eventually(lambda: len(told.stored) > count and failing.failures >= count, "the others go on")  # noqa: B023
            eventually(lambda: service.hook_figures["leaving"].failures == failing.failures, "no hook ends its thread")
            assert service.hook_figures["stuck"].dropped >= 10
            assert service.hook_figures["told"].dropped == 0
            reader = ServiceReader(service)
            (check,) = [each for each in reader.checks() if each.name == "hook failing"]
            assert check.ok
            assert check.text.endswith("last failure: RuntimeError: the workflow engine is away")
            assert f'hook_failures_total{{hook="failing"}} {failing.failures}.0'.encode() in render_metrics(
                service, reader
            )
            shown = reader.moves().moves
            assert [(move.state, move.target) for move in shown] == [("dry", "fast")]
            assert ServicePlans(service).plan().dry_run
            assert service.fold.moves.open == {}
            stuck.ending.set()
        assert service.failure is None
    finally:
        stuck.ending.set()
        publisher.close()


class Broken(Hook):
    def __init__(self) -> None:
        raise OSError("no licence")


def test_a_package_s_hook_is_found_by_its_name_and_another_thing_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    points = [
        EntryPoint("told", f"{__name__}:Told", hooks_room.GROUP),
        EntryPoint("number", f"{__name__}:SPACE", hooks_room.GROUP),
        EntryPoint("gone", f"{__name__}:Nothing", hooks_room.GROUP),
        EntryPoint("broken", f"{__name__}:Broken", hooks_room.GROUP),
    ]
    monkeypatch.setattr(hooks_room, "entry_points", lambda group: EntryPoints(points).select(group=group))
    assert isinstance(hook_named("told"), Hook)
    with pytest.raises(HookUnknown, match=r"is a Namespace: inherit advisor\.hooks\.Hook"):
        hook_named("number")
    with pytest.raises(HookUnknown, match=r"cannot be loaded: .*Nothing"):
        hook_named("gone")
    with pytest.raises(HookUnknown, match=r"'broken' of .* cannot be loaded: no licence"):
        hook_named("broken")
    with pytest.raises(HookUnknown, match=r"'other' is not installed: .* are broken, gone, number, told"):
        hook_named("other")
