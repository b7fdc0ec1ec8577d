"""Which of a prompt's blocks the host evicts first: its tail, without which the rest is still of use."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing

import pytest

from kvbm_core.config import TierVolumes
from kvbm_core.identity import BlockIdentity
from tests.core_room import DISK, REMOTE, CoreRoom, release


@pytest.fixture(params=[{}, {"disk": DISK}, {"remote": REMOTE}], ids=["host alone", "disk", "remote"])
def room(request: pytest.FixtureRequest) -> Iterator[CoreRoom]:
    with closing(CoreRoom(host_blocks=8, reuse="lru", **request.param)) as opened:
        yield opened


def depths_left(room: CoreRoom, blocks: list[BlockIdentity]) -> list[int]:
    """Of those that the host keeps when four other blocks come to it."""
    room.compute_and_release(room.sequence(4, 70_000))
    return [block.depth for block in blocks if room.host_pool.has(block.key)]


def test_what_was_offloaded_loses_its_tail_first(room: CoreRoom) -> None:
    wanted = room.sequence(6)
    room.compute_and_release(wanted)
    assert depths_left(room, wanted) == [0, 1, 2, 3]


def test_what_was_copied_to_the_device_loses_its_tail_first(room: CoreRoom) -> None:
    wanted = room.sequence(6)
    room.compute_and_release(wanted)
    room.push_out_of_device()
    found = room.manager.onboard(wanted)
    assert found.sources == ["G2"] * 6
    release(found.blocks)
    assert depths_left(room, wanted) == [0, 1, 2, 3]


@pytest.mark.parametrize("volumes", [{"disk": DISK}, {"remote": REMOTE}], ids=["disk", "remote"])
def test_what_came_from_a_volume_loses_its_tail_first(volumes: dict[str, TierVolumes]) -> None:
    with closing(CoreRoom(host_blocks=8, reuse="lru", **volumes)) as room:
        wanted = room.sequence(6)
        room.compute_and_release(wanted)
        room.push_out_of_host()
        room.push_out_of_device()
        found = room.manager.onboard(wanted)
        assert [*volumes, *found.sources] in (["disk", *["disk"] * 6], ["remote", *["far"] * 6])
        release(found.blocks)
        assert depths_left(room, wanted) == [0, 1, 2, 3]
