"""The storage agent's port over real volumes: the same answers in process and over its command socket."""

from __future__ import annotations

import itertools
import threading
import uuid
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from event_plane import wire
from event_plane.connect import open_publisher, open_subscriber
from event_plane.errors import TransportError
from event_plane.schema import Batch, BatchKind, EventRecord, EventType, Namespace, RecordFlag, Tier, producer_id
from event_plane.transport import Message
from storage_agent.agent import StorageAgent
from storage_agent.block_header import PAGE_BYTES
from storage_agent.client import AgentClient
from storage_agent.descriptor import VolumeDescriptor
from storage_agent.errors import CommandRefused, VolumeError
from storage_agent.port import AgentPort, BlockKey, Outcome, PutBlock, Result
from storage_agent.service import AgentService
from storage_agent.slab_format import Superblock
from tests.contract.transports import wait_for

NAMESPACE = Namespace(tenant="acme", model="llama", block_tokens=16)
BLOCK_BYTES = 5000
CAPACITY = 64
SLABS = Superblock("any", CAPACITY, BLOCK_BYTES)


def key(number: int) -> BlockKey:
    return BlockKey(NAMESPACE.namespace_id, 0, (number << 100) | (1 << 63) | number)


def keys(*numbers: int) -> list[BlockKey]:
    return [key(number) for number in numbers]


def payload(number: int) -> bytes:
    return b"%04d" % number * (BLOCK_BYTES // 4)


def block(number: int) -> PutBlock:
    return PutBlock(key(number), NAMESPACE, memoryview(payload(number)), depth=number, block_tokens=16)


def results(outcomes: Sequence[Outcome]) -> list[Result]:
    return [outcome.result for outcome in outcomes]


def get(agent: StorageAgent, *numbers: int) -> tuple[list[Outcome], list[bytes]]:
    buffers = [bytearray(b"\xee" * BLOCK_BYTES) for _ in numbers]
    outcomes = agent.get(keys(*numbers), [memoryview(buffer) for buffer in buffers])
    return outcomes, [bytes(buffer) for buffer in buffers]


def flip(path: Path, slot: int, place: int = PAGE_BYTES + 77) -> None:
    with path.open("r+b") as file:
        file.seek(SLABS.slot_offset(slot) + place)
        (byte,) = file.read(1)
        file.seek(-1, 1)
        file.write(bytes([byte ^ 1]))


class Life:
    """One life of an agent with a fast and a slow volume, and a subscriber to its events."""

    def __init__(self, folder: Path, plane: str, epoch: int) -> None:
        self.folder = folder
        self.subscriber = open_subscriber("agent", plane)
        self.publisher = open_publisher(
            plane, producer=producer_id("agent-1"), epoch=epoch, flush_interval_s=60.0, heartbeat_s=0
        )
        self.agent = StorageAgent("agent-1", publisher=self.publisher, allowed_roots=[folder])
        self.batches: list[Batch] = []
        self.agent.register_volumes(
            [
                self.descriptor(name, speed_rank=rank, tier=int(tier))
                for name, rank, tier in (("fast", 0, Tier.G3), ("slow", 1, Tier.G4))
            ]
        )

    def descriptor(self, name: str, **fields: Any) -> VolumeDescriptor:
        return VolumeDescriptor(
            id=name,
            path=str(self.folder / f"{name}.slab"),
            capacity_blocks=CAPACITY,
            block_bytes_max=BLOCK_BYTES,
            **fields,
        )

    def events(self) -> list[tuple[EventType, str, int, int]]:
        """All so far, as (type, volume, depth, hits)."""
        self.publisher.flush()
        while messages := self.subscriber.receive(64):
            self.batches += [wire.decode(m.payload) for m in messages if isinstance(m, Message)]
        return [
            (
                EventType(int(row["event_type"])),
                batch.locations[int(row["storage_location"])],
                int(row["depth"]),
                int(row["hits"]),
            )
            for batch in self.batches
            for row in batch.records
        ]

    def close(self) -> None:
        self.agent.close()
        self.publisher.close()
        self.subscriber.close()


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Callable[[], Life]]:
    lives: list[Life] = []
    plane = f"memory://{uuid.uuid4().hex}"

    def begin() -> Life:
        if lives:
            lives[-1].close()
        lives.append(Life(tmp_path, plane, epoch=len(lives) + 1))
        return lives[-1]

    yield begin
    lives[-1].close()


