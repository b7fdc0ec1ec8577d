"""A move of engine blocks in a thread that nobody waits for: its fault is said."""

from __future__ import annotations

from concurrent.futures import Future, ThreadPoolExecutor

from structlog.testing import capture_logs

from kvbm_core.connectors.engine_store import log_fault


def test_a_fault_in_a_move_that_nobody_waits_for_is_logged_and_a_move_that_works_is_not() -> None:
    def fail() -> None:
        raise ValueError("payload 3 is not C-contiguous")

    with capture_logs() as said, ThreadPoolExecutor(1) as threads:
        for move in (fail, lambda: None):
            threads.submit(move).add_done_callback(log_fault)
    assert [str(entry["exc_info"]) for entry in said] == ["payload 3 is not C-contiguous"]
    assert said[0]["log_level"] == "error"


def test_a_move_that_was_given_up_is_no_fault() -> None:
    move: Future[None] = Future()
    assert move.cancel()
    with capture_logs() as said:
        log_fault(move)
    assert said == []
