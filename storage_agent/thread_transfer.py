"""Bytes between memory and files by plain calls on threads, where NIXL or Linux AIO cannot be had."""

from __future__ import annotations

import os
import threading
import time
from queue import SimpleQueue

import numpy as np

from storage_agent.errors import TransferError
from storage_agent.file_transfer import Columns, FileTransfer, Portion, Portions, move_plainly

THREADS_MAX = 8


class _Flight:
    """One transfer: threads that take the next descriptor. They have the files open themselves until the last ends."""

    def __init__(self, operation: str, memory: memoryview, columns: Columns) -> None:
        self._operation = operation
        self._memory = memory
        self._columns = [column.tolist() for column in columns]
        self._files = {fd: os.dup(fd) for fd in sorted(set(self._columns[-1]))}
        self._todo: SimpleQueue[int | None] = SimpleQueue()
        self._changed = threading.Condition()
        self._ended = bytearray(len(columns[0]))
        """One for each descriptor that was moved, failed or left out."""
        self._is_stopped = False
        self.fault = ""
        """Of the first descriptor that failed."""
        count = min(THREADS_MAX, len(self._ended))
        self._at_work = count
        self._threads = [threading.Thread(target=self._work, name="file-transfer", daemon=True) for _ in range(count)]
        for thread in self._threads:
            thread.start()

    def post(self, first: int, end: int) -> None:
        for number in range(first, end):
            self._todo.put(number)

    def wait(self, first: int, end: int, deadline: float) -> bool:
        """Until these descriptors have ended. False at the deadline."""
        with self._changed:
            return self._changed.wait_for(
                lambda: self._ended.count(1, first, end) == end - first, timeout=max(0.0, deadline - time.monotonic())
            )

    def end(self, deadline: float) -> bool:
        """Begin no other descriptor. False where one is still under way at the deadline."""
        self._is_stopped = True  # of a transfer that is done nothing is left out
        for _ in self._threads:
            self._todo.put(None)
        for thread in self._threads:
            thread.join(max(0.0, deadline - time.monotonic()))
        return not any(thread.is_alive() for thread in self._threads)

    def _work(self) -> None:
        while (number := self._todo.get()) is not None:
            fault = "it was given up" if self._is_stopped else self._move(number)
            with self._changed:
                self._ended[number] = 1
                self.fault = self.fault or fault
                self._changed.notify_all()
        with self._changed:
            self._at_work -= 1
            is_last = self._at_work == 0
        if is_last:
            for fd in self._files.values():
                os.close(fd)

    def _move(self, number: int) -> str:
        file_offset, at, length, fd = (column[number] for column in self._columns)
        return move_plainly(self._operation, self._files[fd], self._memory[at : at + length], file_offset)


class ThreadTransfer(FileTransfer):
    """By `preadv` and `pwritev`. After a deadline a thread may still move bytes of its own staging memory."""

    how = "threads"

    def _make_ready(self) -> None:
        pass

    def _let_go(self) -> None:
        pass

    def _transfer_together(
        self, operation: str, columns: Columns, portions: Portions, before: Portion, after: Portion
    ) -> None:
        self._require_inside(operation, columns, portions.bounds)
        deadline = time.monotonic() + self._deadline_s
        try:
            flight = _Flight(operation, self._memory, columns)
        except OSError as error:
            raise TransferError(f"{self._name}: {operation.lower()} failed: {error.strerror}") from error
        try:
            for begins, number in portions.steps():
                first, end = portions.bounds[number]
                if begins:
                    before(first, end)
                    flight.post(first, end)
                elif flight.wait(first, end, deadline) and not flight.fault:
                    after(first, end)
                else:
                    break
        finally:
            if not flight.end(deadline):
                self._map_staging()
                raise TransferError(
                    f"{self._name}: no answer from the device in {self._deadline_s} s; check it, then register again",
                    in_doubt=True,
                )
        if flight.fault:
            raise TransferError(f"{self._name}: {operation.lower()} failed: {flight.fault}")

    def _require_inside(self, operation: str, columns: Columns, portions: list[tuple[int, int]]) -> None:
        """NIXL refuses what is outside the files, too; a write there would make them longer."""
        part = slice(portions[0][0], portions[-1][1])
        file_offsets, staging_offsets, lengths, fds = (column[part] for column in columns)
        for fd in np.unique(fds).tolist():
            if fd not in self._files:
                raise TransferError(f"{self._name} refuses the {operation.lower()}: file {fd} is not one of its own")
            of_file = fds == fd
            end = int((file_offsets[of_file] + lengths[of_file]).max())
            if end > self._files[fd]:
                raise TransferError(
                    f"{self._name} refuses the {operation.lower()}: it ends at byte {end} of {self._files[fd]}"
                )
        if int((staging_offsets + lengths).max()) > self._staging_bytes:
            raise TransferError(f"{self._name} refuses the {operation.lower()}: it goes past the staging memory")
