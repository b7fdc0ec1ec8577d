"""Layouts drawn at random: what they cover, and that workers of any tensor-parallel size find their heads in them."""

from __future__ import annotations

import ctypes
from itertools import pairwise

import msgspec
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from event_plane.schema import Tier
from kvbm_core.config import KvbmConfig
from kvbm_core.errors import LayoutError, LayoutFormatError
from kvbm_core.layout import DTYPE_BYTES, LayerSeparateLayout, PoolLayout
from kvbm_core.serialized_layout import SerializedLayout, decode_layout, peers_for, runs_between
from kvbm_core.storage import TensorStorage, open_blocks
from tests.examples import examples

ORDERS = ("NHD", "HND", "universal")
SEPARATE = ("layer_separate_block_first", "layer_separate_outer_first")
places = st.one_of(
    st.tuples(st.just("fully_contiguous"), st.sampled_from(ORDERS)),
    st.tuples(st.sampled_from(SEPARATE), st.sampled_from(ORDERS[:2])),
)


@st.composite
def configs(draw: st.DrawFn, **fixed: object) -> KvbmConfig:
    kind, order = draw(places)
    return KvbmConfig(
        **{
            "layers": draw(st.integers(1, 3)),
            "outer": draw(st.integers(1, 2)),
            "page_tokens": draw(st.integers(1, 4)),
            "heads": draw(st.sampled_from([1, 2, 4, 6])),
            "head_dim": draw(st.integers(1, 3)),
            "dtype": draw(st.sampled_from(sorted(DTYPE_BYTES))),
            "device_blocks": draw(st.integers(1, 4)),
            "device_layout": kind,
            "device_order": order,
            "alignment_bytes": draw(st.sampled_from([1, 4, 32, 4_096])),
            "hash_secret": "a secret of the tests",
        }
        | fixed
    )


def open_pool(layout: PoolLayout) -> TensorStorage:
    return open_blocks(layout, "system", Tier.G1, "device:0", setting="device_blocks")


@settings(max_examples=examples(60), deadline=None)
@given(configs())
def test_regions_of_blocks_never_overlap_and_cover_every_byte_of_every_block(config: KvbmConfig) -> None:
    layout = config.device_pool_layout
    taken: list[tuple[int, int, int]] = []
    for block in range(layout.blocks):
        regions = layout.regions(block)
        assert sum(region.bytes for region in regions) == layout.block_bytes == config.block_bytes
        taken += [(buffer, offset, offset + size) for buffer, offset, size in regions]
        assert all(region.offset % config.alignment_bytes == 0 for region in regions)
    taken.sort()
    for (buffer, _, end), (next_buffer, start, _) in pairwise(taken):
        assert buffer < next_buffer or end <= start
    assert all(0 <= buffer < layout.buffers for buffer, _, _ in taken)
    assert max(end for _, _, end in taken) <= layout.buffer_bytes
    buffers, offsets, lengths = layout.regions_of(range(layout.blocks))
    assert sorted(zip(buffers.tolist(), offsets.tolist(), (offsets + lengths).tolist(), strict=True)) == taken


@settings(max_examples=examples(60), deadline=None)
@given(configs())
def test_every_view_is_the_memory_itself_and_each_element_has_one_place(config: KvbmConfig) -> None:
    layout = config.device_pool_layout
    storage = open_pool(layout)
    for layer, tensor in enumerate(storage.layer_tensors):
        memory = storage.memory[layer if layout.buffers > 1 else 0]
        assert memory.address <= tensor.data_ptr() < memory.address + memory.size_bytes
        assert tensor.shape == (layout.blocks, layout.outer, layout.page_tokens, layout.heads, layout.head_dim)
    for block in range(layout.blocks):
        for layer in range(layout.layers):
            view = storage.layer_view(block, layer)
            assert view.data_ptr() == storage.layer_tensors[layer][block].data_ptr()
            assert view[-1].data_ptr() == storage.outer_view(block, layer, layout.outer - 1).data_ptr()
            view.view(torch.uint8).fill_(block + 1)
    for block in range(layout.blocks):
        for buffer, offset, size in layout.regions(block):
            assert (storage.memory[buffer].flat[offset : offset + size] == block + 1).all()
    inside = sum(int((memory.flat != 0).sum()) for memory in storage.memory)
    assert inside == layout.blocks * layout.block_bytes
    by_tensor = sum(int((tensor.contiguous().view(torch.uint8) != 0).sum()) for tensor in storage.tensors)
    assert by_tensor == inside


