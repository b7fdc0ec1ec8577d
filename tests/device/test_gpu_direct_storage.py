"""GPU-direct storage on a machine with a GPU: what was proven works for more than a page, or there is a reason."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")
for package in ("msgspec", "structlog", "xxhash"):  # such a machine may have a bare checkout only
    pytest.importorskip(package)
if not torch.cuda.is_available():
    pytest.skip("no CUDA device here", allow_module_level=True)

from event_plane.schema import Namespace  # noqa: E402 -- after the skip
from storage_agent import gpu_direct  # noqa: E402
from storage_agent.agent import StorageAgent  # noqa: E402
from storage_agent.descriptor import VolumeDescriptor  # noqa: E402
from storage_agent.direct_memory import DirectMemory  # noqa: E402
from storage_agent.gpu_direct import prove  # noqa: E402 -- after the skip
from storage_agent.gpu_direct_proof import BACKENDS  # noqa: E402
from storage_agent.nixl_memory import MemoryPlace, MemoryRegion  # noqa: E402
from storage_agent.nixl_spans import NixlSpans  # noqa: E402
from storage_agent.port import BlockKey, PutBlock, Result  # noqa: E402
from storage_agent.slot_volume import SlotVolume  # noqa: E402

SPAN_BYTES = 1 << 20


def test_a_backend_is_proven_or_there_is_a_reason(tmp_path: Path) -> None:
    found = prove([tmp_path])
    assert found.backend in ("", *BACKENDS)
    assert bool(found.backend) != bool(found.reason), found


def test_spans_of_a_gpus_memory_go_to_a_file_and_come_back(tmp_path: Path) -> None:
    found = prove([tmp_path])
    if not found.backend:
        pytest.skip(f"GPU-direct storage is {found.said}")
    blocks = torch.randint(0, 256, (8, SPAN_BYTES), dtype=torch.uint8, device="cuda")
    kept = blocks.clone()
    place = MemoryPlace("VRAM", blocks.device.index)
    spans = [MemoryRegion(block.data_ptr(), SPAN_BYTES, place) for block in blocks]
    fd = os.open(tmp_path / "file", os.O_RDWR | os.O_CREAT | os.O_DIRECT)
    os.ftruncate(fd, 16 * SPAN_BYTES)
    everything = MemoryRegion(blocks.data_ptr(), blocks.nbytes, place)
    transfer = NixlSpans("gpu", found.backend, {}, [everything], fd, 16 * SPAN_BYTES)
    offsets = [2 * number * SPAN_BYTES for number in range(8)]
    transfer.write(spans, offsets)
    stored = (tmp_path / "file").read_bytes()
    for offset, block in zip(offsets, kept.cpu(), strict=True):
        assert stored[offset : offset + SPAN_BYTES] == bytes(block.numpy())
    blocks.zero_()
    torch.cuda.synchronize()
    transfer.read(spans[::-1], offsets)
    assert torch.equal(blocks, kept.flip(0))
    transfer.close()
    os.close(fd)


def test_blocks_go_from_a_gpus_memory_to_a_slab_and_back_whole_or_not_at_all(tmp_path: Path) -> None:
    """Directly where that is proven, else through the host's memory: the same answers."""
    namespace = Namespace(tenant="gpu")
    keys = [BlockKey(namespace.namespace_id, 0, number) for number in range(8)]
    pool = torch.randint(0, 256, (16, SPAN_BYTES), dtype=torch.uint8, device="cuda")
    torch.cuda.synchronize()
    memory = DirectMemory(pool)
    spans = [memory.span(number * SPAN_BYTES, SPAN_BYTES) for number in range(16)]
    slab = tmp_path / "fast.slab"
    with StorageAgent("gpu", publisher=None, allowed_roots=[tmp_path], mend_interval_s=3600.0) as agent:
        proven = gpu_direct.wait().backend
        agent.register_volume(
            VolumeDescriptor(id="fast", path=str(slab), capacity_blocks=8, block_bytes_max=SPAN_BYTES)
        )
        (volume,) = agent.volumes()
        assert isinstance(volume, SlotVolume)
        assert volume.direct is not None
        goes_directly = volume.direct.takes(spans[0])
        print(f"backend: {proven or gpu_direct.said()}; spans of this slab go directly: {goes_directly}")
        stored = agent.put("fast", [PutBlock(key, namespace, span) for key, span in zip(keys, spans, strict=False)])
        assert {outcome.result for outcome in stored} == {Result.STORED}, stored
        hosts = [bytearray(SPAN_BYTES) for _ in keys]
        got = agent.get(keys, [memoryview(host) for host in hosts])
        assert {outcome.result for outcome in got} == {Result.HIT}, got
        for host, block in zip(hosts, pool[:8].cpu(), strict=True):
            assert host == bytes(block.numpy())
        got = agent.get(keys, spans[8:])
        assert {outcome.result for outcome in got} == {Result.HIT}, got
        assert torch.equal(pool[8:], pool[:8])
        assert agent.stat().volumes[0].degraded == ""
        with slab.open("r+b") as file:  # the last byte of the first block's slot, which is the first
            file.seek(-8 * (SPAN_BYTES + 4096) + SPAN_BYTES + 4095, os.SEEK_END)
            (byte,) = file.read(1)
            file.seek(-1, os.SEEK_CUR)
            file.write(bytes([byte ^ 1]))
            file.flush()
            os.fsync(file.fileno())
        results = [outcome.result for outcome in agent.get(keys, spans[8:])]
        assert sorted(results) == [Result.CORRUPT, *[Result.HIT] * 7]
