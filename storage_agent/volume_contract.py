"""The contract of volumes as a pytest plugin: name it in `pytest_plugins`, derive a class from `VolumeContract`.

    pytest_plugins = ["storage_agent.volume_contract"]   # in conftest.py

    class TestTape(VolumeContract):
        @pytest.fixture
        def case(self, tmp_path):
            return VolumeCase(kind="tape", path=tmp_path / "tape")

Every kind of ours passes it; `examples/custom_volume` shows it on one of another package.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from event_plane.schema import Namespace
from storage_agent.block_header import BlockHeader
from storage_agent.descriptor import OptionValue, VolumeDescriptor
from storage_agent.endpoints import Endpoint
from storage_agent.errors import VolumeError
from storage_agent.kinds import prepare
from storage_agent.port import BlockKey, Outcome, PutBlock, Result
from storage_agent.shards import Axis, BlockLayout, Shard, ShardSpan
from storage_agent.volume import ReadResult, Volume

NAMESPACE = Namespace(tenant="contract", model="llama", block_tokens=16)
BLOCK_BYTES = 6144
CAPACITY = 12
LAYOUT = BlockLayout(
    (Axis("layer", 3), Axis("outer", 2), Axis("token", 16), Axis("head", 8), Axis("element", 4)), 2, "head", "float16"
)
"""A whole block of it has `BLOCK_BYTES`."""


@dataclass(frozen=True, kw_only=True)
class VolumeCase:
    """A kind under test, and what it can do."""

    kind: str
    path: Path | None = None
    options: dict[str, OptionValue] = field(default_factory=dict)
    endpoints: dict[str, Endpoint] = field(default_factory=dict)
    lasts: bool = True
    """Blocks are there again after a close."""
    resizes: bool = True
    room_bytes: int = BLOCK_BYTES
    """The largest block that it takes, at least `BLOCK_BYTES`."""
    damage: Callable[[Volume, BlockHeader], None] | None = None
    """Changes one bit of a block's payload on the medium, behind the back of the volume."""

    def descriptor(self, **fields: Any) -> VolumeDescriptor:
        return VolumeDescriptor(
            **{
                "id": "contract",
                "kind": self.kind,
                "path": str(self.path) if self.path is not None else "",
                "options": self.options,
                "capacity_blocks": CAPACITY,
                "block_bytes_max": BLOCK_BYTES,
                **fields,
            }
        )

    @contextmanager
    def opened(self, told: Told | None = None, **fields: Any) -> Iterator[Volume]:
        """The volume, made if it is not there, until the end of the block."""
        told = told or Told()
        roots = [self.path.parent] if self.path is not None else []
        kind, opening = prepare(
            self.descriptor(**fields),
            roots,
            self.endpoints,
        )
        volume = kind.open(replace(opening, on_stored=told.stored.extend, on_freed=told.freed.extend))
        try:
            yield volume
        finally:
            volume.close()


@dataclass
class Told:
    """What a volume announced."""

    stored: list[BlockHeader] = field(default_factory=list)
    freed: list[BlockHeader] = field(default_factory=list)


def key(number: int) -> BlockKey:
    return BlockKey(NAMESPACE.namespace_id, 0, number << 64 | 0xABC)


def keys(*numbers: int) -> list[BlockKey]:
    return [key(number) for number in numbers]


