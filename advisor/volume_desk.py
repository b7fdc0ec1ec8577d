"""Volumes of the running service: what the REST API asks for, and has their agents do."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from msgspec.structs import replace

from advisor.compaction_view import volume_layout
from advisor.entries import OperatorEntry
from advisor.errors import ActionRefused, NothingSuch
from advisor.fold import VolumeState
from advisor.scrubs import ScrubRunner
from advisor.service import AdvisorService
from advisor.volume_picture import (
    Ways,
    drain_view,
    heat_view,
    sample_of,
    speed_view,
    volume_view,
    written_view,
)
from advisor.volume_views import HealthView, HeatView, ScrubView, UnregisteredView, VolumeDetail, descriptor_refused
from advisor.wording import bytes_text
from storage_agent.descriptor import VolumeDescriptor
from storage_agent.errors import AgentUnreachable, DescriptorError, FieldFault, StorageAgentError
from storage_agent.port import AgentPort, VolumeStat

SAMPLE_KEPT_S = 10.0
USERS_WAIT_S = 5.0
"""How long an agent waits for those that use a volume before it refuses to let it go."""
REFUSAL_CHARACTERS_MAX = 400
"""Of what an agent says against an order, as it is logged."""


class ServiceVolumes:
    """`advisor.volume_views.AdvisorVolumes` over a running service."""

    def __init__(self, service: AdvisorService) -> None:
        self._service = service
        self._scrubs = ScrubRunner(service)
        self._heats: dict[str, tuple[float, HeatView]] = {}
        """By volume: when it was looked at, and what was seen."""

    def get(self, volume: str) -> VolumeDetail:
        """See `AdvisorVolumes.get`."""
        service = self._service
        heat = self._heat(volume)
        with service.lock.shared():
            agent = self._known(volume).agent
        read, write = (service.transfer_times(agent, volume, operation) for operation in ("read", "write"))
        with service.lock.shared():
            fold, known = service.fold, self._known(volume)
            ways = Ways(fold.moves.open.values())
            layout = fold.compactions.layouts.get(volume)
            return VolumeDetail(
                volume=volume_view(fold, known, ways, service.unreachable.get(known.agent)),
                descriptor=known.descriptor,
                health=self._health(known),
                heat=heat,
                read=speed_view(fold, known, "read", read),
                write=speed_view(fold, known, "write", write),
                written=written_view(fold, known),
                layout=None if layout is None else volume_layout(volume, layout),
                moves_in=ways.into(volume),
                moves_out=ways.out_of(volume),
                drain=drain_view(fold, known),
                scrub=self._scrubs.last(volume),
            )

    def register(self, actor: str, agent: str, descriptor: VolumeDescriptor) -> VolumeDetail:
        """See `AdvisorVolumes.register`."""
        service = self._service
        _require_elsewhere(descriptor, service.settings.directory)
        with service.lock.shared():
            known = service.fold.volumes.get(descriptor.id)
        if known is not None and known.agent != agent:
            raise ActionRefused(f"volume {descriptor.id!r} is registered with agent {known.agent}: choose another id")
        with self._ordering(OperatorEntry(actor, "register", descriptor.id), agent) as port:
            port.register_volume(descriptor, term=service.term)
        self._look(agent)
        with service.lock.shared():
            if descriptor.id not in service.fold.volumes:
                raise ActionRefused(f"agent {agent} did it, as a view: the agent that owns the volume tells of it")
        return self.get(descriptor.id)

    def unregister(self, actor: str, volume: str, *, force: bool = False) -> UnregisteredView:
        """See `AdvisorVolumes.unregister`. What the agent holds counts too: its events may be on their way."""
        service = self._service
        with service.lock.shared():
            known = self._known(volume)
            figures = service.fold.index.place_figures(known.place)
        agent = known.agent
        with self._asking(agent) as port:
            there = _find(port.stat().volumes, volume)
            blocks = max(figures.blocks, 0 if there is None else there.blocks)
            block_bytes = max(figures.block_bytes, 0 if there is None else there.payload_bytes)
            if blocks and not force:
                raise ActionRefused(
                    f"volume {volume} holds {blocks} blocks, {bytes_text(block_bytes)}, that no reader would find any "
                    f"more: drain it first (POST /api/v1/volumes/{volume}/drain), or ask with force=true"
                )
            lost = f"with {blocks} blocks on it" if blocks else "empty"
            order = OperatorEntry(actor, "unregister", volume, detail=lost)
            with self._told(order, agent):
                if there is not None:
                    port.unregister_volume(volume, drain_s=USERS_WAIT_S, term=service.term)
        self._look(agent, let_go=volume)
        return UnregisteredView(volume=volume, agent=agent, blocks=blocks, block_bytes=block_bytes)

    def drain(self, actor: str, volume: str) -> VolumeDetail:
        """See `AdvisorVolumes.drain`. One that is drained already goes on as it is."""
        return self._ordered(OperatorEntry(actor, "drain", volume))

    def undrain(self, actor: str, volume: str) -> VolumeDetail:
        """See `AdvisorVolumes.undrain`."""
        with self._service.lock.shared():
            if self._known(volume).drain is None:
                raise ActionRefused(f"volume {volume} is not being drained: there is nothing to take back")
        return self._ordered(OperatorEntry(actor, "undrain", volume))

    def change(
        self,
        actor: str,
        volume: str,
        *,
        capacity_blocks: int | None = None,
        low_watermark: float | None = None,
        high_watermark: float | None = None,
    ) -> VolumeDetail:
        """See `AdvisorVolumes.change`. The agent is asked first: where it refuses, nothing is changed."""
        with self._service.lock.shared():
            known = self._known(volume)
            low = known.low_watermark if low_watermark is None else low_watermark
            high = known.high_watermark if high_watermark is None else high_watermark
        marks = OperatorEntry(actor, "watermarks", volume, low_watermark=low, high_watermark=high)
        if not 0 < low < high <= 1:
            raise ActionRefused(
                f"volume {volume}: low_watermark {low:g} and high_watermark {high:g} must satisfy 0 < low < high <= 1: "
                "change both"
            )
        if capacity_blocks is not None:
            order = OperatorEntry(actor, "resize", volume, detail=f"to {capacity_blocks} blocks")
            with self._ordering(order, known.agent) as port:
                port.resize_volume(volume, capacity_blocks, term=self._service.term)
            self._look(known.agent)
        if low_watermark is not None or high_watermark is not None:
            self._log(marks)
        return self.get(volume)

    def scrub(self, actor: str, volume: str) -> ScrubView:
        """See `AdvisorVolumes.scrub`."""
        with self._service.lock.shared():
            agent = self._known(volume).agent
        return self._scrubs.begin(actor, volume, agent)

    def scrub_of(self, volume: str) -> ScrubView:
        """See `AdvisorVolumes.scrub_of`."""
        with self._service.lock.shared():
            self._known(volume)
        last = self._scrubs.last(volume)
        if last is None:
            raise NothingSuch(
                f"volume {volume} was not scrubbed since the service started: POST /api/v1/volumes/{volume}/scrub"
            )
        return last

    def _known(self, volume: str) -> VolumeState:
        """The caller holds the service's lock."""
        volumes = self._service.fold.volumes
        if volume not in volumes:
            names = ", ".join(sorted(volumes)) or "none: there is none yet"
            raise NothingSuch(f"volume {volume!r} is not registered: name one of {names}")
        return volumes[volume]

    def _heat(self, volume: str) -> HeatView:
        """A sample is not taken again for `SAMPLE_KEPT_S`: it costs the processor a tenth of a second."""
        with self._service.lock.shared():
            fold, known = self._service.fold, self._known(volume)
        kept = self._heats.get(volume)
        if kept is not None and time.monotonic() - kept[0] < SAMPLE_KEPT_S:
            return kept[1]
        sample = sample_of(fold.index, known.place)
        held = fold.index.place_figures(known.place).blocks
        heat = heat_view(sample, known.place, held, fold.now_us)
        if heat.sampled:
            self._heats[volume] = (time.monotonic(), heat)
        return heat

    def _health(self, volume: VolumeState) -> HealthView | None:
        stat = self._service.agent_stats.get(volume.agent)
        told = None if stat is None else _find(stat.volumes, volume.volume_id)
        if told is None:
            return None
        return HealthView(
            mode=told.mode,
            degraded=told.degraded,
            corrupt_blocks_total=told.corrupt_total,
            slots_free=told.slots_free,
        )

    def _ordered(self, entry: OperatorEntry) -> VolumeDetail:
        with self._service.lock.shared():
            self._known(entry.volume)
        self._log(entry)
        return self.get(entry.volume)

    def _log(self, entry: OperatorEntry) -> None:
        self._service.submit(entry).result()

    @contextmanager
    def _asking(self, agent: str) -> Iterator[AgentPort]:
        """An agent; what it has against a question is what the person is told."""
        with self._service.agent(agent) as port:
            try:
                yield port
            except DescriptorError as fault:
                raise descriptor_refused(f"agent {agent}: {fault}", fault.fault) from fault
            except StorageAgentError as fault:
                raise ActionRefused(f"agent {agent}: {fault}") from fault

    @contextmanager
    def _ordering(self, order: OperatorEntry, agent: str) -> Iterator[AgentPort]:
        """As `_asking`, for one order, logged as `_told` does."""
        with self._asking(agent) as port, self._told(order, agent):
            yield port

    @contextmanager
    def _told(self, order: OperatorEntry, agent: str) -> Iterator[None]:
        """Logs an order before an agent is asked, so that a crash leaves none unknown, and then what came of it."""
        self._log(_said(order, f"asked of agent {agent}"))
        try:
            yield
        except StorageAgentError as fault:
            self._log(_said(order, _outcome(agent, fault)))
            raise
        self._log(_said(order, f"done by agent {agent}"))

    def _look(self, agent: str, *, let_go: str = "") -> None:
        if not self._service.look(agent, let_go=let_go):
            raise ActionRefused(f"agent {agent} did it, and does not answer now: ask for the volume again in a moment")


