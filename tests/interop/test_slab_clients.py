"""One owner of a slab and other processes as its clients: tensor-parallel workers that write shards and read slices."""

from __future__ import annotations

import importlib.util
import re
import socket
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from pathlib import Path
from types import ModuleType

import pytest

from event_plane import wire
from event_plane.connect import open_publisher, open_subscriber
from event_plane.schema import EventType, producer_id
from event_plane.transport import Message
from storage_agent.agent import StorageAgent
from storage_agent.client import AgentClient
from storage_agent.descriptor import VolumeDescriptor
from storage_agent.errors import CommandRefused, VolumeError
from storage_agent.port import BlockKey, Outcome, PutBlock, Result, VolumeStat
from storage_agent.service import AgentService
from storage_agent.shards import Shard
from storage_agent.slab_client import SlabClient
from tests.ports import free_ports
from tests.stopping import stop

HERE = Path(__file__).parent
CAPACITY = 8


def _script(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, HERE / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


owner_script, writer = _script("slab_owner"), _script("shard_writer")
UNALIGNED, ALIGNED = 4, 32
"""Elements of a head: shards of four workers of 1,536 and 12,288 bytes."""


@contextmanager
def owner(
    folder: Path, element_count: int, url: str = "tcp://127.0.0.1:*"
) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """An owner's process and its command URL; killed at the end."""
    block_bytes = str(writer.layout(element_count).block_bytes)
    command = [sys.executable, str(HERE / "slab_owner.py"), str(folder), str(CAPACITY), block_bytes, url]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        try:
            yield process, process.stdout.readline().strip()
        finally:
            process.kill()


@contextmanager
def worker(
    url: str, index: int, element_count: int, block_count: int, halt_at: int = -1
) -> Iterator[subprocess.Popen[str]]:
    """Worker `index` of four; killed at the end."""
    command = [sys.executable, str(HERE / "shard_writer.py"), url]
    numbers = (index, 4, element_count, block_count, halt_at)
    with subprocess.Popen([*command, *map(str, numbers)], stdout=subprocess.PIPE, text=True) as process:
        try:
            yield process
        finally:
            process.kill()


def said(process: subprocess.Popen[str]) -> list[str]:
    """Everything it says until it ends by itself."""
    assert process.stdout is not None
    lines = process.stdout.read().split()
    assert process.wait() == 0
    return lines


def until(condition: Callable[[], bool]) -> None:
    """Wait generously."""
    end = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < end, "it did not come to be"
        time.sleep(0.05)


def stat(url: str) -> VolumeStat:
    with AgentClient(url) as client:
        return client.stat().volumes[0]


def get(client: SlabClient, number: int, wanted: Shard | None, size: int) -> tuple[Outcome, bytes]:
    buffer = bytearray(size)
    (outcome,) = client.get([writer.key(number)], [memoryview(buffer)], wanted)
    return outcome, bytes(buffer)


def assert_slices(client: SlabClient, number: int, element_count: int) -> None:
    """Read at 1, 2, 4 and 8 what was written at 4."""
    for workers in (1, 2, 4, 8):
        for index in range(workers):
            expected = writer.part(number, element_count, index, workers)
            outcome, found = get(client, number, Shard(index, workers), len(expected))
            assert (outcome.result, outcome.payload_bytes) == (Result.HIT, len(expected))
            assert found == expected


def test_four_workers_write_four_shards_and_any_number_of_them_read(tmp_path: Path) -> None:
    with owner(tmp_path, ALIGNED) as (_, url), ExitStack() as workers:
        running = [workers.enter_context(worker(url, index, ALIGNED, 5)) for index in range(4)]
        results = [said(process) for process in running]
        for block in zip(*results, strict=True):
            assert sorted(block) == ["partial"] * 3 + ["stored"], "each block was published once, by its last shard"
        assert (stat(url).blocks, stat(url).slots_free) == (5, CAPACITY - 5)
        with SlabClient(url, "shared") as client:
            for number in range(5):
                assert_slices(client, number, ALIGNED)
            assert client.put([writer.shard(0, ALIGNED, 1, 4)])[0].result is Result.PRESENT
            assert get(client, 6, None, 1)[0].result is Result.MISS


def test_shards_that_share_pages_do_not_disturb_each_other(tmp_path: Path) -> None:
    with owner(tmp_path, UNALIGNED) as (_, url), ExitStack() as stack:
        clients = [stack.enter_context(SlabClient(url, "shared")) for _ in range(4)]

        def put_all(index: int) -> list[Result]:
            return [clients[index].put([writer.shard(n, UNALIGNED, index, 4)])[0].result for n in range(CAPACITY)]

        with ThreadPoolExecutor(4) as pool:
            results = list(pool.map(put_all, range(4)))
        for block in zip(*results, strict=True):
            assert sorted(block) == [Result.PARTIAL] * 3 + [Result.STORED]
        for number in range(CAPACITY):
            assert_slices(clients[0], number, UNALIGNED)


def test_a_worker_killed_half_way_leaves_nothing_half_present_and_its_lease_goes_to_another(tmp_path: Path) -> None:
    with owner(tmp_path, ALIGNED) as (_, url), ExitStack() as workers:
        victim = workers.enter_context(worker(url, 2, ALIGNED, 3, halt_at=1))
        running = [workers.enter_context(worker(url, index, ALIGNED, 3)) for index in (0, 1, 3)]
        assert victim.stdout is not None
        assert victim.stdout.readline() in ("partial\n", "stored\n")
        assert victim.stdout.readline() == "halted\n"
        for process in running:
            assert set(said(process)) <= {"partial", "stored"}
        with SlabClient(url, "shared") as client:
            assert_slices(client, 0, ALIGNED)
            missing = [get(client, number, None, 1)[0].result for number in (1, 2)]
            assert missing == [Result.MISS, Result.MISS]
            again = writer.shard(1, ALIGNED, 2, 4)
            assert client.put([again])[0].result is Result.BUSY, "it is alive: it may still write there"
            victim.kill()
            victim.wait()
            outcomes: list[Outcome] = []

            def put_again() -> bool:
                outcomes[:] = client.put([again])
                return outcomes[0].result is not Result.BUSY

            until(put_again)
            assert outcomes[0].result is Result.STORED
            assert_slices(client, 1, ALIGNED)
            assert client.put([writer.shard(2, ALIGNED, 2, 4)])[0].result is Result.STORED
        assert (stat(url).blocks, stat(url).slots_free) == (3, CAPACITY - 3)


def test_a_slot_that_a_client_of_a_dead_owner_may_still_write_is_not_given_away(tmp_path: Path) -> None:
    (port,) = free_ports(1)
    url = f"tcp://127.0.0.1:{port}"
    with ExitStack() as processes:
        first, _ = processes.enter_context(owner(tmp_path, ALIGNED, url))
        client = processes.enter_context(worker(url, 0, ALIGNED, 1, halt_at=0))
        assert client.stdout is not None
        assert client.stdout.readline() == "halted\n"
        stop(client.pid)
        first.kill()
        first.wait()
        processes.enter_context(owner(tmp_path, ALIGNED, url))
        blocks = [PutBlock(writer.key(n), writer.NAMESPACE, memoryview(b"x" * 100)) for n in range(10, 10 + CAPACITY)]
        with SlabClient(url, "shared") as other:
            stored = [outcome.result for outcome in other.put(blocks)]
            assert stored == [Result.STORED] * (CAPACITY - 1) + [Result.FULL]
            client.kill()
            client.wait()
            until(lambda: stat(url).slots_free == 1)
            assert other.put(blocks[-1:])[0].result is Result.STORED
            # What the client had written of its shard is nowhere.
            assert get(other, 0, None, 1)[0].result is Result.MISS
        assert (stat(url).blocks, stat(url).slots_free) == (CAPACITY, 0)


def test_a_second_owner_is_refused_with_the_firsts_pid_and_host_and_told_how_to_be_a_client(tmp_path: Path) -> None:
    with owner(tmp_path, UNALIGNED) as (process, url):
        second = StorageAgent("second", publisher=None, allowed_roots=[tmp_path])
        block_bytes = writer.layout(UNALIGNED).block_bytes
        said_by_it = (
            rf"is open in process {process.pid} on {re.escape(socket.gethostname())}; .*"
            r"be a client of that agent \(storage_agent.slab_client.SlabClient with its command_url\)"
        )
        with second, pytest.raises(VolumeError, match=said_by_it):
            second.register_volume(owner_script.descriptor(tmp_path, CAPACITY, block_bytes))
        with SlabClient(url, "shared") as client:
            assert client.put([PutBlock(writer.key(1), writer.NAMESPACE, memoryview(b"x"))])[0].result is Result.STORED


def test_an_owner_killed_while_clients_write_serves_only_whole_blocks_afterwards(tmp_path: Path) -> None:
    (port,) = free_ports(1)
    url = f"tcp://127.0.0.1:{port}"
    with ExitStack() as stack:
        first, _ = stack.enter_context(owner(tmp_path, ALIGNED, url))
        clients = [stack.enter_context(SlabClient(url, "shared", timeout_s=20)) for _ in range(4)]

        def put(index: int) -> list[Result]:
            return [clients[index].put([writer.shard(n, ALIGNED, index, 4)])[0].result for n in range(2)]

        assert [put(index) for index in range(3)] == [[Result.PARTIAL] * 2] * 3
        first.kill()
        first.wait()
        stack.enter_context(owner(tmp_path, ALIGNED, url))
        assert (stat(url).blocks, stat(url).slots_free) == (0, CAPACITY)
        # Their leases went with the owner: all write again, and the block is there.
        assert [put(index) for index in range(4)] == [[Result.PARTIAL] * 2] * 3 + [[Result.STORED] * 2]
        assert_slices(clients[0], 1, ALIGNED)


def test_a_client_that_finds_a_block_damaged_has_the_owner_free_it(tmp_path: Path) -> None:
    with owner(tmp_path, UNALIGNED) as (_, url), SlabClient(url, "shared") as client:
        client.put([PutBlock(writer.key(n), writer.NAMESPACE, memoryview(b"%d" % n * 50)) for n in range(3)])
        path = tmp_path / "shared.slab"
        content = path.read_bytes()
        with path.open("r+b") as file:
            file.seek(content.index(b"1" * 50))
            file.write(b"Z")
        outcome, _ = get(client, 1, None, 50)
        assert outcome.result is Result.CORRUPT
        assert get(client, 1, None, 50)[0].result is Result.MISS
        assert get(client, 2, None, 50) == (Outcome(writer.key(2), Result.HIT, "shared", 50), b"2" * 50)
        assert (stat(url).blocks, stat(url).corrupt_total) == (2, 1)


def test_a_volume_that_clients_cannot_reach_says_so(tmp_path: Path) -> None:
    with StorageAgent("m", publisher=None, allowed_roots=[]) as agent:
        agent.register_volume(VolumeDescriptor(id="ram", kind="memory", capacity_blocks=4, block_bytes_max=100))
        with AgentService(agent, "tcp://127.0.0.1:*") as service:
            with pytest.raises(CommandRefused, match=r"kind 'memory'; put and get by its agent"):
                SlabClient(service.command_url, "ram")
            with pytest.raises(CommandRefused, match="'none' is not registered"):
                SlabClient(service.command_url, "none")


def test_blocks_that_cannot_be_put_say_why_and_the_others_are_stored(tmp_path: Path) -> None:
    namespace = writer.NAMESPACE
    with owner(tmp_path, UNALIGNED) as (_, url), SlabClient(url, "shared") as client:
        size = writer.layout(UNALIGNED).block_bytes
        shard = writer.shard(7, UNALIGNED, 0, 4)
        outcomes = client.put(
            [
                PutBlock(writer.key(1), namespace, memoryview(bytes(size + 1))),
                PutBlock(writer.key(2), namespace, memoryview(b"")),
                PutBlock(writer.key(3), namespace, memoryview(b"xyxy")[::2]),
                PutBlock(BlockKey(1, 0, 1), namespace, memoryview(b"x")),
                PutBlock(writer.key(7), namespace, shard.payload[:-1], span=shard.span, layout=shard.layout),
                PutBlock(writer.key(5), namespace, memoryview(bytes(size))),
            ]
        )
        assert [outcome.result for outcome in outcomes] == [Result.TOO_LARGE, *[Result.FAILED] * 4, Result.STORED]
        assert all(outcome.reason for outcome in outcomes[:-1])
        assert client.put([shard])[0].result is Result.PARTIAL
        other = PutBlock(shard.key, namespace, shard.payload, span=shard.span, layout=shard.layout, depth=3)
        (differs,) = client.put([other])
        assert differs.result is Result.FAILED
        assert "other facts" in differs.reason


def test_a_clients_put_and_get_are_told_by_the_owner_as_its_own(tmp_path: Path) -> None:
    plane = f"memory://{uuid.uuid4().hex}"
    subscriber = open_subscriber("owner", plane)
    publisher = open_publisher(plane, producer=producer_id("owner"), epoch=1, flush_interval_s=60.0)
    with StorageAgent("owner", publisher=publisher, allowed_roots=[tmp_path]) as agent:
        size = writer.layout(UNALIGNED).block_bytes
        agent.register_volume(owner_script.descriptor(tmp_path, CAPACITY, size))
        with AgentService(agent, "tcp://127.0.0.1:*") as service, SlabClient(service.command_url, "shared") as client:
            for index in range(4):
                client.put([writer.shard(1, UNALIGNED, index, 4)])
            for index in range(2):
                assert get(client, 1, Shard(index, 2), size)[0].result is Result.HIT
            assert get(client, 2, None, size)[0].result is Result.MISS
    publisher.close()
    told: list[tuple[EventType, int, int]] = []
    while messages := subscriber.receive(64):
        batches = [wire.decode(message.payload) for message in messages if isinstance(message, Message)]
        rows = [row for batch in batches for row in batch.records]
        told += [(EventType(int(row["event_type"])), int(row["block_size"]), int(row["hits"])) for row in rows]
    subscriber.close()
    assert told == [(EventType.STORE, size, 0), (EventType.ACCESS, size, 2)]