@pytest.fixture
def life(start: Callable[[], Life]) -> Life:
    return start()


@pytest.fixture
def agent(life: Life) -> StorageAgent:
    return life.agent


@pytest.fixture(params=["in process", "over the socket"])
def port(request: pytest.FixtureRequest, agent: StorageAgent) -> Iterator[AgentPort]:
    if request.param == "in process":
        yield agent
        return
    with AgentService(agent, "tcp://127.0.0.1:*") as service, AgentClient(service.command_url, 20.0) as client:
        yield client


# Commands: the same in process and over the socket


def test_stat_tells_of_the_agent_and_its_volumes_fastest_first(port: AgentPort, agent: StorageAgent) -> None:
    agent.put("slow", [block(1), block(2)])
    stat = port.stat()
    assert (stat.agent, stat.producer, stat.epoch) == ("agent-1", producer_id("agent-1"), 1)
    figures = [(v.descriptor.id, v.blocks, v.slots_free, v.payload_bytes) for v in stat.volumes]
    assert figures == [("fast", 0, CAPACITY, 0), ("slow", 2, CAPACITY - 2, 2 * BLOCK_BYTES)]


def test_a_copy_is_served_from_the_faster_volume_and_stays_on_both(port: AgentPort, agent: StorageAgent) -> None:
    agent.put("slow", [block(1), block(2)])
    agent.put("fast", [block(2)])
    outcome = port.copy("c1", keys(1, 2, 3), "slow", "fast")
    assert results(outcome.outcomes) == [Result.COPIED, Result.PRESENT, Result.MISS]
    assert [o.key for o in outcome.outcomes] == keys(1, 2, 3)
    assert [o.volume for o in outcome.outcomes[:2]] == ["fast", "fast"]
    outcomes, bytes_read = get(agent, 1)
    assert (outcomes[0].volume, bytes_read) == ("fast", [payload(1)])
    assert [v.blocks for v in port.stat().volumes] == [2, 2]


def test_an_outcome_names_the_batch_that_holds_its_events(port: AgentPort, agent: StorageAgent, life: Life) -> None:
    agent.put("slow", [block(1)])
    outcome = port.copy("c1", keys(1), "slow", "fast")
    assert (outcome.producer, outcome.epoch) == (producer_id("agent-1"), 1)
    life.events()
    (held,) = [batch for batch in life.batches if batch.sequence == outcome.sequence]
    assert held.locations[int(held.records[-1]["storage_location"])] == "fast"
    assert int(held.records[-1]["event_type"]) == EventType.STORE
    later = port.delete("d1", "slow", keys(1))
    assert later.sequence > outcome.sequence
    life.events()
    assert life.batches[-1].sequence == later.sequence
    assert int(life.batches[-1].records[-1]["event_type"]) == EventType.REMOVE


def test_a_delete_frees_what_is_there_and_misses_the_rest(port: AgentPort, agent: StorageAgent) -> None:
    agent.put("fast", [block(1), block(2)])
    assert results(port.delete("d1", "fast", keys(1, 9)).outcomes) == [Result.DELETED, Result.MISS]
    assert results(get(agent, 1, 2)[0]) == [Result.MISS, Result.HIT]


def test_a_command_asked_again_answers_as_before_and_does_nothing(port: AgentPort, agent: StorageAgent) -> None:
    agent.put("slow", [block(1)])
    copied = port.copy("c1", keys(1), "slow", "fast")
    deleted = port.delete("d1", "fast", keys(1))
    agent.put("fast", [block(1)])
    assert port.copy("c1", keys(1), "slow", "fast") == copied
    assert port.delete("d1", "fast", keys(1)) == deleted
    assert agent.stat().volumes[0].blocks == 1


def test_a_volume_that_is_not_registered_fails_each_block_and_names_it(port: AgentPort) -> None:
    for outcome in (
        port.copy("c1", keys(1), "absent", "fast"),
        port.copy("c2", keys(1), "fast", "absent"),
        port.delete("d1", "absent", keys(1)),
    ):
        assert results(outcome.outcomes) == [Result.FAILED]
        assert "'absent' is not registered with agent 'agent-1'" in outcome.outcomes[0].reason
    same = port.copy("c3", keys(1), "fast", "fast")
    assert results(same.outcomes) == [Result.FAILED]


