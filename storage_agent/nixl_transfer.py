"""Bytes between memory and files by NIXL's POSIX backend.

Each rule below was paid for: strict synchronisation; never release a handle in flight; Linux AIO only; fewer
descriptors in flight than the pool has; a file descriptor that stays open as long as its registration; a deadline of
our own; no use after fork. NIXL never syncs: the caller does.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from storage_agent.errors import TransferError
from storage_agent.file_transfer import (
    DESCRIPTOR_COUNT_MAX,
    Columns,
    FileTransfer,
    Offsets,
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
        self, operation: str, columns: Columns, portions: Portions, before: Portion, after: Portion
    ) -> None:
        """See `FileTransfer._transfer_together`; fewer descriptors are under way than the pool has."""
        self._make_ready()  # a file was let go of since
        deadline = time.monotonic() + self._deadline_s
        first_runs, runs = _runs(columns, portions.bounds)
        sides = self._sides(operation, runs)
        flights: list[_Flight] = []
        failed = ""
        is_over = False
        try:
            for begins, number in portions.steps():
                first, end = portions.bounds[number]
                if begins:
                    before(first, end)
                    numbers = np.arange(first_runs[number], first_runs[number + 1], dtype=np.int32)
                    flights.append(self._post(operation, sides, numbers, bool(flights)))
                elif failed := self._wait(flights[number], deadline):
                    break
                else:
                    after(first, end)
            for flight in flights:  # where one failed, the others too
                self._wait(flight, deadline)
            is_over = True
        finally:
            if not is_over and flights:
                self._land_or_quarantine(flights, sides, deadline)
        if failed:
            # Others of a portion may be under way still. Nothing polls this agent again, and its end waits for
            # the kernel, so afterwards neither file nor memory changes any more.
            del flight, flights, sides
            self._agent = None
            reason = self._probe(operation, *(column[first:end] for column in columns))
            raise TransferError(f"{self._name}: {operation.lower()} failed: {reason or failed}")
        _release(flights, sides)

    def _land_or_quarantine(self, flights: list[_Flight], sides: tuple[Any, Any], deadline: float) -> None:
        """Whoever wanted the bytes has given up: wait for the rest of them, or never touch their memory again."""
        have_landed = False
        try:
            have_landed = all(not self._wait(flight, deadline) for flight in flights)
        except TransferError:
            pass  # the deadline, of which the caller hears already
        finally:
            if have_landed:
                _release(flights, sides)
            else:
                keep_for_ever(self._agent, flights, sides, self._memory)
                self._map_staging()
                self._agent = None

    def _sides(self, operation: str, runs: Columns) -> tuple[Any, Any]:
        """Both ends of the runs, made known to NIXL. Raises `TransferError` where it refuses one."""
        file_offsets, staging_offsets, lengths, fds = runs
        local = np.zeros((len(lengths), 3), dtype=np.uint64)
        local[:, 0] = staging_offsets + np.uint64(self._address)
        local[:, 1] = lengths
        remote = np.empty_like(local)
        remote[:, 0] = file_offsets
        remote[:, 1] = lengths
        remote[:, 2] = fds
        try:
            return (
                self._agent.prep_xfer_dlist("NIXL_INIT_AGENT", local, "DRAM"),
                self._agent.prep_xfer_dlist(self._agent_name, remote, "FILE"),
            )
        except self._nixl.errors as error:
            raise TransferError(f"{self._name}: NIXL refuses the {operation.lower()}: {error}") from error

    def _post(
        self, operation: str, sides: tuple[Any, Any], numbers: npt.NDArray[np.int32], others_fly: bool
    ) -> _Flight:
        """Begin runs. Raises `TransferError` where NIXL refuses them, in doubt while others are under way."""
        agent = self._agent
        memory_side, file_side = sides
        try:
            handle = agent.make_prepped_xfer(operation, memory_side, numbers, file_side, numbers)
        except self._nixl.errors as error:
            message = f"{self._name}: NIXL refuses the {operation.lower()}: {error}"
            raise TransferError(message, in_doubt=others_fly) from error
        flight = _Flight(handle, _EAGER_POLLS + len(numbers) // _RUNS_A_POLL)
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

    def _probe(
        self, operation: str, file_offsets: Offsets, staging_offsets: Offsets, lengths: Offsets, fds: Offsets
    ) -> str:
        """Say why a transfer failed, which NIXL does not: do it again without NIXL and take the errno."""
        for file_offset, staging_offset, length, fd in zip(
            file_offsets.tolist(), staging_offsets.tolist(), lengths.tolist(), fds.tolist(), strict=True
        ):
            part = self._memory[staging_offset : staging_offset + length]
            if reason := move_plainly(operation, fd, part, file_offset):
                return reason
        return ""


def _release(flights: list[_Flight], sides: tuple[Any, Any]) -> None:
    for flight in flights:
        flight.handle.release()
    for side in sides:
        side.release()


def _runs(columns: Columns, portions: list[tuple[int, int]]) -> tuple[list[int], Columns]:
    """What lies side by side in file and staging as one descriptor: a device does few large requests sooner.

    The number of each portion's first run, and behind them how many there are; the runs' columns.
    """
    begin, end = portions[0][0], portions[-1][1]
    file_offsets, staging_offsets, lengths, fds = (column[begin:end] for column in columns)
    if len(lengths) == 1:
        return [0, 1], (file_offsets, staging_offsets, lengths, fds)
    is_first = np.empty(end - begin, dtype=np.bool_)
    goes_on = np.diff(file_offsets) == lengths[:-1]
    goes_on &= np.diff(staging_offsets) == lengths[:-1]
    goes_on &= fds[1:] == fds[:-1]
    np.logical_not(goes_on, out=is_first[1:])
    edges = np.array([first for first, _ in portions]) - begin
    is_first[edges] = True
    firsts = np.flatnonzero(is_first)
    runs = (file_offsets[firsts], staging_offsets[firsts], np.add.reduceat(lengths, firsts), fds[firsts])
    return [*np.searchsorted(firsts, edges).tolist(), len(firsts)], runs
