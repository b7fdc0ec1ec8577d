"""Jobs spread over processes come back whole, or the reason why not is told."""

from __future__ import annotations

import operator
import os

import pytest

from advisor.replay_processes import ProcessError, spread

MUCH_S = 100.0


def test_each_job_comes_back_from_another_process_with_its_outcome() -> None:
    assert dict(spread(operator.mul, 3, [1, 2, 3], MUCH_S)) == {1: 3, 2: 6, 3: 9}


def test_a_process_that_is_killed_is_told() -> None:
    with pytest.raises(ProcessError, match="was killed"):
        dict(spread(operator.call, os._exit, [3, 4], MUCH_S))


def test_what_a_job_raises_is_raised() -> None:
    with pytest.raises(ZeroDivisionError):
        dict(spread(operator.floordiv, 3, [0, 1], MUCH_S))


def test_little_work_is_done_here() -> None:
    assert list(spread(lambda shared, job: (shared, job, os.getpid()), "a", ["b"], MUCH_S)) == [
        ("b", ("a", "b", os.getpid()))
    ]
    assert [done for _, done in spread(lambda _, job: job, None, [1, 2], 0.1)] == [1, 2]