def test_a_full_target_takes_what_it_can(port: AgentPort, agent: StorageAgent) -> None:
    agent.put("fast", [block(n) for n in range(CAPACITY - 1)])
    agent.put("slow", [block(n) for n in range(100, 103)])
    outcome = port.copy("c1", keys(100, 101, 102), "slow", "fast")
    assert results(outcome.outcomes) == [Result.COPIED, Result.FULL, Result.FULL]


def test_a_corrupt_source_is_not_copied_and_is_taken_out_of_service(
    port: AgentPort, agent: StorageAgent, life: Life
) -> None:
    agent.put("slow", [block(1), block(2)])
    flip(life.folder / "slow.slab", slot=0)
    outcome = port.copy("c1", keys(1, 2), "slow", "fast")
    assert results(outcome.outcomes) == [Result.CORRUPT, Result.COPIED]
    assert [v.blocks for v in agent.stat().volumes] == [1, 1]
    assert (EventType.REMOVE, "slow", 1, 0) in life.events()


def test_a_bad_copy_on_the_target_is_replaced_not_trusted(port: AgentPort, agent: StorageAgent, life: Life) -> None:
    agent.put("fast", [block(1)])
    agent.put("slow", [block(1)])
    flip(life.folder / "slow.slab", slot=0)
    assert results(port.copy("c1", keys(1), "fast", "slow").outcomes) == [Result.COPIED]
    port.delete("d1", "fast", keys(1))
    outcomes, bytes_read = get(agent, 1)
    assert (outcomes[0].volume, bytes_read) == ("slow", [payload(1)])
    assert agent.stat().volumes[1].corrupt_total == 1


# Gets


def test_a_get_falls_back_to_the_next_slower_copy(agent: StorageAgent, life: Life) -> None:
    agent.put("fast", [block(1)])
    agent.put("slow", [block(1)])
    flip(life.folder / "fast.slab", slot=0)
    outcomes, bytes_read = get(agent, 1)
    assert (results(outcomes), outcomes[0].volume, bytes_read) == ([Result.HIT], "slow", [payload(1)])
    stats = {v.descriptor.id: v for v in agent.stat().volumes}
    assert (stats["fast"].blocks, stats["fast"].corrupt_total) == (0, 1)


def test_a_block_without_a_good_copy_is_corrupt_then_a_miss_and_its_buffer_untouched(
    agent: StorageAgent, life: Life
) -> None:
    agent.put("fast", [block(1)])
    agent.put("slow", [block(1)])
    for name in ("fast", "slow"):
        flip(life.folder / f"{name}.slab", slot=0)
    outcomes, bytes_read = get(agent, 1)
    assert (results(outcomes), bytes_read) == ([Result.CORRUPT], [b"\xee" * BLOCK_BYTES])
    outcomes, bytes_read = get(agent, 1)
    assert (results(outcomes), bytes_read) == ([Result.MISS], [b"\xee" * BLOCK_BYTES])


def test_arrays_serve_as_payloads_and_buffers(agent: StorageAgent) -> None:
    array = np.arange(600, dtype=np.float32).reshape(20, 30)
    agent.put("fast", [PutBlock(key(1), NAMESPACE, memoryview(array))])
    back = np.zeros((20, 31), dtype=np.float32)
    (outcome,) = agent.get([key(1)], [memoryview(back)])
    assert (outcome.result, outcome.payload_bytes) == (Result.HIT, 2400)
    assert np.array_equal(back.ravel()[:600], array.ravel())
    assert not back.ravel()[600:].any()


def test_a_buffer_that_cannot_take_the_block_fails_it_alone(agent: StorageAgent) -> None:
    agent.put("fast", [block(1), block(2)])
    good = bytearray(BLOCK_BYTES)
    small = memoryview(bytearray(BLOCK_BYTES - 1))
    outcomes = agent.get(keys(1, 1, 2), [small, memoryview(bytes(BLOCK_BYTES)), memoryview(good)])
    assert results(outcomes) == [Result.FAILED, Result.FAILED, Result.HIT]
    assert "4999 bytes, the block 5000" in outcomes[0].reason
    assert bytes(good) == payload(2)
    with pytest.raises(ValueError, match="one buffer a key"):
        agent.get(keys(1), [])


