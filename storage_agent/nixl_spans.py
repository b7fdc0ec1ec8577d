"""Bytes between memory of somebody else's, a GPU's or this host's, and a file, with no copy in between.

By whichever of NIXL's file backends is named: GDS for a GPU's memory, POSIX for the host's. Nothing is staged and
nothing is checked: what the bytes should be, and when they are durable, is the caller's to know.
"""

from __future__ import annotations

import itertools
import os
import time
from collections.abc import Mapping, Sequence
from typing import Any, Literal

import numpy as np

from storage_agent.errors import TransferError
from storage_agent.fifo_lock import FifoLock
from storage_agent.nixl_loading import keep_for_ever, load_nixl, make_agent
from storage_agent.nixl_memory import MemoryPlace, MemoryRegion

Operation = Literal["READ", "WRITE"]
SPANS_MAX = 4096
"""Of one transfer."""
POSIX: Mapping[str, str] = {"use_aio": "true", "ios_pool_size": str(2 * SPANS_MAX)}
"""What NIXL's POSIX backend must be given."""
_POLL_S_MIN = 0.000_05
_POLL_S_MAX = 0.002
_agent_numbers = itertools.count()


class NixlSpans:
    """Transfers between one file and regions of memory on one place. Thread-safe: one transfer at a time.

    File and regions outlast it. After a deadline it is not to be used any more, and neither the regions of that
    transfer nor the file may be freed: bytes may still come.
    """

    def __init__(
        self,
        name: str,
        backend: str,
        parameters: Mapping[str, str],
        regions: Sequence[MemoryRegion],
        fd: int,
        file_bytes: int,
        *,
        deadline_s: float = 30.0,
    ) -> None:
        """Raises `TransferError`: no NIXL, no such backend, memory or a file that it does not take."""
        if len({region.place for region in regions}) != 1:
            raise TransferError(f"{name}: the regions lie on {len({r.place for r in regions})} places; give one place")
        self._name = name
        self._place: MemoryPlace = regions[0].place
        self._fd = fd
        self._deadline_s = deadline_s
        self._lock = FifoLock()
        self._pid = os.getpid()
        self._nixl = load_nixl()
        self._agent_name = f"{name}-{self._pid}-{next(_agent_numbers)}"
        kind, device = self._place
        try:
            agent = make_agent(self._nixl, self._agent_name)
            agent.create_backend(backend, dict(parameters))
            agent.register_memory([(region.address, region.size_bytes, device, "") for region in regions], kind)
            agent.register_memory([(0, file_bytes, fd, "")], "FILE")
        except self._nixl.errors as error:
            raise TransferError(f"{name}: NIXL's {backend} backend does not serve {kind}: {error}") from error
        self._agent: Any = agent

    def write(self, spans: Sequence[MemoryRegion], file_offsets: Sequence[int]) -> None:
        """Write each span, a part of a region, at its offset. Not durable until the caller syncs.

        Raises `TransferError`, after which the file may hold any part of it.
        """
        self.transfer("WRITE", spans, file_offsets)

    def read(self, spans: Sequence[MemoryRegion], file_offsets: Sequence[int]) -> None:
        """Read into each span. As `write`."""
        self.transfer("READ", spans, file_offsets)

    def close(self) -> None:
        """Wait for the transfer under way, then let go of memory and file. Idempotent."""
        with self._lock:
            self._agent = None

    def transfer(
        self, operation: Operation, spans: Sequence[MemoryRegion], file_offsets: Sequence[int]
    ) -> None:
        """`read` or `write`."""
        self._require_usable(operation, spans, file_offsets)
        kind, device = self._place
        memory = np.array([(span.address, span.size_bytes, device) for span in spans], dtype=np.uint64)
        file = np.array(
            [(at, span.size_bytes, self._fd) for at, span in zip(file_offsets, spans, strict=True)], dtype=np.uint64
        )
        numbers = np.arange(len(spans), dtype=np.int32)
        with self._lock:
            agent = self._agent
            if agent is None:
                raise TransferError(f"{self._name} is closed, or a deadline passed; make another")
            try:
                memory_side = agent.prep_xfer_dlist("NIXL_INIT_AGENT", memory, kind)
                file_side = agent.prep_xfer_dlist(self._agent_name, file, "FILE")
                handle = agent.make_prepped_xfer(operation, memory_side, numbers, file_side, numbers)
            except self._nixl.errors as error:
                raise TransferError(f"{self._name}: NIXL refuses the {operation.lower()}: {error}") from error
            state = "PROC"
            try:
                state = self._wait(agent, handle)
            finally:
                if state != "DONE":  # an error ends the wait for all while some may still be moving
                    keep_for_ever(agent, handle, memory_side, file_side)
                    self._agent = None
            if state != "DONE":
                is_late = state == "PROC"
                said = f"no answer from the device in {self._deadline_s} s" if is_late else f"it failed: {state}"
                raise TransferError(f"{self._name}: {operation.lower()}: {said}", in_doubt=True)
            for each in (handle, memory_side, file_side):
                each.release()

    def _wait(self, agent: Any, handle: Any) -> str:
        """DONE, PROC at the deadline, or what failed."""
        deadline = time.monotonic() + self._deadline_s
        pause_s = _POLL_S_MIN
        state: str
        try:
            state = agent.transfer(handle)
            while state == "PROC" and time.monotonic() < deadline:
                time.sleep(pause_s)
                pause_s = min(2 * pause_s, _POLL_S_MAX)
                state = agent.check_xfer_state(handle)
        except self._nixl.errors as error:
            return str(error) or type(error).__name__
        return state

    def _require_usable(self, operation: str, spans: Sequence[MemoryRegion], file_offsets: Sequence[int]) -> None:
        refused = f"{self._name} refuses the {operation.lower()}"
        if os.getpid() != self._pid:
            raise TransferError(f"{refused}: it was made by process {self._pid}; NIXL cannot be used after a fork")
        if not 0 < len(spans) <= SPANS_MAX or len(spans) != len(file_offsets):
            raise TransferError(
                f"{refused}: {len(spans)} spans, {len(file_offsets)} offsets; give 1 to {SPANS_MAX}, as many of both"
            )
        if strange := {span.place for span in spans} - {self._place}:
            raise TransferError(f"{refused}: a span lies on {min(strange)}, the regions on {self._place}")
