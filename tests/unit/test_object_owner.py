"""One writer of a volume in an object store: taken over when it is dead, never while it lives."""

from __future__ import annotations

import itertools
import threading
import time
from typing import Any

import msgspec
import pytest

from storage_agent import object_owner
from storage_agent.bench_seaweed import BUCKET, SeaweedServer
from storage_agent.descriptor import OptionValue
from storage_agent.errors import TransferError, VolumeError
from storage_agent.object_bucket import Bucket
from storage_agent.object_format import Holder, OwnerRecord, owner_name, pack_owner, unpack_owner
from storage_agent.object_owner import GENERATIONS_A_LIFE, ObjectOwner, this_process
from storage_agent.port import Result
from storage_agent.volume_contract import VolumeCase, assert_exact, block, key, read, results

_prefixes = itertools.count()
LEASE_S = 1.0


class Prefix:
    def __init__(self, bucket: Bucket) -> None:
        self.bucket = bucket
        self.prefix = f"owner/{next(_prefixes)}"

    def owner(self, volume: str = "v", lease_s: float = 60.0) -> ObjectOwner:
        return ObjectOwner(self.bucket, self.prefix, volume, lease_s)

    def record(self) -> OwnerRecord:
        found = self.bucket.get(owner_name(self.prefix))
        assert found is not None
        return unpack_owner(found[0])

    def write(self, record: OwnerRecord) -> None:
        self.bucket.put(owner_name(self.prefix), pack_owner(record))

    def held_by(self, holder: Holder, lease_s: float = LEASE_S) -> OwnerRecord:
        record = OwnerRecord(volume="v", is_open=True, holder=holder, beat=7, lease_s=lease_s, generation_next=50)
        self.write(record)
        return record


@pytest.fixture
def place(seaweed: SeaweedServer) -> Prefix:
    return Prefix(Bucket("v", seaweed.endpoint, BUCKET))


def test_the_first_owner_writes_a_record_and_gives_it_back(place: Prefix) -> None:
    owner = place.owner()
    assert owner.acquire() == 1
    owner.require()
    record = place.record()
    assert (record.is_open, record.holder, record.generation_next) == (True, this_process(), 1 + GENERATIONS_A_LIFE)
    owner.release(in_order=True, generation_next=12)
    record = place.record()
    assert (record.is_open, record.in_order, record.generation_next) == (False, True, 12)
    owner.release(in_order=True, generation_next=13)
    assert place.record() == record


