"""Commands on the same blocks keep their order; others go at once, and each is carried out once."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor

from hypothesis import given, settings
from hypothesis import strategies as st

from storage_agent.command_lane import CommandLane, Turns
from tests.examples import examples


def test_a_stuck_command_holds_up_only_those_that_share_a_block_with_it() -> None:
    lane, begun, stuck, done = CommandLane[str](), threading.Event(), threading.Event(), list[str]()

    def wait() -> str:
        begun.set()
        assert stuck.wait(60)
        done.append("first")
        return "first"

    def note(name: str) -> str:
        done.append(name)
        return name

    with ThreadPoolExecutor(4) as pool:
        first = pool.submit(lane.run, "1", wait, [10, 11])
        assert begun.wait(60)
        again = pool.submit(lane.run, "1", lambda: note("again"), [10, 11])
        behind = pool.submit(lane.run, "2", lambda: note("behind"), [11, 12])
        assert lane.run("3", lambda: note("beside"), [20]) == "beside"
        assert not behind.done()
        stuck.set()
        assert (first.result(60), again.result(60), behind.result(60)) == ("first", "first", "behind")
    assert done == ["beside", "first", "behind"]
    assert lane._turns._lines == {}


@settings(max_examples=examples(30), deadline=None)
@given(st.lists(st.frozensets(st.integers(0, 3), max_size=3), max_size=12))
def test_whoever_shares_a_thing_goes_in_the_order_announced(work: list[frozenset[int]]) -> None:
    turns, order, under_way, clashes = Turns(), list[int](), set[int](), list[int]()
    announced = [turns.announce(things) for things in work]

    def go(number: int) -> None:
        with turns.take(announced[number]):
            if under_way & work[number]:
                clashes.append(number)
            under_way.update(work[number])
            order.append(number)
            under_way.difference_update(work[number])

    with ThreadPoolExecutor(len(work) or 1) as pool:
        list(pool.map(go, reversed(range(len(work)))))
    assert clashes == []
    assert len(order) == len(work)
    for thing in range(4):
        assert [n for n in order if thing in work[n]] == [n for n, things in enumerate(work) if thing in things]
