"""Real NIXL transfers between memory and a real S3 server: what of it must be handled, and that ranges can be read."""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Iterator

import pytest

from storage_agent.bench_seaweed import BUCKET, SeaweedServer
from storage_agent.endpoints import Endpoint
from storage_agent.errors import TransferError
from storage_agent.nixl_objects import NixlObjects, ObjectLanes, ObjectRange
from storage_agent.object_bucket import Bucket
from tests.ports import free_ports

KIB = 1024
CONTENT = bytes(range(256)) * (4 * KIB)
_names = itertools.count()


@pytest.fixture
def bucket(seaweed: SeaweedServer) -> Bucket:
    return Bucket("test", seaweed.endpoint, BUCKET)


@pytest.fixture
def objects(bucket: Bucket) -> Iterator[NixlObjects]:
    made = NixlObjects("test", bucket.nixl_parameters, staging_bytes=2 * 1024 * KIB, deadline_s=30)
    yield made
    made.close()


@pytest.fixture
def name() -> str:
    return f"nixl/{next(_names)}"


def test_several_objects_are_put_whole_and_their_ranges_read(objects: NixlObjects, bucket: Bucket, name: str) -> None:
    objects.staging[: len(CONTENT)] = CONTENT
    puts = [ObjectRange(f"{name}-{n}", 0, 100 * KIB, n * 100 * KIB) for n in range(5)]
    assert objects.write(puts) == {}
    for n in range(5):
        found = bucket.get(f"{name}-{n}")
        assert found is not None
        assert found[0] == CONTENT[n * 100 * KIB : (n + 1) * 100 * KIB]
    at = 1024 * KIB
    parts = [
        ObjectRange(f"{name}-3", 4096, 5000, at),
        ObjectRange(f"{name}-0", 1, 7, at + 8192),
        ObjectRange(f"{name}-3", 90_000, 12_400, at + 16384),  # to its very end
    ]
    assert objects.read(parts) == {}
    start = 3 * 100 * KIB
    assert bytes(objects.staging[at : at + 5000]) == CONTENT[start + 4096 : start + 9096]
    assert bytes(objects.staging[at + 8192 : at + 8199]) == CONTENT[1:8]
    assert bytes(objects.staging[at + 16384 : at + 28784]) == CONTENT[start + 90_000 : start + 102_400]


def test_an_object_shorter_than_asked_is_no_error_but_its_missing_end_is_spoilt(
    objects: NixlObjects, bucket: Bucket, name: str
) -> None:
    bucket.put(name, CONTENT[:10_000])
    objects.staging[:10_100] = CONTENT[:10_100]  # as an earlier read would have left it
    objects.spoil(10_100)
    assert objects.read([ObjectRange(name, 0, 10_100, 0)]) == {}
    assert bytes(objects.staging[:10_000]) == CONTENT[:10_000]
    assert bytes(objects.staging[:10_100]) != CONTENT[:10_100]


def test_a_missing_object_fails_alone_and_the_others_are_read_whole(
    objects: NixlObjects, bucket: Bucket, name: str
) -> None:
    """One handle an object: an error of one must not end the wait for those that are still being written."""
    large = CONTENT * 1
    for n in range(6):
        bucket.put(f"{name}-{n}", large[: 160 * KIB])
    ranges = [ObjectRange(f"{name}-{n}", 0, 160 * KIB, n * 160 * KIB) for n in range(6)]
    ranges.insert(0, ObjectRange(f"{name}-none", 0, 160 * KIB, 6 * 160 * KIB))
    ranges.insert(3, ObjectRange(f"{name}-0", 161 * KIB, 5, 7 * 160 * KIB))  # behind its end
    failures = objects.read(ranges)
    assert set(failures) == {0, 3}
    assert all(failures.values())
    for n in range(6):
        assert bytes(objects.staging[n * 160 * KIB : (n + 1) * 160 * KIB]) == large[: 160 * KIB]
    assert b"NoSuchKey" in bytes(objects.staging[6 * 160 * KIB : 6 * 160 * KIB + 500]), "its text is in the memory"


def test_an_object_put_again_under_its_name_is_read_as_it_is_now(
    objects: NixlObjects, bucket: Bucket, name: str
) -> None:
    for content in (CONTENT[:5000], CONTENT[100:5100]):
        objects.staging[:5000] = content
        assert objects.write([ObjectRange(name, 0, 5000, 0)]) == {}
        assert objects.read([ObjectRange(name, 0, 5000, 8192)]) == {}
        assert bytes(objects.staging[8192:13192]) == content


def test_a_dead_endpoint_is_given_up_after_a_few_attempts(name: str) -> None:
    (port,) = free_ports(1)
    bucket = Bucket("test", Endpoint(url=f"http://127.0.0.1:{port}"), BUCKET)
    keys = {"access_key": "a", "secret_key": "b"}
    objects = NixlObjects("dead", bucket.nixl_parameters | keys, staging_bytes=4096, deadline_s=20)
    failures = objects.read([ObjectRange(name, 0, 100, 0)])  # else the deadline would raise
    assert failures[0]
    objects.close()
    with pytest.raises(TransferError, match=rf"{port}/{BUCKET} does not look at {name}"):
        bucket.size_bytes(name)


def test_after_a_deadline_fresh_memory_takes_the_place_of_what_may_still_be_written(
    seaweed: SeaweedServer, bucket: Bucket, name: str
) -> None:
    bucket.put(name, CONTENT[:5000])
    objects = NixlObjects("late", bucket.nixl_parameters, staging_bytes=8192, deadline_s=0)
    before = objects.staging
    with pytest.raises(TransferError, match=r"no answer in 0 s") as caught:
        objects.read([ObjectRange(name, 0, 5000, 0)])
    assert caught.value.in_doubt
    objects.staging[:4] = b"mine"
    deadline = time.monotonic() + 60
    while bytes(before[:4992]) != CONTENT[:4992] and time.monotonic() < deadline:
        time.sleep(0.01)
    assert bytes(before[:4992]) == CONTENT[:4992], "it was still under way"
    assert bytes(objects.staging[:4]) == b"mine"
    objects.close()


def test_a_closed_one_and_one_of_another_process_are_refused(
    objects: NixlObjects, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        patch.setattr("os.getpid", lambda: 1)
        with pytest.raises(TransferError, match="NIXL cannot be used after a fork"):
            objects.read([ObjectRange(name, 0, 1, 0)])
    objects.close()
    with pytest.raises(TransferError, match="closed"):
        objects.read([ObjectRange(name, 0, 1, 0)])


def test_lanes_are_made_when_needed_and_never_shared(bucket: Bucket) -> None:
    made: list[NixlObjects] = []

    def make() -> NixlObjects:
        made.append(NixlObjects("lane", bucket.nixl_parameters, staging_bytes=4096, deadline_s=30))
        return made[-1]

    lanes = ObjectLanes(make, 2)
    for _ in range(3):
        with lanes.lane() as lane:
            assert lane is made[0]
    both = threading.Barrier(2)
    used: list[NixlObjects] = []

    def use() -> None:
        with lanes.lane() as lane:
            both.wait(30)
            used.append(lane)

    threads = [threading.Thread(target=use) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(made) == 2
    assert used[0] is not used[1]
    lanes.close()
