"""`kvadvisor agent`: the storage agent as a process of its own, one a host."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Sequence
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Annotated

import structlog
import typer

from event_plane.connect import open_publisher
from event_plane.schema import producer_id
from storage_agent.agent import StorageAgent
from storage_agent.config import AgentSettings, load_settings
from storage_agent.descriptor import VolumeDescriptor
from storage_agent.errors import ServiceError, VolumeError
from storage_agent.kinds import prepare
from storage_agent.registered_volumes import KeptVolumes, require_askable
from storage_agent.service import AgentService

PUBLISH_INTERVAL_S = 0.25
_STOPPING = {signal.SIGINT, signal.SIGTERM}
_LOOK_S = 0.25

_log = structlog.get_logger()


def agent(
    config: Annotated[Path, typer.Option(help="The agent's settings (TOML); docs/agent.md lists the keys.")],
) -> None:
    """Run a storage agent: serve its volumes, carry out commands, publish what happens on them."""
    settings = load_settings(config)
    # Blocked before any thread starts: they wait for `sigwait`, and nothing is cut short.
    signal.pthread_sigmask(signal.SIG_BLOCK, _STOPPING)
    heard = _heard_elsewhere()
    faults = _stop_at_a_fault()
    with ExitStack() as closing:
        service = serve(settings, closing)
        # Whoever reads this line is answered.
        typer.echo(f"kvadvisor agent {settings.name}: commands at {service.command_url} (Ctrl-C stops it)")
        while not heard:
            told = signal.sigtimedwait(_STOPPING, _LOOK_S)
            # CPython gives a number of no meaning where the process was stopped (SIGSTOP) past the deadline.
            if told is not None and told.si_signo in _STOPPING:
                heard.append(told.si_signo)
        _log.info("stopping", agent=settings.name, signal=signal.Signals(heard[0]).name)
    if faults:
        raise ServiceError(f"agent {settings.name} stopped at a fault of its own, {faults[0]}; start it anew")
    _log.info("stopped", agent=settings.name)


def _heard_elsewhere() -> list[int]:
    """Signals that a library's thread, older than the mask, is given while nobody waits: they would end the process."""
    heard: list[int] = []
    for number in _STOPPING:
        signal.signal(number, lambda told, _: heard.append(told))
    return heard


def _stop_at_a_fault() -> list[str]:
    """Have the process told to stop when one of its threads ends by an exception; what it was is added to the list.

    Going on, the agent would be deaf in part, and nobody would know.
    """
    faults: list[str] = []

    def note(ended: threading.ExceptHookArgs) -> None:
        name = ended.thread.name if ended.thread is not None else "a thread"
        _log.error("thread ended by a fault", thread=name, exc_info=ended.exc_value)
        faults.append(f"{name}: {ended.exc_value!r}")
        os.kill(os.getpid(), signal.SIGTERM)

    threading.excepthook = note
    return faults


def serve(settings: AgentSettings, closing: ExitStack) -> AgentService:
    """An agent with its volumes, and its command socket; `closing` ends them in order.

    A volume that cannot be opened now is served when it can be. Raises `VolumeError` where none can.
    """
    publisher = open_publisher(
        settings.event_url,
        producer=producer_id(settings.name),
        credentials=settings.credentials,
        flush_interval_s=PUBLISH_INTERVAL_S,
    )
    closing.callback(publisher.close)
    if settings.state_folder is not None and settings.state_folder not in settings.allowed_roots:
        # A root is not made: a file system may belong there. What cannot be made is told at the first write.
        with suppress(OSError):
            settings.state_folder.mkdir(exist_ok=True)
    storage = closing.enter_context(
        StorageAgent(
            settings.name,
            publisher=publisher,
            allowed_roots=settings.allowed_roots,
            endpoints=settings.endpoints,
            state_folder=settings.state_folder,
        )
    )
    kept = KeptVolumes(settings.name, settings.state_folder, settings.volumes)
    volumes = storage.register_volumes([*kept.configured, *_usable(kept.registered, settings)], absent_ok=True)
    if volumes and all(volume.degraded for volume in volumes):
        raise VolumeError("\n".join(volume.degraded for volume in volumes))
    for volume in volumes:
        facts = {"volume": volume.descriptor.id, "kind": volume.descriptor.kind, "mode": volume.mode}
        if volume.degraded:
            _log.warning("volume cannot be used yet", **facts, reason=volume.degraded)
        else:
            _log.info("volume serves", **facts, blocks=volume.blocks, slots_free=volume.slots_free)
    service = AgentService(
        storage, settings.command_url, settings.credentials, kept, may_harm=settings.allow_faulty
    )
    return closing.enter_context(service)


def _usable(registered: Sequence[VolumeDescriptor], settings: AgentSettings) -> list[VolumeDescriptor]:
    """Those that the settings still allow: others are kept, and not opened."""
    usable = []
    for descriptor in registered:
        try:
            require_askable(descriptor, may_harm=settings.allow_faulty)
            prepare(descriptor, settings.allowed_roots, settings.endpoints)
        except VolumeError as error:
            _log.warning("registered volume is not allowed any more", volume=descriptor.id, reason=str(error))
        else:
            usable.append(descriptor)
    return usable
