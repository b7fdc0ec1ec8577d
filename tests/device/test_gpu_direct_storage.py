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

from storage_agent.gpu_direct import prove  # noqa: E402 -- after the skip
from storage_agent.gpu_direct_proof import BACKENDS  # noqa: E402
from storage_agent.nixl_memory import MemoryPlace, MemoryRegion  # noqa: E402
from storage_agent.nixl_spans import NixlSpans  # noqa: E402

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
