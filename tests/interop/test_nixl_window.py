"""Pulls from another process's memory by NIXL UCX: over TCP, as between hosts, from peers that stop and die."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest

from storage_agent.errors import TransferError
from storage_agent.nixl_window import NixlWindow
from tests.stopping import stop

SCRIPT = Path(__file__).with_name("window_owner.py")


class Lender(NamedTuple):
    process: subprocess.Popen[str]
    metadata: bytes
    address: int


@pytest.fixture(autouse=True)
def over_tcp(monkeypatch: pytest.MonkeyPatch) -> None:
    # On one host UCX would copy out of a process that is stopped.
    monkeypatch.setenv("UCX_TLS", "tcp")


@pytest.fixture
def lender() -> Iterator[Lender]:
    with subprocess.Popen([sys.executable, SCRIPT], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        metadata, address = process.stdout.readline().split()
        try:
            yield Lender(process, bytes.fromhex(metadata), int(address, 16))
        finally:
            process.kill()


@pytest.fixture
def window() -> Iterator[NixlWindow]:
    made = NixlWindow("borrower", 1 << 20, deadline_s=60.0)
    yield made
    made.close()


def pull(window: NixlWindow, lender: Lender, *extents: tuple[int, int, int]) -> bytes:
    """Extents are (offset there, offset here, length); the first of them."""
    there, here, lengths = (np.array(column, dtype=np.uint64) for column in zip(*extents, strict=True))
    with window.exclusive() as memory:
        window.pull(lender.metadata, there + np.uint64(lender.address), here, lengths)
        _, at, length = extents[0]
        return bytes(memory[at : at + length])


def test_what_is_pulled_is_what_lies_there(window: NixlWindow, lender: Lender) -> None:
    extents = [(8 * n * 1024, 16 + n * 4096, 8 * (n + 1)) for n in range(100)]
    pull(window, lender, *extents)
    with window.exclusive() as memory:
        for there, here, length in extents:
            expected = b"".join(at.to_bytes(8, "little") for at in range(there, there + length, 8))
            assert bytes(memory[here : here + length]) == expected


def test_a_stopped_peer_meets_our_deadline_and_is_pulled_from_again_when_it_goes_on(
    window: NixlWindow, lender: Lender, monkeypatch: pytest.MonkeyPatch
) -> None:
    pull(window, lender, (0, 0, 4096))
    stop(lender.process.pid)
    with monkeypatch.context() as impatient:
        impatient.setattr(window, "_deadline_s", 0.5)
        with pytest.raises(TransferError, match=r"borrower: the peer did not answer in 0.5 s; check that it runs"):
            pull(window, lender, (0, 0, 1 << 20))
    os.kill(lender.process.pid, signal.SIGCONT)
    # The memory that the late answer goes to is not ours any more.
    assert pull(window, lender, (800, 0, 8)) == (800).to_bytes(8, "little")


def test_a_killed_peer_raises_and_the_window_serves_others(window: NixlWindow, lender: Lender) -> None:
    pull(window, lender, (0, 0, 4096))
    lender.process.kill()
    lender.process.wait()
    for _ in range(2):
        with pytest.raises(TransferError, match=r"borrower: (the peer is gone|NIXL refuses the pull)"):
            pull(window, lender, (0, 0, 4096))
    with subprocess.Popen([sys.executable, SCRIPT], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        metadata, address = process.stdout.readline().split()
        other = Lender(process, bytes.fromhex(metadata), int(address, 16))
        assert pull(window, other, (8000, 0, 8)) == (8000).to_bytes(8, "little")
        process.kill()


def test_memory_that_is_not_the_peers_is_refused(window: NixlWindow, lender: Lender) -> None:
    with pytest.raises(TransferError, match="NIXL refuses the pull"):
        pull(window, lender, (1 << 20, 0, 4096))
    with pytest.raises(TransferError, match="8 bytes of a peer's metadata are damaged"):
        pull(window, lender._replace(metadata=b"nonsense"), (0, 0, 8))
    assert pull(window, lender, (80, 0, 8)) == (80).to_bytes(8, "little")


def test_a_closed_window_and_one_of_a_parent_say_so(window: NixlWindow) -> None:
    pid = os.fork()
    if pid == 0:  # no pytest in the child
        try:
            with window.exclusive():
                os._exit(1)
        except TransferError as error:
            os._exit(0 if "cannot be used after a fork" in str(error) else 2)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    window.close()
    window.close()
    with pytest.raises(TransferError, match="is closed"), window.exclusive():
        pass


def test_no_infiniband_is_looked_for_where_there_is_none(window: NixlWindow) -> None:
    if Path("/sys/class/infiniband").is_dir():
        pytest.skip("this machine has InfiniBand")
    assert os.environ["UCX_MODULES"] == "^ib"
