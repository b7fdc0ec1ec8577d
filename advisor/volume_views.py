"""What the REST API and the pages show of one volume, and take for it: typed pictures, and the port that answers."""

from __future__ import annotations

from typing import Any, Protocol

from advisor.errors import FieldRefused
from advisor.views import View, VolumeLayoutView, VolumeView
from storage_agent.descriptor import VolumeDescriptor
from storage_agent.errors import FieldFault


class DrainView(View):
    """A volume that all blocks are to leave."""

    since_us: int
    blocks_at_start: int
    blocks_left: int
    left_s: float | None
    """At the rate so far; None before the first has left."""
    obstacle: str
    """Why nothing leaves now, or some block does not; empty where nothing keeps them."""


class HeatBin(View):
    at_least: float
    below: float | None
    """None: without an end."""
    blocks: int


class HeatView(View):
    """How lately and how often its blocks were used."""

    sampled: bool
    """Of a sample of `looked_at` blocks, at even distances in the order in which they became known; else of all."""
    looked_at: int
    by_age_s: list[HeatBin]
    """Seconds since the last use, or since it came."""
    by_touches: list[HeatBin]


class SpeedView(View):
    """Bytes/s of one operation, as its transfers took. None where nothing was measured."""

    now_bytes_per_s: float | None
    """Smoothed."""
    best_bytes_per_s: float | None
    """Lately."""
    declared_bytes_per_s: float | None
    """By its descriptor; None where that says nothing."""
    block_s: float | None
    """What a block of mean size takes at the rate of now."""
    transfers: int
    """How many the last 5 minutes had: what its agent did on it for one batch of a get, a put or a move."""
    transfer_p50_s: float | None
    """Half of those took no longer. Estimated: agents count by bounds that double."""
    transfer_p99_s: float | None


class WrittenView(View):
    """Bytes that it was written, by days in UTC."""

    today_bytes: int
    yesterday_bytes: int
    endurance_bytes_per_day: float
    """By its descriptor; 0: no limit."""


class WayView(View):
    """Open moves one way."""

    moves: int
    block_bytes: int


class HealthView(View):
    """What its agent said last."""

    mode: str
    degraded: str
    """Why it is; empty where it is not."""
    corrupt_blocks_total: int
    slots_free: int


class ScrubView(View):
    """The last scrub of a volume that this service had made. Counts are 0 until it is done."""

    volume: str
    state: str
    """`running`, `done` or `failed`."""
    actor: str
    started_us: int
    ended_us: int | None
    good_blocks: int
    corrupt_blocks: int
    """Freed."""
    unreadable_blocks: int
    good_bytes: int
    reason: str
    """Why it failed."""


class VolumeDetail(View):
    """Everything of one volume."""

    volume: VolumeView
    descriptor: dict[str, Any]
    """As its owner describes it. Never a secret: those stay in the agent's files."""
    health: HealthView | None
    """None while the agent has said nothing of it."""
    heat: HeatView
    read: SpeedView
    write: SpeedView
    written: WrittenView
    layout: VolumeLayoutView | None
    moves_in: WayView
    moves_out: WayView
    drain: DrainView | None
    scrub: ScrubView | None


class UnregisteredView(View):
    volume: str
    agent: str
    blocks: int
    """That no reader finds any more; they stay in its file."""
    block_bytes: int


def descriptor_refused(reason: str, fault: FieldFault) -> FieldRefused:
    """Of the field `descriptor` of an order."""
    field = ".".join(part for part in ("descriptor", fault.field) if part)
    return FieldRefused(reason, field, fault.value, fault.remedy)


class AdvisorVolumes(Protocol):
    """Raises `advisor.errors.NothingSuch` and `ActionRefused`. An order returns when it is logged and carried out, a
    scrub when it is begun."""

    def get(self, volume: str) -> VolumeDetail: ...
    def register(self, actor: str, agent: str, descriptor: VolumeDescriptor) -> VolumeDetail:
        """Raises `FieldRefused` for a descriptor that cannot be."""

    def unregister(self, actor: str, volume: str, *, force: bool = False) -> UnregisteredView:
        """Refused while it holds blocks, unless `force`."""

    def drain(self, actor: str, volume: str) -> VolumeDetail: ...
    def undrain(self, actor: str, volume: str) -> VolumeDetail: ...
    def change(
        self,
        actor: str,
        volume: str,
        *,
        capacity_blocks: int | None = None,
        low_watermark: float | None = None,
        high_watermark: float | None = None,
    ) -> VolumeDetail:
        """What is None stays as it is."""

    def scrub(self, actor: str, volume: str) -> ScrubView: ...
    def scrub_of(self, volume: str) -> ScrubView:
        """The last one since the service started."""