def payload(number: int, size: int = BLOCK_BYTES) -> bytes:
    return (b"%08d" % number * (size // 8 + 1))[:size]


def block(number: int, size: int = BLOCK_BYTES) -> PutBlock:
    return PutBlock(
        key(number), NAMESPACE, memoryview(payload(number, size)), max(0, number - 1), number, block_tokens=16
    )


def results(outcomes: Sequence[Outcome] | Sequence[ReadResult]) -> list[Result]:
    return [item.outcome.result if isinstance(item, ReadResult) else item.result for item in outcomes]


def read(volume: Volume, *numbers: int, wanted: Shard | None = None) -> tuple[list[ReadResult], dict[int, bytes]]:
    """The results, and the bytes that were handed over."""
    taken: dict[int, bytes] = {}

    def accept(index: int, header: BlockHeader, view: memoryview) -> str:
        taken[numbers[index]] = bytes(view)
        return ""

    return volume.read(keys(*numbers), accept, wanted), taken


def held(volume: Volume) -> set[int]:
    return {header.key.sequence_hash >> 64 for header in volume.live_headers()}


def assert_exact(volume: Volume) -> None:
    """Figures and headers agree, and no slot is lost while nothing is under way."""
    stat = volume.stat()
    headers = volume.live_headers()
    assert stat.blocks == len(headers) == len({header.key for header in headers})
    assert stat.payload_bytes == sum(header.payload_bytes for header in headers)
    assert stat.blocks + stat.slots_free == stat.descriptor.capacity_blocks


class VolumeContract:
    """Derive from it and give it a fixture `case`."""

    @pytest.fixture
    def volume(self, case: VolumeCase) -> Iterator[Volume]:
        with case.opened() as volume:
            yield volume

    # Blocks in and out

    def test_blocks_come_back_byte_for_byte_with_their_facts(self, volume: Volume) -> None:
        stored = volume.put([block(1), block(2, 1), block(3, 4096)])
        assert results(stored) == [Result.STORED] * 3
        assert [outcome.payload_bytes for outcome in stored] == [BLOCK_BYTES, 1, 4096]
        assert {outcome.volume for outcome in stored} == {"contract"}
        reads, taken = read(volume, 3, 1, 9, 2)
        assert results(reads) == [Result.HIT, Result.HIT, Result.MISS, Result.HIT]
        assert taken == {1: payload(1), 2: payload(2, 1), 3: payload(3, 4096)}
        facts = reads[0].header
        assert facts is not None
        assert (facts.key, facts.namespace, facts.parent_hash) == (key(3), NAMESPACE, 2)
        assert (facts.depth, facts.block_tokens, facts.payload_bytes) == (3, 16, 4096)
        assert volume.live_header(key(3)) == facts
        assert_exact(volume)

    def test_bytes_moved_are_counted(self, volume: Volume) -> None:
        volume.put([block(1), block(2, 100)], read_back=True)
        read(volume, 1, 2, 3)
        stat = volume.stat()
        assert (stat.write_bytes_total, stat.read_bytes_total) == (BLOCK_BYTES + 100, BLOCK_BYTES + 100)
        assert stat.write_seconds_total > 0
        assert stat.read_seconds_total > 0
        assert sum(stat.read_times) >= 1
        assert sum(stat.write_times) >= 1
        assert stat.mode

    def test_a_block_that_is_there_is_present_and_not_written_again(self, case: VolumeCase) -> None:
        told = Told()
        with case.opened(told) as volume:
            volume.put([block(1)])
            generation = told.stored[0].generation
            assert results(volume.put([block(1), block(2)])) == [Result.PRESENT, Result.STORED]
            assert [header.key for header in told.stored] == keys(1, 2)
            assert volume.live_headers()[0].generation == generation

    def test_a_full_volume_refuses_and_takes_again_what_was_freed(self, volume: Volume) -> None:
        outcomes = volume.put([block(n) for n in range(CAPACITY + 1)])
        assert results(outcomes) == [Result.STORED] * CAPACITY + [Result.FULL]
        assert outcomes[-1].reason
        assert results(volume.delete(keys(3))) == [Result.DELETED]
        assert results(volume.put([block(99)])) == [Result.STORED]
        assert read(volume, 3, 99)[1] == {99: payload(99)}
        assert_exact(volume)

    def test_a_bad_block_fails_alone_with_a_reason(self, case: VolumeCase, volume: Volume) -> None:
        other = Namespace(tenant="else")
        bad = [
            PutBlock(key(2), NAMESPACE, memoryview(payload(2, case.room_bytes + 1))),
            PutBlock(key(3), NAMESPACE, memoryview(b"")),
            PutBlock(key(4), other, memoryview(b"x")),
            PutBlock(key(5), NAMESPACE, memoryview(b"xyxyxy")[::2]),
            PutBlock(key(6), NAMESPACE, memoryview(b"x"), depth=-1),
            PutBlock(BlockKey(other.namespace_id, 256, 1), other, memoryview(b"x")),
            PutBlock(key(7), NAMESPACE, memoryview(b"xyz"), span=ShardSpan(2, 0, 2)),
            PutBlock(key(8), NAMESPACE, memoryview(b"xyz"), layout=BlockLayout((), 1)),
        ]
        outcomes = volume.put([block(1), *bad, block(9)])
        assert results(outcomes) == [Result.STORED, Result.TOO_LARGE] + [Result.FAILED] * 7 + [Result.STORED]
        assert all(outcome.reason for outcome in outcomes[1:-1])
        assert held(volume) == {1, 9}
        assert volume.stat().degraded == ""
        assert_exact(volume)

    def test_more_blocks_than_a_batch_takes_go_in_parts(self, case: VolumeCase) -> None:
        with case.opened(capacity_blocks=300, block_bytes_max=512) as volume:
            numbers = range(300)
            assert results(volume.put([block(n, 400) for n in numbers])) == [Result.STORED] * 300
            assert read(volume, *numbers)[1] == {n: payload(n, 400) for n in numbers}
            assert results(volume.delete(keys(*numbers))) == [Result.DELETED] * 300
            assert_exact(volume)

    def test_a_reader_that_cannot_take_a_block_fails_it_alone(self, volume: Volume) -> None:
        volume.put([block(1), block(2)])
        taken: list[int] = []

        def accept(index: int, header: BlockHeader, view: memoryview) -> str:
            taken.append(index)
            return "no room" if index == 0 else ""

        reads = volume.read(keys(1, 2), accept)
        assert results(reads) == [Result.FAILED, Result.HIT]
        assert (reads[0].outcome.reason, sorted(taken)) == ("no room", [0, 1])
        assert held(volume) == {1, 2}

    def test_a_delete_frees_what_is_there_and_misses_the_rest(self, case: VolumeCase) -> None:
        told = Told()
        with case.opened(told) as volume:
            volume.put([block(1), block(2)])
            before = volume.retired_total
            assert results(volume.delete(keys(1, 9, 1))) == [Result.DELETED, Result.MISS, Result.BUSY]
            assert [header.key for header in told.freed] == keys(1)
            assert volume.retired_total == before + 1
            assert results(read(volume, 1)[0]) == [Result.MISS]
            assert volume.live_header(key(1)) is None
            assert_exact(volume)

    def test_generations_rise_with_every_put(self, volume: Volume) -> None:
        seen: list[int] = []
        for _ in range(3):
            volume.put([block(1)])
            (header,) = volume.live_headers()
            seen.append(header.generation)
            volume.delete(keys(1))
        assert seen == sorted(set(seen))

    # Shards

    @pytest.mark.parametrize("workers", [1, 2, 4, 8])
    def test_what_four_workers_wrote_is_read_by_any_number_of_them(self, volume: Volume, workers: int) -> None:
        shape = [axis.extent for axis in LAYOUT.axes]
        whole = np.random.default_rng(7).integers(0, 2**16, shape, dtype=np.uint16)
        stored = b"".join(np.ascontiguousarray(part).tobytes() for part in np.split(whole, 4, axis=3))
        span = ShardSpan(BLOCK_BYTES // 4, 0, 4)
        put = PutBlock(key(1), NAMESPACE, memoryview(stored), span=span, layout=LAYOUT)
        assert results(volume.put([put], read_back=True)) == [Result.STORED]
        for index, part in enumerate(np.split(whole, workers, axis=3)):
            reads, taken = read(volume, 1, wanted=Shard(index, workers))
            assert results(reads) == [Result.HIT]
            assert taken[1] == np.ascontiguousarray(part).tobytes()
            assert reads[0].outcome.payload_bytes == BLOCK_BYTES // workers
        assert read(volume, 1)[1] == {1: stored}

    def test_a_slice_that_cannot_be_cut_says_why(self, volume: Volume) -> None:
        half = ShardSpan(BLOCK_BYTES // 4, 2, 4)
        volume.put(
            [block(1), PutBlock(key(2), NAMESPACE, memoryview(payload(2, BLOCK_BYTES // 2)), span=half, layout=LAYOUT)]
        )
        reads, taken = read(volume, 1, 2, wanted=Shard(0, 2))
        assert results(reads) == [Result.FAILED, Result.FAILED]
        assert "read it whole" in reads[0].outcome.reason
        assert "ask the agent that has the others" in reads[1].outcome.reason
        assert taken == {}
        assert results(read(volume, 2, wanted=Shard(1, 2, LAYOUT))[0]) == [Result.HIT]
        turned = BlockLayout((*LAYOUT.axes[:2], LAYOUT.axes[3], LAYOUT.axes[2], LAYOUT.axes[4]), 2, "head", "float16")
        reads, taken = read(volume, 2, wanted=Shard(1, 2, turned))
        assert results(reads) == [Result.FAILED]
        assert "16 token × 8 head × 4 element of float16" in reads[0].outcome.reason
        assert "wanted as 3 layer × 2 outer × 8 head × 16 token" in reads[0].outcome.reason
        assert taken == {}

    # What lasts

    def test_blocks_are_found_again_after_a_close(self, case: VolumeCase) -> None:
        if not case.lasts:
            pytest.skip(f"blocks of kind {case.kind!r} do not outlast a close")
        span = ShardSpan(BLOCK_BYTES // 4, 0, 4)
        sharded = PutBlock(key(7), NAMESPACE, memoryview(payload(7)), 6, 7, 16, span, LAYOUT)
        with case.opened() as volume:
            volume.put([*(block(n) for n in range(5)), sharded])
            volume.delete(keys(2))
            before = {header.key: header._replace(slot=0) for header in volume.live_headers()}
        told = Told()
        with case.opened(told) as volume:
            assert {header.key: header._replace(slot=0) for header in volume.live_headers()} == before
            assert read(volume, 0, 1, 2, 3, 4, 7)[1] == {n: payload(n) for n in (0, 1, 3, 4, 7)}
            assert (told.stored, told.freed) == ([], []), "what is found is not announced by the volume"
            volume.put([block(9)])
            newest = max(header.generation for header in before.values())
            assert volume.live_header(key(9)) is not None
            assert all(h.generation > newest for h in volume.live_headers() if h.key == key(9))
            assert_exact(volume)

    def test_a_second_opener_is_refused(self, case: VolumeCase) -> None:
        if not case.lasts:
            pytest.skip(f"kind {case.kind!r} has nothing that two could open")
        with case.opened() as volume:
            volume.put([block(1)])
            with pytest.raises(VolumeError, match=r"is open in|is owned by"), case.opened():
                pass
            assert read(volume, 1)[1] == {1: payload(1)}
        with case.opened() as volume:
            assert held(volume) == {1}

    def test_closing_twice_is_harmless(self, volume: Volume) -> None:
        volume.put([block(1)])
        volume.close()
        volume.close()

    # Damage

    def test_a_damaged_block_is_corrupt_once_then_a_miss_and_its_slot_is_free(self, case: VolumeCase) -> None:
        if case.damage is None:
            pytest.skip(f"kind {case.kind!r} has no medium to damage")
        told = Told()
        with case.opened(told) as volume:
            volume.put([block(1), block(2)])
            case.damage(volume, told.stored[0])
            reads, taken = read(volume, 1, 2)
            assert results(reads) == [Result.CORRUPT, Result.HIT]
            assert reads[0].outcome.reason.startswith("CorruptBlock: ")
            assert taken == {2: payload(2)}
            assert [header.key for header in told.freed] == keys(1)
            assert volume.stat().corrupt_total == 1
            assert results(read(volume, 1)[0]) == [Result.MISS]
            assert results(volume.put([block(1)])) == [Result.STORED]
            assert read(volume, 1)[1] == {1: payload(1)}
            assert_exact(volume)

    def test_a_scrub_finds_what_is_damaged_and_frees_it(self, case: VolumeCase) -> None:
        told = Told()
        with case.opened(told) as volume:
            volume.put([block(n) for n in range(4)])
            report = volume.scrub()
            assert (report.good, report.corrupt, report.failed) == (4, 0, 0)
            assert report.payload_bytes == 4 * BLOCK_BYTES
            if case.damage is None:
                return
            case.damage(volume, told.stored[2])
            report = volume.scrub()
            assert (report.good, report.corrupt, report.failed) == (3, 1, 0)
            assert held(volume) == {0, 1, 3}
            assert_exact(volume)

    # Capacity

    def test_it_grows_and_shrinks_while_its_blocks_stay(self, case: VolumeCase) -> None:
        if not case.resizes:
            pytest.skip(f"kind {case.kind!r} keeps its capacity")
        with case.opened() as volume:
            volume.put([block(n) for n in range(CAPACITY)])
            assert volume.resize(CAPACITY + 5).slots_free == 5
            assert results(volume.put([block(n) for n in range(100, 106)])) == [Result.STORED] * 5 + [Result.FULL]
            with pytest.raises(VolumeError, match="delete some first"):
                volume.resize(8)
            kept = [1, 5, 7, 11, 103, 104]
            volume.delete([h.key for h in volume.live_headers() if h.key not in keys(*kept)])
            assert volume.resize(6).slots_free == 0
            assert volume.descriptor.capacity_blocks == 6
            assert read(volume, *kept)[1] == {n: payload(n) for n in kept}
            assert results(volume.put([block(200)])) == [Result.FULL]
            assert_exact(volume)
        if case.lasts:
            with case.opened(capacity_blocks=6) as volume:
                assert read(volume, *kept)[1] == {n: payload(n) for n in kept}
                assert_exact(volume)
            with case.opened(capacity_blocks=CAPACITY) as volume:
                assert volume.stat().slots_free == CAPACITY - 6, "settings with another capacity resize it"

    @pytest.mark.parametrize("capacity", [0, -1, 1 << 40])
    def test_a_capacity_out_of_range_is_refused(self, volume: Volume, capacity: int) -> None:
        with pytest.raises(VolumeError, match=str(capacity)):
            volume.resize(capacity)
        assert volume.stat().slots_free == CAPACITY

    def test_compaction_keeps_every_block(self, case: VolumeCase) -> None:
        with case.opened() as volume:
            for _ in range(3):
                volume.put([block(n) for n in range(CAPACITY)])
                volume.delete(keys(*range(1, CAPACITY, 2)))
            assert volume.compact() >= 0
            assert held(volume) == set(range(0, CAPACITY, 2))
            assert read(volume, *range(CAPACITY))[1] == {n: payload(n) for n in range(0, CAPACITY, 2)}
            assert_exact(volume)
        if case.lasts:
            with case.opened() as volume:
                assert held(volume) == set(range(0, CAPACITY, 2))
                assert volume.scrub().corrupt == 0

    def test_laying_chains_out_keeps_every_block_and_scatters_none(self, case: VolumeCase) -> None:
        chains = [range(first, CAPACITY, 3) for first in range(3)]
        blocks = [replace(block(n), parent_hash=key(n - 3).sequence_hash if n >= 3 else 0) for n in range(CAPACITY)]
        with case.opened() as volume:
            volume.put(blocks)
            volume.delete(keys(*chains[2]))
            left = [n for chain in chains[:2] for n in chain]
            report = volume.lay_out(keys(*left, *chains[2], *left))
            assert report.extents_after <= report.extents_before
            assert (report.moved_blocks > 0) == (report.extents_after < report.extents_before)
            assert held(volume) == set(left)
            assert read(volume, *range(CAPACITY))[1] == {n: payload(n) for n in left}
            assert_exact(volume)
            again = volume.lay_out(keys(*left))
            assert (again.moved_blocks, again.extents_after) == (0, report.extents_after), "it lies well already"
        if case.lasts:
            with case.opened() as volume:
                assert held(volume) == set(left)
                assert volume.scrub().corrupt == 0

    # Several at once

    def test_a_delete_waits_for_the_reader_of_its_slot(self, volume: Volume) -> None:
        volume.put([block(1)])
        deleting: list[Result] = []
        deleter = threading.Thread(target=lambda: deleting.extend(results(volume.delete(keys(1)))))
        seen: list[tuple[bytes, bool]] = []

        def accept(index: int, header: BlockHeader, view: memoryview) -> str:
            deleter.start()
            while volume.live_header(key(1)) is not None:  # until the delete has begun
                threading.Event().wait(0.001)
            seen.append((bytes(view), bool(deleting)))
            return ""

        volume.read(keys(1), accept)
        deleter.join()
        assert seen == [(payload(1), False)]
        assert deleting == [Result.DELETED]
        assert volume.stat().slots_free == CAPACITY

    def test_threads_that_put_read_and_delete_leave_a_true_table(self, case: VolumeCase) -> None:
        told = Told()
        wrong: list[object] = []
        with case.opened(told) as volume:

            def work(seed: int) -> None:
                for step in range(12):
                    number = (seed * 5 + step) % 6
                    volume.put([block(number), block(number + 1)])
                    taken = read(volume, number, number + 2)[1]
                    wrong.extend(n for n, found in taken.items() if found != payload(n))
                    volume.delete(keys((seed + step) % 6))

            threads = [threading.Thread(target=work, args=(seed,)) for seed in range(3)]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
            assert wrong == []
            assert len(told.stored) - len(told.freed) == len(held(volume))
            assert read(volume, *held(volume))[1] == {n: payload(n) for n in held(volume)}
            assert_exact(volume)
