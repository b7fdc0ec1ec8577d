"""Which moves go next, for drawn tables of open moves."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from advisor.index import Key
from advisor.move_turns import COMMAND_MOVES_MAX, Way, next_turns
from advisor.moves import FREES_SOURCE, TRANSITIONS, Move, MoveKind, MoveState

NAMES = ("fast", "middle", "slow")


@st.composite
def open_moves(draw: st.DrawFn) -> list[Move]:
    moves = []
    for number in range(draw(st.integers(0, 50))):
        kind = draw(st.sampled_from(MoveKind))
        source, target = draw(st.permutations(NAMES))[:2]
        move = Move(f"1-{number}", kind, Key(1, 0, number), source, target, 64, "why", 1, 1)
        move.target = "" if kind is MoveKind.DELETE else target
        move.state = draw(st.sampled_from(list(TRANSITIONS[kind])))
        moves.append(move)
    return moves


def copies(move: Move) -> bool:
    return move.kind in (MoveKind.PROMOTE, MoveKind.DEMOTE) and move.state is MoveState.PLANNED


@given(
    open_moves(),
    st.sets(st.integers(0, 50)),
    st.sets(st.sampled_from(("", *NAMES)), max_size=2),
    st.dictionaries(st.sampled_from(NAMES), st.integers(-2, 40)),
)
def test_turns_carry_each_move_once_and_begin_nothing_that_is_paused_or_has_no_room(
    moves: list[Move], taken: set[int], paused: set[str], free: dict[str, int]
) -> None:
    ids = {f"1-{number}" for number in taken}
    turns = next_turns(moves, ids, paused, free)
    chosen = [move for turn in turns.values() for move in turn]
    assert len({move.move_id for move in chosen}) == len(chosen)
    assert ids.isdisjoint(move.move_id for move in chosen)
    for way, turn in turns.items():
        assert 0 < len(turn) <= COMMAND_MOVES_MAX
        assert {(move.source, move.target) for move in turn} == {way}
        assert len({(move.kind, move.state) for move in turn}) == 1
        if turn[0].state is MoveState.PLANNED:
            assert paused.isdisjoint({"", way.source, way.target})
    for volume, slots in free.items():
        begun = [move for move in chosen if copies(move) and move.target == volume]
        frees = any(move.kind in FREES_SOURCE and move.source == volume for move in moves)
        if frees:
            coming = sum(
                move.occupies_target and move.target == volume and (not copies(move) or move.move_id in ids)
                for move in moves
            )
            assert len(begun) <= max(0, slots - coming)


@given(open_moves())
def test_no_way_is_held_up_by_another_and_the_furthest_go_first(moves: list[Move]) -> None:
    turns = next_turns(moves, set(), set(), {})
    assert set(turns) == {Way(move.source, move.target) for move in moves}
    order = list(MoveState)
    for way, turn in turns.items():
        furthest = max(order.index(move.state) for move in moves if (move.source, move.target) == way)
        assert order.index(turn[0].state) == furthest
