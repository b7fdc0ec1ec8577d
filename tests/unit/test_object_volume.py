"""Volumes of kind `object` on a real S3 server: packing, damage, recovery, expiry, compaction."""

from __future__ import annotations

import itertools
import threading
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import pytest
from typer.testing import CliRunner

from storage_agent.bench_seaweed import BUCKET, SeaweedServer
from storage_agent.block_header import PAGE_BYTES
from storage_agent.descriptor import OptionValue
from storage_agent.endpoints import Endpoint
from storage_agent.errors import VolumeError
from storage_agent.kinds import inspect_volume, prepare
from storage_agent.object_bucket import Bucket
from storage_agent.object_format import ObjectIndex, blocks_name, freed_name, pack_index, unpack_index
from storage_agent.object_store import ObjectStore
from storage_agent.object_volume import ObjectVolume
from storage_agent.port import Result
from storage_agent.volume import Volume
from storage_agent.volume_contract import (
    BLOCK_BYTES,
    CAPACITY,
    LAYOUT,
    NAMESPACE,
    PutBlock,
    ShardSpan,
    Told,
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
from storage_agent.volumes_command import app as volumes_app
from tests.ports import free_ports

_prefixes = itertools.count()


class Store:
    """A volume's part of the bucket, as anyone with the keys sees it."""

    def __init__(self, endpoint: Endpoint, **options: Any) -> None:
        self.prefix = f"unit/{next(_prefixes)}"
        self.endpoint = endpoint
        self.bucket = Bucket("contract", endpoint, BUCKET)
        self.case = VolumeCase(
            kind="object",
            options={"endpoint": "store", "bucket": BUCKET, "prefix": self.prefix, **options},
            endpoints={"store": endpoint},
        )

    def with_options(self, **options: Any) -> VolumeCase:
        return VolumeCase(kind="object", options={**self.case.options, **options}, endpoints=self.case.endpoints)

    def names(self, folder: str = "blocks") -> list[str]:
        return sorted(listed.name for listed in self.bucket.list(f"{self.prefix}/{folder}"))

    def content(self, name: str) -> bytes:
        found = self.bucket.get(name)
        assert found is not None
        return found[0]

    def indexes(self) -> list[ObjectIndex]:
        return [unpack_index(self.content(name), int(name[-16:], 16)) for name in self.names()]


@pytest.fixture
def store(seaweed: SeaweedServer) -> Store:
    return Store(seaweed.endpoint)


@pytest.fixture
def volume(store: Store) -> Iterator[Volume]:
    with store.case.opened() as opened:
        yield opened


def numbers(index: ObjectIndex) -> list[int]:
    return [stored.header.key.sequence_hash >> 64 for stored in index.blocks]


# Packing


def test_a_batch_is_one_object_with_an_index_of_its_blocks(store: Store, volume: Volume) -> None:
    volume.put([block(n) for n in range(5)])
    (name,) = store.names()
    (index,) = store.indexes()
    assert name == blocks_name(store.prefix, index.mark)
    assert numbers(index) == [0, 1, 2, 3, 4]
    content = store.content(name)
    assert len(content) == index.object_bytes
    for stored in index.blocks:
        number = stored.header.key.sequence_hash >> 64
        assert content[stored.offset + PAGE_BYTES : stored.end] == payload(number)
        assert abs(stored.stored_ms / 1000 - time.time()) < 60


def test_a_batch_larger_than_an_object_is_several(seaweed: SeaweedServer) -> None:
    store = Store(seaweed.endpoint, object_bytes=65536)
    with store.case.opened(block_bytes_max=100_000) as volume:
        sizes = [30_000, 30_000, 100_000, 20_000, 30_000]
        assert results(volume.put([block(n, size) for n, size in enumerate(sizes)])) == [Result.STORED] * 5
        assert sorted(numbers(index) for index in store.indexes()) == [[0], [1], [2], [3, 4]] or sorted(
            numbers(index) for index in store.indexes()
        ) == [[0, 1], [2], [3, 4]]
        assert read(volume, *range(5))[1] == {n: payload(n, size) for n, size in enumerate(sizes)}


def test_a_read_asks_for_the_range_of_its_block_only(
    store: Store, volume: Volume, monkeypatch: pytest.MonkeyPatch
) -> None:
    from storage_agent.nixl_objects import NixlObjects

    span = ShardSpan(BLOCK_BYTES // 4, 0, 4)
    sharded = PutBlock(key(9), NAMESPACE, memoryview(payload(9)), span=span, layout=LAYOUT)
    volume.put([*(block(n) for n in range(4)), sharded])
    asked: list[int] = []
    real = NixlObjects.read

    def watch(self: NixlObjects, ranges: Any) -> dict[int, str]:
        asked.extend(part.length for part in ranges)
        return real(self, ranges)

    monkeypatch.setattr(NixlObjects, "read", watch)
    assert read(volume, 2)[1] == {2: payload(2)}
    assert asked == [PAGE_BYTES + BLOCK_BYTES]
    del asked[:]
    assert read(volume, 3, 0, 2, 1)[1] == {n: payload(n) for n in range(4)}
    assert asked == [4 * (PAGE_BYTES + BLOCK_BYTES)], "neighbours come by one range"
    del asked[:]
    from storage_agent.shards import Shard

    assert results(read(volume, 9, wanted=Shard(3, 4))[0]) == [Result.HIT]
    assert asked == [PAGE_BYTES, BLOCK_BYTES // 4]


# Freed


def test_what_is_freed_of_an_object_is_said_beside_it_until_all_of_it_is(store: Store) -> None:
    with store.case.opened() as volume:
        volume.put([block(n) for n in range(3)])
        (name,) = store.names()
        assert results(volume.delete(keys(1))) == [Result.DELETED]
        assert store.names("freed") == [name.replace("/blocks/", "/freed/")]
    with store.case.opened() as volume:
        assert held(volume) == {0, 2}
        assert_exact(volume)
        volume.delete(keys(0, 2))
        assert (store.names(), store.names("freed")) == ([], [])
    with store.case.opened() as volume:
        assert held(volume) == set()
        assert_exact(volume)


def test_generations_go_on_after_everything_was_deleted(store: Store) -> None:
    seen: list[int] = []
    for _ in range(3):
        with store.case.opened() as volume:
            volume.put([block(1)])
            seen.append(volume.live_headers()[0].generation)
            volume.delete(keys(1))
    assert seen == sorted(set(seen))


# Damage


def test_an_object_that_is_gone_is_corrupt_and_says_so(store: Store, volume: Volume) -> None:
    volume.put([block(1), block(2)])
    (name,) = store.names()
    store.bucket.delete([name])
    reads, taken = read(volume, 1, 2)
    assert results(reads) == [Result.CORRUPT] * 2
    assert reads[0].outcome.reason == f"CorruptBlock: object {name} is gone"
    assert taken == {}
    assert results(volume.put([block(1)])) == [Result.STORED]
    assert read(volume, 1)[1] == {1: payload(1)}
    assert volume.stat().degraded == "", "the server answered"
    assert_exact(volume)


@pytest.mark.parametrize("cut", ["to a byte", "in the index", "in the first", "in the second", "by a byte"])
def test_a_truncated_object_loses_the_blocks_behind_the_cut_only(store: Store, volume: Volume, cut: str) -> None:
    volume.put([block(1), block(2)])
    read(volume, 1, 2)  # the right bytes are in the staging memory now
    (name,) = store.names()
    (index,) = store.indexes()
    first, second = index.blocks
    left = {
        "to a byte": 1,
        "in the index": 100,
        "in the first": first.end - 1000,
        "in the second": second.offset + 10,
        "by a byte": second.end - 1,
    }[cut]
    store.bucket.put(name, store.content(name)[:left])
    reads, taken = read(volume, 1, 2)
    is_whole = left >= first.end
    assert results(reads) == [Result.HIT if is_whole else Result.CORRUPT, Result.CORRUPT]
    assert taken == ({1: payload(1)} if is_whole else {})


def test_objects_that_were_swapped_or_replaced_are_caught(store: Store, volume: Volume) -> None:
    volume.put([block(1)])
    (first,) = store.names()
    volume.put([block(2)])
    (second,) = set(store.names()) - {first}
    one, two = store.content(first), store.content(second)
    store.bucket.put(first, two)
    store.bucket.put(second, one)
    reads, taken = read(volume, 1, 2)
    assert results(reads) == [Result.CORRUPT] * 2
    assert taken == {}


def test_a_stale_object_with_an_older_generation_of_the_same_block_is_caught(store: Store, volume: Volume) -> None:
    volume.put([block(1)])
    (old,) = store.names()
    content = store.content(old)
    volume.delete(keys(1))
    volume.put([block(1)])
    (new,) = store.names()
    store.bucket.put(new, content)
    assert results(read(volume, 1)[0]) == [Result.CORRUPT]


def test_every_flipped_byte_of_a_block_is_caught(store: Store, volume: Volume) -> None:
    volume.put([block(n, 50) for n in range(6)])
    (name,) = store.names()
    (index,) = store.indexes()
    content = bytearray(store.content(name))
    places = [0, 9, 40, PAGE_BYTES - 1, PAGE_BYTES, PAGE_BYTES + 49]
    for stored, place in zip(index.blocks, places, strict=True):
        content[stored.offset + place] ^= 1
    store.bucket.put(name, bytes(content))
    reads, taken = read(volume, *range(6))
    assert results(reads) == [Result.CORRUPT] * 6
    assert taken == {}


# Recovery


def test_recovery_deletes_what_is_torn_or_orphaned_and_leaves_what_is_not_ours(store: Store) -> None:
    with store.case.opened() as volume:
        volume.put([block(1)])
        volume.put([block(2)])
    torn, whole = store.names()
    number = {name: numbers(index)[0] for name, index in zip(store.names(), store.indexes(), strict=True)}
    content = bytearray(store.content(torn))
    content[60] ^= 1
    store.bucket.put(torn, bytes(content))
    stranger = f"{store.prefix}/blocks/00000000deadbeef"
    store.bucket.put(stranger, b"the diary of someone else, longer than a head of ours is")
    store.bucket.put(f"{store.prefix}/blocks/README", b"a name that is none of ours")
    store.bucket.put(freed_name(store.prefix, 77), b"of an object that is gone")
    with store.case.opened() as volume:
        assert held(volume) == {number[whole]}
        assert store.names() == sorted([whole, stranger, f"{store.prefix}/blocks/README"])
        assert store.names("freed") == []
        assert volume.compact() == 0
        assert stranger in store.names()
        assert_exact(volume)


def test_recovery_serves_the_blocks_before_a_cut(store: Store) -> None:
    with store.case.opened() as volume:
        volume.put([block(n) for n in range(4)])
    (name,) = store.names()
    (index,) = store.indexes()
    store.bucket.put(name, store.content(name)[: index.blocks[2].end - 1])
    with store.case.opened() as volume:
        assert held(volume) == {0, 1}
        assert read(volume, 0, 1)[1] == {0: payload(0), 1: payload(1)}
        assert volume.compact() >= 0, "a cut that is known is no fault"
        assert_exact(volume)
    with store.case.opened() as volume:
        assert held(volume) == {0, 1}


def test_of_two_copies_the_newest_is_served_and_the_other_freed(store: Store) -> None:
    """What a compaction that was killed leaves: the blocks in the old objects and in the fresh one."""
    with store.case.opened() as volume:
        volume.put([block(1)])
        volume.put([block(2)])
        before = {name: store.content(name) for name in store.names()}
        assert volume.compact() > 0
        (fresh,) = store.names()
        for name, content in before.items():
            store.bucket.put(name, content)
    with store.case.opened() as volume:
        assert held(volume) == {1, 2}
        assert store.names() == [fresh]
        assert read(volume, 1, 2)[1] == {1: payload(1), 2: payload(2)}
        assert_exact(volume)


def test_more_blocks_than_the_capacity_are_refused_and_left_alone(store: Store) -> None:
    with store.case.opened() as volume:
        volume.put([block(n) for n in range(5)])
    with pytest.raises(VolumeError, match="holds 5 blocks, more than 4; delete some first"), store.case.opened(
        capacity_blocks=4
    ):
        pass
    with store.case.opened() as volume:
        assert held(volume) == set(range(5))


# A server that does not answer


def test_a_server_that_is_too_slow_fails_what_was_asked_and_is_whole_when_opened_again(
    store: Store, seaweed: SeaweedServer
) -> None:
    with store.case.opened() as volume:
        volume.put([block(1), block(2)])
    kind, opening = prepare(store.case.descriptor(), [], store.case.endpoints)
    volume = kind.open(replace(opening, deadline_s=0.3))
    with seaweed.paused():
        outcomes = volume.put([block(3), block(4), block(5)])
        assert results(outcomes) == [Result.FAILED] * 3
        assert "no answer in 0.3 s" in outcomes[0].reason
        assert "no answer in 0.3 s" in volume.stat().degraded
        assert results(read(volume, 1)[0]) == [Result.FAILED], "it is not waited for again"
        assert results(volume.delete(keys(1))) == [Result.FAILED]
    assert volume.stat().blocks + volume.stat().slots_free == CAPACITY
    volume.close()
    with store.case.opened() as volume:
        assert held(volume) >= {1, 2}
        assert held(volume) <= {1, 2, 3, 4, 5}, "a put whose answer was late may be there, whole"
        assert read(volume, *held(volume))[1] == {n: payload(n) for n in held(volume)}
        assert_exact(volume)


# Time to live


def test_blocks_go_when_their_time_is_over_and_are_announced(seaweed: SeaweedServer) -> None:
    store = Store(seaweed.endpoint, time_to_live_s=0.5)
    told = Told()
    with store.case.opened(told) as volume:
        volume.put([block(1), block(2)])
        deadline = time.monotonic() + 60
        while len(told.freed) < 2 and time.monotonic() < deadline:
            time.sleep(0.05)
        assert {header.key for header in told.freed} == set(keys(1, 2))
        assert results(read(volume, 1, 2)[0]) == [Result.MISS] * 2
        assert store.names() == []
        assert_exact(volume)


def test_time_to_live_counts_from_the_put_through_compaction_and_restart(seaweed: SeaweedServer) -> None:
    store = Store(seaweed.endpoint)
    with store.case.opened() as volume:
        volume.put([block(1)])
        volume.put([block(2)])
        before = sorted(stored.stored_ms for index in store.indexes() for stored in index.blocks)
        volume.compact()
        assert sorted(stored.stored_ms for index in store.indexes() for stored in index.blocks) == before
        time.sleep(0.01)  # for a put in another millisecond
        volume.put([block(3)])
    with store.with_options(time_to_live_s=3600.0).opened() as volume:
        assert isinstance(volume, ObjectVolume)
        assert volume.delete_expired() == []
        assert {header.key for header in volume._objects.expired(before[-1] + 1)} == set(keys(1, 2))


def test_a_faulty_volume_of_objects_honours_their_time_to_live(seaweed: SeaweedServer) -> None:
    """Deletes fail now and then, and are tried again at the next sweep."""
    store = Store(seaweed.endpoint, time_to_live_s=0.5)
    options: dict[str, OptionValue] = {
        "inner": "object", "inner_options": store.case.options, "seed": 2, "error": 0.3
    }  # fmt: skip
    told = Told()
    with VolumeCase(kind="faulty", options=options, endpoints=store.case.endpoints).opened(told) as volume:
        stored = {n for n in range(6) if volume.put([block(n)])[0].result is Result.STORED}
        assert stored
        deadline = time.monotonic() + 60
        while not {header.key for header in told.freed} >= set(keys(*stored)) and time.monotonic() < deadline:
            time.sleep(0.05)
        assert {header.key for header in told.freed} >= set(keys(*stored))
        assert held(volume) == set()
        assert volume.stat().descriptor.kind == "faulty"


# Compaction


def test_many_tiny_objects_become_one_with_chains_together(store: Store) -> None:
    with store.case.opened() as volume:
        order = [3, 11, 1, 2, 12, 4, 10]
        parents = {1: 0, 2: 1, 3: 2, 4: 3, 10: 0, 11: 10, 12: 11}
        for number in order:
            parent = parents[number] << 64 | 0xABC if parents[number] else 0
            volume.put([PutBlock(key(number), NAMESPACE, memoryview(payload(number)), parent, number, 16)])
        assert len(store.names()) == 7
        assert volume.compact() > 0
        (index,) = store.indexes()
        together = numbers(index)
        assert sorted(together) == sorted(order)
        chain, other = [n for n in together if n < 10], [n for n in together if n >= 10]
        assert (chain, other) == ([1, 2, 3, 4], [10, 11, 12])
        assert together in (chain + other, other + chain)
        assert read(volume, *order)[1] == {n: payload(n) for n in order}
        assert volume.compact() == 0, "there is nothing left to do"
        assert_exact(volume)
    with store.case.opened() as volume:
        assert held(volume) == set(order)


def test_half_empty_objects_give_back_their_room(seaweed: SeaweedServer) -> None:
    store = Store(seaweed.endpoint, object_bytes=65536)
    with store.case.opened() as volume:
        volume.put([block(n) for n in range(12)])
        volume.delete(keys(*range(1, 12)))
        assert volume.compact() > 4 * BLOCK_BYTES
        assert [numbers(index) for index in store.indexes()] == [[0]]
        assert store.names("freed") == []
        assert read(volume, 0)[1] == {0: payload(0)}


def test_waste_is_compacted_without_being_asked(seaweed: SeaweedServer) -> None:
    store = Store(seaweed.endpoint)
    with store.case.opened(capacity_blocks=60) as volume:
        for number in range(40):
            volume.put([block(number, 10)])
        assert len(store.names()) < 40
        assert read(volume, *range(40))[1] == {n: payload(n, 10) for n in range(40)}
        assert_exact(volume)


def test_readers_and_deletes_during_compactions_see_every_block(seaweed: SeaweedServer) -> None:
    store = Store(seaweed.endpoint, object_bytes=65536)
    with store.case.opened() as volume:
        volume.put([block(n) for n in range(CAPACITY)])
        compacting = threading.Event()
        wrong: list[object] = []

        def read_on() -> None:
            while not compacting.is_set():
                reads, taken = read(volume, *range(0, CAPACITY, 2))
                wrong.extend(r.outcome for r in reads if r.outcome.result is not Result.HIT)
                wrong.extend(n for n, found in taken.items() if found != payload(n))

        reader = threading.Thread(target=read_on)
        reader.start()
        for number in range(1, CAPACITY, 2):
            volume.delete(keys(number))
            volume.compact()
            volume.put([block(number)])
        volume.compact()
        compacting.set()
        reader.join()
        assert wrong == []
        assert held(volume) == set(range(CAPACITY))
        assert_exact(volume)
    with store.case.opened() as volume:
        assert volume.scrub().good == CAPACITY


def test_a_block_deleted_while_it_is_copied_stays_deleted(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    with store.case.opened() as volume:
        for n in range(3):
            volume.put([block(n)])
        real = ObjectStore._switch

        def delete_first(self: ObjectStore, index: ObjectIndex, sources: Any) -> None:
            monkeypatch.setattr(ObjectStore, "_switch", real)
            assert results(volume.delete(keys(1))) == [Result.DELETED]
            real(self, index, sources)

        monkeypatch.setattr(ObjectStore, "_switch", delete_first)
        volume.compact()
        assert held(volume) == {0, 2}
        assert_exact(volume)
    with store.case.opened() as volume:
        assert held(volume) == {0, 2}
        assert read(volume, 0, 2)[1] == {0: payload(0), 2: payload(2)}


def test_compaction_deletes_orphans_and_finds_what_is_lost(store: Store) -> None:
    with store.case.opened() as volume:
        volume.put([block(1)])
        (name,) = store.names()
        orphan = 0xABCDEF
        packed, _ = pack_index(orphan, [(volume.live_headers()[0]._replace(key=key(5)), 1)])
        store.bucket.put(blocks_name(store.prefix, orphan), packed)  # as a put whose answer was lost leaves it
        store.bucket.put(freed_name(store.prefix, 99), b"")
        volume.compact()
        assert (store.names(), store.names("freed")) == ([name], [])
        store.bucket.delete([name])
        with pytest.raises(VolumeError, match=r"1 objects of .* are gone or have another length"):
            volume.compact()
        assert "are gone" in volume.stat().degraded
    with store.case.opened() as volume:
        assert held(volume) == set()
        assert_exact(volume)


# Looking at it without an agent


def test_an_inspection_reports_every_slot(store: Store) -> None:
    with store.case.opened() as volume:
        volume.put([block(n) for n in range(4)])
        volume.delete(keys(3))
        volume.put([block(9)])
    name = next(n for n in store.names() if len(store.content(n)) > 4 * BLOCK_BYTES)
    index = unpack_index(store.content(name), int(name[-16:], 16))
    content = bytearray(store.content(name))
    content[index.blocks[1].end - 1] ^= 1
    store.bucket.put(name, bytes(content))
    store.bucket.put(f"{store.prefix}/blocks/00000000deadbeef", b"x")
    with closing(inspect_volume(store.case.descriptor(), [], store.case.endpoints)) as inspection:
        assert inspection.was_closed_in_order
        reports = list(inspection.reports())
    assert [report.slot for report in reports] == list(range(CAPACITY))
    assert Counter(report.state for report in reports) == Counter(live=3, torn=2, free=CAPACITY - 5)
    torn = {report.key: report.reason for report in reports if report.state == "torn"}
    assert "has checksum" in torn[key(1)]
    assert "has 1 bytes" in torn[None]
    with store.case.opened(), closing(inspect_volume(store.case.descriptor(), [], store.case.endpoints)) as inspection:
        assert not inspection.was_closed_in_order


def test_an_inspection_of_nothing_or_of_another_volume_is_refused(store: Store) -> None:
    with pytest.raises(VolumeError, match="holds no volume"):
        inspect_volume(store.case.descriptor(), [], store.case.endpoints)
    with store.case.opened():
        pass
    other = msgspec.structs.replace(store.case.descriptor(), id="other")
    with pytest.raises(VolumeError, match="belongs to volume 'contract', not 'other'"):
        inspect_volume(other, [], store.case.endpoints)
    with pytest.raises(VolumeError, match="belongs to volume 'contract'; give another prefix"), store.case.opened(
        id="other"
    ):
        pass


def test_a_person_can_check_and_repair_it_by_command(store: Store, tmp_path: Path) -> None:
    with store.case.opened() as volume:
        volume.put([block(n) for n in range(3)])
    (name,) = store.names()
    (index,) = store.indexes()
    content = bytearray(store.content(name))
    content[index.blocks[1].end - 1] ^= 1
    store.bucket.put(name, bytes(content))
    settings = tmp_path / "agent.toml"
    settings.write_text(
        f"""
        name = "host"
        command_url = "tcp://127.0.0.1:1"
        event_url = "memory://unused"
        allowed_roots = []
        [endpoints.store]
        url = "{store.endpoint.url}"
        access_key_file = "{store.endpoint.access_key_file}"
        secret_key_file = "{store.endpoint.secret_key_file}"
        [[volumes]]
        id = "contract"
        kind = "object"
        capacity_blocks = {CAPACITY}
        block_bytes_max = {BLOCK_BYTES}
        options = {{ endpoint = "store", bucket = "{BUCKET}", prefix = "{store.prefix}" }}
        """
    )

    def run(command: str) -> tuple[int | None, str, str]:
        done = CliRunner().invoke(volumes_app, [command, "--config", str(settings)], env={"COLUMNS": "200"})
        return done.exit_code, done.output, str(done.exception or "")

    status, output, error = run("verify")
    assert status != 0
    assert "has checksum" in output, error
    assert "contract: slots are torn or doubled" in error
    status, output, error = run("fsck")
    assert status != 0
    assert "contract: blocks were lost" in error
    status, output, error = run("fsck")
    assert (status, error) == (0, "")
    status, output, error = run("verify")
    assert (status, error) == (0, "")
    with store.case.opened() as volume:
        assert held(volume) == {0, 2}


def test_fsck_of_a_prefix_without_a_volume_refuses_and_makes_nothing(store: Store, tmp_path: Path) -> None:
    settings = tmp_path / "agent.toml"
    settings.write_text(
        f"""
        name = "a"
        command_url = "tcp://127.0.0.1:1"
        event_url = "zmq+tcp://127.0.0.1:2"
        allowed_roots = []
        [endpoints.store]
        url = "{store.endpoint.url}"
        access_key_file = "{store.endpoint.access_key_file}"
        secret_key_file = "{store.endpoint.secret_key_file}"
        [[volumes]]
        id = "contract"
        kind = "object"
        capacity_blocks = 12
        block_bytes_max = {BLOCK_BYTES}
        options = {{ endpoint = "store", bucket = "{BUCKET}", prefix = "{store.prefix}/nothing" }}
        """
    )
    done = CliRunner().invoke(volumes_app, ["fsck", "--config", str(settings)])
    assert done.exit_code != 0
    assert f"{store.prefix}/nothing holds no volume" in str(done.exception)
    assert list(store.bucket.list(f"{store.prefix}/nothing")) == []


# Configuration


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"endpoint": "elsewhere"}, r"endpoint 'elsewhere' is not configured, \['store'\] are; add \[endpoints.else"),
        ({"endpoint": "http://evil.example"}, r"is not configured"),
        ({"bucket": "../x"}, r"'../x' is no name of a bucket"),
        ({"prefix": "a//b"}, r"prefix 'a//b' is not letters"),
        ({"prefix": "../a"}, r"prefix '../a' is not letters"),
        ({"object_bytes": 1}, r"options of kind 'object'.*object_bytes"),
        ({"lease_s": 0}, r"lease_s"),
        ({"time_to_live_s": -1}, r"time_to_live_s"),
        ({"url": "http://x"}, r"unknown field `url`"),
    ],
)
def test_a_descriptor_names_only_what_is_configured(store: Store, options: dict[str, Any], reason: str) -> None:
    with pytest.raises(VolumeError, match=reason), store.with_options(**options).opened():
        pass


