"""The order that compaction writes blocks in."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from event_plane.schema import Namespace
from storage_agent.block_header import BlockHeader
from storage_agent.chains import chain_order
from storage_agent.port import BlockKey

numbers = st.integers(1, 12)


def header(number: int, parent: int, generation: int) -> BlockHeader:
    return BlockHeader(0, BlockKey(1, 0, number), Namespace(), parent, 0, 16, 1, 0, generation)


@settings(deadline=None)
@given(st.dictionaries(numbers, st.integers(0, 12), max_size=12), st.randoms())
def test_every_block_comes_once_and_each_subtree_is_in_one_piece(parents: dict[int, int], random: object) -> None:
    headers = [header(number, parent, generation) for generation, (number, parent) in enumerate(parents.items())]
    ordered = [h.key.sequence_hash for h in chain_order(headers)]
    assert sorted(ordered) == sorted(parents)
    for number in parents:
        family = {number} | {other for other in parents if _descends(parents, other, number)}
        if _loops(parents, number):
            continue
        places = sorted(ordered.index(member) for member in family)
        assert places == list(range(places[0], places[0] + len(places))), "a chain lies together"
        assert places[0] == ordered.index(number), "parents come before children"


def _ancestors(parents: dict[int, int], number: int) -> list[int]:
    found: list[int] = []
    while (number := parents.get(number, 0)) in parents and number not in found:
        found.append(number)
    return found


def _descends(parents: dict[int, int], number: int, ancestor: int) -> bool:
    return number != ancestor and ancestor in _ancestors(parents, number)


def _loops(parents: dict[int, int], number: int) -> bool:
    line = [number, *_ancestors(parents, number)]
    return any(other in _ancestors(parents, other) for other in line)


def test_a_long_chain_is_no_deep_recursion() -> None:
    headers = [header(number, number - 1, number) for number in range(1, 50_000)]
    assert [h.key.sequence_hash for h in chain_order(headers[::-1])] == list(range(1, 50_000))