# Moves


def test_a_move_keeps_or_frees_its_source(agent: StorageAgent, life: Life) -> None:
    agent.put("slow", [block(1), block(2)])
    assert results(agent.move("", keys(1), "slow", "fast", keep=True).outcomes) == [Result.COPIED]
    assert results(agent.move("", keys(2, 3), "slow", "fast", keep=False).outcomes) == [Result.COPIED, Result.MISS]
    assert [v.blocks for v in agent.stat().volumes] == [2, 1]
    # A demotion whose slower copy is there already only frees the fast one.
    assert results(agent.move("", keys(1), "fast", "slow", keep=False).outcomes) == [Result.PRESENT]
    assert [v.blocks for v in agent.stat().volumes] == [1, 1]
    assert get(agent, 1, 2)[1] == [payload(1), payload(2)]


def test_gets_succeed_at_every_moment_of_moves_back_and_forth(agent: StorageAgent) -> None:
    numbers = list(range(24))
    agent.put("slow", [block(n) for n in numbers])
    done = threading.Event()
    faults: list[object] = []
    served: set[str] = set()

    def watch() -> None:
        while not done.is_set():
            outcomes, bytes_read = get(agent, *numbers)
            for number, outcome, found in zip(numbers, outcomes, bytes_read, strict=True):
                served.add(outcome.volume)
                if outcome.result is not Result.HIT or found != payload(number):
                    faults.append(outcome)

    watcher = threading.Thread(target=watch)
    watcher.start()
    for _ in range(3):
        for source, target in (("slow", "fast"), ("fast", "slow")):
            for number in numbers:
                assert agent.move("", keys(number), source, target, keep=False).outcomes[0].result is Result.COPIED
    done.set()
    watcher.join()
    assert faults == []
    assert "slow" in served
    assert [v.blocks for v in agent.stat().volumes] == [0, len(numbers)]


def test_threads_that_put_and_delete_the_same_blocks_leave_events_in_true_order(
    agent: StorageAgent, life: Life
) -> None:
    def work(seed: int) -> None:
        for step in range(30):
            number = (seed * 7 + step) % 5
            agent.put("fast", [block(number)])
            agent.delete(f"{seed}-{step}", "fast", keys((seed + step) % 5))

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    placed: set[int] = set()
    for kind, volume, depth, _ in life.events():
        assert volume == "fast"
        assert (depth in placed) == (kind is EventType.REMOVE), "a block is stored when absent, removed when there"
        placed ^= {depth}
    assert placed == {n for n in range(5) if get(agent, n)[0][0].result is Result.HIT}


# Events


def test_a_put_is_announced_as_a_copy_with_all_its_facts(agent: StorageAgent, life: Life) -> None:
    parent = key(6).sequence_hash
    agent.put("slow", [PutBlock(key(7), NAMESPACE, memoryview(payload(7)), parent, depth=7, block_tokens=16)])
    assert life.events() == [(EventType.STORE, "slow", 7, 0)]
    batch = life.batches[-1]
    (row,) = batch.records
    assert int(row["sequence_hash_hi"]) << 64 | int(row["sequence_hash_lo"]) == key(7).sequence_hash
    assert int(row["parent_hash_hi"]) << 64 | int(row["parent_hash_lo"]) == parent
    assert (int(row["flags"]), int(row["tier"]), int(row["group"])) == (RecordFlag.COPY, Tier.G4, 0)
    assert (int(row["block_size"]), int(row["block_tokens"])) == (BLOCK_BYTES, 16)
    assert batch.namespaces[int(row["namespace"])] == NAMESPACE


def test_stores_go_up_and_removes_go_down(agent: StorageAgent, life: Life) -> None:
    agent.put("fast", [block(n) for n in (3, 1, 2)])
    agent.delete("d1", "fast", keys(2, 3, 1))
    assert [(kind, depth) for kind, _, depth, _ in life.events()] == [
        *((EventType.STORE, depth) for depth in (1, 2, 3)),
        *((EventType.REMOVE, depth) for depth in (3, 2, 1)),
    ]


