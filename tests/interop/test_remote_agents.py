"""Two agents in two processes: one pulls blocks from the other's volume and offers its own, whatever becomes of it."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest
from typer.testing import CliRunner

from event_plane import wire
from event_plane.connect import open_publisher, open_subscriber
from event_plane.schema import Namespace, producer_id
from event_plane.transport import Message
from storage_agent import loans, remote_volume
from storage_agent.agent import StorageAgent
from storage_agent.block_wire import header_from_wire, keys_to_wire
from storage_agent.client import AgentClient
from storage_agent.data_wire import BorrowReply, BorrowRequest, DoneReply, ReturnRequest
from storage_agent.descriptor import VolumeDescriptor
from storage_agent.endpoints import Endpoint
from storage_agent.errors import CommandRefused, CorruptBlock, VolumeError
from storage_agent.nixl_window import NixlWindow
from storage_agent.port import BlockKey, PutBlock, Result
from storage_agent.remote_volume import RemoteVolume
from storage_agent.service import AgentService
from storage_agent.shards import Axis, BlockLayout, Shard, ShardSpan
from storage_agent.volumes_command import app
from tests.nats_server import nats_server
from tests.ports import free_ports
from tests.stopping import stop

OWNER = Path(__file__).with_name("slab_owner.py")
NAMESPACE = Namespace(tenant="far", model="llama", block_tokens=16)
BLOCK_BYTES = 48 * 1024
CAPACITY = 32
PATIENCE_S = 100.0
LAYOUT = BlockLayout((Axis("layer", 3), Axis("head", 8), Axis("element", 1024)), 2, "head")


@pytest.fixture(autouse=True)
def over_tcp(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("UCX_TLS", "tcp")  # as between hosts


def key(number: int) -> BlockKey:
    return BlockKey(NAMESPACE.namespace_id, 0, number << 64 | 0x55)


def payload(number: int, size: int = BLOCK_BYTES) -> bytes:
    return number.to_bytes(8, "little") * (size // 8)


def block(number: int) -> PutBlock:
    span = ShardSpan(BLOCK_BYTES // 4, 0, 4)
    return PutBlock(key(number), NAMESPACE, memoryview(payload(number)), number, number, 16, span, LAYOUT)


def get(agent: StorageAgent, *numbers: int, wanted: Shard | None = None) -> tuple[list[Result], list[bytes]]:
    buffers = [bytearray(BLOCK_BYTES) for _ in numbers]
    outcomes = agent.get([key(n) for n in numbers], [memoryview(buffer) for buffer in buffers], wanted)
    return [outcome.result for outcome in outcomes], [bytes(buffer) for buffer in buffers]


@contextmanager
def owner(folder: Path, url: str) -> Iterator[subprocess.Popen[str]]:
    command = [sys.executable, str(OWNER), str(folder), str(CAPACITY), str(BLOCK_BYTES), url]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline().strip() == url
        try:
            yield process
        finally:
            process.kill()


class Pair:
    """An agent here with a slab `near`, and the volume `shared` of an agent in another process, which is waited for
    `timeout_s`."""

    def __init__(self, folder: Path, stack: ExitStack, timeout_s: float) -> None:
        self.folder = folder
        self.stack = stack
        self.url = f"tcp://127.0.0.1:{free_ports(1)[0]}"
        self.start_owner()
        plane = f"memory://{uuid.uuid4().hex}"
        self.subscriber = open_subscriber("agent", plane)
        self.publisher = open_publisher(plane, producer=producer_id("here"), epoch=1, flush_interval_s=60.0)
        self.agent = stack.enter_context(
            StorageAgent(
                "here",
                publisher=self.publisher,
                allowed_roots=[folder],
                endpoints={"peer": Endpoint(url=self.url)},
                mend_interval_s=3600.0,
            )
        )
        near = VolumeDescriptor(
            id="near", path=str(folder / "near.slab"), capacity_blocks=CAPACITY, block_bytes_max=BLOCK_BYTES
        )
        self.agent.register_volumes([near, self.remote(timeout_s)])

    def start_owner(self) -> None:
        self.owner = self.stack.enter_context(owner(self.folder, self.url))

    @staticmethod
    def remote(timeout_s: float) -> VolumeDescriptor:
        return VolumeDescriptor(
            id="shared",
            kind="remote",
            capacity_blocks=CAPACITY,
            block_bytes_max=BLOCK_BYTES,
            speed_rank=5,
            options={"endpoint": "peer", "timeout_s": timeout_s},
        )

    def told_of(self) -> set[str]:
        """Volumes that events of the agent here named."""
        self.agent.close()
        self.publisher.close()
        found: set[str] = set()
        while messages := self.subscriber.receive(64):
            for message in messages:
                if isinstance(message, Message):
                    batch = wire.decode(message.payload)
                    found |= {batch.locations[int(row["storage_location"])] for row in batch.records}
        return found


@pytest.fixture
def pair(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Pair]:
    with ExitStack() as stack:
        made = Pair(tmp_path, stack, getattr(request, "param", PATIENCE_S))
        yield made
        made.publisher.close()
        made.subscriber.close()


def test_blocks_go_to_another_agents_volume_and_come_back_whole_and_in_slices(pair: Pair) -> None:
    assert {o.result for o in pair.agent.put("shared", [block(n) for n in range(20)])} == {Result.STORED}
    results, found = get(pair.agent, *range(20), 99)
    assert results == [Result.HIT] * 20 + [Result.MISS]
    assert found[:20] == [payload(n) for n in range(20)]
    whole = b"".join(
        payload(3)[shard * 12288 + layer * 4096 :][:4096] for layer in range(3) for shard in range(4)
    )  # heads of one layer lie side by side in the whole block
    for workers in (1, 2, 8):
        size = BLOCK_BYTES // workers
        rows = [whole[layer * 16384 :][:16384] for layer in range(3)]
        for index in (0, workers - 1):
            wanted = b"".join(row[index * 16384 // workers :][: 16384 // workers] for row in rows)
            results, found = get(pair.agent, 3, wanted=Shard(index, workers))
            assert (results, found[0][:size]) == ([Result.HIT], wanted)
    stat = pair.agent.stat()
    assert [volume.descriptor.id for volume in stat.volumes] == ["near"], "the other is not ours"
    (view,) = stat.views
    assert (view.descriptor.id, view.blocks, view.mode, view.degraded) == ("shared", 20, "remote", "")
    assert pair.told_of() == set(), "its owner tells of it"


def test_the_destination_of_a_move_between_agents_pulls(pair: Pair) -> None:
    pair.agent.put("shared", [block(n) for n in range(4)])
    keys = [key(n) for n in range(4)]
    copied = pair.agent.copy("c1", keys, "shared", "near")
    assert {o.result for o in copied.outcomes} == {Result.COPIED}
    (header,) = [h for volume in pair.agent.volumes()[:1] for h in volume.live_headers() if h.key == key(2)]
    assert (header.span, header.layout, header.depth) == (ShardSpan(BLOCK_BYTES // 4, 0, 4), LAYOUT, 2)
    freed = pair.agent.delete("d1", "shared", keys)
    assert {o.result for o in freed.outcomes} == {Result.DELETED}
    assert get(pair.agent, *range(4)) == ([Result.HIT] * 4, [payload(n) for n in range(4)])
    back = pair.agent.move("m1", keys, "near", "shared", keep=False)
    assert {o.result for o in back.outcomes} == {Result.COPIED}
    assert get(pair.agent, *range(4)) == ([Result.HIT] * 4, [payload(n) for n in range(4)])
    assert pair.told_of() == {"near"}


@pytest.mark.parametrize("pair", [2.0], indirect=True)
def test_a_stopped_owner_fails_gets_by_our_deadline_and_others_are_served(
    pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(remote_volume, "ABSENT_S", 0.2)
    until_put(pair.agent, 1)
    pair.agent.put("near", [block(2)])
    stop(pair.owner.pid)
    results, found = get(pair.agent, 1, 2)
    assert results == [Result.FAILED, Result.HIT]
    assert found[1] == payload(2)
    (outcome,) = pair.agent.put("shared", [block(3)])
    assert outcome.result is Result.FAILED
    assert "did not answer" in outcome.reason
    assert "did not answer" in pair.agent.stat().views[0].degraded
    os.kill(pair.owner.pid, signal.SIGCONT)
    assert until_hit(pair.agent, 1) == payload(1)


def test_a_stopped_owner_keeps_neither_commands_nor_stats_waiting(
    pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    pair.agent.put("shared", [block(1)])
    pair.agent.put("near", [block(2)])
    monkeypatch.setattr(remote_volume, "STAT_S", PATIENCE_S)
    pair.agent.unregister_volume("shared")
    pair.agent.register_volume(pair.remote(timeout_s=600.0))
    volume = next(each for each in pair.agent.volumes() if isinstance(each, RemoteVolume))
    service = pair.stack.enter_context(AgentService(pair.agent, "tcp://127.0.0.1:*"))
    client = pair.stack.enter_context(AgentClient(service.command_url, 60.0))
    listed = CliRunner().invoke(app, ["ls", "--command-url", service.command_url]).stdout
    assert "serves, of another agent" in next(line for line in listed.splitlines() if "shared" in line)
    stop(pair.owner.pid)
    monkeypatch.setattr(volume._looking, "_timeout_s", 0.3)
    with ThreadPoolExecutor() as pool:
        waiting = pool.submit(get, pair.agent, 1)
        while not volume.is_asking:
            time.sleep(0.01)
        (view,) = client.stat().views
        assert "did not answer" in view.degraded
        assert [o.result for o in client.delete("d", "near", [key(2)]).outcomes] == [Result.DELETED]
        pair.agent.announce_snapshot()
        assert [outcome.result for outcome in pair.agent.put("near", [block(3)])] == [Result.STORED]
        assert not waiting.done()
        os.kill(pair.owner.pid, signal.SIGCONT)
        assert waiting.result()[0] == [Result.HIT]


def test_an_id_that_was_a_view_is_told_of_when_it_is_a_volume_of_ones_own(pair: Pair) -> None:
    pair.agent.unregister_volume("shared")
    own = VolumeDescriptor(
        id="shared", path=str(pair.folder / "own.slab"), capacity_blocks=4, block_bytes_max=BLOCK_BYTES
    )
    pair.agent.register_volume(own)
    pair.agent.put("shared", [block(1)])
    assert [volume.descriptor.id for volume in pair.agent.stat().volumes] == ["near", "shared"]
    assert pair.told_of() == {"shared"}


@pytest.mark.parametrize("pair", [2.0], indirect=True)
def test_a_killed_owner_fails_gets_and_is_found_again_when_it_is_back(
    pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(remote_volume, "ABSENT_S", 0.2)
    until_put(pair.agent, 1)
    until_hit(pair.agent, 1)
    pair.owner.kill()
    pair.owner.wait()
    assert get(pair.agent, 1)[0] == [Result.FAILED]
    pair.start_owner()
    assert until_hit(pair.agent, 1) == payload(1)
    until_put(pair.agent, 2)


def until_put(agent: StorageAgent, number: int) -> None:
    """An owner that serves may answer late on a busy machine, and have done what it was asked to."""
    end = time.monotonic() + PATIENCE_S
    while agent.put("shared", [block(number)])[0].result not in (Result.STORED, Result.PRESENT):
        assert time.monotonic() < end, "it is not put"
        time.sleep(0.1)


def until_hit(agent: StorageAgent, number: int) -> bytes:
    end = time.monotonic() + PATIENCE_S
    while True:
        results, found = get(agent, number)
        if results == [Result.HIT]:
            return found[0]
        assert time.monotonic() < end, "it never came back"
        time.sleep(0.1)


def test_a_remote_volume_that_cannot_be_says_why(tmp_path: Path) -> None:
    (port,) = free_ports(1)
    nobody = {"peer": Endpoint(url=f"tcp://127.0.0.1:{port}")}
    with StorageAgent("here", publisher=None, allowed_roots=[], endpoints=nobody) as agent:
        with pytest.raises(VolumeError, match=rf"'shared' cannot be used: agent at tcp://127.0.0.1:{port} did not ans"):
            agent.register_volume(Pair.remote(2.0))
        wrong = VolumeDescriptor(
            id="x", kind="remote", capacity_blocks=1, block_bytes_max=1, options={"endpoint": "other"}
        )
        with pytest.raises(VolumeError, match=r"endpoint 'other' is not in the agent's .*; use one of \['peer'\]"):
            agent.register_volume(wrong)
    with (
        StorageAgent("there", publisher=None, allowed_roots=[tmp_path]) as there,
        AgentService(there, f"tcp://127.0.0.1:{port}"),
        StorageAgent("here", publisher=None, allowed_roots=[], endpoints=nobody) as agent,
    ):
        with pytest.raises(VolumeError, match="has no volume 'shared'"):
            agent.register_volume(Pair.remote(PATIENCE_S))
        there.register_volume(
            VolumeDescriptor(id="shared", path=str(tmp_path / "s"), capacity_blocks=4, block_bytes_max=100)
        )
        with pytest.raises(VolumeError, match=f"block_bytes_max is {BLOCK_BYTES}, its owner takes 100; lower it"):
            agent.register_volume(Pair.remote(PATIENCE_S))


def test_commands_may_go_over_nats_while_the_bytes_are_pulled(tmp_path: Path) -> None:
    with nats_server(tmp_path / "nats") as server, ExitStack() as stack:
        url = server.url("kv.commands.there")
        there = stack.enter_context(StorageAgent("there", publisher=None, allowed_roots=[tmp_path]))
        there.register_volume(
            VolumeDescriptor(id="shared", path=str(tmp_path / "s"), capacity_blocks=8, block_bytes_max=BLOCK_BYTES)
        )
        stack.enter_context(AgentService(there, url))
        endpoints = {"peer": Endpoint(url=url)}
        here = stack.enter_context(StorageAgent("here", publisher=None, allowed_roots=[], endpoints=endpoints))
        here.register_volume(
            VolumeDescriptor(
                id="far",
                kind="remote",
                capacity_blocks=8,
                block_bytes_max=BLOCK_BYTES,
                options={"endpoint": "peer", "volume": "shared"},
            )
        )
        assert [outcome.result for outcome in here.put("far", [block(1), block(2)])] == [Result.STORED] * 2
        results, found = get(here, 1, 2, 3)
        assert results == [Result.HIT, Result.HIT, Result.MISS]
        assert found[:2] == [payload(1), payload(2)]


# Loans, with the lender in this process


@pytest.fixture
def lender(tmp_path: Path) -> Iterator[AgentClient]:
    with StorageAgent("lender", publisher=None, allowed_roots=[tmp_path]) as agent:
        agent.register_volume(
            VolumeDescriptor(
                id="shared", path=str(tmp_path / "s.slab"), capacity_blocks=CAPACITY, block_bytes_max=BLOCK_BYTES
            )
        )
        agent.put("shared", [block(n) for n in range(4)])
        with AgentService(agent, "tcp://127.0.0.1:*") as service, AgentClient(service.command_url) as client:
            yield client


def borrow(lender: AgentClient, *numbers: int) -> BorrowReply:
    return lender.ask(BorrowRequest("shared", keys_to_wire([key(n) for n in numbers]), None), BorrowReply)


def pull(reply: BorrowReply) -> bytes | CorruptBlock:
    """The first block of a loan."""
    place = reply.lent[0].place
    assert place is not None
    window = NixlWindow("late", 1 << 20)
    try:
        with window.exclusive() as memory:
            headers = [header_from_wire(place.header)]
            (found,) = loans.pulled_blocks(window, memory, reply.metadata, reply.mark, headers, [place.address])
            return found if isinstance(found, CorruptBlock) else bytes(found)
    finally:
        window.close()


def test_a_borrower_that_comes_late_never_takes_anothers_block_for_its_own(lender: AgentClient) -> None:
    first = borrow(lender, 1)
    assert pull(first) == payload(1)
    lender.ask(ReturnRequest(first.loan), DoneReply)
    second = borrow(lender, 2)
    place, again = first.lent[0].place, second.lent[0].place
    assert place is not None
    assert again is not None
    assert place.address == again.address, "the memory is used again"
    late = pull(first)
    assert isinstance(late, CorruptBlock)
    assert "another file" in str(late)
    third = borrow(lender, 1)
    lender.ask(ReturnRequest(second.loan), DoneReply)
    same_block = borrow(lender, 1)  # the same bytes at the old place, lent to another
    assert isinstance(pull(first), CorruptBlock)
    assert pull(same_block) == pull(third) == payload(1)


def test_loans_are_limited_and_a_returned_one_makes_room(lender: AgentClient, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loans, "WINDOW_WAIT_S", 0.0)
    lent = [borrow(lender, number) for number in range(loans.WINDOWS_MAX)]
    with pytest.raises(CommandRefused, match="all 2 windows are lent; ask again in a moment"):
        borrow(lender, 1)
    lender.ask(ReturnRequest(lent[0].loan), DoneReply)
    assert pull(borrow(lender, 3)) == payload(3)


def test_memory_of_borrowers_that_died_is_lent_again(lender: AgentClient, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loans, "LOAN_S", 0.1)
    for number in range(3 * loans.WINDOWS_MAX):
        assert borrow(lender, number % 4).loan


def test_what_is_not_there_is_not_lent_and_takes_no_memory(lender: AgentClient) -> None:
    for _ in range(2 * loans.WINDOWS_MAX):
        reply = borrow(lender, 8, 9)
        assert reply.loan == 0
        assert [each.outcome.result for each in reply.lent] == [Result.MISS, Result.MISS]
