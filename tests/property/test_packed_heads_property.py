"""Heads of a block packed by byte ranges of any pool's memory, and unpacked: the elements they are."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kvbm_core.config import KvbmConfig
from kvbm_core.packed_heads import PackedHeads, heads_in, put_heads_in
from kvbm_core.storage import TensorStorage, open_device
from tests.examples import examples

PLACES = st.sampled_from(
    [
        ("NHD", "fully_contiguous"),
        ("HND", "fully_contiguous"),
        ("universal", "fully_contiguous"),
        ("NHD", "layer_separate_block_first"),
        ("HND", "layer_separate_outer_first"),
    ]
)


@st.composite
def pools(draw: st.DrawFn) -> tuple[TensorStorage, KvbmConfig]:
    order, layout = draw(PLACES)
    size = draw(st.sampled_from([1, 2, 4]))
    numbers: dict[str, Any] = {
        "device_order": order,
        "device_layout": layout,
        "layers": draw(st.integers(1, 3)),
        "outer": draw(st.integers(1, 2)),
        "page_tokens": draw(st.integers(1, 4)),
        "heads": 4 * draw(st.integers(1, 2)),
        "head_dim": draw(st.integers(1, 5)),
        "dtype": draw(st.sampled_from(["float16", "float32", "float8_e4m3fn", "int8"])),
        "alignment_bytes": draw(st.sampled_from([4, 64])),
        "tensor_parallel_size": size,
        "tensor_parallel_rank": draw(st.integers(0, size - 1)),
    }
    config = KvbmConfig(device_blocks=3, hash_secret="sixteen characters", **numbers)
    storage = open_device(config.device_pool_layout)
    for at, each in enumerate(storage.memory):
        each.flat.copy_(torch.from_numpy(np.random.default_rng(at).integers(0, 256, each.size_bytes, dtype=np.uint8)))
    return storage, config


def ranges(storage: TensorStorage, packed: PackedHeads, block: int) -> list[tuple[np.ndarray[Any, Any], int]]:
    """The owner's memory of each byte range, and where it lies in the packed bytes."""
    runs = packed.runs
    start = block * packed.theirs.strides.block
    found = []
    for buffer, offset, ours in zip(runs.their_buffers, runs.their_offsets, runs.our_offsets, strict=True):
        at = start + int(offset)
        found.append((storage.memory[buffer].flat.numpy()[at : at + runs.run_bytes], int(ours)))
    return found


@settings(max_examples=examples(40), deadline=None)
@given(pools(), st.integers(0, 2), st.data())
def test_heads_read_by_ranges_are_those_of_the_block_and_written_back_are_the_same(
    pool: tuple[TensorStorage, KvbmConfig], block: int, data: st.DataObject
) -> None:
    storage, config = pool
    theirs = storage.serialized(config)
    first = data.draw(st.integers(0, theirs.heads - 1))
    count = data.draw(st.integers(1, theirs.heads - first))
    packed = PackedHeads(theirs, theirs.first_head + first, count)
    memory = bytearray(packed.size_bytes)
    covered = 0
    for their_bytes, ours in ranges(storage, packed, block):
        memory[ours : ours + len(their_bytes)] = their_bytes.tobytes()
        covered += len(their_bytes)
    assert covered == packed.size_bytes
    heads = packed.unpack(memoryview(memory))
    assert np.array_equal(heads, heads_in(storage, block, first, count))
    for layer in range(config.layers):
        lying = storage.layer_view(block, layer)[:, :, first : first + count].view(torch.uint8).numpy()
        assert np.array_equal(heads[:, layer], lying.transpose(2, 0, 1, 3))

    again = bytearray(packed.size_bytes)
    packed.pack(heads, memoryview(again))
    assert again == memory
    everything = [each.flat.clone() for each in storage.memory]
    put_heads_in(storage, block, first, heads)
    for before, each in zip(everything, storage.memory, strict=True):
        assert torch.equal(before, each.flat)
    other = (block + 1) % 3
    put_heads_in(storage, other, first, heads)
    assert np.array_equal(heads_in(storage, other, first, count), heads)
