"""A volume on a medium with every fault: what it serves is right, what it lost it says, and it counts every slot."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from storage_agent.block_header import BlockHeader
from storage_agent.faulty_volume import Fault, FaultyOptions, FaultyStore
from storage_agent.memory_volume import MemoryStore
from storage_agent.port import Result
from storage_agent.slot_volume import SlotVolume
from storage_agent.volume_contract import CAPACITY, VolumeCase, block, held, keys, payload, read, results
from tests.examples import examples

CASE = VolumeCase(kind="faulty")
share = st.sampled_from([0.0, 0.0, 0.1, 0.4])
faults = st.builds(
    FaultyOptions, seed=st.integers(0, 2**32), error=share, full=share, short=share, torn=share, flipped=share,
    vanished_after=st.sampled_from([0, 0, 0, 15]),
)  # fmt: skip
steps = st.lists(
    st.tuples(st.sampled_from(["put", "get", "delete", "scrub", "put back"]), st.lists(st.integers(0, 15), max_size=5)),
    max_size=25,
)


def no_pause(seconds: float) -> None:
    pass


def faulty(options: FaultyOptions) -> tuple[SlotVolume, FaultyStore, set[int]]:
    """A volume, its store, and the blocks that it announced as there."""
    announced: set[int] = set()

    def numbers(headers: object) -> set[int]:
        assert isinstance(headers, list)
        return {header.key.sequence_hash >> 64 for header in headers if isinstance(header, BlockHeader)}

    store = FaultyStore(MemoryStore(CAPACITY), options, pause=no_pause)
    volume = SlotVolume(
        CASE.descriptor(),
        store,
        on_stored=lambda headers: announced.update(numbers(headers)),
        on_freed=lambda headers: announced.difference_update(numbers(headers)),
    )
    return volume, store, announced


@settings(max_examples=examples(60), deadline=None)
@given(faults, steps)
def test_whatever_the_medium_does_bytes_are_right_and_the_table_is_true(
    options: FaultyOptions, todo: list[tuple[str, list[int]]]
) -> None:
    volume, _, announced = faulty(options)
    for what, numbers in todo:
        if what in ("put", "put back"):
            outcomes = volume.put([block(n) for n in numbers], read_back=what == "put back")
            assert len(outcomes) == len(numbers)
            assert all(o.reason for o in outcomes if not o.result.ok)
        elif what == "get":
            reads, taken = read(volume, *numbers)
            assert taken == {n: payload(n) for n in taken}
            assert {n for n, r in zip(numbers, results(reads), strict=True) if r is Result.HIT} == set(taken)
        elif what == "delete":
            volume.delete(keys(*numbers))
        else:
            volume.scrub()
        assert held(volume) == announced
        stat = volume.stat()
        assert stat.blocks == len(announced)
        assert 0 <= stat.slots_free <= CAPACITY - stat.blocks
    volume.close()


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        (FaultyOptions(torn=1.0), Result.CORRUPT),
        (FaultyOptions(flipped=1.0), Result.CORRUPT),
        (FaultyOptions(short=1.0), Result.FAILED),
    ],
)
def test_a_block_that_is_bad_on_the_medium_is_never_handed_over(options: FaultyOptions, expected: Result) -> None:
    volume, _, _ = faulty(options)
    assert results(volume.put([block(1)])) == [Result.STORED]
    reads, taken = read(volume, 1)
    assert (results(reads), taken) == ([expected], {})


@pytest.mark.parametrize("options", [FaultyOptions(torn=1.0), FaultyOptions(flipped=1.0), FaultyOptions(short=1.0)])
def test_a_put_that_is_read_back_finds_it_before_it_is_served(options: FaultyOptions) -> None:
    volume, _, announced = faulty(options)
    assert results(volume.put([block(1), block(2)], read_back=True)) == [Result.FAILED] * 2
    assert (announced, volume.stat().slots_free) == (set(), CAPACITY)
    assert volume.stat().degraded


@pytest.mark.parametrize(("options", "said"), [(FaultyOptions(error=1.0), "EIO"), (FaultyOptions(full=1.0), "ENOSPC")])
def test_a_write_that_fails_names_the_error(options: FaultyOptions, said: str) -> None:
    volume, _, _ = faulty(options)
    (outcome,) = volume.put([block(1)])
    assert outcome.result is Result.FAILED
    assert said in outcome.reason
    assert said in volume.stat().degraded


def test_a_medium_that_vanished_fails_every_call_until_it_is_back_with_what_it_held() -> None:
    volume, store, _ = faulty(FaultyOptions())
    volume.put([block(1), block(2)])
    store.vanish()
    assert results(read(volume, 1)[0]) == [Result.FAILED]
    assert results(volume.put([block(3)])) == [Result.FAILED]
    assert results(volume.delete(keys(2))) == [Result.FAILED]
    store.come_back()
    assert read(volume, 1, 2)[1] == {1: payload(1), 2: payload(2)}
    assert store.drawn[Fault.VANISHED] >= 3


def test_a_slow_medium_is_waited_for_as_long_as_was_asked() -> None:
    waited: list[float] = []
    store = FaultyStore(MemoryStore(CAPACITY), FaultyOptions(slow=1.0, slow_s=2.5), pause=waited.append)
    volume = SlotVolume(CASE.descriptor(), store, on_stored=lambda headers: None, on_freed=lambda headers: None)
    assert results(volume.put([block(1)])) == [Result.STORED]
    assert waited == [2.5, 2.5], "the write and the sync"


def test_the_same_seed_gives_the_same_faults() -> None:
    def outcomes(seed: int) -> list[Result]:
        volume, _, _ = faulty(FaultyOptions(seed=seed, flipped=0.5))
        return results(volume.put([block(n) for n in range(CAPACITY)], read_back=True))

    assert outcomes(5) == outcomes(5)
    assert len({tuple(outcomes(seed)) for seed in range(8)}) > 1
