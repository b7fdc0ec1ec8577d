"""Memory behind pools: where it starts, what shares it, and when it goes."""

from __future__ import annotations

import gc
import mmap
import threading
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from msgspec import convert

from event_plane.schema import Namespace, Tier
from kvbm_core.config import KvbmConfig
from kvbm_core.errors import LayoutError, StorageClosedError, TensorAllocationError
from kvbm_core.layout import MemoryKind
from kvbm_core.storage import (
    NixlStorage,
    SystemStorage,
    TensorStorage,
    allocate,
    open_device,
    open_host,
    open_staging,
)
from storage_agent.agent import StorageAgent
from storage_agent.descriptor import VolumeDescriptor
from storage_agent.nixl_window import NixlWindow
from storage_agent.port import BlockKey, PutBlock, Result

SMALL: dict[str, Any] = {
    "layers": 3,
    "heads": 8,
    "head_dim": 4,
    "page_tokens": 4,
    "device_blocks": 4,
    "host_blocks": 4,
    "hash_secret": "a secret of the tests",
}
DTYPES = ["float16", "bfloat16", "float32", "int8", "float8_e4m3fn", "float8_e5m2"]


def is_mapped(address: int) -> bool:
    for line in Path("/proc/self/maps").read_text().splitlines():
        start, end = (int(part, 16) for part in line.split(maxsplit=1)[0].split("-"))
        if start <= address < end:
            return True
    return False


@pytest.mark.parametrize("kind", ["system", "pinned"])
@pytest.mark.parametrize("size_bytes", [1, 4_097])
def test_host_memory_starts_at_a_page_and_holds_zeros(kind: MemoryKind, size_bytes: int) -> None:
    memory = allocate(kind, size_bytes)
    assert (memory.kind, memory.size_bytes, memory.device.type) == (kind, size_bytes, "cpu")
    assert memory.address % mmap.PAGESIZE == 0
    assert memory.address == memory.flat.data_ptr()
    assert not memory.flat.any()


def test_memory_stays_while_a_view_of_it_does_and_goes_with_the_last_one() -> None:
    memory = allocate("pinned", 64 << 20)  # large enough that nothing else comes to lie there
    address = memory.address
    view = memory.flat[5:8]
    view.fill_(7)
    memory.close()
    memory.close()
    with pytest.raises(StorageClosedError, match="pinned memory of 67108864 bytes was closed"):
        _ = memory.flat
    assert view.tolist() == [7, 7, 7]
    assert is_mapped(address)
    del view
    gc.collect()
    assert not is_mapped(address)


@pytest.mark.parametrize(
    ("opened", "setting"),
    [
        (lambda c: open_host(c.host_pool_layout), "lower host_blocks, now 16777216"),
        (lambda c: open_device(c.device_pool_layout), "lower device_blocks, now 16777216"),
    ],
)
def test_memory_that_cannot_be_had_names_the_number_to_lower(opened: Any, setting: str) -> None:
    many = {"device_blocks": 1 << 24, "host_blocks": 1 << 24, "layers": 64, "page_tokens": 1_024, "head_dim": 16}
    config = KvbmConfig(**SMALL | many)
    assert config.block_bytes == 32 << 20
    with pytest.raises(TensorAllocationError, match=f"no {32 << 44} bytes of .*: {setting}"):
        opened(config)


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_host_payload_is_the_blocks_own_bytes(dtype: str) -> None:
    config = KvbmConfig(**SMALL | {"dtype": dtype, "alignment_bytes": 4_096})
    assert config.host_pool_layout is not None
    host = open_host(config.host_pool_layout)
    assert (host.tier, host.location, host.memory[0].kind) == (Tier.G2, "host", "pinned")
    payload = host.payload(1)
    assert np.frombuffer(payload, dtype=np.uint8).ctypes.data == host.tensor[1].data_ptr()
    assert (len(payload), payload.readonly, payload.c_contiguous) == (config.block_bytes, False, True)
    payload[:] = bytes(len(payload) - 1) + b"\x01"
    assert host.tensor[1].reshape(-1).view(torch.uint8).nonzero().tolist() == [[config.block_bytes - 1]]
    assert not any(bytes(host.payload(0)))
    assert not any(bytes(host.payload(2)))
    for outside in (-1, 4):
        with pytest.raises(LayoutError, match=f"block {outside} is outside the pool: give an index from 0 to 3"):
            host.payload(outside)
    host.close()
    with pytest.raises(StorageClosedError, match="host were closed"):
        _ = host.tensor
    with pytest.raises(StorageClosedError, match="host were closed"):
        host.payload(0)


def test_the_device_pool_has_the_layouts_shape() -> None:
    device = open_device(KvbmConfig(**SMALL).device_pool_layout)
    assert (device.tier, device.location, device.memory[0].kind) == (Tier.G1, "device:0", "device")
    assert device.tensor.shape == (4, 3, 2, 4, 32)
    separate = open_device(KvbmConfig(**SMALL | {"device_layout": "layer_separate_outer_first"}).device_pool_layout)
    assert [tuple(tensor.shape) for tensor in separate.tensors] == [(2, 4, 4, 32)] * 3
    assert len({memory.address for memory in separate.memory}) == 3