def _require_elsewhere(descriptor: VolumeDescriptor, directory: Path) -> None:
    """Agents do not know our directory. Raises `FieldRefused` for a path in it or above it, also where the agent is on
    another host: which that is cannot be told."""
    own, path = directory.resolve(), Path(os.path.realpath(descriptor.path))
    if descriptor.path and (own.is_relative_to(path) or path.is_relative_to(own)):
        said = f"volume {descriptor.id!r}: path {descriptor.path!r} is in, or above, the advisor's own directory {own}"
        remedy = "give a path beside it"
        raise descriptor_refused(f"{said}; {remedy}", FieldFault("path", repr(descriptor.path), remedy))


def _said(order: OperatorEntry, what: str) -> OperatorEntry:
    """An order with `what` is to be said of it, besides what it is about."""
    return replace(order, detail=", ".join(part for part in (order.detail, what) if part))


def _outcome(agent: str, fault: StorageAgentError) -> str:
    """Of a descriptor only what to mend: what was sent may hold a secret."""
    if isinstance(fault, AgentUnreachable):
        return f"agent {agent} gave no answer: whether it was done is not known"
    if isinstance(fault, DescriptorError):
        return f"refused by agent {agent}: {fault.fault.field}: {fault.fault.remedy}"[:REFUSAL_CHARACTERS_MAX]
    return f"refused by agent {agent}: {fault}"[:REFUSAL_CHARACTERS_MAX]


def _find(volumes: list[VolumeStat], volume: str) -> VolumeStat | None:
    return next((each for each in volumes if each.descriptor.id == volume), None)
