"""What only a GPU can show of the kernels; the tests of `tests/unit/test_kernels*.py` run there too."""

from __future__ import annotations

import pytest
import torch

from kernels import (
    KvLayout,
    checksum_blocks,
    dequantize_blocks,
    dispatch,
    gather_blocks,
    permute_blocks,
    quantize_blocks,
    reference,
    scatter_blocks,
)

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA GPU: run benchmarks/gpu.sh where one is")


def _pool(blocks: int, *, layers: int = 4) -> torch.Tensor:
    """NHD blocks of 16 tokens, 8 heads × 128, bfloat16: 64 KiB a layer."""
    drawn = torch.Generator("cuda").manual_seed(5)
    shape = (blocks, layers, 2, 16, 8, 128)
    return torch.randn(shape, generator=drawn, dtype=torch.bfloat16, device="cuda")


def test_tensors_on_the_gpu_are_triton_s() -> None:
    pytest.importorskip("triton")
    assert dispatch.implementation_for(torch.device("cuda")) is not reference


def test_ids_on_the_gpu_are_used_without_waiting_for_it() -> None:
    pytest.importorskip("triton")
    pool = _pool(64)
    ids = torch.randperm(64, device="cuda")[:32]
    staging = gather_blocks(pool, ids)
    checksum_blocks(pool, ids)
    torch.cuda.set_sync_debug_mode("error")
    try:
        gather_blocks(pool, ids, staging)
        gather_blocks(pool, [1, 2, 3])
        scatter_blocks(staging, pool, ids)
        checksum_blocks(pool, ids)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert torch.equal(staging, pool[ids])


def test_ids_on_the_gpu_that_are_out_of_range_read_zeros_and_write_nothing() -> None:
    pytest.importorskip("triton")
    pool = _pool(8)
    before = pool.clone()
    ids = torch.tensor([7, 8, -1], device="cuda")
    staging = gather_blocks(pool, ids)
    assert torch.equal(staging[0], pool[7])
    assert staging[1:].count_nonzero() == 0
    scatter_blocks(torch.ones_like(staging), pool, ids)
    assert torch.equal(pool[:7], before[:7])
    assert bool((pool[7] == 1).all())


def test_work_is_done_in_the_current_stream() -> None:
    pool = _pool(512)
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        pool.mul_(2)
        staging = gather_blocks(pool, list(range(511, -1, -1)))
    torch.cuda.current_stream().wait_stream(stream)
    assert torch.equal(staging, pool.flip(0))


def test_a_gigabyte_has_the_cpu_s_checksums() -> None:
    pytest.importorskip("numba")
    pool = _pool(1024, layers=16)
    ids = [1023, 0, 511]
    assert torch.equal(checksum_blocks(pool, ids).cpu(), checksum_blocks(pool[ids].cpu()))
    assert checksum_blocks(pool).unique().numel() == 1024


def test_quantised_blocks_are_the_cpu_s_bit_for_bit() -> None:
    pytest.importorskip("numba")
    pool = _pool(64)
    values, scales = quantize_blocks(pool, KvLayout.NHD)
    on_cpu = quantize_blocks(pool.cpu(), KvLayout.NHD)
    assert torch.equal(scales.cpu(), on_cpu.scales)
    assert torch.equal(values.cpu().view(torch.uint8), on_cpu.values.view(torch.uint8))
    back = dequantize_blocks(values, scales, KvLayout.NHD)
    assert torch.equal(back.cpu(), dequantize_blocks(*on_cpu, KvLayout.NHD))


def test_without_triton_the_reference_gives_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("numba")
    pool = _pool(64)
    ids = torch.randperm(64, device="cuda")[:32]
    wanted = (gather_blocks(pool, ids), permute_blocks(pool, KvLayout.NHD, KvLayout.UNIVERSAL), checksum_blocks(pool))
    monkeypatch.setattr(dispatch, "_triton", lambda: None)
    assert torch.equal(gather_blocks(pool, ids), wanted[0])
    assert torch.equal(permute_blocks(pool, KvLayout.NHD, KvLayout.UNIVERSAL), wanted[1])
    assert torch.equal(checksum_blocks(pool), wanted[2])
