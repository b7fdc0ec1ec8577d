"""The agent's ports on an event loop: the same answers, cancellation that leaves buffers alone, a bound on threads."""

from __future__ import annotations

import asyncio
import inspect
import threading
from collections.abc import Coroutine, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from event_plane.schema import Namespace
from storage_agent.agent import StorageAgent
from storage_agent.async_agent import AsyncAgentClient, AsyncStorageAgent
from storage_agent.client import AgentClient
from storage_agent.descriptor import VolumeDescriptor
from storage_agent.errors import CommandRefused, StaleTerm, VolumeError
from storage_agent.port import (
    AgentPort,
    AsyncAgentPort,
    AsyncStoragePort,
    BlockKey,
    Outcome,
    PutBlock,
    Result,
    ScrubReport,
    StoragePort,
)
from storage_agent.service import AgentService
from storage_agent.shards import Shard

NAMESPACE = Namespace(tenant="async")
BLOCK_BYTES = 8192
PATIENCE_S = 60.0


def key(number: int) -> BlockKey:
    return BlockKey(NAMESPACE.namespace_id, 0, number + 1)


def block(number: int) -> PutBlock:
    return PutBlock(key(number), NAMESPACE, memoryview(b"%08d" % number * (BLOCK_BYTES // 8)))


def buffer() -> memoryview:
    return memoryview(bytearray(BLOCK_BYTES))


def descriptor(folder: Path, name: str, rank: int = 0) -> VolumeDescriptor:
    path = str(folder / f"{name}.slab")
    return VolumeDescriptor(id=name, path=path, capacity_blocks=64, block_bytes_max=BLOCK_BYTES, speed_rank=rank)


class Gated(StorageAgent):
    """A real agent whose puts, gets and scrubs wait before they begin until the gate is open."""

    def __init__(self, folder: Path) -> None:
        super().__init__("a", publisher=None, allowed_roots=[folder])
        self.gate = threading.Event()
        self.gate.set()
        self.at_gate = 0
        self.at_gate_most = 0
        self._counting = threading.Lock()

    def put(self, volume: str, blocks: Sequence[PutBlock]) -> list[Outcome]:
        self._pass()
        return super().put(volume, blocks)

    def get(
        self, keys: Sequence[BlockKey], buffers: Sequence[memoryview], wanted: Shard | None = None
    ) -> list[Outcome]:
        self._pass()
        return super().get(keys, buffers, wanted)

    def scrub(self, command_id: str, volume: str, *, term: int = 0) -> ScrubReport:
        self._pass()
        return super().scrub(command_id, volume, term=term)

    def _pass(self) -> None:
        with self._counting:
            self.at_gate += 1
            self.at_gate_most = max(self.at_gate_most, self.at_gate)
        assert self.gate.wait(PATIENCE_S)
        with self._counting:
            self.at_gate -= 1


@pytest.fixture
def agent(tmp_path: Path) -> Iterator[Gated]:
    made = Gated(tmp_path)
    with made:
        made.register_volumes([descriptor(tmp_path, "fast"), descriptor(tmp_path, "slow", 1)])
        yield made


def run(work: Coroutine[Any, Any, None]) -> None:
    asyncio.run(asyncio.wait_for(work, PATIENCE_S))


async def until_at_gate(agent: Gated, count: int) -> None:
    """The loop goes on meanwhile: that is what this waits by."""
    while agent.at_gate < count:  # noqa: ASYNC110 -- threads come to the gate, and no loop is told
        await asyncio.sleep(0.001)


def test_many_gets_at_once_each_fill_their_own_buffer(agent: Gated) -> None:
    async def work() -> None:
        async with AsyncStorageAgent(agent) as port:
            stored = await asyncio.gather(*(port.put("fast", [block(n), block(n + 1)]) for n in range(0, 60, 2)))
            assert {outcome.result for outcomes in stored for outcome in outcomes} == {Result.STORED}
            buffers = [buffer() for _ in range(180)]
            found = await asyncio.gather(*(port.get([key(n % 60)], [buffers[n]]) for n in range(180)))
            assert [outcomes[0].result for outcomes in found] == [Result.HIT] * 180
            assert all(each == block(n % 60).payload for n, each in enumerate(buffers))
            assert (await port.get([key(99)], [buffer()]))[0].result is Result.MISS

    run(work())


def test_the_loop_goes_on_and_no_more_calls_run_than_there_are_threads(agent: Gated) -> None:
    async def work() -> None:
        async with AsyncStorageAgent(agent, threads=3) as port:
            agent.gate.clear()
            gets = [asyncio.create_task(port.get([key(n)], [buffer()])) for n in range(20)]
            await until_at_gate(agent, 3)
            for _ in range(100):  # had a fourth been let in, it would come meanwhile
                await asyncio.sleep(0)
            assert (await port.stat()).agent == "a"
            agent.gate.set()
            await asyncio.gather(*gets)
        assert agent.at_gate_most == 3

    run(work())


def test_a_cancelled_get_ends_only_when_nothing_writes_to_its_buffer_any_more(agent: Gated) -> None:
    async def work() -> None:
        agent.put("fast", [block(1)])
        async with AsyncStorageAgent(agent) as port:
            agent.gate.clear()
            into = buffer()
            getting = asyncio.create_task(port.get([key(1)], [into]))
            await until_at_gate(agent, 1)
            for _ in range(3):  # impatience changes nothing
                getting.cancel()
                await asyncio.sleep(0.01)
                assert not getting.done()
            agent.gate.set()
            with pytest.raises(asyncio.CancelledError):
                await getting
            assert into == block(1).payload

    run(work())


def test_a_put_that_had_begun_is_done_though_cancelled_and_one_that_waited_never_is(agent: Gated) -> None:
    async def work() -> None:
        async with AsyncStorageAgent(agent, threads=1) as port:
            agent.gate.clear()
            begun = asyncio.create_task(port.put("fast", [block(1)]))
            await until_at_gate(agent, 1)
            waiting = asyncio.create_task(port.put("fast", [block(2)]))
            await asyncio.sleep(0)
            begun.cancel()
            waiting.cancel()
            with pytest.raises(asyncio.CancelledError):
                await waiting
            assert not begun.done()
            agent.gate.set()
            with pytest.raises(asyncio.CancelledError):
                await begun
            assert [o.result for o in await port.put("fast", [block(1), block(2)])] == [Result.PRESENT, Result.STORED]

    run(work())


def test_a_timeout_is_one_but_waits_for_what_has_begun(agent: Gated) -> None:
    async def work() -> None:
        async with AsyncStorageAgent(agent) as port:
            agent.gate.clear()
            limit = asyncio.timeout(None)

            async def expire() -> None:
                await until_at_gate(agent, 1)
                loop = asyncio.get_running_loop()
                limit.reschedule(loop.time())
                loop.call_later(0.1, agent.gate.set)

            expiring = asyncio.create_task(expire())
            with pytest.raises(TimeoutError):
                async with limit:
                    await port.put("fast", [block(1)])
            await expiring
            assert agent.gate.is_set()
            assert (await port.put("fast", [block(1)]))[0].result is Result.PRESENT

    run(work())


def test_closing_waits_for_calls_that_run_and_refuses_those_that_wait(agent: Gated) -> None:
    async def work() -> None:
        port = AsyncStorageAgent(agent, threads=1)
        agent.gate.clear()
        running = asyncio.create_task(port.put("fast", [block(1)]))
        await until_at_gate(agent, 1)
        waiting = asyncio.create_task(port.put("fast", [block(2)]))
        await asyncio.sleep(0)
        closing = asyncio.create_task(port.close())
        await asyncio.sleep(0.01)
        assert not closing.done()
        agent.gate.set()
        await closing
        assert (await running)[0].result is Result.STORED
        with pytest.raises(CommandRefused, match="is closed; make another"):
            await waiting
        with pytest.raises(CommandRefused, match="is closed; make another"):
            await port.stat()
        await port.close()
        assert agent.stat().volumes[0].blocks == 1, "the agent itself stays open"
        assert not [each for each in threading.enumerate() if each.name.startswith("async-")]

    run(work())


def test_scrubs_keep_no_get_and_no_move_waiting(agent: Gated) -> None:
    async def work() -> None:
        agent.put("slow", [block(n) for n in range(3)])
        async with AsyncStorageAgent(agent) as port:
            agent.gate.clear()
            scrubs = [asyncio.create_task(port.scrub(f"s{n}", "slow")) for n in range(4)]
            await until_at_gate(agent, 2)
            moved = await port.move("m", [key(0)], "slow", "fast", keep=False)
            assert moved.outcomes[0].result is Result.COPIED
            agent.gate.set()
            assert [(await scrub).good for scrub in scrubs] == [2] * 4

    run(work())


def test_volumes_and_commands_answer_and_fail_as_in_process(agent: Gated, tmp_path: Path) -> None:
    async def work() -> None:
        async with AsyncStorageAgent(agent) as port:
            assert (await port.register_volume(descriptor(tmp_path, "third", 2))).slots_free == 64
            with pytest.raises(VolumeError, match="is registered already"):
                await port.register_volume(descriptor(tmp_path, "third", 2))
            assert (await port.resize_volume("third", 70)).slots_free == 70
            await port.put("third", [block(5)])
            assert (await port.copy("c", [key(5)], "third", "slow", term=2)).outcomes[0].result is Result.COPIED
            assert (await port.delete("d", "third", [key(5)], term=2)).outcomes[0].result is Result.DELETED
            with pytest.raises(StaleTerm):
                await port.compact("k", "third", term=1)
            assert (await port.compact("k", "third", term=2)).freed_bytes == 0
            await port.unregister_volume("third", drain_s=1.0)
            assert [each.descriptor.id for each in (await port.stat()).volumes] == ["fast", "slow"]

    run(work())


def test_an_agent_of_another_process_is_asked_the_same_way(agent: Gated) -> None:
    agent.put("slow", [block(n) for n in range(4)])

    async def work(client: AgentClient) -> None:
        async with AsyncAgentClient(client) as port:
            moves = [port.move(f"m{n}", [key(n)], "slow", "fast", keep=False, term=1) for n in range(4)]
            answers = await asyncio.gather(*moves)
            assert [answer.outcomes[0].result for answer in answers] == [Result.COPIED] * 4
            assert [volume.blocks for volume in (await port.stat()).volumes] == [4, 0]
            assert (await port.scrub("s", "fast")).good == 4

    with AgentService(agent, "tcp://127.0.0.1:*") as service, AgentClient(service.command_url, PATIENCE_S) as client:
        run(work(client))


def test_no_thread_at_all_is_refused(agent: Gated) -> None:
    with pytest.raises(ValueError, match="0 threads are asked for; give at least 1"):
        AsyncStorageAgent(agent, threads=0)


@pytest.mark.parametrize(("port", "twin"), [(AgentPort, AsyncAgentPort), (StoragePort, AsyncStoragePort)])
def test_every_call_of_a_port_has_its_twin_with_the_same_arguments(port: type, twin: type) -> None:
    names = {name for name, _ in inspect.getmembers(port, inspect.isfunction) if not name.startswith("_")}
    assert names == {name for name, _ in inspect.getmembers(twin, inspect.iscoroutinefunction)}
    for name in names:
        assert inspect.signature(getattr(port, name)) == inspect.signature(getattr(twin, name))
        implementation = AsyncStorageAgent if port is StoragePort else AsyncAgentClient
        assert inspect.signature(getattr(implementation, name)) == inspect.signature(getattr(twin, name))