def test_wrong_keys_and_dead_servers_are_named(store: Store, tmp_path: Path) -> None:
    (tmp_path / "wrong").write_text("hunter2")
    wrong = msgspec.structs.replace(store.endpoint, secret_key_file=tmp_path / "wrong")
    absent = msgspec.structs.replace(store.endpoint, secret_key_file=tmp_path / "absent")
    half = msgspec.structs.replace(store.endpoint, secret_key_file=None)
    (port,) = free_ports(1)
    dead = msgspec.structs.replace(store.endpoint, url=f"http://127.0.0.1:{port}")
    scheme = msgspec.structs.replace(store.endpoint, url="ftp://x")
    for endpoint, reason in (
        (wrong, r"does not read unit/\d+/owner: .*(Forbidden|PermissionDenied|SignatureDoesNotMatch)"),
        (absent, r"absent cannot be read: .*; name the file of the key"),
        (half, "give both access_key_file and secret_key_file"),
        (dead, rf"{port}/{BUCKET} does not read unit/\d+/owner"),
        (scheme, "'ftp://x' is no http or https URL"),
    ):
        case = VolumeCase(kind="object", options=store.case.options, endpoints={"store": endpoint})
        with pytest.raises(VolumeError, match=reason) as caught, case.opened():
            pass
        assert "hunter2" not in str(caught.value)


