"""Launches the Triton kernels: from checked tensors to addresses, strides, tiles and grids. An `Implementation`."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import cache, lru_cache
from itertools import pairwise
from math import gcd, prod

import torch
import triton.language as tl

from kernels import nh64
from kernels.errors import ShapeError
from kernels.strides import Axis, CopyPlan, Tile, choose_tile, merged_axes, plan_copy, power_of_two
from kernels.triton_kernels import add_chunks, copy_tiles, dequantize_groups, quantize_groups

TILE_WORDS = 4096
"""16 KiB of a copy for each program of 256 threads: four accesses of 16 bytes under way in each thread."""

WARP_WORDS = 512
CHUNKS_OF_PROGRAM = 8
GROUP_TILE_ELEMENTS = 4096
GROUP_UNIT_MAX = 16
"""Elements whose e4m3 form fills one access."""

PROGRAMS_MAX = (1 << 31) - 1
ROWS_OF_GRID_MAX = 65_535

_WORDS = {16: (tl.int32, 4), 8: (tl.int32, 2), 4: (tl.int32, 1), 2: (tl.int16, 1), 1: (tl.int8, 1)}
"""By bytes of an access: the word that is moved and how many make one access."""


def copy(
    sources: Sequence[torch.Tensor],
    targets: Sequence[torch.Tensor],
    source_ids: torch.Tensor | None,
    target_ids: torch.Tensor | None,
) -> None:
    first, into = sources[0], targets[0]
    alike = all(layer.stride() == first.stride() for layer in sources) and all(
        layer.stride() == into.stride() for layer in targets
    )
    if not alike:
        for source, target in zip(sources, targets, strict=True):
            copy([source], [target], source_ids, target_ids)
        return
    blocks = next((len(ids) for ids in (source_ids, target_ids) if ids is not None), first.shape[0])
    size = first.element_size()
    axes = merged_axes(first.shape[1:], first.stride()[1:], into.stride()[1:])
    source_step, target_step = _step(sources), _step(targets)
    if len(sources) > 1 and source_step and target_step and not (source_step % size or target_step % size):
        # Layers of one tensor on both sides are an axis like any other.
        shape, strides = (len(sources), *first.shape[1:]), (source_step // size, *first.stride()[1:])
        axes = merged_axes(shape, strides, (target_step // size, *into.stride()[1:]))
        sources, targets = sources[:1], targets[:1]
    steps = [step for step in (source_step, target_step) if step]
    aligned_to = [tensor.data_ptr() for tensor in (*sources, *targets)]
    plan = plan_copy(axes, size, [*aligned_to, *steps, first.stride(0) * size, into.stride(0) * size])
    for source_offset, target_offset in _offsets(plan):
        _launch_copy(plan, blocks, sources, targets, source_ids, target_ids, source_offset, target_offset)


def _launch_copy(
    plan: CopyPlan,
    blocks: int,
    sources: Sequence[torch.Tensor],
    targets: Sequence[torch.Tensor],
    source_ids: torch.Tensor | None,
    target_ids: torch.Tensor | None,
    source_offset: int,
    target_offset: int,
) -> None:
    """One launch; the offsets are bytes into every source and target."""
    device, access, size = sources[0].device, plan.access_bytes, sources[0].element_size()
    word, vector = _WORDS[access]
    tile = choose_tile(plan, blocks, TILE_WORDS // vector)
    read, source_step = _place([layer.data_ptr() + source_offset for layer in sources], device)
    write, target_step = _place([layer.data_ptr() + target_offset for layer in targets], device)
    a, b, c, d = plan.axes
    with _on(device):
        copy_tiles[(_programs(plan, tile, blocks) * len(sources),)](
            read, write, source_ids, target_ids, sources[0].shape[0], targets[0].shape[0],
            blocks, plan.run, a.size, b.size, c.size, d.size,
            sources[0].stride(0) * size // access, a.source, b.source, c.source, d.source, source_step // access,
            targets[0].stride(0) * size // access, a.target, b.target, c.target, d.target, target_step // access,
            WORD=word, VECTOR=vector,
            RUN_TILE=tile.run * vector, A_TILE=tile.first, B_TILE=tile.second, BLOCK_TILE=tile.blocks,
            SOURCE_TABLE=isinstance(read, torch.Tensor), TARGET_TABLE=isinstance(write, torch.Tensor),
            SOURCE_INDEXED=source_ids is not None, TARGET_INDEXED=target_ids is not None,
            num_warps=_warps(tile.run * vector * tile.first * tile.second * tile.blocks),
        )  # fmt: skip


def checksum(blocks: torch.Tensor, block_ids: torch.Tensor) -> torch.Tensor:
    length = blocks[:1].nbytes
    stride_bytes, address = blocks.stride(0) * blocks.element_size(), blocks.data_ptr()
    aligned = next(size for size in (16, 8, 1) if address % size == stride_bytes % size == 0)
    sums = torch.full((len(block_ids),), _signed(nh64.length_term(length)), dtype=torch.int64, device=blocks.device)
    chunks = -(-length // nh64.CHUNK_BYTES)
    if not chunks:
        return sums
    for first in range(0, len(block_ids), ROWS_OF_GRID_MAX):
        ids = block_ids[first : first + ROWS_OF_GRID_MAX]
        with _on(blocks.device):
            add_chunks[(-(-chunks // CHUNKS_OF_PROGRAM), len(ids))](
                address, stride_bytes, length, blocks.shape[0], ids, _keys(blocks.device), sums[first:],
                CHUNKS=CHUNKS_OF_PROGRAM, ALIGNED=aligned, TAIL=length % 16 != 0, num_warps=1,
            )  # fmt: skip
    return sums


def quantize(blocks: torch.Tensor, values: torch.Tensor, scales: torch.Tensor) -> None:
    _launch_groups(quantize_groups, blocks, values, scales)


def dequantize(values: torch.Tensor, scales: torch.Tensor, blocks: torch.Tensor) -> None:
    _launch_groups(dequantize_groups, blocks, values, scales.contiguous())


def _launch_groups(kernel: object, wide: torch.Tensor, narrow: torch.Tensor, scales: torch.Tensor) -> None:
    if wide.stride(-1) != 1:
        wide = wide.contiguous()
    _, layers, outer, heads, tokens, head_dim = wide.shape
    dim_tile = power_of_two(head_dim)
    token_tile = max(1, min(power_of_two(tokens), GROUP_TILE_ELEMENTS // dim_tile))
    unit = gcd(GROUP_UNIT_MAX, head_dim, *wide.stride()[:5], *narrow.stride()[:5])
    with _on(wide.device):
        kernel[(scales.numel(),)](  # type: ignore[index]
            wide, narrow, scales, layers, outer, heads, tokens, head_dim // unit,
            *(stride // unit for stride in (*wide.stride()[:5], *narrow.stride()[:5])),
            UNIT=unit, TOKEN_TILE=token_tile, DIM_TILE=dim_tile, num_warps=_warps(token_tile * dim_tile),
        )  # fmt: skip


def _programs(plan: CopyPlan, tile: Tile, blocks: int) -> int:
    a, b, c, d = plan.axes
    tiles = (
        -(-plan.run // tile.run), -(-a.size // tile.first), -(-b.size // tile.second), c.size, d.size,
        -(-blocks // tile.blocks),
    )  # fmt: skip
    if prod(tiles) > PROGRAMS_MAX:
        raise ShapeError(f"{blocks} blocks need {prod(tiles)} programs, at most {PROGRAMS_MAX}: copy fewer at once")
    return prod(tiles)


def _offsets(plan: CopyPlan) -> Iterator[tuple[int, int]]:
    """Bytes from the start of source and target to each launch; one unless there are more axes than a launch takes."""

    def walk(axes: Sequence[Axis], source: int, target: int) -> Iterator[tuple[int, int]]:
        if not axes:
            yield source * plan.access_bytes, target * plan.access_bytes
            return
        for step in range(axes[0].size):
            yield from walk(axes[1:], source + step * axes[0].source, target + step * axes[0].target)

    return walk(plan.looped, 0, 0)


def _step(layers: Sequence[torch.Tensor]) -> int:
    """Bytes from each layer to the next; 0 where they differ, or there is one layer."""
    addresses = [layer.data_ptr() for layer in layers]
    steps = {after - before for before, after in pairwise(addresses)}
    return max(steps.pop(), 0) if len(steps) == 1 else 0


def _place(addresses: Sequence[int], device: torch.device) -> tuple[int | torch.Tensor, int]:
    """The first address and the bytes to the next; or a table of them and 0, where they are not evenly apart."""
    steps = {after - before for before, after in pairwise(addresses)}
    if len(steps) > 1:
        return _table(tuple(addresses), device), 0
    return addresses[0], steps.pop() if steps else 0


@lru_cache(maxsize=256)
def _table(addresses: tuple[int, ...], device: torch.device) -> torch.Tensor:
    return torch.tensor(addresses, dtype=torch.int64, device=device)


@cache
def _keys(device: torch.device) -> torch.Tensor:
    return torch.from_numpy(nh64.keys().view("int64").copy()).to(device)


def _warps(words: int) -> int:
    return max(1, min(8, words // WARP_WORDS))


def _signed(word: int) -> int:
    return word - (1 << 64) if word >> 63 else word


def _on(device: torch.device) -> AbstractContextManager[object]:
    """Triton launches on the current GPU, wherever the tensors are."""
    return torch.cuda.device(device) if device.type == "cuda" else nullcontext()

