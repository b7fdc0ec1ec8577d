"""What `kvadvisor bench core` measures beside: plain copies, bytes over a socket, and a computation."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager

import torch

from kvbm_core.errors import BenchError
from storage_agent.bench_media import RawWay

MATRIX = 256
"""Side of the square matrices that are multiplied, in one thread."""


def memory_ways(size_bytes: int) -> list[RawWay]:
    """One plain copy of all bytes between host memory and the device's."""
    device = torch.device("cuda") if torch.cuda.is_available() else torch.device("cpu")
    near = torch.ones(size_bytes, dtype=torch.uint8, pin_memory=device.type == "cuda")
    far = torch.ones(size_bytes, dtype=torch.uint8, device=device)

    def copy(source: torch.Tensor, target: torch.Tensor) -> None:
        target.copy_(source)
        if device.type == "cuda":
            torch.cuda.synchronize()

    return [RawWay("one copy", lambda: copy(far, near), lambda: copy(near, far), lambda: None)]


def socket_ways(size_bytes: int, closing: ExitStack) -> list[RawWay]:
    """All bytes to another thread of this process and back, over TCP."""
    wire = closing.enter_context(_wire(size_bytes))
    return [RawWay("TCP", lambda: wire(b"w"), lambda: wire(b"r"), lambda: None)]


@contextmanager
def _wire(size_bytes: int) -> Iterator[Callable[[bytes], None]]:
    """Sends so many bytes to another thread over TCP (`w`), or has them sent (`r`); returns when they are there."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        ours = socket.create_connection(server.getsockname())
        its, _ = server.accept()
    here, there = bytearray(size_bytes), bytearray(size_bytes)

    def serve() -> None:
        while asked := its.recv(1):
            if asked == b"w":
                _receive(its, there)
                its.sendall(b".")
            else:
                its.sendall(there)

    def ask(what: bytes) -> None:
        ours.sendall(what)
        if what == b"w":
            ours.sendall(here)
            _receive(ours, bytearray(1))
        else:
            _receive(ours, here)

    thread = threading.Thread(target=serve, name="bench-wire")
    thread.start()
    with ours, its:
        try:
            yield ask
        finally:
            ours.shutdown(socket.SHUT_RDWR)
            thread.join()


def _receive(connection: socket.socket, into: bytearray) -> None:
    view = memoryview(into)
    while view:
        received = connection.recv_into(view)
        if not received:
            raise BenchError(f"the socket was closed {len(view)} bytes before the end: try again")
        view = view[received:]


def computation(device: torch.device) -> Callable[[], AbstractContextManager[Callable[[], float]]]:
    """A computation that goes on within each use of what this gives, and then says how many steps/s it made."""
    matrix = torch.rand(MATRIX, MATRIX, device=device)

    @contextmanager
    def running() -> Iterator[Callable[[], float]]:
        stop = threading.Event()
        steps = 0

        def work() -> None:
            nonlocal steps
            while not stop.is_set():
                torch.mm(matrix, matrix)
                if device.type == "cuda":
                    torch.cuda.synchronize()
                steps += 1

        thread = threading.Thread(target=work, name="bench-compute")
        began_s = time.monotonic()
        thread.start()
        try:
            yield lambda: steps / lasted_s
        finally:
            stop.set()
            thread.join()
            lasted_s = time.monotonic() - began_s

    return running
