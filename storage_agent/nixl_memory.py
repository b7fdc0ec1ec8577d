"""Memory of somebody else's, a pool's, that peers read and write by NIXL's UCX backend.

Deregistering is no fence: over TCP this process itself copies for its peers, from wherever they say, so memory that is
unmapped while the agent lives ends the process. Closing the agent is the fence.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Any, Literal, NamedTuple

from storage_agent.errors import TransferError
from storage_agent.nixl_loading import load_nixl, make_ucx_agent
from storage_agent.nixl_metadata import seal_metadata


class MemoryPlace(NamedTuple):
    """What NIXL calls the memory, and the number of the GPU that it is on (0 for DRAM)."""

    kind: Literal["DRAM", "VRAM"]
    device: int


HOST_MEMORY = MemoryPlace("DRAM", 0)


class MemoryRegion(NamedTuple):
    address: int
    size_bytes: int
    place: MemoryPlace = HOST_MEMORY


class NixlMemory:
    """Regions that peers may read and write. Thread-safe. Free none of them before `close`.

    Peers get on only while `notifications` is called, every `nixl_window.PROGRESS_INTERVAL_S`.
    """

    def __init__(self, name: str, regions: Sequence[MemoryRegion]) -> None:
        """Raises `TransferError` where NIXL or its UCX backend cannot be had, or does not take the memory."""
        self._name = name
        self._regions = tuple(regions)
        self._nixl = load_nixl()
        self._lock = threading.Lock()  # a call and `close` at once would end the process
        self._agent: Any = None
        self.metadata = b""
        """What a peer needs to reach the regions."""
        self._open()

    def notifications(self) -> list[bytes]:
        """What peers told since the last call, each in its order; lets their transfers go on. Nothing once closed."""
        with self._lock:
            if self._agent is None:
                return []
            try:
                found: dict[str, list[bytes]] = self._agent.get_new_notifs()
            except self._nixl.errors:  # a peer's fault is its own to find
                return []
        return [told for of_peer in found.values() for told in of_peer]

    def renew(self) -> None:
        """End every peer's transfers. Peers reach the regions again by the `metadata` there is then.

        Raises `TransferError` where NIXL does not start again; it stays closed then.
        """
        with self._lock:
            self._agent = None
            self._open()

    def close(self) -> None:
        """End every peer's transfers; the regions may be freed then. Idempotent."""
        with self._lock:
            self._agent = None

    def _open(self) -> None:
        agent = make_ucx_agent(self._nixl, self._name)
        for address, size_bytes, (kind, device) in self._regions:
            try:
                agent.register_memory([(address, size_bytes, device, "")], kind)
            except self._nixl.errors as error:
                raise TransferError(
                    f"{self._name}: NIXL does not take {size_bytes} bytes of {kind}: {error}; compare them with "
                    "`ulimit -l`, and for VRAM see whether UCX was built with CUDA"
                ) from error
        self.metadata = seal_metadata(agent.get_agent_metadata(), self._nixl.release)
        self._agent = agent
