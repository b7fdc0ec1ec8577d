"""`kvadvisor bench kernels`: each kernel beside a plain copy of the same bytes and torch's own, in one run.

GB/s count the bytes of the blocks once, whatever is read and written. On a GPU the plain copy is the device's, timed by
its events; on the CPU it is one thread's, and rows that have a goal, which is for a GPU, are measured without judging.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
import torch

from event_plane.figures import Figure, at_least
from kernels import (
    KvLayout,
    checksum_blocks,
    dequantize_blocks,
    gather_blocks,
    permute_blocks,
    quantize_blocks,
    reshard_blocks,
    scatter_blocks,
)

HEADS = 8
HEAD_DIM = 128
PAGE_TOKENS = 16
LAYER_BYTES = 2 * PAGE_TOKENS * HEADS * HEAD_DIM * 2
"""Keys and values of a page in one layer, bfloat16: 64 KiB."""

LAYERS = (1, 4, 16)
LAYERS_QUICK = (1, 16)
MOVED_BYTES_GPU = 1 << 30
MOVED_BYTES_CPU = 1 << 28
MOVED_BYTES_CPU_QUICK = 1 << 25
ROUNDS = 15
ROUNDS_QUICK = 7
CALLS_OF_ROUND_GPU = 3
COPY_GOAL = 0.9
PERMUTE_GOAL = 0.8
NO_GPU = "the goal is for a GPU of the H200's kind; there is none here"

NHD, HND, UNIVERSAL = KvLayout.NHD, KvLayout.HND, KvLayout.UNIVERSAL
Call = Callable[[], object]


class Case(NamedTuple):
    """One row: ours, torch's where it has the like, and what share of the plain copy's speed is wanted."""

    name: str
    ours: Call
    torch: Call | None = None
    goal: float | None = None


def run(quick: bool) -> list[Figure]:
    """A minute; `quick` half of that, with fewer sizes and bytes."""
    device = torch.device("cuda") if torch.cuda.is_available() else torch.device("cpu")
    moved_bytes = MOVED_BYTES_GPU
    if device.type == "cpu":
        moved_bytes = MOVED_BYTES_CPU_QUICK if quick else MOVED_BYTES_CPU
    rounds = ROUNDS_QUICK if quick else ROUNDS
    figures: list[Figure] = []
    for layers in LAYERS_QUICK if quick else LAYERS:
        blocks = moved_bytes // (layers * LAYER_BYTES)
        figures += _measure(_paged_cases(blocks, layers, device), blocks * layers * LAYER_BYTES, device, rounds)
    blocks = moved_bytes // (LAYERS[-1] * LAYER_BYTES)
    for cases in (_layered_cases, _relayout_cases, _other_cases):
        figures += _measure(cases(blocks, LAYERS[-1], device), blocks * LAYERS[-1] * LAYER_BYTES, device, rounds)
    return figures


def _paged_cases(blocks: int, layers: int, device: torch.device) -> list[Case]:
    """Half of a block-first pool's blocks, in a random order."""
    pool = _random(2 * blocks, layers, 2, PAGE_TOKENS, HEADS * HEAD_DIM, device=device)
    ids = _some(2 * blocks, blocks).to(device)
    staging, other = torch.empty_like(pool[:blocks]), torch.empty_like(pool[:blocks])
    size = f"{layers * LAYER_BYTES >> 10} KiB blocks, block first"
    return [
        Case(
            f"gather, {size}",
            lambda: gather_blocks(pool, ids, staging),
            lambda: torch.index_select(pool, 0, ids, out=other),
            COPY_GOAL,
        ),
        Case(
            f"scatter, {size}",
            lambda: scatter_blocks(staging, pool, ids),
            lambda: pool.index_copy_(0, ids, staging),
            COPY_GOAL,
        ),
    ]


def _layered_cases(blocks: int, layers: int, device: torch.device) -> list[Case]:
    """The same blocks, each layer with a tensor of its own, keys before values."""
    pools = [_random(2, 2 * blocks, PAGE_TOKENS, HEADS * HEAD_DIM, device=device) for _ in range(layers)]
    ids = _some(2 * blocks, blocks).to(device)
    staging = gather_blocks(pools, ids, block_dim=1)
    other = torch.empty_like(staging)
    size = f"{layers * LAYER_BYTES >> 10} KiB blocks, layers apart, outer first"

    def select() -> None:
        for layer, pool in enumerate(pools):
            other[:, layer] = pool.index_select(1, ids).movedim(1, 0)

    return [
        Case(f"gather, {size}", lambda: gather_blocks(pools, ids, staging, block_dim=1), select, COPY_GOAL),
        Case(f"scatter, {size}", lambda: scatter_blocks(staging, pools, ids, block_dim=1), None, COPY_GOAL),
    ]


