"""An agent obeys the newest advisor it has heard of: in process, over its command socket; a late advisor stops."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from advisor.service import AdvisorService
from advisor.settings import AdvisorSettings, AgentSettings, PolicySettings, SourceSettings
from event_plane.connect import open_publisher
from event_plane.schema import Namespace, producer_id
from storage_agent.agent import StorageAgent
from storage_agent.client import AgentClient
from storage_agent.descriptor import VolumeDescriptor
from storage_agent.errors import CommandRefused, StaleTerm, TermError
from storage_agent.port import AgentPort, BlockKey, PutBlock, Result
from storage_agent.service import AgentService
from storage_agent.term_fence import TermFence
from tests.ports import free_ports

NAMESPACE = Namespace(tenant="term")


def key(number: int) -> BlockKey:
    return BlockKey(NAMESPACE.namespace_id, 0, number)


def add_volumes(agent: StorageAgent, folder: Path) -> None:
    for rank, name in enumerate(("fast", "slow")):
        agent.register_volume(
            VolumeDescriptor(
                id=name, path=str(folder / f"{name}.slab"), capacity_blocks=16, block_bytes_max=100, speed_rank=rank
            )
        )
    agent.put("slow", [PutBlock(key(n), NAMESPACE, memoryview(b"%03d" % n), block_tokens=16) for n in range(1, 9)])


@pytest.fixture
def agent(tmp_path: Path) -> Iterator[StorageAgent]:
    with StorageAgent("a", publisher=None, allowed_roots=[tmp_path]) as made:
        add_volumes(made, tmp_path)
        yield made


@pytest.fixture(params=["in process", "over its socket"])
def port(agent: StorageAgent, request: pytest.FixtureRequest) -> Iterator[AgentPort]:
    if request.param == "in process":
        yield agent
        return
    with AgentService(agent, "tcp://127.0.0.1:*") as service, AgentClient(service.command_url) as client:
        yield client


def test_a_command_of_an_older_term_is_refused_and_changes_nothing(agent: StorageAgent, port: AgentPort) -> None:
    assert port.copy("c1", [key(1)], "slow", "fast", term=2).outcomes[0].result is Result.COPIED
    refusal = r"of term 1, an advisor of term 2 has taken over; stop this one"
    with pytest.raises(StaleTerm, match=refusal):
        port.copy("c2", [key(2)], "slow", "fast", term=1)
    with pytest.raises(StaleTerm, match=refusal):
        port.delete("c3", "slow", [key(1)], term=1)
    with pytest.raises(StaleTerm, match=refusal):
        port.move("c4", [key(3)], "slow", "fast", keep=False, term=1)
    with pytest.raises(StaleTerm, match=refusal):
        port.copy("c1", [key(1)], "slow", "fast", term=1)
    with pytest.raises(StaleTerm, match=refusal):
        port.scrub("s1", "slow", term=1)
    with pytest.raises(StaleTerm, match=refusal):
        port.compact("k1", "slow", term=1)
    assert (port.scrub("s1", "slow", term=2).good, port.compact("k1", "slow", term=2).freed_bytes) == (8, 0)
    assert [volume.blocks for volume in agent.stat().volumes] == [1, 8]


def test_a_newer_term_gets_the_answer_of_an_older_ones_command_without_a_second_run(port: AgentPort) -> None:
    first = port.delete("d1", "slow", [key(1), key(99)], term=1)
    assert [outcome.result for outcome in first.outcomes] == [Result.DELETED, Result.MISS]
    assert port.delete("d1", "slow", [key(1), key(99)], term=2) == first


def test_a_person_needs_no_term(port: AgentPort) -> None:
    port.copy("c1", [key(1)], "slow", "fast", term=7)
    assert port.delete("d1", "fast", [key(1)]).outcomes[0].result is Result.DELETED
    assert port.scrub("s1", "slow").good == 8


@pytest.mark.parametrize("command", ["scrub", "compact"])
def test_a_scrub_or_compaction_of_a_newer_term_ends_the_older_one(port: AgentPort, command: str) -> None:
    getattr(port, command)("first", "slow", term=3)
    with pytest.raises(StaleTerm, match="of term 2, an advisor of term 3 has taken over"):
        port.delete("d1", "slow", [key(1)], term=2)


def test_a_restarted_agent_refuses_what_its_former_life_would_have_refused(tmp_path: Path) -> None:
    def opened(name: str = "a") -> StorageAgent:
        return StorageAgent(name, publisher=None, allowed_roots=[tmp_path], state_folder=tmp_path)

    with opened() as agent:
        add_volumes(agent, tmp_path)
        agent.delete("d1", "slow", [key(1)], term=7)
    (kept,) = tmp_path.glob(".kvadvisor-*.term")
    with opened() as agent:
        with pytest.raises(StaleTerm, match=rf"an advisor of term 7 has taken over; .* remove {kept} and restart"):
            agent.delete("d2", "slow", [key(2)], term=6)
        agent.delete("d3", "slow", [key(2)], term=7)
    with opened("b") as other:
        other.delete("d4", "slow", [], term=1)  # another agent of the same folder has terms of its own
    kept.unlink()
    with opened() as agent:
        agent.delete("d5", "slow", [], term=1)


def test_a_newer_term_is_on_disk_before_the_command_is_carried_out(tmp_path: Path) -> None:
    fence, late = TermFence("a", tmp_path), TermFence("a", tmp_path)
    fence.require(4)
    assert b'"newest_term":4' in next(tmp_path.glob(".kvadvisor-*.term")).read_bytes()
    fence.require(5)
    with pytest.raises(StaleTerm, match="of term 4, an advisor of term 5"):
        late.require(4)  # it read nothing when it was made
    with pytest.raises(StaleTerm):
        TermFence("a", tmp_path).require(4)


def test_a_folder_that_cannot_be_written_keeps_no_advisor_out_and_is_tried_again(tmp_path: Path) -> None:
    folder = tmp_path / "not mounted yet"
    fence = TermFence("a", folder)
    fence.require(4)
    with pytest.raises(StaleTerm):
        fence.require(3)
    folder.mkdir()
    TermFence("a", folder).require(6)
    with pytest.raises(StaleTerm, match="an advisor of term 6"):
        fence.require(5)  # what was kept there counts from when it can be seen
    fence.require(6)
    fence.require(8)
    with pytest.raises(StaleTerm, match="an advisor of term 8"):
        TermFence("a", folder).require(7)


@pytest.mark.parametrize("content", [b"", b"seven", b'{"agent":"a"}', b'{"agent":"a","newest_term":"7"}'])
def test_a_file_that_holds_no_term_is_named_with_the_remedy(tmp_path: Path, content: bytes) -> None:
    TermFence("a", tmp_path).require(1)
    (kept,) = tmp_path.glob(".kvadvisor-*.term")
    kept.write_bytes(content)
    with pytest.raises(TermError, match=rf"{kept} holds no term .*; remove it if no older advisor runs"):
        TermFence("a", tmp_path)
    kept.unlink()
    kept.mkdir()
    with pytest.raises(TermError, match=rf"{kept} cannot be read: Is a directory"):
        TermFence("a", tmp_path)


@pytest.mark.parametrize("term", [-1, 2**63])
def test_a_number_that_is_no_term_is_refused(port: AgentPort, term: int) -> None:
    with pytest.raises(CommandRefused, match=rf"of term {term}; terms are 1 to"):
        port.delete("d1", "slow", [key(1)], term=term)
    assert port.delete("d1", "slow", [key(1)], term=1).outcomes[0].result is Result.DELETED


def test_of_many_advisors_at_once_none_is_obeyed_after_a_newer_one(tmp_path: Path) -> None:
    fence = TermFence("a", tmp_path)
    obeyed: list[int] = []
    guard = threading.Lock()

    def command(term: int) -> None:
        for _ in range(50):
            with guard:
                try:
                    fence.require(term)
                except StaleTerm:
                    return
                obeyed.append(term)

    threads = [threading.Thread(target=command, args=(term,)) for term in range(1, 6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert obeyed == sorted(obeyed)
    assert obeyed[-50:] == [5] * 50


def test_an_advisor_whose_term_is_over_stops_and_says_why(tmp_path: Path) -> None:
    event_port, _ = free_ports(2)
    event_url, command_url = f"zmq+tcp://127.0.0.1:{event_port}", f"ipc://{tmp_path}/commands"
    publisher = open_publisher(event_url, producer=producer_id("a"), flush_interval_s=0.05)
    with StorageAgent("a", publisher=publisher, allowed_roots=[tmp_path]) as agent:
        add_volumes(agent, tmp_path)
        service = AdvisorService(
            AdvisorSettings(
                directory=tmp_path,
                tick_interval_s=0.1,
                sources=(SourceSettings(name="agent", url=event_url),),
                agents=(AgentSettings(name="a", command_url=command_url),),
                policy=PolicySettings(admission="always", promote_moves_max=4),
            )
        )
        agent.delete("of-another", "slow", [], term=9)
        with AgentService(agent, command_url), service:
            end = time.monotonic() + 60
            while service.failure is None:
                assert time.monotonic() < end, "it goes on"
                agent.get([key(1)], [memoryview(bytearray(100))])
                time.sleep(0.05)
        assert isinstance(service.failure, StaleTerm) or isinstance(service.failure.__cause__, StaleTerm)
        assert "of term 1, an advisor of term 9 has taken over" in str(service.failure.__cause__ or service.failure)
        assert [volume.blocks for volume in agent.stat().volumes] == [0, 8]
    publisher.close()
