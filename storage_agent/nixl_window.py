"""Memory that peers pull from, and from which theirs is read and written, by NIXL's UCX backend.

Two agents exchange NIXL's metadata over a command socket. A peer that stops answers never and one that dies raises, so
every transfer has a deadline of ours. Taking memory back is no fence: a peer may still read it, so what lies in it says
by a mark and checksums whether it is what was lent (`loans`).
"""

from __future__ import annotations

import ctypes
import mmap
import os
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from storage_agent.errors import TransferError
from storage_agent.fifo_lock import FifoLock
from storage_agent.nixl_loading import keep_for_ever, load_nixl, make_ucx_agent
from storage_agent.nixl_memory import HOST_MEMORY, MemoryPlace
from storage_agent.nixl_metadata import open_metadata, seal_metadata

Offsets = npt.NDArray[np.uint64]

PROGRESS_INTERVAL_S = 0.000_3
_POLL_S_MIN = 0.000_2
_POLL_S_MAX = 0.001


class NixlWindow:
    """One piece of memory and a UCX agent for it. Thread-safe: one holder of `exclusive` at a time.

    After a deadline, or a peer's end, the agent and the memory are never touched nor freed again, and fresh ones take
    their place.
    """

    def __init__(self, name: str, window_bytes: int, *, deadline_s: float = 30.0) -> None:
        """Raises `TransferError` where NIXL or its UCX backend cannot be had."""
        self._name = name
        self._bytes = window_bytes
        self._deadline_s = deadline_s
        self._lock = FifoLock()
        self._pid = os.getpid()
        self._closed = False
        self._nixl = load_nixl()
        self._agent: Any = None
        self._peers: dict[bytes, Any] = {}
        """Names of peers by their metadata."""
        with self._lock:
            self._open()

    @property
    def window_bytes(self) -> int:
        return self._bytes

    @contextmanager
    def exclusive(self) -> Iterator[memoryview]:
        """The memory, for one thread at a time. Raises `TransferError` when closed or in a forked child."""
        with self._lock:
            if self._closed:
                raise TransferError(f"{self._name} is closed")
            if os.getpid() != self._pid:
                raise TransferError(f"{self._name} was made by process {self._pid}; NIXL cannot be used after a fork")
            if self._agent is None:
                self._open()
            yield memoryview(self._memory)

    @property
    def address(self) -> int:
        """Of the memory's first byte. Hold `exclusive`."""
        return self._address

    @property
    def metadata(self) -> bytes:
        """What a peer needs to pull from here. Hold `exclusive`."""
        return seal_metadata(self._agent.get_agent_metadata(), self._nixl.release)

    def progress(self) -> None:
        """Let peers' pulls go on: UCX answers them only while it is called, every `PROGRESS_INTERVAL_S`."""
        agent = self._agent
        if agent is not None:
            with suppress(*self._nixl.errors):  # a peer's fault is its own to find
                agent.get_new_notifs()

    @contextmanager
    def served(self) -> Iterator[None]:
        """A thread that calls `progress` meanwhile."""
        done = threading.Event()

        def serve() -> None:
            while not done.wait(PROGRESS_INTERVAL_S):
                self.progress()

        thread = threading.Thread(target=serve, name=f"progress-{self._name}", daemon=True)
        thread.start()
        try:
            yield
        finally:
            done.set()
            thread.join()

    def pull(
        self,
        metadata: bytes,
        addresses: Offsets,
        offsets: Offsets,
        lengths: Offsets,
        there: MemoryPlace = HOST_MEMORY,
        *,
        notification: bytes = b"",
    ) -> None:
        """Read a peer's memory, which lies `there`, into ours at `offsets`. In bytes, equally long. Hold `exclusive`.

        The peer is told `notification` afterwards. (One that is sent alone, to a peer that is gone, ends this process
        when the window closes.) Raises `TransferError`: the peer is gone, or does not answer before the deadline.
        Nothing is written later.
        """
        self._move("READ", metadata, addresses, offsets, lengths, there, notification)

    def push(
        self,
        metadata: bytes,
        addresses: Offsets,
        offsets: Offsets,
        lengths: Offsets,
        there: MemoryPlace = HOST_MEMORY,
        *,
        notification: bytes,
    ) -> None:
        """Write ours at `offsets` into a peer's memory, which is told `notification` once all of it lies there.

        As `pull`, but after `TransferError` with `in_doubt` the peer's memory may be written to later.
        """
        self._move("WRITE", metadata, addresses, offsets, lengths, there, notification)

    def forget(self, metadata: bytes) -> None:
        """Let go of a peer. Hold `exclusive`."""
        peer = self._peers.pop(metadata, None)
        if peer is not None and self._agent is not None:
            with suppress(*self._nixl.errors):  # it is gone by itself
                self._agent.remove_remote_agent(peer)

    def close(self) -> None:
        """Wait for the pull under way, then let go of peers and memory. Idempotent."""
        with self._lock:
            self._closed = True
            for metadata in list(self._peers):
                self.forget(metadata)
            self._agent = None

    def _open(self) -> None:
        flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | mmap.MAP_POPULATE
        self._memory = mmap.mmap(-1, self._bytes, flags=flags)
        self._address = ctypes.addressof(ctypes.c_char.from_buffer(self._memory))
        self._peers = {}
        agent = make_ucx_agent(self._nixl, self._name)
        try:
            agent.register_memory([(self._address, self._bytes, 0, "")], "DRAM")
        except self._nixl.errors as error:
            raise TransferError(f"{self._name}: NIXL does not take {self._bytes} bytes of memory: {error}") from error
        self._agent = agent

    def _peer(self, metadata: bytes) -> Any:
        peer = self._peers.get(metadata)
        if peer is None:
            peer = self._peers[metadata] = self._agent.add_remote_agent(
                open_metadata(metadata, self._nixl.release)
            )
        return peer

    def _move(
        self,
        operation: Literal["READ", "WRITE"],
        metadata: bytes,
        addresses: Offsets,
        offsets: Offsets,
        lengths: Offsets,
        there: MemoryPlace,
        notification: bytes,
    ) -> None:
        agent = self._agent
        try:
            peer = self._peer(metadata)
            ours = _descriptors(offsets + np.uint64(self._address), lengths, 0)
            theirs = _descriptors(addresses, lengths, there.device)
            indices = np.arange(len(lengths), dtype=np.int32)
            our_side = agent.prep_xfer_dlist("NIXL_INIT_AGENT", ours, "DRAM")
            their_side = agent.prep_xfer_dlist(peer, theirs, there.kind)
            handle = agent.make_prepped_xfer(operation, our_side, indices, their_side, indices, notification)
        except self._nixl.errors as error:
            self.forget(metadata)
            verb = "pull" if operation == "READ" else "push"
            raise TransferError(f"{self._name}: NIXL refuses the {verb}: {error}") from error
        state = "PROC"
        try:
            state = self._wait(agent, handle)
            if state == "PROC":
                reason = f"the peer did not answer in {self._deadline_s} s; check that it runs"
                raise TransferError(f"{self._name}: {reason}", in_doubt=operation == "WRITE")
            for each in (handle, our_side, their_side):
                each.release()
        except self._nixl.errors as error:
            state = str(error) or type(error).__name__
        finally:
            # An interrupt too: it may be written into still. And to end an agent that lost a peer ends the process,
            # by an assertion of UCX, where anything for that peer was queued.
            if state != "DONE":
                self._quarantine(agent, handle, our_side, their_side)
        if state != "DONE":
            raise TransferError(f"{self._name}: the peer is gone: {state}", in_doubt=operation == "WRITE")

    def _wait(self, agent: Any, handle: Any) -> str:
        deadline = time.monotonic() + self._deadline_s
        pause_s = _POLL_S_MIN
        state: str = agent.transfer(handle)
        while state == "PROC" and time.monotonic() < deadline:
            time.sleep(pause_s)
            pause_s = min(2 * pause_s, _POLL_S_MAX)
            state = agent.check_xfer_state(handle)
        return state

    def _quarantine(self, *in_flight: Any) -> None:
        keep_for_ever(*in_flight, self._memory)
        self._agent = None


def _descriptors(addresses: Offsets, lengths: Offsets, device: int) -> Offsets:
    made = np.zeros((len(lengths), 3), dtype=np.uint64)
    made[:, 0] = addresses
    made[:, 1] = lengths
    made[:, 2] = device
    return made
