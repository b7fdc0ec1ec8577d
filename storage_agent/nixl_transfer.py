"""Bytes between memory and files by NIXL's POSIX backend.

Each rule below was paid for: strict synchronisation; never release a handle in flight; Linux AIO only; fewer
descriptors in flight than the pool has; a file descriptor that stays open as long as its registration; a deadline of
our own; no use after fork. NIXL never syncs: the caller does.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from storage_agent.errors import TransferError
from storage_agent.file_transfer import (
    DESCRIPTOR_COUNT_MAX,
    Extent,
    FileTransfer,
    Portion,
    Portions,
    move_plainly,
)
from storage_agent.nixl_loading import keep_for_ever, load_nixl, make_agent

_IOS_POOL_SIZE = 2 * DESCRIPTOR_COUNT_MAX
_PAUSE_S_MIN = 0.000_02
_PAUSE_S_MAX = 0.002
_PAUSE_SHARE = 1 / 16
"""Of the time waited so far for one transfer: a pause that lasts past its end costs no more than that."""
_RUNS_A_POLL = 64
"""NIXL submits so many at each poll: before the first pause all must be under way."""
_EAGER_POLLS = 2
"""Before a pause at least: the poll that finds what has ended may still answer that it has not."""

_agent_numbers = itertools.count()


@dataclass(slots=True)
class _Flight:
    """A transfer that was begun. `state`: PROC while it is under way, DONE, or what failed."""

    handle: Any
    memory_side: Any
    file_side: Any
    eager_polls: int
    state: str = "PROC"

    def advance(self, ask: Callable[[], str], errors: tuple[type[Exception], ...]) -> None:
        try:
            state = ask()
        except errors as error:
            self.state = str(error) or type(error).__name__
        else:
            self.state = state if state in ("PROC", "DONE") else f"NIXL answers {state}"


class NixlTransfer(FileTransfer):
    """By NIXL's POSIX backend. After a deadline its agent and handle are never touched nor freed again, either."""

    def __init__(
        self, name: str, files: Mapping[int, int], *, staging_bytes: int, deadline_s: float = 30.0
    ) -> None:
        """`files`: bytes by file descriptor. Raises `TransferError` where NIXL or its POSIX backend cannot be had."""
        super().__init__(name, files, staging_bytes=staging_bytes, deadline_s=deadline_s)
        self._nixl = load_nixl()
        self._agent: Any = self._make_agent()

    def add_file(self, fd: int, file_bytes: int) -> None:
        """See `FileTransfer.add_file`."""
        super().add_file(fd, file_bytes)
        if self._agent is not None:
            self._register_file(self._agent, fd)

    def _make_ready(self) -> None:
        if self._agent is None:
            self._agent = self._make_agent()

    def _let_go(self) -> None:
        self._agent = None  # with all its registrations; the next one to come makes another

    def _make_agent(self) -> Any:
        self._agent_name = f"{self._name}-{self._pid}-{next(_agent_numbers)}"
        try:
            agent = make_agent(self._nixl, self._agent_name)
            agent.create_backend("POSIX", {"use_aio": "true", "ios_pool_size": str(_IOS_POOL_SIZE)})
            agent.register_memory([(self._address, self._staging_bytes, 0, "")], "DRAM")
        except self._nixl.errors as error:
            raise TransferError(
                f"{self._name}: NIXL's POSIX backend does not start ({error}); "
                "compare /proc/sys/fs/aio-nr with aio-max-nr"
            ) from error
        for fd in self._files:
            self._register_file(agent, fd)
        return agent

    def _register_file(self, agent: Any, fd: int) -> None:
        try:
            agent.register_memory([(0, self._files[fd], fd, "")], "FILE")
        except self._nixl.errors as error:
            raise TransferError(f"{self._name}: NIXL does not take the file: {error}") from error

    def _transfer_together(
        self, operation: str, extents: Sequence[Extent], portions: Portions, before: Portion, after: Portion
    ) -> None:
        """See `FileTransfer._transfer_together`; fewer descriptors are under way than the pool has."""
        self._make_ready()  # a file was let go of since
        deadline = time.monotonic() + self._deadline_s
        flights: list[_Flight] = []
        failed = ""
        is_over = False
        try:
            for begins, number in portions.steps():
                first, end = portions.bounds[number]
                if begins:
                    before(first, end)
                    flights.append(self._post(operation, extents[first:end], others_fly=bool(flights)))
                    continue
                deadline = time.monotonic() + self._deadline_s  # anew: what was handed over meanwhile took its time
                failed = self._wait(flights[number], deadline)
                if failed:
                    break
                after(first, end)
            for flight in flights:  # where one failed, the others too
                self._wait(flight, deadline)
            is_over = True
        finally:
            if not is_over and flights:
                self._land_or_quarantine(flights, deadline)
        if failed:
            # Others of a portion may be under way still. Nothing polls this agent again, and its end waits for
            # the kernel, so afterwards neither file nor memory changes any more.
            del flight, flights
            self._agent = None
            reason = self._probe(operation, extents[first:end])
            raise TransferError(f"{self._name}: {operation.lower()} failed: {reason or failed}")
        _release(flights)

    def _land_or_quarantine(self, flights: list[_Flight], deadline: float) -> None:
        """Whoever wanted the bytes has given up: wait for the rest of them, or never touch their memory again."""
        have_landed = False
        try:
            have_landed = all(not self._wait(flight, deadline) for flight in flights)
        except TransferError:
            pass  # the deadline, of which the caller hears already
        finally:
            if have_landed:
                _release(flights)
            else:
                keep_for_ever(self._agent, flights, self._memory)
                self._map_staging()
                self._agent = None

    def _post(self, operation: str, extents: Sequence[Extent], *, others_fly: bool) -> _Flight:
        """Begin a transfer. Raises `TransferError` where NIXL refuses it, in doubt while others are under way."""
        agent = self._agent
        local, remote = runs_of(extents, self._address)
        numbers = np.arange(len(local), dtype=np.int32)
        try:
            memory_side = agent.prep_xfer_dlist("NIXL_INIT_AGENT", np.array(local, dtype=np.uint64), "DRAM")
            file_side = agent.prep_xfer_dlist(self._agent_name, np.array(remote, dtype=np.uint64), "FILE")
            handle = agent.make_prepped_xfer(operation, memory_side, numbers, file_side, numbers)
        except self._nixl.errors as error:
            message = f"{self._name}: NIXL refuses the {operation.lower()}: {error}"
            raise TransferError(message, in_doubt=others_fly) from error
        flight = _Flight(handle, memory_side, file_side, _EAGER_POLLS + len(local) // _RUNS_A_POLL)
        flight.advance(lambda: agent.transfer(handle), self._nixl.errors)
        return flight

    def _wait(self, flight: _Flight, deadline: float) -> str:
        """Until a transfer has ended. Empty, or what failed. Raises `TransferError` in doubt at the deadline."""
        agent = self._agent
        started = time.monotonic()
        while flight.state == "PROC":
            now = time.monotonic()
            if now >= deadline:
                raise TransferError(
                    f"{self._name}: no answer from the device in {self._deadline_s} s; check it, then register again",
                    in_doubt=True,
                )
            if flight.eager_polls:
                flight.eager_polls -= 1
            else:
                time.sleep(min(max(_PAUSE_S_MIN, (now - started) * _PAUSE_SHARE), _PAUSE_S_MAX))
            flight.advance(lambda: agent.check_xfer_state(flight.handle), self._nixl.errors)
        return "" if flight.state == "DONE" else flight.state

    def _probe(self, operation: str, extents: Sequence[Extent]) -> str:
        """Say why a transfer failed, which NIXL does not: do it again without NIXL and take the errno."""
        for file_offset, staging_offset, length, fd in extents:
            part = self._memory[staging_offset : staging_offset + length]
            if reason := move_plainly(operation, fd, part, file_offset):
                return reason
        return ""


def _release(flights: list[_Flight]) -> None:
    for flight in flights:
        flight.handle.release()
        flight.memory_side.release()
        flight.file_side.release()


def runs_of(extents: Sequence[Extent], address: int) -> tuple[list[list[int]], list[list[int]]]:
    """What lies side by side in file and staging as one descriptor: a device does few large requests sooner.

    NIXL's descriptors of memory, where staging begins at `address`, and of files: address or offset, length, device.
    """
    local: list[list[int]] = []
    remote: list[list[int]] = []
    file_end = staging_end = fd_before = -1
    for file_offset, staging_offset, length, fd in extents:
        if file_offset == file_end and staging_offset == staging_end and fd == fd_before:
            local[-1][1] += length
            remote[-1][1] += length
        else:
            local.append([address + staging_offset, length, 0])
            remote.append([file_offset, length, fd])
        file_end, staging_end, fd_before = file_offset + length, staging_offset + length, fd
    return local, remote
