"""Slices of stored shards against cutting the whole block with numpy."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from storage_agent.errors import ShardError
from storage_agent.shards import Axis, BlockLayout, Shard, ShardSpan, check_layout, check_span, gather, slices

extents = st.lists(st.integers(1, 3), max_size=3)
workers = st.sampled_from([1, 2, 4, 8])


@settings(deadline=None)
@given(extents, extents, workers, workers, st.integers(0, 7), st.sampled_from([1, 2]))
def test_a_worker_gets_its_part_whatever_the_number_of_writers(
    slower: list[int], faster: list[int], written: int, count: int, index: int, heads: int
) -> None:
    index %= count
    axes = [Axis(f"slow{n}", extent) for n, extent in enumerate(slower)]
    axes += [Axis("head", 8 * heads)]
    axes += [Axis(f"fast{n}", extent) for n, extent in enumerate(faster)]
    layout = BlockLayout(tuple(axes), 2, "head")
    check_layout(layout)
    shape = [axis.extent for axis in axes]
    whole = np.arange(np.prod(shape), dtype=np.uint16).reshape(shape)
    stored = b"".join(np.ascontiguousarray(part).tobytes() for part in np.split(whole, written, axis=len(slower)))
    wanted = np.ascontiguousarray(np.split(whole, count, axis=len(slower))[index])
    parts = slices(layout, written, Shard(index, count))
    shard_bytes = len(stored) // written
    first, last = parts[0].shard, parts[-1].shard
    held = memoryview(stored)[first * shard_bytes : (last + 1) * shard_bytes]
    assert bytes(gather(parts, held, first)) == wanted.tobytes()
    assert sum(part.row_bytes * part.rows for part in parts) == wanted.nbytes, "no byte more than is wanted"


HEADS = BlockLayout((Axis("layer", 2), Axis("head", 8), Axis("element", 4)), 2, "head", "float16")


@pytest.mark.parametrize(
    ("written", "wanted", "said"),
    [
        (3, Shard(0, 2), "cannot be split evenly among 3 workers"),
        (2, Shard(0, 16), "cannot be split evenly among 16 workers"),
        (2, Shard(2, 2), "no worker 2 of 2"),
        (2, Shard(-1, 2), "no worker -1 of 2"),
        (0, Shard(0, 1), "among 0 workers"),
    ],
)
def test_a_split_that_does_not_add_up_is_refused(written: int, wanted: Shard, said: str) -> None:
    with pytest.raises(ShardError, match=said):
        slices(HEADS, written, wanted)


@pytest.mark.parametrize(
    ("span", "payload_bytes", "said"),
    [
        (ShardSpan(32, 0, 0), 32, "0 shards is not possible"),
        (ShardSpan(32, 0, 257), 32, "257 shards is not possible"),
        (ShardSpan(0, 0, 4), 32, "not whole shards of 0"),
        (ShardSpan(32, 0, 4), 48, "48 bytes are not whole shards"),
        (ShardSpan(32, 3, 4), 64, "2 shards from number 3 are not of 4"),
        (ShardSpan(32, -1, 4), 32, "number -1"),
        (ShardSpan(16, 0, 4), 64, "not the 128 bytes of the layout"),
    ],
)
def test_a_span_that_does_not_add_up_is_refused(span: ShardSpan, payload_bytes: int, said: str) -> None:
    with pytest.raises(ShardError, match=said):
        check_span(span, payload_bytes, HEADS)


@pytest.mark.parametrize(
    ("layout", "said"),
    [
        (BlockLayout((), 2), "has 0"),
        (BlockLayout((Axis("head", 0),), 2), "extent 0"),
        (BlockLayout((Axis("head", 1),), 17), "element_bytes is 17"),
        (BlockLayout((Axis("head", 1),), 2, "heads"), "no axis 'heads'"),
    ],
)
def test_a_layout_out_of_range_is_refused(layout: BlockLayout, said: str) -> None:
    with pytest.raises(ShardError, match=said):
        check_layout(layout)
