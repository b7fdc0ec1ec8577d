"""The end at any change that an agent makes on its volumes: a kill, or a power cut that loses what was not synced.

A seeded choice of them here; `make soak-agent` tries them all.
"""

from __future__ import annotations

import os
import random
import subprocess
import sys
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path
from typing import get_args

import pytest

from storage_agent.kinds import inspect_volume, kind_named
from storage_agent.port import PutBlock, Result
from tests.crash.agent_script import CAPACITIES, KILLED, KINDS, NAMESPACE, key, live, open_agent, payload
from tests.disk_shim import Change, Disk, Kept, Recording

EVERY = os.environ.get("KVADVISOR_EVERY_CHANGE") == "1"
SEED = 5
CUTS = 4
"""Of each kind of volume and of each way to lose changes."""
KILLS = 1
"""Of a real process, for each kind."""


@dataclass
class Promised:
    """What was said before the end."""

    stored: set[int] = field(default_factory=set)
    deleted: set[int] = field(default_factory=set)
    in_doubt: set[int] = field(default_factory=set)
    capacity: int = CAPACITIES["first"]

    def hear(self, words: str) -> None:
        verb, _, rest = words.partition(" ")
        numbers = {int(number) for number in rest.split(",") if number}
        match verb:
            case "putting" | "deleting":
                self.in_doubt |= numbers
                self.stored -= numbers
            case "put":
                self.in_doubt -= numbers
                self.stored |= numbers
            case "deleted":
                self.in_doubt -= numbers
                self.deleted |= numbers
            case "resized":
                self.capacity = numbers.pop()


def require_promises_kept(folder: Path, kind: str, promised: Promised) -> None:
    """Open what the end left: acknowledged blocks are there, deleted ones are not, every slot is accounted for."""
    numbers = sorted(promised.stored | promised.deleted | promised.in_doubt)
    capacities = {**CAPACITIES, "first": promised.capacity}
    with closing(open_agent(folder, kind, capacities)) as agent:
        buffers = {number: bytearray(len(payload(number))) for number in numbers}
        outcomes = agent.get([key(n) for n in numbers], [memoryview(buffers[n]) for n in numbers])
        found = dict(zip(numbers, outcomes, strict=True))
        assert {n for n in promised.stored if found[n].result is not Result.HIT} == set(), found
        assert {n for n in promised.deleted if found[n].result is not Result.MISS} == set(), found
        assert {outcome.result for outcome in outcomes} <= {Result.HIT, Result.MISS}, found
        assert all(bytes(buffers[n]) == payload(n) for n in numbers if found[n].result is Result.HIT)
        for volume in agent.stat().volumes:
            assert volume.blocks + volume.slots_free == volume.descriptor.capacity_blocks, "a slot is leaked"
            assert volume.degraded == ""
        new = PutBlock(key(99), NAMESPACE, memoryview(payload(99)))
        assert agent.put("first", [new])[0].result in (Result.STORED, Result.FULL)
        volumes = agent.stat().volumes
    for volume in volumes:
        if kind_named(volume.descriptor.kind, volume.descriptor.id).inspect is None:
            continue
        with closing(inspect_volume(volume.descriptor, [folder])) as inspection:
            keys = [report.key for report in inspection.reports() if report.state == "live"]
            assert len(keys) == len(set(keys)) == volume.blocks, "the volume and its table differ"


@pytest.fixture(scope="module", params=KINDS)
def recording(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[str, Recording, Path]:
    folder = tmp_path_factory.mktemp("whole")
    recorded = Recording(folder)
    with recorded.watching():
        live(folder, request.param, recorded.say)
    return request.param, recorded, folder


Recorded = tuple[str, Recording, Path]


def test_the_shim_sees_every_change(recording: Recorded, tmp_path: Path) -> None:
    _, recorded, folder = recording
    disk = Disk()
    for change in recorded.changes:
        if isinstance(change, Change):
            disk.apply(change)
    disk.write_to(tmp_path / "again", "all", random.Random(SEED))
    assert _contents(tmp_path / "again") == _contents(folder)


def _contents(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


@pytest.mark.crash
@pytest.mark.parametrize("kept", get_args(Kept))
def test_nothing_that_was_promised_is_lost_at_any_cut(recording: Recorded, kept: Kept, tmp_path: Path) -> None:
    kind, recorded, _ = recording
    places = [at for at, change in enumerate(recorded.changes) if isinstance(change, Change)]
    chance = random.Random(f"{SEED}{kind}{kept}")
    chosen = set(places if EVERY else chance.sample(places, CUTS))
    disk, promised = Disk(), Promised()
    for at, change in enumerate(recorded.changes):
        if at in chosen:
            folder = tmp_path / str(at)
            disk.write_to(folder, kept, chance)
            try:
                require_promises_kept(folder, kind, promised)
            except Exception as fault:
                fault.add_note(f"{kind}, {kept} kept, cut before change {at}: {_shortly(change)}")
                raise
        if isinstance(change, Change):
            disk.apply(change)
        else:
            promised.hear(change)


@pytest.mark.crash
def test_nothing_that_was_promised_is_lost_when_the_process_is_killed(recording: Recorded, tmp_path: Path) -> None:
    kind, recorded, _ = recording
    count = sum(isinstance(change, Change) for change in recorded.changes)
    chance = random.Random(f"{SEED}{kind}")
    for at in range(count) if EVERY else sorted(chance.sample(range(count), KILLS)):
        folder = tmp_path / str(at)
        folder.mkdir()
        half = chance.choice(["half", "not at all"])
        command = [sys.executable, "-m", "tests.crash.agent_script", folder, kind, str(at), half]
        ended = subprocess.run(command, capture_output=True, text=True, check=False)
        assert ended.returncode == KILLED, ended.stderr
        promised = Promised()
        for words in ended.stdout.splitlines():
            promised.hear(words)
        try:
            require_promises_kept(folder, kind, promised)
        except Exception as fault:
            fault.add_note(f"{kind}, killed at change {at}, which was done {half}")
            raise


def _shortly(change: Change | str) -> str:
    return change if isinstance(change, str) else str(change._replace(data=change.data[:16]))
