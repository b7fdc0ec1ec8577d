"""Blocks of a slab straight from and into memory of callers': whole, checked where they lie, or by the host.

Memory of the host and NIXL's POSIX backend stand in for a GPU's memory and GDS, by the same code.
"""

from __future__ import annotations

import gc
import os
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
import torch

from event_plane.schema import Namespace
from storage_agent import gpu_direct, slab_direct
from storage_agent.agent import StorageAgent
from storage_agent.block_header import PAGE_BYTES, ChecksumName, PartChecksums, unpack_header
from storage_agent.descriptor import VolumeDescriptor
from storage_agent.direct_memory import DirectMemory, DirectSpan
from storage_agent.endpoints import Endpoint
from storage_agent.errors import TransferError, VolumeError
from storage_agent.gpu_direct import GpuDirect
from storage_agent.kinds import inspect_volume
from storage_agent.nh64_sums import nh64_of_tensors
from storage_agent.nixl_spans import NixlSpans
from storage_agent.port import BlockKey, Outcome, PutBlock, Result, ScrubReport
from storage_agent.service import AgentService
from storage_agent.shards import Axis, BlockLayout, Shard, ShardSpan
from storage_agent.slab_client import SlabClient
from storage_agent.slab_volume import SlabStore
from storage_agent.slot_volume import SlotVolume
from tests.disks import loop_device

NAMESPACE = Namespace(tenant="direct")
BLOCK_BYTES = 3 * PAGE_BYTES
CAPACITY = 8
NH64, XXH3 = ChecksumName.NH64, ChecksumName.XXH3


class Pool:
    """Pages of host memory at a page boundary, each with bytes of its own."""

    def __init__(self, pages: int = 64) -> None:
        tensor = torch.randint(0, 256, ((pages + 1) * PAGE_BYTES,), dtype=torch.uint8)
        start = -tensor.data_ptr() % PAGE_BYTES
        self.memory = DirectMemory(tensor[start : start + pages * PAGE_BYTES])

    def span(self, page: int, size_bytes: int = BLOCK_BYTES, *, shift_bytes: int = 0) -> DirectSpan:
        return self.memory.span(page * PAGE_BYTES + shift_bytes, size_bytes)


@pytest.fixture
def pool() -> Pool:
    return Pool()


def descriptor(folder: Path, name: str = "fast", **fields: Any) -> VolumeDescriptor:
    return VolumeDescriptor(
        **{
            "id": name, "path": str(folder / f"{name}.slab"), "capacity_blocks": CAPACITY,
            "block_bytes_max": BLOCK_BYTES, **fields,
        }
    )  # fmt: skip


def agent_of(folder: Path, *descriptors: VolumeDescriptor, **settings: Any) -> StorageAgent:
    agent = StorageAgent("a", publisher=None, allowed_roots=[folder], mend_interval_s=3600.0, **settings)
    agent.register_volumes(descriptors or [descriptor(folder)])
    return agent


@pytest.fixture
def agent(tmp_path: Path) -> Iterator[StorageAgent]:
    with agent_of(tmp_path) as made:
        yield made


def key(number: int) -> BlockKey:
    return BlockKey(NAMESPACE.namespace_id, 0, number)


def block(number: int, payload: memoryview | DirectSpan, **facts: Any) -> PutBlock:
    return PutBlock(key(number), NAMESPACE, payload, **facts)


def bytes_of(span: DirectSpan) -> bytes:
    return bytes(span.in_host_memory())


def put(agent: StorageAgent, number: int, payload: memoryview | DirectSpan, volume: str = "fast", **facts: Any) -> None:
    (outcome,) = agent.put(volume, [block(number, payload, **facts)])
    assert outcome == Outcome(key(number), Result.STORED, volume, payload.nbytes)


def get(agent: StorageAgent | SlabClient, number: int, size_bytes: int = BLOCK_BYTES) -> tuple[Outcome, bytes]:
    buffer = bytearray(size_bytes)
    (outcome,) = agent.get([key(number)], [memoryview(buffer)])
    return outcome, bytes(buffer)