@settings(max_examples=examples(60), deadline=None)
@given(configs(layers=2, dtype="int8", device_blocks=2))
def test_a_blocks_views_and_payload_agree(config: KvbmConfig) -> None:
    layout = config.device_pool_layout
    storage = open_pool(layout)
    numbers = torch.arange(layout.block_bytes, dtype=torch.int32).to(torch.int8)
    shape = (layout.layers, layout.outer, layout.page_tokens, layout.heads, layout.head_dim)
    whole = numbers.reshape(shape)
    for layer in range(layout.layers):
        storage.layer_view(1, layer)[:] = whole[layer]
    if isinstance(layout, LayerSeparateLayout):
        for read in (lambda: storage.tensor, lambda: storage.block_view(1), lambda: storage.payload(1)):
            with pytest.raises(LayoutError, match="device:0"):
                read()
        return
    assert torch.equal(storage.block_view(1), whole)
    assert storage.block_view(1).data_ptr() == storage.tensor[1].data_ptr()
    assert torch.equal(torch.frombuffer(storage.payload(1), dtype=torch.int8), storage.tensor[1].reshape(-1))
    axes = {"NHD": (0, 1, 2, 3, 4), "HND": (0, 1, 3, 2, 4), "universal": (3, 0, 1, 2, 4)}[layout.order]
    assert bytes(storage.payload(1)) == whole.permute(axes).contiguous().numpy().tobytes()


def fill(storage: TensorStorage, config: KvbmConfig, block: int, whole: torch.Tensor) -> None:
    """`whole` is `[layers, outer, tokens, all heads, head_dim]`; a worker holds its heads of it."""
    first = config.shard.index * config.shard_heads
    for layer in range(config.layers):
        storage.layer_view(block, layer)[:] = whole[layer, :, :, first : first + config.shard_heads]


def read_runs(theirs: SerializedLayout, their_block: int, ours: SerializedLayout, our_block: int) -> None:
    """Copy what `runs_between` says, by addresses, as a NIXL transfer would."""
    runs = runs_between(theirs, ours)
    sources = theirs.addresses(runs.their_buffers, runs.their_offsets, [their_block])
    targets = ours.addresses(runs.our_buffers, runs.our_offsets, [our_block])
    assert len(sources) == len(targets)
    for source, target in zip(sources.tolist(), targets.tolist(), strict=True):
        _memory(target, runs.run_bytes)[:] = _memory(source, runs.run_bytes)


def _memory(address: int, size_bytes: int) -> np.ndarray[tuple[int], np.dtype[np.uint8]]:
    return np.ctypeslib.as_array((ctypes.c_uint8 * size_bytes).from_address(address))


@settings(max_examples=examples(60), deadline=None)
@given(data=st.data(), written=st.sampled_from([1, 2, 4, 8]), read=st.sampled_from([1, 2, 4, 8]))
def test_workers_of_any_size_find_their_heads_in_the_pools_of_workers_of_any_other(
    data: st.DataObject, written: int, read: int
) -> None:
    first = data.draw(configs(heads=4, dtype="int8", device_blocks=2))
    same = {name: getattr(first, name) for name in ("layers", "outer", "page_tokens", "head_dim", "heads", "dtype")}
    whole = torch.randint(-128, 128, (first.layers, first.outer, first.page_tokens, 4, first.head_dim)).to(torch.int8)

    def worker(rank: int, size: int) -> tuple[KvbmConfig, TensorStorage, SerializedLayout]:
        config = data.draw(configs(**same, device_blocks=2, tensor_parallel_rank=rank, tensor_parallel_size=size))
        pool = open_pool(config.device_pool_layout)
        told = pool.serialized(config)
        assert decode_layout(told.encode()) == told
        return config, pool, told

    writers = [worker(rank, written) for rank in range(written)]
    for config, pool, _ in writers:
        fill(pool, config, 1, whole)
    told = [layout for _, _, layout in writers]
    config, pool, ours = worker(data.draw(st.integers(0, read - 1)), read)
    chosen = peers_for(ours, told)
    assert len(chosen) <= max(1, config.shard_heads)
    for peer in chosen:
        read_runs(told[peer], 1, ours, 0)
    start = config.shard.index * config.shard_heads
    for layer in range(config.layers):
        assert torch.equal(pool.layer_view(0, layer), whole[layer, :, :, start : start + config.shard_heads])
    assert not any(bool(memory.any()) for memory in (pool.layer_view(1, layer) for layer in range(config.layers)))


@settings(max_examples=examples(150), deadline=None)
@given(st.binary(max_size=80), st.data())
def test_bytes_that_are_no_layout_give_a_named_error_and_never_a_layout_outside_its_buffers(
    garbage: bytes, data: st.DataObject
) -> None:
    with pytest.raises(LayoutFormatError):
        decode_layout(garbage)
    config = data.draw(configs())
    sound = open_pool(config.device_pool_layout).serialized(config)
    fields = msgspec.to_builtins(sound)
    name = data.draw(st.sampled_from([n for n, value in fields.items() if isinstance(value, int)]))
    fields[name] = data.draw(st.integers(-(1 << 63), (1 << 64) - 1))
    fields["strides"] = [
        data.draw(st.sampled_from([stride, stride, 0, stride - 1, stride * 2, (1 << 63)])) for stride in sound.strides
    ]
    raw = msgspec.msgpack.encode(fields | {"strides": [max(0, stride) for stride in fields["strides"]]})
    try:
        found = decode_layout(raw)
    except LayoutFormatError:
        return
    ends = found.addresses(
        np.zeros(1, dtype=np.int64),
        np.array([found.strides.head * (found.heads - 1) + found.head_dim * found.element_bytes]),
        [found.blocks - 1],
    )
    assert ends[0] <= found.buffers[0].address + found.buffers[0].size_bytes
