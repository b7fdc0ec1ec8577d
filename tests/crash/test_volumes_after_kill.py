"""kill -9 of an agent at work: every block that it said was stored can be read, and every slot is accounted for."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

from storage_agent.descriptor import VolumeDescriptor
from storage_agent.port import Result
from storage_agent.slab_volume import SlabInspection

WRITER = Path(__file__).with_name("put_until_killed.py")
_spec = importlib.util.spec_from_file_location("put_until_killed", WRITER)
assert _spec is not None
assert _spec.loader is not None
writer = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(writer)


def run_then_kill(folder: Path, first: int, line_count: int) -> list[tuple[str, int]]:
    with subprocess.Popen(
        [sys.executable, WRITER, folder, str(first)], stdout=subprocess.PIPE, text=True
    ) as child:
        assert child.stdout is not None
        lines = [child.stdout.readline() for _ in range(line_count)]
        child.kill()
        lines += list(child.stdout)
    return [(line.split()[0], int(line.split()[1])) for line in lines if line.endswith("\n")]


def scan(folder: Path, name: str) -> list[tuple[str, int | None]]:
    descriptor = VolumeDescriptor(
        id=name,
        path=str(folder / f"{name}.slab"),
        capacity_blocks=writer.CAPACITY,
        block_bytes_max=writer.BLOCK_BYTES,
    )
    slab = SlabInspection(descriptor, Path(descriptor.path))
    try:
        return [
            (report.state, report.key.sequence_hash if report.key else None)
            for report in slab.reports()
        ]
    finally:
        slab.close()


@pytest.mark.crash
def test_acknowledged_blocks_survive_kill_and_no_slot_is_lost_or_doubled(tmp_path: Path) -> None:
    held: set[int] = set()
    for life, line_count in enumerate((3, 90, 211, 150)):
        said = run_then_kill(tmp_path, life * 1_000_000, line_count)
        stored = {number for verb, number in said if verb == "put"}
        assert len(stored) > 0
        maybe_deleted = {number for verb, number in said if verb == "deleting"}
        for name in ("fast", "slow"):
            live = Counter(number for state, number in scan(tmp_path, name) if state == "live")
            assert max(live.values(), default=0) <= 1, "a block is twice on a volume"
        with writer.open_agent(tmp_path) as agent:
            wanted = sorted(stored - maybe_deleted)
            buffers = [bytearray(writer.BLOCK_BYTES) for _ in wanted]
            outcomes = agent.get([writer.key(n) for n in wanted], [memoryview(buffer) for buffer in buffers])
            assert {outcome.result for outcome in outcomes} == {Result.HIT}
            assert [bytes(buffer) for buffer in buffers] == [writer.payload(n) for n in wanted]
            held |= set(wanted)
            for volume in agent.stat().volumes:
                states = Counter(state for state, _ in scan(tmp_path, volume.descriptor.id))
                assert states == Counter(live=volume.blocks, free=volume.slots_free)
                assert volume.blocks + volume.slots_free == writer.CAPACITY
            for name in ("fast", "slow"):  # room for the next life
                numbers = [number for _, number in scan(tmp_path, name) if number is not None]
                agent.delete(f"{life}-{name}", name, [writer.key(n) for n in numbers])
    assert held