def store_of(agent: StorageAgent, place: int = 0) -> SlabStore:
    volume = agent.volumes()[place]
    assert isinstance(volume, SlotVolume)
    assert isinstance(volume._store, SlabStore)
    return volume._store


def place_of(agent: StorageAgent, number: int) -> tuple[Path, int]:
    """The file and where in it the block's header begins."""
    for volume in agent.volumes():
        header = volume.live_header(key(number))
        if header is not None:
            return Path(volume.descriptor.path), store_of(agent)._slab.superblock.slot_offset(header.slot)
    raise AssertionError(f"block {number} is nowhere")


def checksums_of(agent: StorageAgent, number: int, place: int = 0) -> PartChecksums:
    """As the page of the block's slot says them."""
    header = agent.volumes()[place].live_header(key(number))
    assert header is not None
    slab = store_of(agent, place)._slab
    with slab.path.open("rb") as file:
        file.seek(slab.superblock.slot_offset(header.slot))
        page = file.read(PAGE_BYTES)
    found, checksums = unpack_header(page, header.slot, place=header.slot, mark=slab.superblock.mark)
    assert found == header
    return checksums


def flip(agent: StorageAgent, number: int, at: int) -> None:
    """One bit of the block's slot, `at` bytes from its header on."""
    path, offset = place_of(agent, number)
    with path.open("r+b") as file:
        file.seek(offset + at)
        (byte,) = file.read(1)
        file.seek(-1, 1)
        file.write(bytes([byte ^ 0x10]))
        file.flush()
        os.fsync(file.fileno())


# There and back


def test_what_is_put_from_a_span_is_summed_there_and_read_by_every_reader(agent: StorageAgent, pool: Pool) -> None:
    source, target = pool.span(0), pool.span(8)
    put(agent, 1, source)
    assert checksums_of(agent, 1).name is NH64
    assert get(agent, 1) == (Outcome(key(1), Result.HIT, "fast", BLOCK_BYTES), bytes_of(source))
    assert agent.get([key(1)], [target]) == [Outcome(key(1), Result.HIT, "fast", BLOCK_BYTES)]
    assert bytes_of(target) == bytes_of(source)
    stat = agent.stat().volumes[0]
    assert (stat.blocks, stat.payload_bytes, stat.degraded) == (1, BLOCK_BYTES, "")
    assert (stat.write_bytes_total, stat.read_bytes_total) == (BLOCK_BYTES, 2 * BLOCK_BYTES)
    assert agent.put("fast", [block(1, source)])[0].result is Result.PRESENT


