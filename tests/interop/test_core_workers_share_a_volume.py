"""Tensor-parallel workers, each a process with a block manager of its own, over one agent's volumes."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any

import msgspec
import pytest
import zmq

from event_plane.schema import Namespace
from storage_agent import client_storage, remote_volume
from storage_agent.agent import StorageAgent
from storage_agent.client_storage import ClientStorage
from storage_agent.descriptor import VolumeDescriptor
from storage_agent.errors import AgentUnreachable, NotTheOwner
from storage_agent.port import BlockKey, Outcome, PutBlock, Result
from storage_agent.service import AgentService
from storage_agent.shards import Axis, BlockLayout, Shard, ShardSpan
from storage_agent.slot_volume import SlotVolume
from tests.ports import free_ports

WORKER = Path(__file__).with_name("core_worker.py")
CAPACITY = 16
NAMESPACE = Namespace(tenant="acme", model="tiny", block_tokens=4)


def _script() -> ModuleType:
    spec = importlib.util.spec_from_file_location("core_worker", WORKER)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


core_worker = _script()


def slab(folder: Path, name: str = "shared", *, speed_rank: int = 1) -> VolumeDescriptor:
    return VolumeDescriptor(
        id=name,
        path=str(folder / f"{name}.slab"),
        capacity_blocks=CAPACITY,
        block_bytes_max=core_worker.BLOCK_BYTES,
        speed_rank=speed_rank,
    )


@contextmanager
def served(
    folder: Path, *more: VolumeDescriptor, url: str = "tcp://127.0.0.1:*"
) -> Iterator[tuple[StorageAgent, str]]:
    """An agent with the slab `shared` and more, and its command URL."""
    with StorageAgent("owner", publisher=None, allowed_roots=[folder]) as agent:
        agent.register_volumes([slab(folder), *more])
        with AgentService(agent, url) as service:
            yield agent, service.command_url


@contextmanager
def worker(url: str, rank: int, blocks: int, halt_after: int = -1) -> Iterator[subprocess.Popen[str]]:
    """Worker `rank` of two; killed at the end."""
    command = [sys.executable, str(WORKER), url, *map(str, (rank, 2, blocks, halt_after))]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        try:
            yield process
        finally:
            process.kill()


def key(number: int) -> BlockKey:
    return BlockKey(NAMESPACE.namespace_id, 0, number << 64 | 0x99)


def content(number: int) -> bytes:
    return b"%04d" % number * 100


def block(number: int) -> PutBlock:
    return PutBlock(key(number), NAMESPACE, memoryview(content(number)))


def get(storage: ClientStorage, *numbers: int) -> list[tuple[Result, str]]:
    """(result, volume) of each, checked for its bytes."""
    buffers = [bytearray(400) for _ in numbers]
    outcomes = storage.get([key(n) for n in numbers], [memoryview(buffer) for buffer in buffers])
    for number, outcome, buffer in zip(numbers, outcomes, buffers, strict=True):
        if outcome.result is Result.HIT:
            assert bytes(buffer) == content(number)
    return [(outcome.result, outcome.volume) for outcome in outcomes]


def results(outcomes: Sequence[Outcome]) -> list[Result]:
    return [outcome.result for outcome in outcomes]


def assert_onboarded(url: str, blocks: int) -> None:
    """By groups of 1, 2 and 4 workers, with the right bytes; the one behind them by none."""
    for size in (1, 2, 4):
        for rank in range(size):
            with closing(core_worker.CoreWorker(url, rank, size)) as reader:
                found = reader.onboard(reader.sequence(blocks + 1))
                assert (found.sources, found.ended) == (["shared"] * blocks, "miss")


def test_any_number_of_workers_read_what_two_put_and_one_that_is_killed_leaves_no_half_blocks(tmp_path: Path) -> None:
    with served(tmp_path) as (agent, url), worker(url, 0, 4) as first, worker(url, 1, 4, halt_after=1) as victim:
        assert first.stdout is not None
        assert first.stdout.read() == "{'shared': 4} {}\n"
        assert first.wait() == 0
        assert victim.stdout is not None
        assert victim.stdout.readline() == "halted\n"
        victim.kill()
        victim.wait()
        assert agent.stat().volumes[0].blocks == core_worker.BATCH_BLOCKS
        assert_onboarded(url, core_worker.BATCH_BLOCKS)
        (volume,) = agent.volumes()
        assert isinstance(volume, SlotVolume)
        assert volume.leasing is not None
        volume.leasing.reclaim()  # as the agent does every second
        with closing(core_worker.CoreWorker(url, 1, 2)) as again:
            again.compute_and_offload(again.sequence(4))
            assert again.manager.totals().put == {"shared": 4}
        assert agent.stat().volumes[0].blocks == 4
        assert_onboarded(url, 4)


def test_volumes_are_asked_the_fastest_first_whatever_their_kind(tmp_path: Path) -> None:
    memory = VolumeDescriptor(
        id="slow", kind="memory", capacity_blocks=4, block_bytes_max=core_worker.BLOCK_BYTES, speed_rank=9
    )
    fast = slab(tmp_path, "fast", speed_rank=0)
    with served(tmp_path, memory, fast) as (agent, url), ClientStorage(url) as storage:
        assert results(storage.put("slow", [block(1), block(2)])) == [Result.STORED] * 2
        assert results(storage.put("fast", [block(2), block(3)])) == [Result.STORED] * 2
        assert results(storage.put("fast", [block(2)])) == [Result.PRESENT]
        assert get(storage, 1, 2, 3, 4) == [
            (Result.HIT, "slow"),
            (Result.HIT, "fast"),
            (Result.HIT, "fast"),
            (Result.MISS, ""),
        ]
        assert storage.holding([key(1), key(2), key(3), key(4)]) == ["slow", "fast", "fast", ""]
        moved = storage.move("m-1", [key(3)], "fast", "slow", keep=False)
        assert results(moved.outcomes) == [Result.COPIED]
        assert results(storage.delete("d-1", "slow", [key(1)]).outcomes) == [Result.DELETED]
        assert get(storage, 1, 3) == [(Result.MISS, ""), (Result.HIT, "slow")]
        assert [volume.blocks for volume in storage.stat().volumes] == [v.blocks for v in agent.stat().volumes]


def test_a_block_that_moves_past_a_get_is_had_where_it_went(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    memory = VolumeDescriptor(
        id="slow", kind="memory", capacity_blocks=4, block_bytes_max=core_worker.BLOCK_BYTES, speed_rank=9
    )
    read, moves = client_storage._get, iter(("shared", "slow"))
    with served(tmp_path, memory) as (_, url), ClientStorage(url) as storage:

        def read_and_move(*asked: Any, **more: Any) -> list[Outcome]:
            """A block is promoted behind a look at the faster volume, and demoted behind a look at the slower."""
            answers = read(*asked, **more)
            if answers[0].result is Result.MISS and (target := next(moves, "")):
                source = "slow" if target == "shared" else "shared"
                storage.move(f"to-{target}", [key(1)], source, target, keep=False)
            return answers

        monkeypatch.setattr(client_storage, "_get", read_and_move)
        assert results(storage.put("slow", [block(1), block(2)])) == [Result.STORED] * 2
        assert get(storage, 1, 2, 3) == [(Result.HIT, "slow"), (Result.HIT, "slow"), (Result.MISS, "")]
        assert next(moves, "") == ""


def test_threads_share_it_until_it_is_closed_under_them(tmp_path: Path) -> None:
    fast = slab(tmp_path, "fast", speed_rank=0)
    with served(tmp_path, fast) as (_, url), ClientStorage(url) as storage, ThreadPoolExecutor(4) as pool:

        def put_and_get(number: int) -> str:
            assert results(storage.put(("fast", "shared")[number % 2], [block(number)])) == [Result.STORED]
            while True:
                (outcome,) = storage.get([key(number)], [memoryview(bytearray(400))])
                if outcome.result is not Result.HIT:
                    return outcome.reason
                rounds.release()

        rounds = threading.Semaphore(0)
        ends = [pool.submit(put_and_get, number) for number in range(4)]
        for _ in range(20):
            assert rounds.acquire(timeout=30)
        storage.close()
        for end in ends:
            assert "is closed" in end.result(30)


def test_a_slice_is_read_of_a_volume_that_takes_no_clients(tmp_path: Path) -> None:
    layout = BlockLayout((Axis("token", 2), Axis("head", 4), Axis("element", 8)), 2, "head")
    memory = VolumeDescriptor(id="ram", kind="memory", capacity_blocks=4, block_bytes_max=128)
    whole = bytes(range(128))
    put = PutBlock(key(1), NAMESPACE, memoryview(whole), span=ShardSpan(128, 0, 1), layout=layout)
    with served(tmp_path, memory) as (_, url), ClientStorage(url) as storage:
        assert results(storage.put("ram", [put])) == [Result.STORED]
        buffer = bytearray(64)
        otherwise = msgspec.structs.replace(layout, dtype="int16")
        assert storage.holding([key(1)], Shard(1, 2, layout)) == ["ram"]
        assert storage.holding([key(1)], Shard(1, 2, otherwise)) == [""]  # a get would not give it either
        (outcome,) = storage.get([key(1)], [memoryview(buffer)], Shard(1, 2, layout))
        assert (outcome.result, outcome.payload_bytes) == (Result.HIT, 64)
        assert bytes(buffer) == whole[32:64] + whole[96:]


def test_a_shard_is_not_said_to_be_there_where_the_agent_itself_put_another_alone(tmp_path: Path) -> None:
    whole = content(1)
    layout = BlockLayout((Axis("head", 4), Axis("element", 50)), 2, "head")

    def shard(rank: int) -> PutBlock:
        payload = memoryview(whole)[200 * rank : 200 * (rank + 1)]
        return PutBlock(key(1), NAMESPACE, payload, span=ShardSpan(200, rank, 2), layout=layout)

    with served(tmp_path) as (agent, url), ClientStorage(url) as storage:
        assert results(agent.put("shared", [shard(0)])) == [Result.STORED]
        (other,) = storage.put("shared", [shard(1)])
        assert other.result is Result.FAILED
        assert "let each worker put through storage_agent.client_storage.ClientStorage" in other.reason
        assert results(storage.put("shared", [shard(0)])) == [Result.PRESENT]
        assert results(storage.delete("d-1", "shared", [key(1)]).outcomes) == [Result.DELETED]
        assert results(storage.put("shared", [shard(0), shard(1)])) == [Result.STORED] * 2
        assert get(storage, 1) == [(Result.HIT, "shared")]


def test_what_the_owner_alone_does_is_refused_and_an_unknown_volume_named(tmp_path: Path) -> None:
    with served(tmp_path) as (_, url), ClientStorage(url) as storage:
        with pytest.raises(NotTheOwner, match=r"'more' cannot be registered from here: the agent at tcp:.* owns it"):
            storage.register_volume(slab(tmp_path, "more"))
        with pytest.raises(NotTheOwner, match="'shared' cannot be unregistered"):
            storage.unregister_volume("shared")
        with pytest.raises(NotTheOwner, match="'shared' cannot be given 99 blocks"):
            storage.resize_volume("shared", 99)
        (outcome,) = storage.put("none", [block(1)])
        assert outcome.result is Result.FAILED
        assert "owns no volume 'none': register it there, or name one of ['shared']" in outcome.reason
        with pytest.raises(ValueError, match="2 keys, 0 buffers"):
            storage.get([key(1), key(2)], [])


def test_an_agent_that_is_restarted_is_used_again_also_with_another_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(client_storage, "ABSENT_S", 0.0)
    (port,) = free_ports(1)
    url = f"tcp://127.0.0.1:{port}"
    with ClientStorage(url, timeout_s=10.0) as storage:
        with served(tmp_path, url=url):
            assert results(storage.put("shared", [block(1)])) == [Result.STORED]
        with served(tmp_path, url=url):
            assert get(storage, 1) == [(Result.HIT, "shared")]
            assert results(storage.put("shared", [block(2)])) == [Result.STORED]
        (tmp_path / "shared.slab").unlink()
        (tmp_path / "shared.slab.table").unlink(missing_ok=True)
        with served(tmp_path, url=url):
            assert get(storage, 1, 2) == [(Result.MISS, "")] * 2
            assert results(storage.put("shared", [block(3)])) == [Result.STORED]
            assert get(storage, 3) == [(Result.HIT, "shared")]


def test_an_agent_that_does_not_answer_fails_the_blocks_with_the_reason_and_is_waited_for_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (port,) = free_ports(1)
    url = f"tcp://127.0.0.1:{port}"
    monkeypatch.setattr(client_storage, "ABSENT_S", 600.0)
    with ClientStorage(url, timeout_s=0.2) as storage:
        (first,) = storage.put("shared", [block(1)])
        buffer = memoryview(bytearray(400))
        (second,) = storage.get([key(1)], [buffer])
        assert (first.result, second.result) == (Result.FAILED, Result.FAILED)
        assert "did not answer" in first.reason
        assert "it is asked again soon" in second.reason
    (closed,) = storage.put("shared", [block(1)])
    assert "is closed" in closed.reason
    with pytest.raises(AgentUnreachable, match="is closed"):
        storage.stat()


def test_an_agent_that_did_not_answer_is_waited_for_briefly_until_it_does(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(client_storage, "ABSENT_S", 0.0)
    monkeypatch.setattr(client_storage, "PROBE_S", 0.5)
    with zmq.Context() as context, context.socket(zmq.ROUTER) as frozen:
        port = frozen.bind_to_random_port("tcp://127.0.0.1")
        url = f"tcp://127.0.0.1:{port}"
        with ClientStorage(url, timeout_s=600.0) as storage, ThreadPoolExecutor(1) as asking:
            first = asking.submit(storage.put, "shared", [block(1)])
            frozen.recv_multipart()
            frozen.unbind(url)
            frozen.close(linger=0)
            reason = first.result(60)[0].reason
            assert "ended the connection" in reason or "did not answer" in reason
            with context.socket(zmq.ROUTER) as again:
                again.bind(url)  # it hears all and answers nothing
                assert "did not answer in 0.5 s" in storage.put("shared", [block(1)])[0].reason
                assert "did not answer in 0.5 s" in storage.get([key(1)], [memoryview(bytearray(400))])[0].reason
                again.unbind(url)
            with served(tmp_path, url=url):
                while results(storage.put("shared", [block(1)])) != [Result.STORED]:
                    pass  # it has to connect within 0.5 s
                assert get(storage, 1) == [(Result.HIT, "shared")]


def test_of_a_lent_volume_an_agent_that_did_not_answer_is_waited_for_briefly_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(remote_volume, "ABSENT_S", 0.0)
    monkeypatch.setattr(remote_volume, "STAT_S", 0.5)
    memory = VolumeDescriptor(id="ram", kind="memory", capacity_blocks=4, block_bytes_max=core_worker.BLOCK_BYTES)
    (port,) = free_ports(1)
    url = f"tcp://127.0.0.1:{port}"
    with ClientStorage(url, timeout_s=1.5) as storage, zmq.Context() as context, context.socket(zmq.ROUTER) as frozen:
        with served(tmp_path, memory, url=url):
            while results(storage.put("ram", [block(1)])) not in ([Result.STORED], [Result.PRESENT]):
                pass  # it has to answer within 0.5 s
        frozen.bind(url)
        assert "did not answer in 1.5 s" in storage.put("ram", [block(2)])[0].reason
        assert "did not answer in 0.5 s" in storage.put("ram", [block(2)])[0].reason
