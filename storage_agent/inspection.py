"""A volume looked at without an agent: what `kvadvisor verify` and `fsck` go by."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal, Protocol

from storage_agent.port import BlockKey

SlotFinding = Literal["free", "live", "torn"]


@dataclass(frozen=True, slots=True)
class SlotReport:
    """One slot as it lies on the volume.

    `torn`: neither free nor live. A put or delete cut short leaves that, and so does damage; recovery frees it.
    `key`, `generation` and `payload_bytes` are set for a live slot, and for a torn one whose header is whole.
    """

    slot: int
    state: SlotFinding
    key: BlockKey | None = None
    generation: int = 0
    payload_bytes: int = 0
    reason: str = ""
    """Why a slot is torn, else empty."""


class Inspection(Protocol):
    """A volume opened to look at it: takes no lock and writes nothing. Run it while no agent has the volume open."""

    @property
    def was_closed_in_order(self) -> bool:
        """Whether the last opener closed it, so that no put or delete was cut short."""

    def reports(self) -> Iterator[SlotReport]:
        """Every slot, headers and payloads checked."""

    def close(self) -> None:
        """Idempotent."""