def test_gets_are_folded_into_one_access_a_block_naming_the_volume_that_served_it(
    agent: StorageAgent, life: Life
) -> None:
    agent.put("fast", [block(1)])
    agent.put("slow", [block(1), block(2)])
    for _ in range(3):
        get(agent, 1, 2, 5)
    agent.copy("c1", keys(2), "slow", "fast")  # not a use
    agent.close()
    accesses = [event for event in life.events() if event[0] is EventType.ACCESS]
    assert sorted(accesses) == [(EventType.ACCESS, "fast", 1, 3), (EventType.ACCESS, "slow", 2, 3)]


def test_an_access_comes_before_the_remove_of_its_block(agent: StorageAgent, life: Life) -> None:
    agent.put("fast", [block(1)])
    get(agent, 1)
    agent.delete("d1", "fast", keys(1))
    assert [kind for kind, *_ in life.events()] == [EventType.STORE, EventType.ACCESS, EventType.REMOVE]


def test_accesses_go_out_by_themselves(agent: StorageAgent, life: Life) -> None:
    agent.put("fast", [block(1)])
    get(agent, 1)
    waiting = threading.Event()
    for _ in range(1_200):  # half a second is enough; sixty are allowed
        if life.events()[-1][0] is EventType.ACCESS:
            return
        waiting.wait(0.05)
    pytest.fail("no access was published")


def test_a_restart_announces_what_it_found_parents_first(start: Callable[[], Life]) -> None:
    first = start()
    first.agent.put("fast", [block(n) for n in (5, 2, 9)])
    first.agent.put("slow", [block(4)])
    first.agent.delete("d1", "fast", keys(9))
    second = start()
    assert second.events() == [
        (EventType.STORE, "fast", 2, 0),
        (EventType.STORE, "slow", 4, 0),
        (EventType.STORE, "fast", 5, 0),
    ]
    assert {int(row["flags"]) for batch in second.batches for row in batch.records} == {RecordFlag.COPY}
    assert get(second.agent, 2, 5, 4)[1] == [payload(2), payload(5), payload(4)]


def test_the_first_message_of_a_life_is_a_snapshot_of_every_volume(start: Callable[[], Life]) -> None:
    first = start()
    first.agent.put("fast", [block(1)])
    first.agent.put("slow", [block(2)])
    second = start()
    second.agent.put("fast", [block(3)])
    second.events()
    events, begin, chunk, end = (
        BatchKind.EVENTS, BatchKind.SNAPSHOT_BEGIN, BatchKind.SNAPSHOT_CHUNK, BatchKind.SNAPSHOT_END,
    )  # fmt: skip
    assert [(batch.sequence, batch.kind) for batch in second.batches] == [(0, begin), (1, chunk), (2, end), (3, events)]
    assert sorted(second.batches[1].locations) == ["fast", "slow"]


def test_a_volume_registered_later_is_told_of_without_a_snapshot(start: Callable[[], Life], tmp_path: Path) -> None:
    life = start()
    life.agent.put("slow", [block(1)])
    life.agent.unregister_volume("slow")
    life.agent.register_volume(life.descriptor("slow", speed_rank=1, tier=4))
    assert [kind for kind, *_ in life.events()] == [EventType.STORE, EventType.CLEAR, EventType.STORE]
    assert [batch.kind for batch in life.batches].count(BatchKind.SNAPSHOT_BEGIN) == 1


def test_volumes_are_registered_all_or_none(agent: StorageAgent, life: Life) -> None:
    good, twice = life.descriptor("third"), life.descriptor("fast")
    with pytest.raises(VolumeError, match="'fast' is registered already"):
        agent.register_volumes([good, twice])
    assert [volume.descriptor.id for volume in agent.stat().volumes] == ["fast", "slow"]
    agent.register_volumes([good])


def placed(batches: Sequence[Batch]) -> set[tuple[str, int]]:
    """(volume, hash) of what a reader of the stream believes, snapshots taking the place of what was before."""
    there: set[tuple[str, int]] = set()
    listed: set[tuple[str, int]] = set()
    for batch in batches:
        rows = {
            (batch.locations[int(row["storage_location"])], int(row["sequence_hash_lo"])): EventType(row["event_type"])
            for row in batch.records
        }
        match batch.kind:
            case BatchKind.SNAPSHOT_BEGIN:
                listed = set()
            case BatchKind.SNAPSHOT_CHUNK:
                listed |= set(rows)
            case BatchKind.SNAPSHOT_END:
                there = listed
            case BatchKind.EVENTS:
                for place, kind in rows.items():
                    if kind is EventType.STORE:
                        there.add(place)
                    elif kind is EventType.REMOVE:
                        there.discard(place)
    return there


