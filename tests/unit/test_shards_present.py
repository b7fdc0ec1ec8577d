"""A block that is there with some workers' shards is not said to be there with another's."""

from __future__ import annotations

from contextlib import closing

import pytest

from storage_agent.agent import StorageAgent
from storage_agent.port import PutBlock, Result
from storage_agent.shards import ShardSpan, lacking
from tests.core_room import DISK, CoreRoom, release


@pytest.mark.parametrize(
    ("put", "put_bytes", "has"),
    [
        (ShardSpan(10, 0, 4), 20, True),
        (ShardSpan(10, 1, 4), 10, True),
        (ShardSpan(20, 0, 2), 20, True),
        (ShardSpan(5, 3, 8), 5, True),
        (ShardSpan(5, 4, 8), 5, False),
        (ShardSpan(10, 1, 4), 20, False),
        (ShardSpan(20, 1, 2), 20, False),
        (None, 40, False),
    ],
)
def test_shards_are_compared_whatever_their_number(put: ShardSpan | None, put_bytes: int, has: bool) -> None:
    assert (lacking(ShardSpan(10, 0, 4), 20, put, put_bytes) == "") is has
    assert lacking(None, 40, put, put_bytes) == ""


def test_a_second_workers_shards_are_refused_and_counted_instead_of_lost_as_present() -> None:
    with closing(CoreRoom(disk=DISK, heads=4, tensor_parallel_size=2, tensor_parallel_rank=1)) as room:
        wanted = room.sequence(1)
        agent: StorageAgent = room.agent
        other = PutBlock(
            wanted[0].key,
            wanted[0].namespace,
            memoryview(bytes(room.config.block_bytes)),
            span=ShardSpan(room.config.block_bytes, 0, 2),
            layout=room.config.block_layout,
        )
        assert [agent.put("disk", [other])[0].result for _ in range(2)] == [Result.STORED, Result.PRESENT]
        release(room.compute(wanted))
        room.manager.offload(1)
        totals = room.manager.totals()
        assert (totals.put, totals.put_refused) == ({}, {Result.FAILED: 1})
