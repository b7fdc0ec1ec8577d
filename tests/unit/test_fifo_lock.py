"""The lock that goes to whoever waited longest."""

from __future__ import annotations

import threading

from storage_agent.fifo_lock import FifoLock


def test_the_lock_goes_to_waiters_in_order_of_arrival() -> None:
    lock = FifoLock()
    order: list[int] = []

    def take(number: int) -> None:
        with lock:
            order.append(number)

    threads = [threading.Thread(target=take, args=(number,)) for number in range(5)]
    with lock:
        for number, thread in enumerate(threads):
            thread.start()
            while len(lock._waiting) <= number:
                threading.Event().wait(0.001)
    with lock:  # whoever lets go of it and wants it back comes after all of them
        assert order == [0, 1, 2, 3, 4]
    for thread in threads:
        thread.join()


def test_one_thread_holds_it_at_a_time() -> None:
    lock = FifoLock()
    held = 0
    most = 0

    def take() -> None:
        nonlocal held, most
        for _ in range(300):
            with lock:
                held += 1
                most = max(most, held)
                held -= 1

    threads = [threading.Thread(target=take) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert (held, most) == (0, 1)