def test_snapshots_asked_for_while_blocks_come_and_go_never_contradict_the_volumes(start: Callable[[], Life]) -> None:
    life = start()
    stop = threading.Event()

    def come_and_go(volume: str, first: int) -> None:
        for turn in itertools.count():
            if stop.is_set():
                return
            numbers = range(first + turn % 3, first + 9)
            life.agent.put(volume, [block(number) for number in numbers])
            life.agent.delete(f"{volume}-{first}-{turn}", volume, keys(*numbers[: 1 + turn % 5]))

    threads = [
        threading.Thread(target=come_and_go, args=place)
        for place in (("fast", 0), ("fast", 20), ("slow", 0), ("slow", 20))
    ]
    for thread in threads:
        thread.start()
    for _ in range(30):
        life.agent.announce_snapshot()
        life.events()
    stop.set()
    for thread in threads:
        thread.join()
    life.events()
    there = {
        (volume.descriptor.id, header.key.sequence_hash & (2**64 - 1))
        for volume in life.agent._shelf.volumes()
        for header in volume.live_headers()
    }
    assert placed(life.batches) == there
    assert [batch.sequence for batch in life.batches] == list(range(len(life.batches)))


def test_a_snapshot_between_a_store_and_its_block_going_live_waits_for_the_block(
    agent: StorageAgent, life: Life, monkeypatch: pytest.MonkeyPatch
) -> None:
    publish = life.publisher.publish
    snapshots: list[threading.Thread] = []

    def publish_and_ask(events: Sequence[EventRecord], flush: bool = False) -> None:
        publish(events, flush)
        snapshots.append(threading.Thread(target=agent.announce_snapshot))
        snapshots[-1].start()
        snapshots[-1].join(0.2)  # time enough to do it wrong

    monkeypatch.setattr(life.publisher, "publish", publish_and_ask)
    agent.put("fast", [block(1)])
    snapshots[0].join()
    life.events()
    assert [batch.kind for batch in life.batches].count(BatchKind.SNAPSHOT_BEGIN) == 2
    assert placed(life.batches) == {("fast", key(1).sequence_hash & (2**64 - 1))}


def test_a_closed_agent_publishes_no_snapshot(agent: StorageAgent, life: Life) -> None:
    agent.put("fast", [block(1)])
    agent.close()
    life.events()
    before = len(life.batches)
    agent.announce_snapshot()
    life.events()
    assert len(life.batches) == before


def test_a_closed_publisher_is_said_and_the_block_is_there(agent: StorageAgent, life: Life) -> None:
    life.publisher.close()
    with pytest.raises(TransportError):
        agent.put("fast", [block(1)])
    assert results(get(agent, 1)[0]) == [Result.HIT]
    with (
        AgentService(agent, "tcp://127.0.0.1:*") as service,
        AgentClient(service.command_url, 20.0) as client,
        pytest.raises(CommandRefused, match="cannot publish what it did"),
    ):
        client.delete("d1", "fast", keys(1))


# Volumes


def test_a_volume_comes_and_goes(agent: StorageAgent, life: Life) -> None:
    agent.put("slow", [block(1)])
    agent.unregister_volume("slow")
    assert results(get(agent, 1)[0]) == [Result.MISS]
    assert results(agent.put("slow", [block(2)])) == [Result.FAILED]
    assert life.events()[-1][:2] == (EventType.CLEAR, "slow")
    stat = agent.register_volume(life.descriptor("slow", speed_rank=1, tier=4))
    assert stat.blocks == 1
    assert life.events()[-1] == (EventType.STORE, "slow", 1, 0)
    assert get(agent, 1)[1] == [payload(1)]


