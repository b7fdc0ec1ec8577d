"""The command socket: who may bind it, what it answers to nonsense, and what a caller sees when nobody is there."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import msgspec
import pytest
import zmq

from event_plane.schema import Namespace
from storage_agent.agent import StorageAgent
from storage_agent.client import AgentClient
from storage_agent.command_wire import CopyRequest, RefusedReply, decode_reply, encode
from storage_agent.descriptor import VolumeDescriptor
from storage_agent.errors import AgentUnreachable, CommandRefused, ServiceError
from storage_agent.port import BlockKey, CommandOutcome, PutBlock, Result
from storage_agent.service import AgentService

NAMESPACE = Namespace(tenant="t")


def key(number: int) -> BlockKey:
    return BlockKey(NAMESPACE.namespace_id, 0, (1 << 127) + number)


@pytest.fixture
def agent(tmp_path: Path) -> Iterator[StorageAgent]:
    with StorageAgent("a", publisher=None, allowed_roots=[tmp_path]) as made:
        for rank, name in enumerate(("fast", "slow")):
            made.register_volume(
                VolumeDescriptor(
                    id=name, path=str(tmp_path / name), capacity_blocks=32, block_bytes_max=100, speed_rank=rank
                )
            )
        made.put("slow", [PutBlock(key(n), NAMESPACE, memoryview(b"%03d" % n)) for n in range(16)])
        yield made


@pytest.fixture
def service(agent: StorageAgent) -> Iterator[AgentService]:
    with AgentService(agent, "tcp://127.0.0.1:*") as made:
        yield made


@pytest.mark.parametrize(
    "url", ["tcp://0.0.0.0:5555", "tcp://*:5555", "tcp://192.0.2.1:5555", "inproc://x", "nonsense"]
)
def test_an_address_that_others_could_reach_is_refused(agent: StorageAgent, url: str) -> None:
    with pytest.raises(ServiceError, match=r"is not on this host; use tcp://127.0.0.1:PORT"):
        AgentService(agent, url)


def test_a_port_in_use_is_named_with_the_remedy(agent: StorageAgent, service: AgentService) -> None:
    with pytest.raises(ServiceError, match=r"tcp://127.0.0.1:\d+' cannot be bound: Address already in use; stop what"):
        AgentService(agent, service.command_url)


def test_nobody_there_is_unreachable_and_names_the_address(free_port: int) -> None:
    with AgentClient(f"tcp://127.0.0.1:{free_port}", timeout_s=0.2) as client:
        with pytest.raises(AgentUnreachable, match=rf"127.0.0.1:{free_port} did not answer in 0.2 s"):
            client.stat()
        with pytest.raises(AgentUnreachable):
            client.copy("c", [key(1)], "slow", "fast")
    with pytest.raises(AgentUnreachable, match="closed"):
        client.stat()


def test_an_agent_that_ends_before_it_answers_is_unreachable_at_once() -> None:
    with zmq.Context() as context, context.socket(zmq.ROUTER) as ending:
        port = ending.bind_to_random_port("tcp://127.0.0.1")
        with AgentClient(f"tcp://127.0.0.1:{port}", timeout_s=600.0) as client, ThreadPoolExecutor(1) as asking:
            asked = asking.submit(client.stat)
            ending.recv_multipart()
            ending.close(linger=0)
            with pytest.raises(AgentUnreachable, match=rf"127.0.0.1:{port} ended the connection and did not answer"):
                asked.result(60)


def test_an_address_that_is_none_is_unreachable() -> None:
    said = "tcp://no-port cannot be asked"
    with AgentClient("tcp://no-port", timeout_s=1.0) as client, pytest.raises(AgentUnreachable, match=said):
        client.stat()


def test_a_client_finds_the_agent_again_after_a_restart(agent: StorageAgent, free_port: int) -> None:
    url = f"tcp://127.0.0.1:{free_port}"
    with AgentClient(url, timeout_s=10.0) as client:
        with AgentService(agent, url):
            assert client.stat().agent == "a"
        with AgentService(agent, url):
            assert results(client, "c") == {Result.COPIED}
            assert client.stat().volumes[0].blocks == 16


def results(client: AgentClient, command_id: str) -> set[Result]:
    outcome = client.copy(command_id, [key(n) for n in range(16)], "slow", "fast")
    return {block.result for block in outcome.outcomes}


def test_a_command_given_up_by_its_caller_is_done_once_and_answered_when_asked_again(
    agent: StorageAgent, service: AgentService
) -> None:
    with AgentClient(service.command_url, timeout_s=0.0) as hasty, pytest.raises(AgentUnreachable):
        results(hasty, "c")
    with AgentClient(service.command_url, timeout_s=20.0) as patient:
        assert results(patient, "c") == {Result.COPIED}


def test_one_client_serves_many_threads(service: AgentService) -> None:
    seen: list[tuple[int, BlockKey]] = []
    with AgentClient(service.command_url, timeout_s=20.0) as client:

        def ask(number: int) -> None:
            outcome = client.copy(f"c{number}", [key(number)], "slow", "fast")
            seen.append((number, outcome.outcomes[0].key))
            assert client.stat().agent == "a"

        threads = [threading.Thread(target=ask, args=(number,)) for number in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert sorted(seen) == [(number, key(number)) for number in range(8)]


def test_nonsense_is_refused_with_a_reason_and_the_next_command_is_served(service: AgentService) -> None:
    no_id = encode(CopyRequest("", [], "slow", "fast"))
    long_id = encode(CopyRequest("c" * 300, [], "slow", "fast"))
    unknown = msgspec.msgpack.encode({"type": "format-disk"})
    with zmq.Context() as context, context.socket(zmq.DEALER) as socket:
        socket.linger = 0
        socket.connect(service.command_url)
        socket.send_multipart([b"no number"])
        for number, payload in enumerate((b"", b"\xc1", unknown, no_id, long_id)):
            socket.send_multipart([b"%d" % number, payload])
            echoed, answer = socket.recv_multipart()
            assert echoed == b"%d" % number
            reply = decode_reply(answer)
            assert isinstance(reply, RefusedReply)
            assert "command" in reply.reason
    with AgentClient(service.command_url, timeout_s=20.0) as client:
        assert client.stat().agent == "a"


def test_a_command_too_long_for_the_socket_is_refused_by_the_client(service: AgentService) -> None:
    with AgentClient(service.command_url) as client, pytest.raises(CommandRefused, match="ask for less"):
        client.copy("c", [key(1)] * 300_000, "slow", "fast")


def test_a_reply_of_something_that_is_no_agent_says_so() -> None:
    with pytest.raises(CommandRefused, match="is this the command port of an agent"):
        decode_reply(b"HTTP/1.1 400 Bad Request")


def test_closing_a_client_ends_the_request_that_waits() -> None:
    # A ROUTER that never answers: the request would wait for its whole timeout.
    with zmq.Context() as context, context.socket(zmq.ROUTER) as silent:
        port = silent.bind_to_random_port("tcp://127.0.0.1")
        client = AgentClient(f"tcp://127.0.0.1:{port}", timeout_s=600.0)
        with ThreadPoolExecutor(1) as pool:
            waiting = pool.submit(client.stat)
            assert silent.poll(60_000)
            client.close()
            with pytest.raises(AgentUnreachable, match="closed"):
                waiting.result()


def test_a_command_that_is_stuck_keeps_only_those_on_its_blocks_waiting(tmp_path: Path) -> None:
    entered, leaving = threading.Event(), threading.Event()

    class StuckStore(StorageAgent):
        def delete(
            self, command_id: str, volume: str, keys: Sequence[BlockKey], *, term: int = 0
        ) -> CommandOutcome:
            if volume == "tape":
                entered.set()
                assert leaving.wait(60)
            return super().delete(command_id, volume, keys, term=term)

    with (
        StuckStore("a", publisher=None, allowed_roots=[tmp_path]) as agent,
        AgentService(agent, "tcp://127.0.0.1:*") as service,
        AgentClient(service.command_url) as first,
        AgentClient(service.command_url) as second,
        AgentClient(service.command_url) as third,
        ThreadPoolExecutor(2) as pool,
    ):
        stuck = pool.submit(first.delete, "1", "tape", [key(1), key(2)])
        assert entered.wait(60)
        behind = pool.submit(second.delete, "2", "disk", [key(2), key(3)])
        assert third.delete("3", "disk", [key(4)]).command_id == "3"
        assert not behind.done()
        leaving.set()
        assert (stuck.result(60).command_id, behind.result(60).command_id) == ("1", "2")
