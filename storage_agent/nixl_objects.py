"""Bytes between memory and objects of an S3 bucket by NIXL's OBJ backend.

Each rule below was paid for: one handle per object, because an error of one ends the wait for all while others still
write; a device id that no other object has; checksums required; a deadline of our own. An object shorter than asked is
no error to NIXL and leaves the end of the memory as it was, and an error writes its text into the memory: so the caller
spoils the memory before, and checks all bytes after.
"""

from __future__ import annotations

import ctypes
import itertools
import mmap
import os
import queue
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import numpy as np

from storage_agent.errors import TransferError
from storage_agent.nixl_loading import keep_for_ever, load_nixl, make_agent

_POLL_S_MIN = 0.000_2
_POLL_S_MAX = 0.002
_SPOILT_BYTES = 8

_agent_numbers = itertools.count()


class ObjectRange(NamedTuple):
    """`length` bytes of an object from `offset` on, and where in staging memory they are or go."""

    name: str
    offset: int
    length: int
    staging_offset: int


class NixlObjects:
    """Transfers between its own staging memory and objects. One thread at a time.

    After a deadline the NIXL agent, the handles and the staging memory are never touched nor freed again, and fresh
    ones take their place.
    """

    def __init__(self, name: str, backend: Mapping[str, str], *, staging_bytes: int, deadline_s: float) -> None:
        """`backend`: NIXL's parameters for the bucket. Raises `TransferError` where NIXL or OBJ cannot be had."""
        self._name = name
        self._backend = dict(backend)
        self._staging_bytes = staging_bytes
        self._deadline_s = deadline_s
        self._pid = os.getpid()
        self._nixl = load_nixl()
        self._devices = itertools.count(1)
        self._memory: mmap.mmap
        self._address: int
        self._map_staging()
        self._agent: Any = self._make_agent()

    @property
    def staging(self) -> memoryview:
        """Page-aligned and writable. Other memory after a deadline."""
        return memoryview(self._memory)

    def write(self, ranges: Sequence[ObjectRange]) -> dict[int, str]:
        """Make whole objects (offset 0) of staging memory. Durable, as far as the server is, where it does not fail.

        What NIXL says of those that failed, by number; they may be there all the same, whole or not at all. Raises
        `TransferError` in doubt on the deadline.
        """
        return self._transfer("WRITE", ranges)

    def read(self, ranges: Sequence[ObjectRange]) -> dict[int, str]:
        """Read into staging memory. As `write`.

        A range that the object ends in is no failure, and the memory behind its end stays as it was: `spoil` it before
        at every place where checked bytes end.
        """
        return self._transfer("READ", ranges)

    def spoil(self, end: int) -> None:
        """Put into the 8 bytes before `end` what no earlier read left there."""
        start = max(0, end - _SPOILT_BYTES)
        self.staging[start:end] = os.urandom(end - start)

    def close(self) -> None:
        """Idempotent."""
        self._agent = None

    def _make_agent(self) -> Any:
        self._agent_name = f"{self._name}-{self._pid}-{next(_agent_numbers)}"
        try:
            agent = make_agent(self._nixl, self._agent_name)
            agent.create_backend("OBJ", self._backend)
            agent.register_memory([(self._address, self._staging_bytes, 0, "")], "DRAM")
        except self._nixl.errors as error:
            raise TransferError(f"{self._name}: NIXL's OBJ backend does not start: {error}") from error
        return agent

    def _map_staging(self) -> None:
        self._memory = mmap.mmap(-1, self._staging_bytes)
        self._address = ctypes.addressof(ctypes.c_char.from_buffer(self._memory))

    def _transfer(self, operation: str, ranges: Sequence[ObjectRange]) -> dict[int, str]:
        if os.getpid() != self._pid:
            raise TransferError(f"{self._name} was opened by process {self._pid}; NIXL cannot be used after a fork")
        if self._agent is None:
            raise TransferError(f"{self._name} is closed; register the volume again")
        agent = self._agent
        held: list[Any] = [agent]
        finished = False
        try:
            try:
                handles, registered = self._prepare(agent, operation, ranges, held)
            except self._nixl.errors as error:
                finished = True
                raise TransferError(f"{self._name}: NIXL refuses the {operation.lower()}: {error}") from error
            failures = self._run(agent, handles)
            finished = True
        finally:
            if not finished:
                keep_for_ever(*held, self._memory)
                self._map_staging()
                self._agent = self._make_agent()
        for handle in held[1:]:
            handle.release()
        agent.deregister_memory(registered)
        return failures

    def _prepare(
        self, agent: Any, operation: str, ranges: Sequence[ObjectRange], held: list[Any]
    ) -> tuple[list[Any], Any]:
        """A handle for each range, not begun, and the registration of their objects. `held` gets what to release."""
        ends: dict[str, int] = {}
        for wanted in ranges:
            ends[wanted.name] = max(ends.get(wanted.name, 0), wanted.offset + wanted.length)
        devices = {name: next(self._devices) for name in ends}
        registered = agent.register_memory([(0, ends[name], device, name) for name, device in devices.items()], "OBJ")
        local = np.array([(self._address + r.staging_offset, r.length, 0) for r in ranges], dtype=np.uint64)
        remote = np.array([(r.offset, r.length, devices[r.name]) for r in ranges], dtype=np.uint64)
        memory_side = agent.prep_xfer_dlist("NIXL_INIT_AGENT", local, "DRAM")
        object_side = agent.prep_xfer_dlist(self._agent_name, remote, "OBJ")
        handles = []
        for number in range(len(ranges)):
            index = np.array([number], dtype=np.int32)
            handles.append(agent.make_prepped_xfer(operation, memory_side, index, object_side, index))
        held += [*handles, memory_side, object_side]
        return handles, registered

    def _run(self, agent: Any, handles: list[Any]) -> dict[int, str]:
        """Wait until every handle has ended. Raises `TransferError` in doubt on the deadline."""
        deadline = time.monotonic() + self._deadline_s
        pause_s = _POLL_S_MIN
        failures: dict[int, str] = {}
        under_way = set(range(len(handles)))
        ask = agent.transfer
        while True:
            for number in sorted(under_way):
                try:
                    state = ask(handles[number])
                except self._nixl.errors as error:
                    state = str(error) or type(error).__name__
                if state == "PROC":
                    continue
                under_way.discard(number)
                if state != "DONE":
                    failures[number] = state
            if not under_way:
                return failures
            if time.monotonic() >= deadline:
                raise TransferError(f"{self._name}: no answer in {self._deadline_s} s; check the server", in_doubt=True)
            time.sleep(pause_s)
            pause_s = min(2 * pause_s, _POLL_S_MAX)
            ask = agent.check_xfer_state


class ObjectLanes:
    """Several `NixlObjects`, each used by one thread at a time and made when it is first needed. Thread-safe."""

    def __init__(self, make: Callable[[], NixlObjects], count: int) -> None:
        """Makes the first at once. Raises `TransferError` where it cannot be had."""
        self._make = make
        self._count = count
        self._idle: queue.LifoQueue[NixlObjects | None] = queue.LifoQueue()
        for _ in range(count - 1):
            self._idle.put(None)
        self._idle.put(make())

    @contextmanager
    def lane(self) -> Iterator[NixlObjects]:
        """One that nobody else uses meanwhile. Raises `TransferError` where it cannot be made."""
        taken = self._idle.get()
        try:
            if taken is None:
                taken = self._make()
            yield taken
        finally:
            self._idle.put(taken)

    def close(self) -> None:
        """Wait for the transfers under way. Call it once."""
        for _ in range(self._count):
            taken = self._idle.get()
            if taken is not None:
                taken.close()
