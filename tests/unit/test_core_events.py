"""What the core announces, and when: folding, order, batches, snapshots, and a publisher that goes first."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import closing

import pytest

from event_plane.errors import TransportError
from event_plane.schema import BatchKind, RecordFlag
from kvbm_core.errors import ManagerClosedError
from kvbm_core.manager import KvBlockManager
from tests.core_room import DISK, PATIENCE_S, CoreRoom, low, release

COPY = RecordFlag.COPY


@pytest.fixture
def room() -> Iterator[CoreRoom]:
    with closing(CoreRoom(disk=DISK)) as opened:
        yield opened


def test_matches_of_a_block_are_folded_into_one_access_with_their_count(room: CoreRoom) -> None:
    wanted = room.sequence(2)
    release(room.compute(wanted))
    for _ in range(5):
        release(room.manager.match(wanted))
    release(room.manager.match(wanted[:1]))
    records = [record for batch in room.published() for record in batch.records]
    accesses = {int(record["sequence_hash_lo"]): int(record["hits"]) for record in records[2:]}
    assert accesses == {low(wanted[0]): 6, low(wanted[1]): 5}
    assert len(records) == 4


def test_an_access_comes_before_the_end_of_its_block(room: CoreRoom) -> None:
    (first,) = room.sequence(1)
    release(room.compute([first]))
    release(room.manager.match([first]))
    release(room.compute(room.sequence(8, 1_000)))
    told = [event[0] for event in room.events(tier=1) if event[3] == low(first)]
    assert told == ["STORE", "ACCESS", "REMOVE"]


def test_events_are_published_without_being_asked_for(room: CoreRoom) -> None:
    (first,) = room.sequence(1)
    release(room.compute([first]))
    release(room.manager.match([first]))
    seen: set[int] = set()
    deadline_s = time.monotonic() + PATIENCE_S
    while seen != {1, 3}:
        assert time.monotonic() < deadline_s
        room.publisher.flush()
        seen = {int(record["event_type"]) for batch in room.received() for record in batch.records}
        time.sleep(0.005)


def test_onboard_and_offload_are_copies_and_no_touches(room: CoreRoom) -> None:
    wanted = room.sequence(2)
    room.compute_and_release(wanted)
    room.push_out_of_device()
    before = len(room.events())
    release(room.manager.onboard(wanted).blocks)
    assert [event for event in room.events()[before:] if event[0] != "REMOVE"] == [
        *(("STORE", 1, COPY, low(identity)) for identity in wanted),
        *(("ACCESS", 2, 0, low(identity)) for identity in wanted),
    ]


def test_a_snapshot_holds_both_tiers_and_follows_what_led_to_it(room: CoreRoom) -> None:
    wanted = room.sequence(3)
    room.compute_and_release(wanted)
    room.manager.announce_snapshot()
    (chunk,) = [batch for batch in room.published()[-3:] if batch.kind is BatchKind.SNAPSHOT_CHUNK]
    placed = {(int(record["tier"]), int(record["sequence_hash_lo"])) for record in chunk.records}
    assert placed == {(tier, low(identity)) for tier in (1, 2) for identity in wanted}


def test_a_publisher_that_goes_first_costs_its_events_and_nothing_else(room: CoreRoom) -> None:
    room.publisher.close()
    wanted = room.sequence(2)
    room.compute_and_release(wanted)
    room.push_out_of_device()
    found = room.manager.onboard(wanted)
    assert all(room.is_right(block) for block in found.blocks)
    release(found.blocks)
    room.manager.flush_events()
    assert room.manager.totals().events_lost > 0


def test_a_manager_that_cannot_be_opened_leaves_no_thread(room: CoreRoom) -> None:
    room.publisher.close()
    before = set(threading.enumerate())
    with pytest.raises(TransportError):
        KvBlockManager(room.config, room.publisher, room.agent)
    assert not [thread.name for thread in set(threading.enumerate()) - before if thread.name.startswith("kvbm")]


def test_a_forked_process_is_told_to_open_its_own_manager_and_ends_nothing_of_its_parents(room: CoreRoom) -> None:
    held = room.compute(room.sequence(2))
    pid = os.fork()
    if pid == 0:  # no pytest in the child
        signal.alarm(60)
        said = ""
        try:
            room.manager.onboard(room.sequence(2))
        except ManagerClosedError as error:
            said = str(error)
        room.manager.close()
        os._exit(0 if "before this process was forked" in said else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    assert room.manager.onboard(room.sequence(2)).sources == ["G1", "G1"]
    assert all(map(room.is_right, held))
    assert "CLEAR" not in {event[0] for event in room.events()}


def test_a_closed_manager_leaves_no_thread_and_no_memory_of_its_own(room: CoreRoom) -> None:
    before = {thread for thread in threading.enumerate() if thread.name.startswith("kvbm")}
    with KvBlockManager(room.config, room.publisher, room.agent) as manager:
        view = manager.device_tensor
        view[:] = 1.0
    assert {thread for thread in threading.enumerate() if thread.name.startswith("kvbm")} == before
    assert float(view.sum()) == view.numel()
