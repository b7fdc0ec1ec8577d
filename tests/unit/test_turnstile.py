"""The fold's lock: one at a time, nobody starved, readers beside a holder that thinks."""

from __future__ import annotations

import threading
from collections.abc import Callable

from advisor.turnstile import Turnstile


def started(work: Callable[[], None]) -> threading.Thread:
    thread = threading.Thread(target=work)
    thread.start()
    return thread


def test_readers_come_in_while_the_holder_thinks_and_it_goes_on_when_they_left() -> None:
    lock = Turnstile()
    inside, leave, order = threading.Event(), threading.Event(), []

    def read() -> None:
        with lock.shared(), lock, lock.shared():  # what a visitor takes again, it has
            inside.set()
            leave.wait(30)
            order.append("reader left")

    with lock:
        with lock.open_to_readers():
            reader = started(read)
            assert inside.wait(30)
            leave.set()
        order.append("holder goes on")
    reader.join()
    assert order == ["reader left", "holder goes on"]


def test_others_than_readers_wait_for_a_holder_that_thinks() -> None:
    lock = Turnstile()
    order: list[str] = []

    def write() -> None:
        with lock:
            order.append("writer")

    with lock:
        with lock.open_to_readers():
            writer = started(write)
            writer.join(0.05)
            order.append("thought")
        order.append("held")
    writer.join()
    assert order == ["thought", "held", "writer"]


def test_readers_and_writers_never_meet_but_where_the_writer_thinks() -> None:
    lock = Turnstile()
    writing = 0
    met: list[int] = []
    stop = threading.Event()

    def read() -> None:
        while not stop.is_set():
            with lock.shared():
                met.append(writing)

    readers = [started(read) for _ in range(3)]
    for _ in range(300):
        with lock:
            writing = 1
            writing = 0
            with lock.open_to_readers():
                assert writing == 0
            writing = 1
            writing = 0
    while len(met) < 300:
        with lock:
            pass
    stop.set()
    for reader in readers:
        reader.join()
    assert set(met) == {0}


def test_a_reader_is_not_starved_by_a_writer_that_comes_again_and_again() -> None:
    lock = Turnstile()
    stop = threading.Event()

    def write() -> None:
        while not stop.is_set():
            with lock:
                pass

    writer = started(write)
    for _ in range(200):
        with lock.shared():
            pass
    stop.set()
    writer.join()
