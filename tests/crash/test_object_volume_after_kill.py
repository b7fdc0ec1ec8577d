"""A process that dies with blocks on their way to an object store; a server that goes away and comes back."""

from __future__ import annotations

import importlib.util
import itertools
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from storage_agent import object_owner
from storage_agent.agent import StorageAgent
from storage_agent.bench_seaweed import BUCKET, SeaweedServer
from storage_agent.descriptor import VolumeDescriptor
from storage_agent.errors import VolumeError
from storage_agent.nixl_objects import NixlObjects
from storage_agent.object_bucket import Bucket
from storage_agent.object_store import ObjectStore
from storage_agent.port import Result
from storage_agent.volume import Volume
from storage_agent.volume_contract import (
    BLOCK_BYTES,
    VolumeCase,
    assert_exact,
    block,
    held,
    key,
    keys,
    payload,
    read,
    results,
)

WRITER = Path(__file__).with_name("put_objects_until_killed.py")
_spec = importlib.util.spec_from_file_location("put_objects_until_killed", WRITER)
assert _spec is not None
assert _spec.loader is not None
writer = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(writer)
_prefixes = itertools.count()
EVERY = os.environ.get("KVADVISOR_EVERY_CHANGE") == "1"


def new_case(server: SeaweedServer) -> VolumeCase:
    endpoint = server.endpoint
    made: VolumeCase = writer.case(
        endpoint.url, endpoint.access_key_file, endpoint.secret_key_file, f"crash/{next(_prefixes)}"
    )
    return made


class Killed(BaseException):
    """The process ends here: nothing that comes after is carried out."""


