"""kill -9 of an owner and its clients at random moments while four workers write shards: no block is half-present.

`make soak-agent` kills for longer.
"""

from __future__ import annotations

import importlib.util
import os
import random
import subprocess
import sys
import time
from pathlib import Path
from types import ModuleType

import pytest

from storage_agent.client import AgentClient
from storage_agent.port import Result
from storage_agent.shards import Shard
from storage_agent.slab_client import SlabClient
from tests.ports import free_ports

INTEROP = Path(__file__).parents[1] / "interop"
ELEMENTS = 32
BLOCKS = CAPACITY = 24
WORKERS = 4
KILLS = 60 if os.environ.get("KVADVISOR_EVERY_CHANGE") else 2


def _script(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, INTEROP / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


writer = _script("shard_writer")


def start_owner(folder: Path, url: str) -> subprocess.Popen[str]:
    block_bytes = str(writer.layout(ELEMENTS).block_bytes)
    command = [sys.executable, str(INTEROP / "slab_owner.py"), str(folder), str(CAPACITY), block_bytes, url]
    owner = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    assert owner.stdout is not None
    assert owner.stdout.readline().strip() == url
    return owner


def start_worker(url: str, index: int) -> subprocess.Popen[str]:
    numbers = (index, WORKERS, ELEMENTS, BLOCKS, -1)
    command = [sys.executable, str(INTEROP / "shard_writer.py"), url, *map(str, numbers)]
    return subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, text=True)


def end(process: subprocess.Popen[str]) -> None:
    process.kill()
    process.wait()
    if process.stdout is not None:
        process.stdout.close()


def assert_whole(client: SlabClient) -> int:
    """Every block that is served is what all workers together wrote. How many are."""
    served = 0
    for number in range(BLOCKS):
        for workers in (2, 8):
            index = number % workers
            expected = writer.part(number, ELEMENTS, index, workers)
            buffer = bytearray(len(expected))
            (outcome,) = client.get([writer.key(number)], [memoryview(buffer)], Shard(index, workers))
            assert outcome.result in (Result.HIT, Result.MISS), outcome
            if outcome.result is Result.HIT:
                assert bytes(buffer) == expected
        served += outcome.result is Result.HIT
    return served


def put_the_rest(client: SlabClient) -> None:
    """What nobody has finished; a lease of the dead is taken back within moments."""
    wait_until = time.monotonic() + 60
    missing = [(number, index) for number in range(BLOCKS) for index in range(WORKERS)]
    while missing:
        outcomes = client.put([writer.shard(number, ELEMENTS, index, WORKERS) for number, index in missing])
        done = (Result.STORED, Result.PRESENT, Result.PARTIAL)
        missing = [each for each, outcome in zip(missing, outcomes, strict=True) if outcome.result not in done]
        assert time.monotonic() < wait_until, outcomes
        time.sleep(0.1)


@pytest.mark.crash
def test_whoever_is_killed_no_block_is_half_present_and_no_slot_is_lost(tmp_path: Path) -> None:
    choice = random.Random(KILLS)
    url = f"tcp://127.0.0.1:{free_ports(1)[0]}"
    processes = {-1: start_owner(tmp_path, url)}
    try:
        for turn in range(KILLS):
            for index in range(WORKERS):
                if index not in processes or processes[index].poll() is not None:
                    processes[index] = start_worker(url, index)
            time.sleep(choice.uniform(0.0, 1.2))
            victim = choice.randrange(-1, WORKERS)
            end(processes[victim])
            if victim == -1:
                processes[-1] = start_owner(tmp_path, url)
            with SlabClient(url, "shared") as client, AgentClient(url) as agent:
                assert_whole(client)
                # So that there is something to write for those that go on, and those that come.
                agent.delete(f"turn-{turn}", "shared", [writer.key(n) for n in choice.sample(range(BLOCKS), 16)])
        for index in range(WORKERS):
            end(processes[index])
        with SlabClient(url, "shared") as client:
            put_the_rest(client)
            assert assert_whole(client) == BLOCKS
        with AgentClient(url) as agent:
            (volume,) = agent.stat().volumes
            assert (volume.blocks, volume.slots_free, volume.corrupt_total) == (BLOCKS, 0, 0)
    finally:
        for process in processes.values():
            end(process)