def test_the_record_lives_on_while_its_owner_does(place: Prefix, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(object_owner, "_BEATS_A_LEASE", 200)
    owner = place.owner()
    owner.acquire()
    deadline = time.monotonic() + 60
    while place.record().beat < 4 and time.monotonic() < deadline:
        time.sleep(0.05)
    assert place.record().beat >= 4
    owner.require()
    owner.release(in_order=True, generation_next=2)


def test_a_second_owner_in_this_process_is_refused(place: Prefix) -> None:
    owner = place.owner()
    owner.acquire()
    with pytest.raises(VolumeError, match="is open in this process; close it first"):
        place.owner().acquire()
    owner.release(in_order=True, generation_next=2)
    second = place.owner()
    assert second.acquire() == 2
    second.release(in_order=True, generation_next=2)


def test_a_dead_process_of_this_machine_is_followed_at_once_behind_its_generations(place: Prefix) -> None:
    me = this_process()
    for dead in (msgspec.structs.replace(me, pid=2**22 + 1), msgspec.structs.replace(me, started="0"), me):
        place.held_by(dead)
        owner = place.owner()
        assert owner.acquire() == 50
        owner.release(in_order=True, generation_next=60)


def test_a_living_process_of_this_machine_is_not_followed(place: Prefix) -> None:
    parent = msgspec.structs.replace(this_process(), pid=1, started=object_owner._started(1))
    place.held_by(parent)
    with pytest.raises(VolumeError, match=r"is owned by process 1 on .*; stop it first, or be its client"):
        place.owner().acquire()


def test_a_host_whose_beat_stands_still_is_followed_after_its_lease(place: Prefix) -> None:
    place.held_by(Holder("elsewhere", "other machine", 5, "5"))
    owner = place.owner()
    before = time.monotonic()
    assert owner.acquire() == 50
    assert time.monotonic() - before >= LEASE_S
    owner.release(in_order=True, generation_next=60)


def test_a_host_whose_beat_rises_is_not_followed(place: Prefix) -> None:
    record = place.held_by(Holder("elsewhere", "other machine", 5, "5"), lease_s=60.0)
    stop = threading.Event()

    def beat() -> None:
        beats = itertools.count(record.beat + 1)
        while not stop.wait(0.1):
            place.write(msgspec.structs.replace(record, beat=next(beats)))

    beating = threading.Thread(target=beat)
    beating.start()
    with pytest.raises(VolumeError, match="is owned by process 5 on elsewhere"):
        place.owner().acquire()
    stop.set()
    beating.join()


def test_of_two_that_take_a_volume_at_once_one_gets_it(place: Prefix, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(object_owner, "_held_here", _NeverFull())
    both = threading.Barrier(2)
    got: list[ObjectOwner] = []
    refused: list[VolumeError] = []

    def take() -> None:
        owner = place.owner()
        real = owner._put

        def put(record: OwnerRecord, tag: str | None) -> bool:
            both.wait(30)
            return real(msgspec.structs.replace(record, lease_s=LEASE_S + len(threading.current_thread().name)), tag)

        owner._put = put  # type: ignore[method-assign]
        try:
            owner.acquire()
            owner._put = real  # type: ignore[method-assign]
            got.append(owner)
        except VolumeError as error:
            refused.append(error)

    threads = [threading.Thread(target=take, name="x" * n) for n in (1, 2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert (len(got), len(refused)) == (1, 1)
    assert "took it just now" in str(refused[0])
    got[0].release(in_order=True, generation_next=2)


class _NeverFull(set[str]):
    def add(self, element: str) -> None:
        pass


def test_an_owner_that_was_followed_may_write_no_more(place: Prefix) -> None:
    owner = place.owner()
    owner.acquire()
    place.held_by(Holder("elsewhere", "other machine", 5, "5"))
    with pytest.raises(TransferError, match="is owned by another process, which took it over"):
        owner.renew()
    with pytest.raises(TransferError, match="is owned by another process"):
        owner.require()
    owner.release(in_order=True, generation_next=2)
    assert place.record().holder.host == "elsewhere", "the other's record is left alone"


def test_an_owner_that_cannot_renew_stops_writing_by_its_own_clock(place: Prefix) -> None:
    owner = place.owner(lease_s=LEASE_S)
    owner.acquire()
    owner._closing.set()  # its thread stands still
    owner._keeper.join()
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        try:
            owner.require()
        except TransferError as error:
            assert "its lease of 1.0 s was not renewed" in str(error)  # noqa: PT017 - it comes when the time is over
            break
        time.sleep(0.05)
    else:
        pytest.fail("it would still write")
    owner._closing.clear()
    owner.release(in_order=True, generation_next=2)


def test_a_server_that_ignores_conditions_is_refused(place: Prefix, monkeypatch: pytest.MonkeyPatch) -> None:
    def put_anyway(self: Bucket, name: str, content: bytes, tag: str | None) -> str:
        self.put(name, content)
        return "tag"

    monkeypatch.setattr(Bucket, "put_if", put_anyway)
    with pytest.raises(VolumeError, match="puts without looking at conditions"):
        place.owner().acquire()


def test_what_is_no_record_is_left_alone(place: Prefix) -> None:
    place.bucket.put(owner_name(place.prefix), b"someone's")
    with pytest.raises(VolumeError, match=r"is not ours .* it is left alone: give another prefix"):
        place.owner().acquire()
    found = place.bucket.get(owner_name(place.prefix))
    assert found is not None
    assert found[0] == b"someone's"


def test_a_volume_that_was_taken_over_refuses_puts_and_deletes(seaweed: SeaweedServer) -> None:
    prefix = f"owner/{next(_prefixes)}"
    options: dict[str, OptionValue] = {
        "endpoint": "s", "bucket": BUCKET, "prefix": prefix, "lease_s": 1.0,
    }  # fmt: skip
    case = VolumeCase(kind="object", options=options, endpoints={"s": seaweed.endpoint})
    bucket = Bucket("contract", seaweed.endpoint, BUCKET)
    with case.opened() as volume:
        volume.put([block(1)])
        found = bucket.get(owner_name(prefix))
        assert found is not None
        other = msgspec.structs.replace(unpack_owner(found[0]), holder=Holder("elsewhere", "m", 5, "5"))
        bucket.put(owner_name(prefix), pack_owner(other))
        store: Any = volume
        with pytest.raises(TransferError):
            store._store._owner.renew()
        (refused,) = volume.put([block(2)])
        assert refused.result is Result.FAILED
        assert "is owned by another process" in refused.reason
        assert volume.delete([key(1)])[0].result is Result.FAILED
        assert "is owned by another process" in volume.stat().degraded
        assert results(read(volume, 1)[0]) == [Result.HIT], "what it knows of may still be read"
        assert_exact(volume)
