"""Another process's own memory, read and written by NIXL UCX over TCP, and what closing it does to those who use it."""

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
from storage_agent.nixl_memory import MemoryRegion, NixlMemory
from storage_agent.nixl_window import NixlWindow, Offsets
from tests.stopping import stop

SCRIPT = Path(__file__).with_name("memory_owner.py")
LOST_PEER = Path(__file__).with_name("window_lost_peer.py")


class Owner(NamedTuple):
    process: subprocess.Popen[str]
    metadata: bytes
    address: int

    def say(self, line: str) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(line + "\n")
        self.process.stdin.flush()

    def hear(self) -> list[str]:
        assert self.process.stdout is not None
        return self.process.stdout.readline().split()


@pytest.fixture(autouse=True)
def over_tcp(monkeypatch: pytest.MonkeyPatch) -> None:
    # On one host UCX would copy out of a process that is stopped.
    monkeypatch.setenv("UCX_TLS", "tcp")


@pytest.fixture
def owner() -> Iterator[Owner]:
    pipe = subprocess.PIPE
    with subprocess.Popen([sys.executable, SCRIPT], stdin=pipe, stdout=pipe, text=True) as process:
        assert process.stdout is not None
        metadata, address = process.stdout.readline().split()
        try:
            yield Owner(process, bytes.fromhex(metadata), int(address, 16))
        finally:
            process.kill()


@pytest.fixture
def window() -> Iterator[NixlWindow]:
    made = NixlWindow("writer", 1 << 20, deadline_s=60.0)
    yield made
    made.close()


def column(*values: int) -> Offsets:
    return np.array(values, dtype=np.uint64)


def push(window: NixlWindow, owner: Owner, text: bytes, offsets: Offsets, note: bytes) -> None:
    with window.exclusive() as memory:
        memory[: len(text)] = text
        each = len(text) // len(offsets)
        ours = np.arange(len(offsets), dtype=np.uint64) * np.uint64(each)
        lengths = np.full_like(offsets, each)
        window.push(owner.metadata, offsets + np.uint64(owner.address), ours, lengths, notification=note)


def test_what_is_pushed_lies_there_when_its_notification_arrives(window: NixlWindow, owner: Owner) -> None:
    push(window, owner, b"abcdefgh", column(4096, 100), b"two pieces")
    assert owner.hear() == ["told", b"two pieces".hex()]
    owner.say("show 4096 4")
    assert owner.hear() == ["bytes", b"abcd".hex()]
    owner.say("show 100 4")
    assert owner.hear() == ["bytes", b"efgh".hex()]
    with window.exclusive() as memory:
        window.pull(owner.metadata, column(owner.address + 100), column(0), column(4), notification=b"was read")
        assert memory[:4] == b"efgh"
    assert owner.hear() == ["told", b"was read".hex()]


def test_after_close_nobody_reads_or_writes(window: NixlWindow, owner: Owner) -> None:
    push(window, owner, b"before", column(0), b"1")
    assert owner.hear() == ["told", b"1".hex()]
    owner.say("close")
    assert owner.hear() == ["closed"]
    with pytest.raises(TransferError, match=r"writer: (the peer is gone|NIXL refuses)"):
        push(window, owner, b"after!", column(0), b"2")
    with pytest.raises(TransferError, match=r"writer: (the peer is gone|NIXL refuses)"), window.exclusive():
        window.pull(owner.metadata, column(owner.address), column(0), column(6))
    owner.say("show 0 6")
    assert owner.hear() == ["bytes", b"before".hex()]


def test_a_push_to_a_stopped_peer_meets_our_deadline_and_is_in_doubt(
    window: NixlWindow, owner: Owner, monkeypatch: pytest.MonkeyPatch
) -> None:
    push(window, owner, b"before", column(0), b"1")
    assert owner.hear() == ["told", b"1".hex()]
    stop(owner.process.pid)
    with monkeypatch.context() as impatient:
        impatient.setattr(window, "_deadline_s", 0.5)
        with pytest.raises(TransferError, match=r"the peer did not answer in 0.5 s; check that it runs") as stopped:
            push(window, owner, b"x" * (1 << 20), column(0), b"2")
    assert stopped.value.in_doubt
    os.kill(owner.process.pid, signal.SIGCONT)
    push(window, owner, b"after!", column(0), b"3")
    told = owner.hear()
    while told == ["told", b"2".hex()]:  # the late one may arrive too, whole or not at all
        told = owner.hear()
    assert told == ["told", b"3".hex()]


def test_memory_that_cannot_be_registered_says_how_much(owner: Owner) -> None:
    with pytest.raises(TransferError, match=r"NIXL does not take 64 bytes of VRAM: .*built with CUDA"):
        NixlMemory("nowhere", [MemoryRegion(owner.address, 64, place=("VRAM", 0))])  # type: ignore[arg-type]


def test_closed_memory_is_told_nothing() -> None:
    page = np.zeros(4096, dtype=np.uint8)
    memory = NixlMemory("short", [MemoryRegion(page.ctypes.data, page.nbytes)])
    memory.close()
    memory.close()
    assert memory.notifications() == []


def test_windows_that_lost_their_peers_are_closed_and_the_process_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    # Through shared memory UCX's assertion fails where an agent ends with something queued for a peer that is gone.
    monkeypatch.delenv("UCX_TLS")
    ended = subprocess.run([sys.executable, LOST_PEER], stdout=subprocess.PIPE, text=True, timeout=120, check=False)
    *losses, last = ended.stdout.splitlines()
    assert (ended.returncode, last) == (0, "end")
    assert len(losses) == 8