def test_what_the_host_put_comes_into_a_span_checked_by_the_host(agent: StorageAgent, pool: Pool) -> None:
    put(agent, 1, memoryview(b"host" * (BLOCK_BYTES // 4)))
    assert checksums_of(agent, 1).name is XXH3
    span = pool.span(1)
    assert agent.get([key(1)], [span])[0].result is Result.HIT
    assert bytes_of(span) == b"host" * (BLOCK_BYTES // 4)


def test_a_batch_of_both_and_more_than_a_batch_keeps_its_order(tmp_path: Path) -> None:
    pool = Pool(330)
    with agent_of(tmp_path, descriptor(tmp_path, capacity_blocks=400, block_bytes_max=PAGE_BYTES)) as agent:
        blocks = [
            block(n, pool.span(n, PAGE_BYTES) if n % 3 else memoryview(bytes_of(pool.span(n, PAGE_BYTES))))
            for n in range(320)
        ]
        blocks[7] = block(7, pool.span(0, 2 * PAGE_BYTES))
        stored = agent.put("fast", blocks)
        assert [outcome.key for outcome in stored] == [key(n) for n in range(320)]
        assert {n for n, outcome in enumerate(stored) if outcome.result is not Result.STORED} == {7}
        assert stored[7].reason == "the block has 8192 bytes, 'fast' takes 4096"
        kept = pool.memory.bytes.clone()
        pool.memory.bytes.zero_()
        hosts = {n: bytearray(PAGE_BYTES) for n in range(0, 320, 5)}
        outcomes = agent.get(
            [key(n) for n in range(320)],
            [memoryview(hosts[n]) if n in hosts else pool.span(n, PAGE_BYTES) for n in range(320)],
        )
        assert {n for n, outcome in enumerate(outcomes) if outcome.result is not Result.HIT} == {7}
        wanted = kept.view(-1, PAGE_BYTES)
        for n in set(range(320)) - {7}:
            found = bytes(hosts[n]) if n in hosts else bytes_of(pool.span(n, PAGE_BYTES))
            assert found == bytes(wanted[n].numpy()), n


@pytest.mark.parametrize(
    ("pages", "size_bytes", "shift_bytes", "said"),
    [
        (2, BLOCK_BYTES, 512, "its address, "),
        (2, PAGE_BYTES + 512, 0, "its length, 4608, is not a multiple of 4096"),
    ],
    ids=["address", "length"],
)
def test_what_is_no_whole_pages_goes_by_the_host(
    agent: StorageAgent, pool: Pool, pages: int, size_bytes: int, shift_bytes: int, said: str
) -> None:
    span = pool.span(pages, size_bytes, shift_bytes=shift_bytes)
    assert store_of(agent).span_fault(span, span.nbytes).startswith(said)
    put(agent, 1, span)
    assert checksums_of(agent, 1).name is XXH3
    kept = bytes_of(span)
    span.bytes.zero_()
    assert agent.get([key(1)], [span])[0].result is Result.HIT
    assert bytes_of(span) == kept


def test_a_span_too_short_for_the_block_is_not_written(agent: StorageAgent, pool: Pool) -> None:
    put(agent, 1, pool.span(0))
    short = pool.span(9, PAGE_BYTES)
    before = bytes_of(pool.span(9))
    assert agent.get([key(1)], [short])[0] == Outcome(
        key(1), Result.FAILED, "fast", BLOCK_BYTES, "the buffer has 4096 bytes, the block 12288"
    )
    assert bytes_of(pool.span(9)) == before


@pytest.mark.parametrize("kind", ["memory", "directory", "faulty"])
def test_kinds_that_reach_no_memory_of_callers_take_spans_by_the_host(tmp_path: Path, pool: Pool, kind: str) -> None:
    fields: dict[str, Any] = {"kind": kind, "path": str(tmp_path / "folder")}
    if kind == "memory":
        fields["path"] = ""
    if kind == "faulty":
        fields["options"] = {"inner": "slab"}
    with agent_of(tmp_path, descriptor(tmp_path, **fields)) as agent:
        put(agent, 1, pool.span(0))
        assert agent.get([key(1)], [pool.span(8)])[0].result is Result.HIT
        assert bytes_of(pool.span(8)) == bytes_of(pool.span(0))


def test_a_volume_asked_without_an_agent_takes_spans_by_the_host(agent: StorageAgent, pool: Pool) -> None:
    (volume,) = agent.volumes()
    assert volume.put([block(1, pool.span(0))])[0].result is Result.STORED
    assert get(agent, 1)[1] == bytes_of(pool.span(0))


def test_shards_are_summed_each_and_read_alone_directly_or_cut_by_the_host(tmp_path: Path, pool: Pool) -> None:
    layout = BlockLayout((Axis("heads", 4), Axis("rest", PAGE_BYTES)), 1, "heads")
    with agent_of(tmp_path, descriptor(tmp_path, block_bytes_max=4 * PAGE_BYTES)) as agent:
        source = pool.span(0, 4 * PAGE_BYTES)
        put(agent, 1, source, span=ShardSpan(2 * PAGE_BYTES, 0, 2), layout=layout)
        assert checksums_of(agent, 1).name is NH64
        assert len(checksums_of(agent, 1).each) == 2
        for workers, pages in ((2, 2), (4, 1), (1, 4)):
            for index in range(workers):
                span = pool.span(16, pages * PAGE_BYTES)
                span.bytes.zero_()
                (outcome,) = agent.get([key(1)], [span], wanted=Shard(index, workers))
                assert (outcome.result, outcome.payload_bytes) == (Result.HIT, pages * PAGE_BYTES)
                start = index * pages * PAGE_BYTES
                assert bytes_of(span) == bytes_of(source)[start : start + pages * PAGE_BYTES]
        flip(agent, 1, PAGE_BYTES + 3 * PAGE_BYTES)
        span = pool.span(16, 2 * PAGE_BYTES)
        assert agent.get([key(1)], [span], wanted=Shard(0, 2))[0].result is Result.HIT, "the other shard is whole"
        assert agent.get([key(1)], [span], wanted=Shard(1, 2))[0].result is Result.CORRUPT


def test_what_cannot_be_put_is_refused_as_bytes_would_be(agent: StorageAgent, pool: Pool) -> None:
    stranger = PutBlock(BlockKey(7, 0, 1), NAMESPACE, pool.span(0))
    torn = block(2, pool.span(0), span=ShardSpan(5000, 0, 2))
    reasons = [outcome.reason for outcome in agent.put("fast", [stranger, torn])]
    assert reasons == [
        "the key's namespace is not that of 'direct'",
        "12288 bytes are not whole shards of 5000; put whole shards",
    ]
    assert agent.stat().volumes[0].slots_free == CAPACITY


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda: torch.zeros(8, 8)[:, 1:], "give one without gaps"),
        (lambda: torch.zeros(0), "give one without gaps"),
        (lambda: torch.zeros(8, device="meta"), "the tensor is on meta; give one on a CUDA device or the CPU"),
    ],
    ids=["gaps", "empty", "nowhere"],
)
def test_memory_that_cannot_be_had_is_named(make: Callable[[], torch.Tensor], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        DirectMemory(make())


def test_a_span_lies_inside_its_memory_of_any_dtype() -> None:
    memory = DirectMemory(torch.zeros(4, 8, dtype=torch.bfloat16))
    assert (memory.size_bytes, memory.span(16).nbytes) == (64, 48)
    for offset, size in ((-1, 4), (0, 65), (60, 5), (3, 0), (64, None)):
        with pytest.raises(ValueError, match="are not inside the memory's 64"):
            memory.span(offset, size)


# Damage


@pytest.mark.parametrize(
    ("reader", "at"),
    [
        ("span", 40),
        ("span", PAGE_BYTES),
        ("span", PAGE_BYTES + BLOCK_BYTES - 1),
        ("host", PAGE_BYTES + 5),
        ("scrub", PAGE_BYTES + 4095),
    ],
)
def test_a_flipped_bit_is_found_by_every_reader_and_the_block_is_freed(
    agent: StorageAgent, pool: Pool, reader: str, at: int
) -> None:
    put(agent, 1, pool.span(0))
    put(agent, 2, pool.span(4))
    flip(agent, 1, at)
    if reader == "scrub":
        assert agent.scrub("s", "fast") == ScrubReport(1, 1, 0, BLOCK_BYTES)
    else:
        wanted: list[Any] = [pool.span(8) if reader == "span" else memoryview(bytearray(BLOCK_BYTES)) for _ in "12"]
        bad, good = agent.get([key(1), key(2)], wanted)
        assert (bad.result, good.result) == (Result.CORRUPT, Result.HIT)
        assert "checksum" in bad.reason
    assert agent.get([key(1)], [pool.span(8)])[0].result is Result.MISS
    stat = agent.stat().volumes[0]
    assert (stat.blocks, stat.slots_free, stat.corrupt_total, stat.degraded) == (1, CAPACITY - 1, 1, "")


def test_bytes_that_change_while_they_are_put_are_never_served(
    agent: StorageAgent, pool: Pool, monkeypatch: pytest.MonkeyPatch
) -> None:
    def sum_then_change(tensors: Sequence[torch.Tensor]) -> list[tuple[int, ...]]:
        sums = nh64_of_tensors(tensors)
        tensors[0][0, 100] ^= 1
        return sums

    monkeypatch.setattr(slab_direct, "nh64_of_tensors", sum_then_change)
    put(agent, 1, pool.span(0))
    monkeypatch.undo()
    assert agent.get([key(1)], [pool.span(8)])[0].result is Result.CORRUPT


def test_a_sound_copy_on_a_slower_volume_is_read_after_a_corrupt_one(tmp_path: Path, pool: Pool) -> None:
    slow = descriptor(tmp_path, "slow", speed_rank=5)
    with agent_of(tmp_path, descriptor(tmp_path), slow) as agent:
        for volume in ("fast", "slow"):
            put(agent, 1, pool.span(0), volume)
        flip(agent, 1, PAGE_BYTES)
        assert agent.get([key(1)], [pool.span(8)]) == [Outcome(key(1), Result.HIT, "slow", BLOCK_BYTES)]
        assert bytes_of(pool.span(8)) == bytes_of(pool.span(0))


@pytest.mark.parametrize("is_damaged", [False, True])
def test_a_look_from_outside_and_a_recovery_check_by_the_checksum_that_the_header_names(
    tmp_path: Path, pool: Pool, is_damaged: bool
) -> None:
    with agent_of(tmp_path) as agent:
        put(agent, 1, pool.span(0))
        if is_damaged:
            flip(agent, 1, PAGE_BYTES + 9)
        left = {path: path.read_bytes() for path in tmp_path.iterdir()}
    for path in tmp_path.iterdir():  # as a crash leaves it
        path.write_bytes(left[path]) if path in left else path.unlink()
    with closing(inspect_volume(descriptor(tmp_path), [tmp_path])) as inspection:
        found = next(iter(inspection.reports()))
    assert (found.state, "(nh64)" in found.reason) == (("torn", True) if is_damaged else ("live", False))
    with agent_of(tmp_path) as agent:
        outcome, got = get(agent, 1)
        assert outcome.result is (Result.MISS if is_damaged else Result.HIT)
        assert got == (bytes(BLOCK_BYTES) if is_damaged else bytes_of(pool.span(0)))


# Moves, sizes, other processes


def test_moves_sum_again_as_the_target_needs(tmp_path: Path, pool: Pool) -> None:
    memory = descriptor(tmp_path, "memory", kind="memory", path="", speed_rank=2)
    slow = descriptor(tmp_path, "slow", speed_rank=5)
    with agent_of(tmp_path, descriptor(tmp_path), memory, slow) as agent:
        put(agent, 1, pool.span(0))
        for source, target in (("fast", "memory"), ("memory", "slow")):
            (moved,) = agent.move("", [key(1)], source, target, keep=False).outcomes
            assert moved.result is Result.COPIED
            assert get(agent, 1)[1] == bytes_of(pool.span(0))
        assert checksums_of(agent, 1, place=2).name is XXH3
        put(agent, 1, pool.span(0))
        (moved,) = agent.move("", [key(1)], "slow", "fast", keep=False).outcomes
        assert moved.result is Result.PRESENT, "the copy that was there was read and checked"


def test_a_slab_grows_and_shrinks_under_blocks_that_were_put_directly(agent: StorageAgent, pool: Pool) -> None:
    for number in range(CAPACITY):
        put(agent, number, pool.span(3 * number))
    agent.resize_volume("fast", CAPACITY + 2)
    put(agent, 20, pool.span(30))
    assert checksums_of(agent, 20).name is NH64, "NIXL was told of the larger file"
    agent.delete("", "fast", [key(n) for n in range(4)])
    agent.resize_volume("fast", 5)
    span = pool.span(40)
    for number in (*range(4, CAPACITY), 20):
        wanted = bytes_of(pool.span(3 * number if number != 20 else 30))
        assert get(agent, number)[1] == wanted
        assert agent.get([key(number)], [span])[0].result is Result.HIT
        assert bytes_of(span) == wanted
    stat = agent.stat().volumes[0]
    assert (stat.blocks, stat.slots_free, stat.corrupt_total) == (5, 0, 0)


def test_other_agents_and_clients_read_what_was_put_directly_and_put_spans(tmp_path: Path, pool: Pool) -> None:
    with agent_of(tmp_path) as owner, AgentService(owner, "tcp://127.0.0.1:*") as service:
        put(owner, 1, pool.span(0))
        with SlabClient(service.command_url, "fast") as client:
            outcome, got = get(client, 1)
            assert (outcome.result, got) == (Result.HIT, bytes_of(pool.span(0)))
            assert client.put([block(2, pool.span(4))])[0].result is Result.STORED
            assert client.get([key(2)], [pool.span(16)])[0].result is Result.HIT
        assert bytes_of(pool.span(16)) == bytes_of(pool.span(4))
        remote = descriptor(tmp_path, "far", kind="remote", path="", options={"endpoint": "peer", "volume": "fast"})
        with agent_of(tmp_path, remote, endpoints={"peer": Endpoint(url=service.command_url)}) as borrower:
            outcome, got = get(borrower, 1)
            assert (outcome.result, got) == (Result.HIT, bytes_of(pool.span(0))), outcome
            put(borrower, 3, pool.span(8), "far")
            assert borrower.get([key(3)], [pool.span(20)])[0].result is Result.HIT
        assert bytes_of(pool.span(20)) == bytes_of(pool.span(8))


def test_a_block_device_takes_spans_directly(tmp_path: Path, pool: Pool) -> None:
    image = tmp_path / "image"
    image.write_bytes(bytes(1 << 20))
    with loop_device(image) as device, StorageAgent("a", publisher=None, allowed_roots=[device.parent]) as agent:
        agent.register_volume(descriptor(tmp_path, path=str(device)))
        put(agent, 1, pool.span(0))
        assert checksums_of(agent, 1).name is NH64
        assert agent.get([key(1)], [pool.span(8)])[0].result is Result.HIT
        assert bytes_of(pool.span(8)) == bytes_of(pool.span(0))


# Which way


def test_memory_of_a_gpu_goes_by_the_host_where_no_backend_is_proven(
    agent: StorageAgent, pool: Pool, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(pool.memory, "kind", "VRAM")
    monkeypatch.setattr(gpu_direct, "wait", lambda timeout_s: GpuDirect("", "no driver"))
    monkeypatch.setattr(gpu_direct, "said", lambda: "not available: no driver")
    assert store_of(agent).span_fault(pool.span(0), BLOCK_BYTES) == "not available: no driver"
    put(agent, 1, pool.span(0))
    monkeypatch.setattr(gpu_direct, "wait", lambda timeout_s: GpuDirect("GDS_MT"))
    put(agent, 2, pool.span(4))  # NIXL does not take what is no GPU's memory
    put(agent, 3, pool.span(8))
    assert [checksums_of(agent, number).name for number in (1, 2, 3)] == [XXH3] * 3
    said = [record.message for record in caplog.records if "goes through the host's memory" in record.message]
    assert len(said) == 1, "it is said once"
    assert "volume fast: VRAM goes through the host's memory" in said[0]


def test_nixl_lets_go_of_memory_that_nobody_has_any_more(agent: StorageAgent) -> None:
    pool = Pool()
    put(agent, 1, pool.span(0))
    ways, memory = store_of(agent)._direct._ways, weakref.ref(pool.memory)
    assert len(ways) == 1
    del pool
    gc.collect()
    assert (len(ways), memory()) == (0, None)


def test_more_memories_than_nixl_is_told_of_go_by_the_host(
    agent: StorageAgent, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(slab_direct, "MEMORIES_MAX", 2)
    pools = [Pool() for _ in range(3)]
    for number, each in enumerate(pools):
        put(agent, number, each.span(0))
    assert [checksums_of(agent, number).name for number in range(3)] == [NH64, NH64, XXH3]
    assert "put all blocks' memory into fewer" in store_of(agent).span_fault(pools[2].span(0), BLOCK_BYTES)


# A device that is late

LATE_BLOCKS = 200
"""More than NIXL begins before it is asked again."""


@pytest.fixture
def late(tmp_path: Path) -> Iterator[StorageAgent]:
    """Two volumes with the same blocks; the fast one's direct transfers have no time at all."""
    sizes: dict[str, Any] = {"capacity_blocks": LATE_BLOCKS + 8, "block_bytes_max": PAGE_BYTES}
    slow = descriptor(tmp_path, "slow", speed_rank=5, **sizes)
    with agent_of(tmp_path, descriptor(tmp_path, **sizes), slow) as agent:
        pool = Pool(LATE_BLOCKS)
        for volume in ("fast", "slow"):
            blocks = [block(n, pool.span(n, PAGE_BYTES)) for n in range(LATE_BLOCKS)]
            assert {outcome.result for outcome in agent.put(volume, blocks)} == {Result.STORED}
        store_of(agent)._direct.forget()
        store_of(agent)._direct._deadline_s = 0.0
        yield agent


def test_a_late_get_fails_says_that_the_memory_may_be_written_and_nothing_else_goes_there(late: StorageAgent) -> None:
    pool = Pool(LATE_BLOCKS)
    kept = weakref.ref(pool.memory)
    outcomes = late.get(
        [key(n) for n in range(LATE_BLOCKS)], [pool.span(n, PAGE_BYTES) for n in range(LATE_BLOCKS)]
    )
    assert {(outcome.result, outcome.volume) for outcome in outcomes} == {(Result.FAILED, "fast")}, "not the slow one"
    assert outcomes[0].reason == (
        "volume fast: read: no answer from the device in 0.0 s; the memory it was read into may be written still; "
        "keep nothing there until this process ends"
    )
    stat = {volume.descriptor.id: volume for volume in late.stat().volumes}
    assert stat["fast"].degraded.startswith("volume fast: read: no answer")
    assert (stat["fast"].blocks, stat["slow"].degraded) == (LATE_BLOCKS, "")
    assert get(late, 3, PAGE_BYTES)[0].volume == "fast", "the host reads on"
    del pool
    gc.collect()
    assert kept() is not None, "late bytes must not come into memory of somebody else's"


def test_a_late_put_fails_and_its_slots_are_held_back_until_the_volume_is_opened_anew(
    late: StorageAgent, tmp_path: Path
) -> None:
    assert {o.result for o in late.delete("", "fast", [key(n) for n in range(100)]).outcomes} == {Result.DELETED}
    pool = Pool(100)
    outcomes = late.put("fast", [block(1000 + n, pool.span(n, PAGE_BYTES)) for n in range(100)])
    assert {outcome.result for outcome in outcomes} == {Result.FAILED}
    stat = late.stat().volumes[0]
    assert (stat.blocks, stat.slots_free, stat.degraded != "") == (LATE_BLOCKS - 100, 8, True)
    assert get(late, 1000, PAGE_BYTES)[0].result is Result.MISS
    late.unregister_volume("fast")
    late.register_volume(stat.descriptor)
    fresh = {volume.descriptor.id: volume for volume in late.stat().volumes}["fast"]
    assert (fresh.blocks, fresh.slots_free) == (LATE_BLOCKS - 100, 108)


def test_a_gpus_late_write_keeps_the_slab_closed_until_the_process_ends(
    agent: StorageAgent, pool: Pool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A backend's own threads may write to the file at any time. No GPU is here to be late: NIXL is stood in for."""

    class Late(NixlSpans):
        def __init__(self) -> None:
            pass

        def transfer(self, *_: object) -> None:
            raise TransferError("late", in_doubt=True)

    put(agent, 1, pool.span(0))
    direct, fd = store_of(agent)._direct, store_of(agent)._direct._fd
    direct.forget()
    direct._ways[pool.memory] = Late()
    monkeypatch.setattr(pool.memory, "kind", "VRAM")
    assert agent.put("fast", [block(2, pool.span(8))])[0].result is Result.FAILED
    (volume,) = agent.stat().volumes
    agent.unregister_volume("fast")
    with pytest.raises(VolumeError, match="is open in process"):
        agent.register_volume(volume.descriptor)
    os.close(fd)
    agent.register_volume(volume.descriptor)
    assert get(agent, 1)[0].result is Result.HIT