class Mortal:
    """Counts the requests that change something, and dies in the middle of number `dies_at`."""

    def __init__(self, dies_at: int | None) -> None:
        self.dies_at = dies_at
        self.count = 0

    def carry_out(self, items: list[Any], request: Callable[[list[Any]], Any]) -> Any:
        number, self.count = self.count, self.count + 1
        if self.dies_at is None or number < self.dies_at:
            return request(items)
        if number == self.dies_at and len(items) > 1:
            request(items[: len(items) // 2])
        raise Killed


@contextmanager
def mortal(dies_at: int | None) -> Iterator[Mortal]:
    life = Mortal(dies_at)
    put, delete, write = Bucket.put, Bucket.delete, NixlObjects.write
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Bucket, "put", lambda self, name, c: life.carry_out([name], lambda _: put(self, name, c)))
        patch.setattr(
            Bucket,
            "delete",
            lambda self, names: life.carry_out(list(names), lambda part: delete(self, part)) if names else None,
        )
        patch.setattr(
            NixlObjects, "write", lambda self, ranges: life.carry_out(list(ranges), lambda part: write(self, part))
        )
        yield life


class Said:
    """What the volume answered: `maybe` blocks were being put or deleted when it died."""

    def __init__(self) -> None:
        self.there: set[int] = set()
        self.maybe: set[int] = set()

    def put(self, volume: Volume, *numbers: int) -> None:
        self.maybe |= set(numbers)
        assert results(volume.put([block(n) for n in numbers])) == [Result.STORED] * len(numbers)
        self.maybe -= set(numbers)
        self.there |= set(numbers)

    def delete(self, volume: Volume, *numbers: int) -> None:
        self.maybe |= set(numbers)
        self.there -= set(numbers)
        assert results(volume.delete(keys(*numbers))) == [Result.DELETED] * len(numbers)
        self.maybe -= set(numbers)


def live(volume: Volume, said: Said) -> None:
    """Puts in one object and in several, deletes of parts and of the last of an object, copies, a shrink."""
    said.put(volume, 0, 1)
    said.put(volume, *range(2, 12))
    said.delete(volume, 3, 5, 7)
    said.delete(volume, 0, 1)
    said.put(volume, 20, 21)
    volume.compact()
    said.delete(volume, 20, 4)
    said.put(volume, 30)
    said.put(volume, 31)
    volume.compact()
    said.delete(volume, 30)
    volume.resize(8)
    volume.compact()


def die_at(case: VolumeCase, number: int | None) -> tuple[Said, int]:
    said = Said()
    with mortal(number) as life:
        kind, opening = _prepared(case)
        volume = kind.open(opening)
        try:
            live(volume, said)
        except Killed:
            store: ObjectStore = volume._store
            store._owner._closing.set()  # its thread dies with the process
            object_owner._held_here.discard(store._owner._held_as)
        else:
            volume.close()
    return said, life.count


def _prepared(case: VolumeCase) -> Any:
    from storage_agent.kinds import prepare

    return prepare(case.descriptor(), [], case.endpoints)


@pytest.mark.crash
def test_whatever_request_it_dies_in_acknowledged_blocks_are_there_and_nothing_is_left_over(
    seaweed: SeaweedServer,
) -> None:
    _, requests = die_at(new_case(seaweed), None)
    assert requests > 12
    for number in range(0, requests, 1 if EVERY else 2):
        case = new_case(seaweed)
        said, _ = die_at(case, number)
        with case.opened() as volume:
            found = held(volume)
            assert said.there <= found <= said.there | said.maybe, f"died in request {number}"
            assert read(volume, *found)[1] == {n: payload(n) for n in found}
            assert_exact(volume)
            volume.compact()
            assert held(volume) == found
            assert_exact(volume)
            store: Any = volume
            bucket = Bucket("contract", seaweed.endpoint, BUCKET)
            prefix = str(case.options["prefix"])
            assert len(list(bucket.list(f"{prefix}/blocks"))) == len(store._store._catalogue.objects)
            assert len(list(bucket.list(f"{prefix}/freed"))) <= len(store._store._catalogue.objects)


@pytest.mark.crash
def test_acknowledged_blocks_survive_a_kill_and_the_next_process_takes_over_at_once(seaweed: SeaweedServer) -> None:
    case = new_case(seaweed)
    endpoint = seaweed.endpoint
    arguments = [endpoint.url, endpoint.access_key_file, endpoint.secret_key_file, case.options["prefix"]]
    with subprocess.Popen(
        [sys.executable, WRITER, *map(str, arguments)], stdout=subprocess.PIPE, text=True
    ) as child:
        assert child.stdout is not None
        lines = [child.stdout.readline() for _ in range(70)]
        with pytest.raises(VolumeError, match=rf"is owned by process {child.pid} on "), case.opened():
            pass
        child.kill()
        lines += list(child.stdout)
    said = [(line.split()[0], int(line.split()[1])) for line in lines if line.endswith("\n")]
    put = {number for verb, number in said if verb == "put"}
    deleting = {number for verb, number in said if verb == "deleting"}
    deleted = {number for verb, number in said if verb == "deleted"}
    assert len(put) >= 40
    last = max(put)
    with case.opened(capacity_blocks=200) as volume:
        found = held(volume)
        wanted = {number for number in put - deleting if number > last - 40}
        assert wanted <= found
        assert not found & deleted
        assert read(volume, *found)[1] == {n: payload(n) for n in found}
        assert_exact(volume)


@pytest.mark.crash
def test_a_server_that_goes_away_is_named_others_go_on_and_it_comes_back_by_itself(tmp_path: Path) -> None:
    server = SeaweedServer(tmp_path / "server")
    server.start()
    case = new_case(server)
    near = VolumeDescriptor(id="near", kind="memory", capacity_blocks=8, block_bytes_max=BLOCK_BYTES, speed_rank=0)
    far = case.descriptor(id="far", speed_rank=1)
    buffers = [memoryview(bytearray(BLOCK_BYTES)) for _ in range(2)]
    with StorageAgent(
        "host", publisher=None, allowed_roots=[], endpoints=case.endpoints, mend_interval_s=0.1
    ) as agent:
        agent.register_volumes([near, far])
        assert results(agent.put("far", [block(1), block(2)])) == [Result.STORED] * 2
        assert results(agent.put("near", [block(3)])) == [Result.STORED]
        server.kill()
        (failed,) = agent.put("far", [block(4)])
        assert failed.result is Result.FAILED
        assert f"{server.endpoint.url}/{BUCKET}" in failed.reason
        assert results(agent.get(keys(3), buffers[:1])) == [Result.HIT], "the others go on"
        assert not agent.get(keys(1), buffers[:1])[0].result.ok
        assert next(v.degraded for v in agent.stat().volumes if v.descriptor.id == "far")
        server.start()
        deadline = time.monotonic() + 60
        while not all(outcome.result.ok for outcome in agent.get(keys(1, 2), buffers)):
            assert time.monotonic() < deadline, agent.stat()
            time.sleep(0.1)
        assert [bytes(buffer) for buffer in buffers] == [payload(1), payload(2)]
        assert results(agent.put("far", [block(5)])) == [Result.STORED]
        (stat,) = [v for v in agent.stat().volumes if v.descriptor.id == "far"]
        assert stat.degraded == ""
        assert stat.blocks + stat.slots_free == stat.descriptor.capacity_blocks
        assert agent.delete("", "far", [key(1)]).outcomes[0].result is Result.DELETED
    server.kill()
