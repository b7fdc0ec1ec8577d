"""Chains laid out in a bucket: in as few objects as they need, and the end at every request loses nothing."""

from __future__ import annotations

import threading
from dataclasses import replace
from typing import Any

import pytest

from storage_agent import object_owner
from storage_agent.bench_seaweed import BUCKET, SeaweedServer
from storage_agent.nixl_objects import NixlObjects
from storage_agent.object_bucket import Bucket
from storage_agent.port import PutBlock, Result
from storage_agent.volume import Volume
from storage_agent.volume_contract import VolumeCase, assert_exact, block, held, key, keys, payload, read, results
from tests.crash.test_object_volume_after_kill import Killed, _prepared, mortal, new_case

CHAINS = [[0, 3, 6, 9], [1, 4, 7, 10], [2, 5, 8, 11]]
EVERY_BLOCK = [n for chain in CHAINS for n in chain]


def chained(number: int) -> PutBlock:
    return replace(block(number), parent_hash=key(number - 3).sequence_hash if number >= 3 else 0)


def put_turn_by_turn(volume: Volume) -> None:
    for depth in range(4):
        assert results(volume.put([chained(n) for n in range(3 * depth, 3 * depth + 3)])) == [Result.STORED] * 3


def test_each_chain_comes_to_lie_in_one_object_and_readers_miss_nothing(seaweed: SeaweedServer) -> None:
    case = new_case(seaweed)
    with case.opened() as volume:
        put_turn_by_turn(volume)
        ended = threading.Event()
        seen: list[Result] = []

        def keep_reading() -> None:
            while not ended.is_set():
                seen.extend(results(read(volume, *EVERY_BLOCK)[0]))

        reader = threading.Thread(target=keep_reading)
        reader.start()
        report = volume.lay_out(keys(*EVERY_BLOCK))
        ended.set()
        reader.join()
        assert (report.extents_before, report.extents_after, report.moved_blocks) == (12, 3, 12)
        figures = report.fragmentation
        assert (figures.extents, figures.objects) == (figures.chains, 3), "no chain lies in two objects"
        assert figures.reclaimable_bytes == 0, "the objects that they came from are gone"
        assert set(seen) == {Result.HIT}
        assert volume.lay_out(keys(*EVERY_BLOCK)).moved_blocks == 0
        assert_exact(volume)
    with case.opened() as volume:
        assert read(volume, *EVERY_BLOCK)[1] == {n: payload(n) for n in EVERY_BLOCK}
        assert volume.lay_out(keys(*EVERY_BLOCK)).moved_blocks == 0, "it lasts"


def test_copies_that_the_server_does_not_give_back_whole_are_not_served(
    seaweed: SeaweedServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    with new_case(seaweed).opened() as volume:
        put_turn_by_turn(volume)
        with monkeypatch.context() as patch:
            whole = NixlObjects.write

            def cut(self: NixlObjects, ranges: Any) -> dict[int, str]:
                return whole(self, [part._replace(length=part.length // 2) for part in ranges])

            patch.setattr(NixlObjects, "write", cut)
            with pytest.raises(Exception, match="is not what was put"):
                volume.lay_out(keys(*EVERY_BLOCK))
        assert read(volume, *EVERY_BLOCK)[1] == {n: payload(n) for n in EVERY_BLOCK}


@pytest.mark.crash
def test_whatever_request_it_dies_in_every_block_is_there(seaweed: SeaweedServer) -> None:
    number = 0
    while die_laying_out(case := new_case(seaweed), number):
        with case.opened() as volume:
            assert held(volume) == set(EVERY_BLOCK), f"died in request {number}"
            assert read(volume, *EVERY_BLOCK)[1] == {n: payload(n) for n in EVERY_BLOCK}
            assert_exact(volume)
            volume.compact()
            store: Any = volume
            listed = list(Bucket("contract", seaweed.endpoint, BUCKET).list(f"{case.options['prefix']}/blocks"))
            assert len(listed) == len(store._store._catalogue.objects), "nothing is left over"
        number += 1
    assert number > 2


def die_laying_out(case: VolumeCase, number: int) -> bool:
    """False where it was done before that many requests."""
    kind, opening = _prepared(case)
    volume: Any = kind.open(opening)
    put_turn_by_turn(volume)
    try:
        with mortal(number):
            volume.lay_out(keys(*EVERY_BLOCK))
    except Killed:
        store = volume._store
        store._owner._closing.set()  # its thread dies with the process
        object_owner._held_here.discard(store._owner._held_as)
        return True
    volume.close()
    return False