def test_block_sizes_from_one_byte_to_the_largest_come_back(seaweed: SeaweedServer) -> None:
    store = Store(seaweed.endpoint)
    sizes = [1, 7, 4095, 4096, 4097, 300_000, 1_000_000]
    with store.case.opened(block_bytes_max=1_000_000) as volume:
        volume.put([block(n, size) for n, size in enumerate(sizes)], read_back=True)
    with store.case.opened(block_bytes_max=1_000_000) as volume:
        assert read(volume, *range(len(sizes)))[1] == {n: payload(n, size) for n, size in enumerate(sizes)}


def test_without_files_of_keys_those_of_the_environment_are_used(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert store.endpoint.access_key_file is not None
    assert store.endpoint.secret_key_file is not None
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", store.endpoint.access_key_file.read_text().strip())
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", store.endpoint.secret_key_file.read_text().strip())
    case = VolumeCase(
        kind="object", options=store.case.options, endpoints={"store": Endpoint(url=store.endpoint.url)}
    )
    with case.opened() as volume:
        assert results(volume.put([block(1)])) == [Result.STORED]
        assert read(volume, 1)[1] == {1: payload(1)}


def test_what_is_torn_or_flipped_on_the_way_to_it_is_never_served(store: Store) -> None:
    options: dict[str, OptionValue] = {
        "inner": "object", "inner_options": store.case.options, "seed": 3, "torn": 0.3, "flipped": 0.3
    }  # fmt: skip
    with VolumeCase(kind="faulty", options=options, endpoints=store.case.endpoints).opened() as volume:
        assert volume.stat().mode.endswith(", faulty")
        outcomes = [volume.put([block(number)], read_back=True)[0].result for number in range(12)]
        stored = {number for number, result in enumerate(outcomes) if result is Result.STORED}
        assert 0 < len(stored) < 12
        assert read(volume, *range(12))[1] == {n: payload(n) for n in stored}
        assert_exact(volume)
    with store.case.opened() as volume:
        assert held(volume) == stored, "what failed to verify was freed"
        assert volume.scrub().corrupt == 0