class HeldPublisher:
    """A publisher whose subscribers are behind: it takes events when told that they caught up."""

    producer = 1
    epoch = 1

    def __init__(self) -> None:
        self.asked = threading.Event()
        self.caught_up = threading.Event()

    def publish(self, events: Sequence[EventRecord], flush: bool = False) -> None:
        self.asked.set()
        self.caught_up.wait()

    def publish_snapshot(self, events: Sequence[EventRecord]) -> None:
        pass

    def serve_snapshots(self, announce: Callable[[], None]) -> None:
        pass

    def flush(self) -> int:
        return 0

    def close(self) -> None:
        pass


def test_a_volume_in_use_is_not_unregistered(tmp_path: Path) -> None:
    publisher = HeldPublisher()
    with StorageAgent("busy", publisher=publisher, allowed_roots=[tmp_path]) as agent:
        agent.register_volume(
            VolumeDescriptor(id="v", path=str(tmp_path / "v"), capacity_blocks=2, block_bytes_max=BLOCK_BYTES)
        )
        putting = threading.Thread(target=agent.put, args=("v", [block(1)]))
        putting.start()
        publisher.asked.wait()
        with pytest.raises(VolumeError, match="'v' is in use"):
            agent.unregister_volume("v")
        assert results(get(agent, 1)[0]) == [Result.MISS], "it is served once it is announced, and gets do not wait"
        publisher.caught_up.set()
        putting.join()
        assert get(agent, 1)[1] == [payload(1)]
        agent.unregister_volume("v")
        with pytest.raises(VolumeError, match=r"'v' is not registered; this agent has \[\]"):
            agent.unregister_volume("v")


def test_unregistering_waits_for_those_who_use_the_volume_and_lets_nobody_else_in(tmp_path: Path) -> None:
    publisher = HeldPublisher()
    descriptor = VolumeDescriptor(id="v", path=str(tmp_path / "v"), capacity_blocks=2, block_bytes_max=BLOCK_BYTES)
    with StorageAgent("busy", publisher=publisher, allowed_roots=[tmp_path]) as agent:
        agent.register_volume(descriptor)
        with ThreadPoolExecutor(2) as pool:
            putting = pool.submit(agent.put, "v", [block(1)])
            publisher.asked.wait()
            with pytest.raises(VolumeError, match="'v' is in use"):
                agent.unregister_volume("v", drain_s=0.05)
            leaving = pool.submit(agent.unregister_volume, "v", drain_s=20.0)
            wait_for(lambda: agent.stat().volumes == [])
            assert results(agent.put("v", [block(2)])) == [Result.FAILED]
            publisher.caught_up.set()
            leaving.result(60.0)
            assert results(putting.result(60.0)) == [Result.STORED]
        assert agent.register_volume(descriptor).blocks == 1, "found again under the same id"
        assert get(agent, 1)[1] == [payload(1)]


def test_a_volume_that_cannot_be_is_refused_and_the_others_go_on(
    agent: StorageAgent, life: Life, tmp_path_factory: pytest.TempPathFactory
) -> None:
    outside = tmp_path_factory.mktemp("outside") / "x.slab"
    for descriptor, said in (
        (life.descriptor("fast"), "registered already"),
        (life.descriptor("other", kind="tape"), "kind 'tape' is not known"),
        (VolumeDescriptor(id="x", path=str(outside), capacity_blocks=1, block_bytes_max=1), "outside the allowed"),
    ):
        with pytest.raises(VolumeError, match=said):
            agent.register_volume(descriptor)
    assert not outside.exists()
    assert results(agent.put("fast", [block(1)])) == [Result.STORED]


def test_a_closed_agent_has_no_volumes(agent: StorageAgent, life: Life) -> None:
    agent.close()
    assert agent.stat().volumes == []
    with pytest.raises(VolumeError, match="is closed"):
        agent.register_volume(life.descriptor("fast"))


def test_an_agent_without_a_publisher_works(tmp_path: Path) -> None:
    with StorageAgent("quiet", publisher=None, allowed_roots=[tmp_path]) as agent:
        agent.register_volume(
            VolumeDescriptor(id="v", path=str(tmp_path / "v"), capacity_blocks=2, block_bytes_max=BLOCK_BYTES)
        )
        agent.put("v", [block(1)])
        assert get(agent, 1)[1] == [payload(1)]
        assert agent.delete("d", "v", keys(1)).sequence == -1