def _relayout_cases(blocks: int, layers: int, device: torch.device) -> list[Case]:
    in_layout = {NHD: _random(blocks, layers, 2, PAGE_TOKENS, HEADS, HEAD_DIM, device=device)}
    for layout in (HND, UNIVERSAL):
        in_layout[layout] = permute_blocks(in_layout[NHD], NHD, layout)
    out = {layout: torch.empty_like(given) for layout, given in in_layout.items()}

    def case(source: KvLayout, target: KvLayout) -> Case:
        given, wanted, order = in_layout[source], out[target], source.order(target)
        return Case(
            f"permute, {source} to {target}",
            lambda: permute_blocks(given, source, target, wanted),
            lambda: wanted.copy_(given.permute(order)),
            PERMUTE_GOAL,
        )

    shards = list(in_layout[NHD].chunk(2, dim=NHD.head_axis))
    return [
        case(NHD, HND),
        case(HND, NHD),
        case(NHD, UNIVERSAL),
        case(UNIVERSAL, NHD),
        Case("reshard, 2 to 4 workers, NHD to universal", lambda: reshard_blocks(shards, NHD, UNIVERSAL, 4)),
    ]


def _other_cases(blocks: int, layers: int, device: torch.device) -> list[Case]:
    given = _random(blocks, layers, 2, PAGE_TOKENS, HEADS, HEAD_DIM, device=device)
    values, scales = quantize_blocks(given, NHD)
    ids = torch.arange(blocks, device=device)
    return [
        Case("checksum", lambda: checksum_blocks(given, ids)),
        Case("quantise to fp8", lambda: quantize_blocks(given, NHD)),
        Case("dequantise from fp8", lambda: dequantize_blocks(values, scales, NHD)),
    ]


def _measure(cases: Sequence[Case], moved_bytes: int, device: torch.device, rounds: int) -> list[Figure]:
    source = torch.ones(moved_bytes, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)

    def plain() -> None:
        if device.type == "cuda":
            target.copy_(source)
        else:
            np.copyto(target.numpy(), source.numpy())

    figures: list[Figure] = []
    for case in cases:
        calls = [call for call in (case.ours, plain, case.torch) if call is not None]
        seconds = _rounds(calls, device, rounds)
        ratio = statistics.median(copy / ours for ours, copy in zip(seconds[0], seconds[1], strict=True))
        figures.append(Figure(case.name, _rate(moved_bytes, seconds[0]), "GB/s"))
        figures.append(Figure(f"{case.name}: plain copy", _rate(moved_bytes, seconds[1]), "GB/s"))
        if case.torch is not None:
            figures.append(Figure(f"{case.name}: torch", _rate(moved_bytes, seconds[2]), "GB/s"))
        figures.append(_ratio(f"{case.name} against the plain copy", ratio, case.goal, device))
    return figures


def _ratio(name: str, ratio: float, goal: float | None, device: torch.device) -> Figure:
    if goal is None:
        return Figure(name, ratio, "×")
    judged = at_least(name, ratio, "×", goal)
    return judged if device.type == "cuda" else Figure(name, ratio, "×", judged.goal, None, NO_GPU)


def _rounds(calls: Sequence[Call], device: torch.device, rounds: int) -> list[list[float]]:
    """Seconds of each call, in turn, `rounds` times; once before, to compile and to touch the memory."""
    timed = _gpu_seconds if device.type == "cuda" else _cpu_seconds
    for call in calls:
        timed(call)
    by_round = [[timed(call) for call in calls] for _ in range(rounds)]
    return [list(seconds) for seconds in zip(*by_round, strict=True)]


def _gpu_seconds(call: Call) -> float:
    started, ended = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
    torch.cuda.synchronize()
    started.record()
    for _ in range(CALLS_OF_ROUND_GPU):
        call()
    ended.record()
    ended.synchronize()
    return float(started.elapsed_time(ended)) / 1e3 / CALLS_OF_ROUND_GPU


def _cpu_seconds(call: Call) -> float:
    started_s = time.perf_counter()
    call()
    return time.perf_counter() - started_s


def _rate(moved_bytes: int, seconds: Sequence[float]) -> float:
    return moved_bytes / statistics.median(seconds) / 1e9


def _random(*shape: int, device: torch.device) -> torch.Tensor:
    return torch.rand(shape, dtype=torch.bfloat16, device=device)


def _some(pool_blocks: int, blocks: int) -> torch.Tensor:
    """So many different blocks of a pool, in an order that is the same in every run."""
    return torch.randperm(pool_blocks, generator=torch.Generator().manual_seed(1))[:blocks]
