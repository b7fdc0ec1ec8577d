"""`AdvisorVolumes` over the sample reader's volumes: nvme-a holds blocks, nvme-b is being drained."""

from __future__ import annotations

from typing import Any

from sample_reader import BLOCK_BYTES, NOW_US, SampleReader

from advisor.errors import ActionRefused, NothingSuch
from advisor.views import LayoutView, VolumeLayoutView, VolumeView
from advisor.volume_views import (
    DrainView,
    HealthView,
    HeatBin,
    HeatView,
    ScrubView,
    SpeedView,
    UnregisteredView,
    VolumeDetail,
    WayView,
    WrittenView,
)
from storage_agent.descriptor import VolumeDescriptor

AGE_COUNTS = (40, 310, 900, 1_200, 820, 500, 240, 86)
TOUCH_COUNTS = (210, 1_900, 900, 500, 320, 160, 70, 30, 6)
AGES_S = (0.0, 1.0, 10.0, 100.0, 1_000.0, 10_000.0, 100_000.0, 1_000_000.0)
TOUCHES = (0.0, 1.0, 2.0, 4.0, 8.0, 16.0, 32.0, 64.0, 128.0)


def _bins(begins: tuple[float, ...], counts: tuple[int, ...]) -> list[HeatBin]:
    ends = [*begins[1:], None]
    return [HeatBin(at_least=b, below=e, blocks=n) for b, e, n in zip(begins, ends, counts, strict=True)]


def _scrub(volume: str, actor: str = "ann", **changes: object) -> ScrubView:
    base = ScrubView(
        volume=volume, state="done", actor=actor, started_us=NOW_US - 90_000_000, ended_us=NOW_US - 30_000_000,
        good_blocks=834, corrupt_blocks=1, unreadable_blocks=0, good_bytes=834 * BLOCK_BYTES, reason="",
    )  # fmt: skip
    return base.model_copy(update=changes)


def detail(view: VolumeView, scrub: ScrubView | None = None) -> VolumeDetail:
    layout = LayoutView(
        held_bytes=view.block_bytes, live_bytes=view.block_bytes, reclaimable_bytes=0, objects=1, objects_least=1,
        chains=64, chain_blocks=1_024, extents=140, extents_least=70.0, spread=2.0,
    )  # fmt: skip
    told = VolumeLayoutView(
        volume=view.id, as_of_us=NOW_US - 75_000_000, layout=layout, note="rests for 5 min more"
    )
    drain = DrainView(
        since_us=NOW_US - 600_000_000, blocks_at_start=2 * view.blocks, blocks_left=view.blocks, left_s=600.0,
        obstacle="the budget of 20 moves/s is spent",
    )  # fmt: skip
    return VolumeDetail(
        volume=view,
        descriptor={
            "id": view.id, "kind": view.kind, "path": f"/srv/kv/{view.id}.slab", "tier": view.tier,
            "capacity_blocks": view.capacity_blocks, "block_bytes_max": BLOCK_BYTES, "speed_rank": view.speed_rank,
            "high_watermark": view.high_watermark, "low_watermark": view.low_watermark,
        },
        health=HealthView(
            mode="O_DIRECT", degraded="", corrupt_blocks_total=1, slots_free=view.capacity_blocks - view.blocks
        ),
        heat=HeatView(
            sampled=view.blocks > 4_096, looked_at=min(view.blocks, 4_096), by_age_s=_bins(AGES_S, AGE_COUNTS),
            by_touches=_bins(TOUCHES, TOUCH_COUNTS),
        ),
        read=SpeedView(
            now_bytes_per_s=view.read_bytes_per_s, best_bytes_per_s=5.1e9, declared_bytes_per_s=None, block_s=3.9e-6,
            transfers=1_800, transfer_p50_s=0.00031, transfer_p99_s=0.0029,
        ),
        write=SpeedView(
            now_bytes_per_s=view.write_bytes_per_s, best_bytes_per_s=9.9e8, declared_bytes_per_s=1e9, block_s=2.7e-5,
            transfers=0, transfer_p50_s=None, transfer_p99_s=None,
        ),
        written=WrittenView(
            today_bytes=310_000_000_000, yesterday_bytes=820_000_000_000, endurance_bytes_per_day=1_000_000_000_000.0
        ),
        layout=told,
        moves_in=WayView(moves=view.incoming, block_bytes=view.incoming * BLOCK_BYTES),
        moves_out=WayView(moves=view.outgoing, block_bytes=view.outgoing * BLOCK_BYTES),
        drain=drain if view.draining else None,
        scrub=scrub,
    )  # fmt: skip