@pytest.mark.parametrize(
    ("call", "text"),
    [
        (lambda pool: pool.layer_view(0, 3), "layer 3 is not in the block: give one from 0 to 2"),
        (lambda pool: pool.outer_view(0, 0, 2), "outer 2 is not in the block: give one from 0 to 1"),
        (lambda pool: pool.block_view(4), "block 4 is outside the pool"),
        (lambda pool: pool.addresses_of([0, 9]), "block 9 is outside the pool"),
    ],
)
def test_a_view_of_what_is_not_there_says_what_there_is(call: Any, text: str) -> None:
    with pytest.raises(LayoutError, match=text):
        call(open_device(KvbmConfig(**SMALL).device_pool_layout))


def test_buffers_of_somebody_else_are_taken_when_they_are_large_enough() -> None:
    layout = KvbmConfig(**SMALL | {"device_layout": "layer_separate_block_first"}).device_pool_layout
    given = [SystemStorage(layout.buffer_bytes + 100) for _ in range(3)]
    pool = TensorStorage(layout, Tier.G1, "device:0", given)
    pool.layer_view(3, 2).fill_(1.0)
    assert given[2].flat.any()
    assert not given[1].flat.any()
    with pytest.raises(LayoutError, match=f"given buffers of 5 bytes: its layout needs 3 of {layout.buffer_bytes}"):
        TensorStorage(layout, Tier.G1, "device:0", [SystemStorage(5)])


def test_a_staging_buffer_is_there_only_where_volumes_have_no_host_tier_before_them() -> None:
    disk = {"volumes": ("slow",), "retention_s": 60.0}
    assert KvbmConfig(**SMALL | {"host_blocks": 0}).staging_pool_layout is None
    assert convert(SMALL | {"disk": disk}, KvbmConfig).staging_pool_layout is None
    config = convert(SMALL | {"host_blocks": 0, "staging_blocks": 2, "remote": disk}, KvbmConfig)
    assert config.host_pool_layout is None
    assert config.staging_pool_layout is not None
    assert len(open_staging(config.staging_pool_layout).payload(1)) == config.block_bytes


def test_registered_memory_is_read_by_a_peer_until_it_is_closed() -> None:
    layout = KvbmConfig(**SMALL | {"device_order": "HND"}).device_pool_layout
    memory = allocate("pinned", layout.buffer_bytes, nixl_name="pool")
    assert isinstance(memory, NixlStorage)
    pool = TensorStorage(layout, Tier.G1, "device:0", [memory])
    pool.block_view(2).copy_(torch.arange(768.0).reshape(3, 2, 4, 8, 4))
    addresses, lengths = (each.astype(np.uint64) for each in pool.addresses_of([3, 2]))
    done = threading.Event()

    def progress() -> None:
        while not done.wait(0.000_3):
            memory.nixl.notifications()

    thread = threading.Thread(target=progress)
    thread.start()
    with closing(NixlWindow("reader", 1 << 16)) as window, window.exclusive() as read:
        window.pull(memory.nixl.metadata, addresses, np.array([0, 4_096], dtype=np.uint64), lengths)
        assert read[4_096 : 4_096 + layout.block_bytes] == pool.payload(2)
        assert not any(read[: layout.block_bytes])
    done.set()
    thread.join()
    pool.close()
    pool.close()
    with pytest.raises(StorageClosedError):
        _ = memory.flat


def test_a_block_put_by_four_workers_is_read_by_two_and_by_eight(tmp_path: Path) -> None:
    """As `KvbmConfig` describes blocks and shards to the agent, in every order that a host tier may have."""
    namespace = Namespace(tenant="acme", model="m", kv_dtype="float16", block_tokens=4)
    for depth, order in enumerate(("NHD", "HND", "universal")):
        whole = torch.randn(3, 2, 4, 8, 4).to(torch.float16)
        key = BlockKey(namespace.namespace_id, 0, depth + 1)

        def worker(rank: int, size: int, order: str = order) -> tuple[KvbmConfig, TensorStorage]:
            config = KvbmConfig(
                **SMALL | {"host_order": order, "tensor_parallel_rank": rank, "tensor_parallel_size": size}
            )
            assert config.host_pool_layout is not None
            return config, open_host(config.host_pool_layout)

        shards = []
        for rank in range(4):
            config, host = worker(rank, 4)
            host.block_view(0).copy_(whole[:, :, :, 2 * rank : 2 * rank + 2])
            shards.append(bytes(host.payload(0)))
        first, _ = worker(0, 4)
        put = PutBlock(
            key=key,
            namespace=namespace,
            payload=memoryview(b"".join(shards)),
            block_tokens=4,
            span=first.shard_span,
            layout=first.block_layout,
        )
        with StorageAgent("agent", publisher=None, allowed_roots=[tmp_path]) as agent:
            agent.register_volume(
                VolumeDescriptor(
                    id="slow", path=str(tmp_path / f"{order}.slab"), capacity_blocks=4, block_bytes_max=len(put.payload)
                )
            )
            assert agent.put("slow", [put])[0].result is Result.STORED
            for size in (1, 2, 8, 16):
                for rank in range(size):
                    config, host = worker(rank, size)
                    (outcome,) = agent.get([key], [host.payload(1)], config.wanted)
                    assert (outcome.result, outcome.payload_bytes) == (Result.HIT, config.block_bytes)
                    head = rank * 8 // size
                    assert torch.equal(host.block_view(1), whole[:, :, :, head : head + config.shard_heads])
                    others = [each for each in ("NHD", "HND", "universal") if each != order]
                    for other in others:
                        config, host = worker(rank, size, other)
                        (outcome,) = agent.get([key], [host.payload(1)], config.wanted)
                        assert outcome.result is Result.FAILED
                        assert "is wanted as" in outcome.reason
                        assert not any(host.payload(1))
