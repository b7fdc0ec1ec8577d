"""Bytes between memory and files by plain calls on threads, where NIXL or Linux AIO cannot be had."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Sequence
from queue import SimpleQueue

from storage_agent.errors import TransferError
from storage_agent.file_transfer import Extent, FileTransfer, Portion, Portions, move_plainly

THREADS_MAX = 8


class _Flight:
    """One transfer: threads that take the next descriptor. They have the files open themselves until the last ends."""

    def __init__(self, operation: str, memory: memoryview, extents: Sequence[Extent]) -> None:
        self._operation = operation
        self._memory = memory
        self._extents = extents
        self._files = {fd: os.dup(fd) for fd in sorted({fd for *_, fd in extents})}
        self._todo: SimpleQueue[int | None] = SimpleQueue()
        self._changed = threading.Condition()
        self._ended = bytearray(len(extents))
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
        file_offset, at, length, fd = self._extents[number]
        return move_plainly(self._operation, self._files[fd], self._memory[at : at + length], file_offset)


class ThreadTransfer(FileTransfer):
    """By `preadv` and `pwritev`. After a deadline a thread may still move bytes of its own staging memory."""

    how = "threads"

    def _make_ready(self) -> None:
        pass

    def _let_go(self) -> None:
        pass

    def _transfer_together(
        self, operation: str, extents: Sequence[Extent], portions: Portions, before: Portion, after: Portion
    ) -> None:
        self._require_inside(operation, extents[portions.bounds[0][0] : portions.bounds[-1][1]])
        is_late = False
        try:
            flight = _Flight(operation, self._memory, extents)
        except OSError as error:
            raise TransferError(f"{self._name}: {operation.lower()} failed: {error.strerror}") from error
        try:
            for begins, number in portions.steps():
                first, end = portions.bounds[number]
                if begins:
                    before(first, end)
                    flight.post(first, end)
                    continue
                is_late = not flight.wait(first, end, time.monotonic() + self._deadline_s)
                if is_late or flight.fault:
                    break
                after(first, end)
        finally:
            ended = flight.end(time.monotonic() + (0.0 if is_late else self._deadline_s))
            if is_late or not ended:  # of one that ended just after its time nothing was handed over
                self._map_staging()
                raise TransferError(
                    f"{self._name}: no answer from the device in {self._deadline_s} s; check it, then register again",
                    in_doubt=True,
                )
        if flight.fault:
            raise TransferError(f"{self._name}: {operation.lower()} failed: {flight.fault}")

    def _require_inside(self, operation: str, extents: Sequence[Extent]) -> None:
        """NIXL refuses what is outside the files, too; a write there would make them longer."""
        refuses = f"{self._name} refuses the {operation.lower()}"
        for file_offset, staging_offset, length, fd in extents:
            if fd not in self._files:
                raise TransferError(f"{refuses}: file {fd} is not one of its own")
            if file_offset + length > self._files[fd]:
                raise TransferError(f"{refuses}: it ends at byte {file_offset + length} of {self._files[fd]}")
            if staging_offset + length > self._staging_bytes:
                raise TransferError(f"{refuses}: it goes past the staging memory")