class SampleVolumes:
    """`asked`: action, actor, volume."""

    def __init__(self) -> None:
        draining = {"draining": True, "outgoing": 64, "state": "being drained: 4750 blocks left, about 10 min"}
        self.views = {view.id: view for view in SampleReader().volumes()}
        self.views["nvme-b"] = self.views["nvme-b"].model_copy(update=draining)
        self.scrubs = {"nvme-a": _scrub("nvme-a")}
        self.asked: list[tuple[str, str, str]] = []

    def get(self, volume: str) -> VolumeDetail:
        if volume not in self.views:
            raise NothingSuch(f"volume {volume!r} is not registered: name one of {', '.join(sorted(self.views))}")
        return detail(self.views[volume], self.scrubs.get(volume))

    def register(self, actor: str, agent: str, descriptor: VolumeDescriptor) -> VolumeDetail:
        if agent != "host-7":
            raise NothingSuch(f"agent {agent!r} is not in the settings: name one of host-7")
        if descriptor.id in self.views:
            raise ActionRefused(f"agent host-7: volume {descriptor.id!r} is registered already; unregister it first")
        self.asked.append(("register", actor, descriptor.id))
        changes: dict[str, Any] = {
            "id": descriptor.id, "kind": descriptor.kind, "tier": descriptor.tier, "blocks": 0, "block_bytes": 0,
            "capacity_blocks": descriptor.capacity_blocks, "fill": 0.0, "incoming": 0,
        }  # fmt: skip
        return detail(self.views["nvme-a"].model_copy(update=changes))

    def unregister(self, actor: str, volume: str, *, force: bool = False) -> UnregisteredView:
        view = self.get(volume).volume
        if not force:
            raise ActionRefused(
                f"volume {volume} holds {view.blocks} blocks that no reader would find any more: drain it first "
                f"(POST /api/v1/volumes/{volume}/drain), or ask with force=true"
            )
        self.asked.append(("unregister", actor, volume))
        return UnregisteredView(volume=volume, agent=view.agent, blocks=view.blocks, block_bytes=view.block_bytes)

    def drain(self, actor: str, volume: str) -> VolumeDetail:
        return self._changed("drain", actor, volume, draining=True)

    def undrain(self, actor: str, volume: str) -> VolumeDetail:
        if not self.get(volume).volume.draining:
            raise ActionRefused(f"volume {volume} is not being drained: there is nothing to take back")
        return self._changed("undrain", actor, volume, draining=False, state="healthy")

    def change(
        self,
        actor: str,
        volume: str,
        *,
        capacity_blocks: int | None = None,
        low_watermark: float | None = None,
        high_watermark: float | None = None,
    ) -> VolumeDetail:
        given = {
            "capacity_blocks": capacity_blocks, "low_watermark": low_watermark, "high_watermark": high_watermark,
        }  # fmt: skip
        changes = {name: value for name, value in given.items() if value is not None}
        return self._changed("change", actor, volume, **changes)

    def scrub(self, actor: str, volume: str) -> ScrubView:
        self.get(volume)
        running = self.scrubs.get(volume)
        if running is not None and running.state == "running":
            raise ActionRefused(f"volume {volume} is being scrubbed for {running.actor}: wait for its end")
        self.asked.append(("scrub", actor, volume))
        began = {"state": "running", "ended_us": None, "good_blocks": 0, "corrupt_blocks": 0, "good_bytes": 0}
        self.scrubs[volume] = _scrub(volume, actor, **began)
        return self.scrubs[volume]

    def scrub_of(self, volume: str) -> ScrubView:
        self.get(volume)
        if volume not in self.scrubs:
            raise NothingSuch(
                f"volume {volume} was not scrubbed since the service started: POST /api/v1/volumes/{volume}/scrub"
            )
        return self.scrubs[volume]

    def _changed(self, action: str, actor: str, volume: str, **changes: object) -> VolumeDetail:
        self.views[volume] = self.get(volume).volume.model_copy(update=changes)
        self.asked.append((action, actor, volume))
        return self.get(volume)
