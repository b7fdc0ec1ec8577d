"""Commands over every carrier: the same answers, each command once, long ones beside short ones."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import msgspec
import pytest
from msgspec.structs import replace

from event_plane.schema import Namespace
from storage_agent.agent import StorageAgent
from storage_agent.client import AgentClient
from storage_agent.descriptor import VolumeDescriptor
from storage_agent.errors import AgentUnreachable, CommandRefused, DescriptorError, ServiceError
from storage_agent.port import AgentStat, BlockKey, Fragmentation, PutBlock, Result, ScrubReport
from storage_agent.service import AgentService
from tests.contract.transports import wait_for
from tests.nats_server import NatsServer, nats_server

NAMESPACE = Namespace(tenant="t")
PATIENCE_S = 60.0


def key(number: int) -> BlockKey:
    return BlockKey(NAMESPACE.namespace_id, 0, (1 << 127) + number)


@pytest.fixture
def agent() -> Iterator[StorageAgent]:
    with StorageAgent("a", publisher=None, allowed_roots=[]) as made:
        for rank, name in enumerate(("fast", "slow")):
            made.register_volume(
                VolumeDescriptor(id=name, kind="memory", capacity_blocks=32, block_bytes_max=100, speed_rank=rank)
            )
        made.put("slow", [PutBlock(key(n), NAMESPACE, memoryview(b"%03d" % n)) for n in range(16)])
        yield made


@pytest.fixture
def server(tmp_path: Path) -> Iterator[NatsServer]:
    with nats_server(tmp_path / "nats") as server:
        yield server


@pytest.fixture(params=["zmq", "nats"])
def client(request: pytest.FixtureRequest, agent: StorageAgent) -> Iterator[AgentClient]:
    url = "tcp://127.0.0.1:*"
    if request.param == "nats":
        url = request.getfixturevalue("server").url("kv.agent-a")
    with AgentService(agent, url) as service, AgentClient(service.command_url, PATIENCE_S) as client:
        yield client


def test_who_asks_for_a_harmful_volume_is_refused_unless_the_settings_allow_it(agent: StorageAgent) -> None:
    faulty = VolumeDescriptor(id="bad", kind="faulty", capacity_blocks=4, block_bytes_max=100)
    url = "tcp://127.0.0.1:*"
    with AgentService(agent, url) as service, AgentClient(service.command_url, PATIENCE_S) as client:
        with pytest.raises(DescriptorError, match="kind 'faulty' loses blocks on purpose") as refused:
            client.register_volume(faulty)
        assert (refused.value.fault.field, refused.value.fault.value) == ("kind", "'faulty'")
        with pytest.raises(DescriptorError) as refused:
            client.register_volume(msgspec.structs.replace(faulty, kind="memory", options={"size": 1}))
        assert refused.value.fault.field == "options.size"
        with pytest.raises(CommandRefused, match="is registered already"):
            client.register_volume(msgspec.structs.replace(faulty, id="fast", kind="memory"))
    with (
        AgentService(agent, url, may_harm=True) as service,
        AgentClient(service.command_url, PATIENCE_S) as client,
    ):
        assert client.register_volume(faulty).descriptor == faulty


def _lasting(stat: AgentStat) -> AgentStat:
    """Without what is reckoned anew every few seconds."""
    volumes = [replace(volume, fragmentation=Fragmentation()) for volume in stat.volumes]
    return replace(stat, volumes=volumes)


def test_blocks_are_copied_moved_and_deleted(agent: StorageAgent, client: AgentClient) -> None:
    assert _lasting(client.stat()) == _lasting(agent.stat())
    copied = client.copy("c", [key(0), key(99)], "slow", "fast")
    assert [outcome.result for outcome in copied.outcomes] == [Result.COPIED, Result.MISS]
    moved = client.move("m", [key(1), key(2)], "slow", "fast", keep=False)
    assert [outcome.result for outcome in moved.outcomes] == [Result.COPIED, Result.COPIED]
    kept = client.move("k", [key(3)], "slow", "fast", keep=True)
    assert kept.outcomes[0].key == key(3)
    deleted = client.delete("d", "slow", [key(4), key(1)])
    assert [outcome.result for outcome in deleted.outcomes] == [Result.DELETED, Result.MISS]
    assert [(volume.descriptor.id, volume.blocks) for volume in client.stat().volumes] == [("fast", 4), ("slow", 13)]


def test_a_command_asked_again_is_answered_as_before(agent: StorageAgent, client: AgentClient) -> None:
    first = client.move("m", [key(1)], "slow", "fast", keep=False)
    agent.delete("", "fast", [key(1)])
    assert client.move("m", [key(1)], "slow", "fast", keep=False) == first
    assert client.scrub("s", "slow") == ScrubReport(15, 0, 0, 45)
    agent.delete("", "slow", [key(2)])
    assert client.scrub("s", "slow") == ScrubReport(15, 0, 0, 45), "the same scrub"
    assert client.scrub("t", "slow") == ScrubReport(14, 0, 0, 42)
    assert client.compact("s", "slow").freed_bytes == 0, "an id of a scrub is free for a compaction"


def test_blocks_are_laid_out_in_the_order_asked_for(agent: StorageAgent, client: AgentClient) -> None:
    wanted = [key(number) for number in (3, 1, 99)]
    report = client.compact("l", "slow", wanted)
    assert (report.extents_before, report.extents_after, report.fragmentation.chains) == (2, 2, 16)
    assert agent.compact("l", "slow", wanted) == report
    with pytest.raises(CommandRefused, match="4097 blocks are to be laid out, at most 4096 go; ask in parts"):
        client.compact("m", "slow", [key(1)] * 4097)


def test_what_the_agent_refuses_is_said(client: AgentClient) -> None:
    with pytest.raises(CommandRefused, match="'tape' is not registered with agent 'a'; register it first"):
        client.scrub("s", "tape")
    with pytest.raises(CommandRefused, match="'tape' is not registered"):
        client.compact("s", "tape")
    with pytest.raises(CommandRefused, match="a command id has 1 to 256 bytes"):
        client.scrub("", "slow")
    with pytest.raises(CommandRefused, match="ask for less"):
        client.copy("c", [key(1)] * 300_000, "slow", "fast")
    assert client.stat().agent == "a"


def test_a_move_does_not_wait_for_a_scrub(
    agent: StorageAgent, client: AgentClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun, go_on = threading.Event(), threading.Event()

    def scrub(command_id: str, volume: str, *, term: int) -> ScrubReport:
        begun.set()
        assert go_on.wait(PATIENCE_S)
        return ScrubReport(0, 0, 0, 0)

    monkeypatch.setattr(agent, "scrub", scrub)
    with AgentClient(client.command_url, PATIENCE_S) as other, ThreadPoolExecutor(1) as pool:
        scrubbing = pool.submit(other.scrub, "s", "slow")
        assert begun.wait(PATIENCE_S)
        assert client.move("m", [key(1)], "slow", "fast", keep=False).outcomes[0].result is Result.COPIED
        go_on.set()
        assert scrubbing.result(PATIENCE_S) == ScrubReport(0, 0, 0, 0)


# NATS alone


def test_nobody_on_the_subject_is_unreachable_at_once_and_a_late_agent_is_found(
    agent: StorageAgent, server: NatsServer
) -> None:
    url = server.url("kv.late")
    with AgentClient(url, PATIENCE_S) as client:
        with pytest.raises(AgentUnreachable, match="does not listen; check that it runs"):
            client.stat()
        with AgentService(agent, url):
            assert client.stat().agent == "a"


def test_a_second_agent_on_the_subject_is_refused(
    agent: StorageAgent, server: NatsServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    url = server.url("kv.agent-a")
    with AgentService(agent, url):
        for wait in ("_OTHER_WAIT_S", "_OPEN_WAIT_S"):  # for the first one's answer
            monkeypatch.setattr(f"storage_agent.command_nats.{wait}", PATIENCE_S)
        with pytest.raises(ServiceError, match="another agent takes commands"):
            AgentService(agent, url)


@pytest.mark.parametrize("url", ["nats://127.0.0.1:1/", "nats://127.0.0.1:1/kv.*", "nats://u:p@127.0.0.1:1/kv"])
def test_a_nats_url_that_cannot_be_used_is_named(agent: StorageAgent, url: str) -> None:
    with pytest.raises(ServiceError, match=r"command_url .*nats"):
        AgentService(agent, url)
    with AgentClient(url, 1.0) as client, pytest.raises(AgentUnreachable, match="cannot be asked"):
        client.stat()


def test_commands_go_on_after_the_server_was_away(agent: StorageAgent, server: NatsServer) -> None:
    with AgentService(agent, server.url("kv.a")) as service, AgentClient(service.command_url, PATIENCE_S) as client:
        first = client.copy("c", [key(1)], "slow", "fast")
        server.kill()
        with AgentClient(service.command_url, 0.3) as hasty, pytest.raises(AgentUnreachable, match="no connection"):
            hasty.stat()
        server.start()
        wait_for(lambda: _answers(client))
        assert client.copy("c", [key(1)], "slow", "fast") == first


def _answers(client: AgentClient) -> bool:
    try:
        client.stat()
    except AgentUnreachable:
        return False
    return True


def test_an_answer_that_is_too_long_for_the_server_says_so_and_others_are_answered(
    agent: StorageAgent, tmp_path: Path
) -> None:
    with (
        nats_server(tmp_path / "small", "max_payload: 16384") as server,
        AgentService(agent, server.url("kv.agent-a")) as service,
        AgentClient(service.command_url) as client,
    ):
        absent = [key(number) for number in range(100, 500)]
        with pytest.raises(CommandRefused, match=r"carried out, but the answer has \d+ bytes .* takes 15872; ask"):
            client.delete("long", "slow", absent)
        assert {o.result for o in client.delete("short", "slow", absent[:10]).outcomes} == {Result.MISS}
        with pytest.raises(CommandRefused, match="at most 15872 go; ask for less"):
            client.delete("longer", "slow", [key(number) for number in range(2000)])
        assert client.stat() == agent.stat()
