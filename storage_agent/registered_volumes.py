"""Volumes that an agent is given and resized while it runs: who may ask for what, and what is kept over restarts."""

from __future__ import annotations

import threading
from collections.abc import Iterable, Sequence
from pathlib import Path

import msgspec
import structlog

from event_plane.schema import producer_id
from storage_agent.agent import StorageAgent
from storage_agent.descriptor import VolumeDescriptor, wrong
from storage_agent.errors import UNREADABLE, VolumeError
from storage_agent.files import replace_file
from storage_agent.kinds import kind_named
from storage_agent.port import VolumeStat

OWN_FILES = ".kvadvisor-"
"""How the names of the agents' own files begin: no volume lies under one."""

_log = structlog.get_logger()


class _Resized(msgspec.Struct, frozen=True):
    """`configured`: what the settings said then; once they say something else, that counts."""

    configured: int
    capacity_blocks: int


class _Kept(msgspec.Struct, frozen=True):
    """What the file holds, in JSON. `agent` is for people."""

    agent: str
    volumes: list[VolumeDescriptor]
    resized: dict[str, _Resized] = {}


class KeptVolumes:
    """What the agent's settings do not say of its volumes. On disk when a call returns, unless the file cannot be
    written: then it counts for this life, which is logged."""

    def __init__(
        self, agent: str, state_folder: Path | None = None, configured: Sequence[VolumeDescriptor] = ()
    ) -> None:
        """Remembers for its own life where no folder is given. Raises `VolumeError` for a file that is damaged."""
        self._agent = agent
        self._file = None if state_folder is None else state_folder / f"{OWN_FILES}{producer_id(agent):016x}.registered"
        self._configured = {descriptor.id: descriptor for descriptor in configured}
        kept = self._read()
        self._volumes = {volume.id: volume for volume in kept.volumes if volume.id not in self._configured}
        self._resized = {
            name: resized
            for name, resized in kept.resized.items()
            if name in self._configured and self._configured[name].capacity_blocks == resized.configured
        }

    @property
    def configured(self) -> list[VolumeDescriptor]:
        """Those of the settings, each with the capacity that it was given since."""
        return [
            msgspec.structs.replace(descriptor, capacity_blocks=self._resized[name].capacity_blocks)
            if name in self._resized
            else descriptor
            for name, descriptor in self._configured.items()
        ]

    @property
    def registered(self) -> list[VolumeDescriptor]:
        """Those that were registered while the agent ran."""
        return list(self._volumes.values())

    def add(self, descriptor: VolumeDescriptor) -> None:
        if descriptor.id not in self._configured:
            self._volumes[descriptor.id] = descriptor
            self._write()

    def remove(self, volume: str) -> None:
        if self._volumes.pop(volume, None) is not None:
            self._write()

    def resize(self, volume: str, capacity_blocks: int) -> None:
        if volume in self._configured:
            self._resized[volume] = _Resized(self._configured[volume].capacity_blocks, capacity_blocks)
        elif volume in self._volumes:
            before = self._volumes[volume]
            self._volumes[volume] = msgspec.structs.replace(before, capacity_blocks=capacity_blocks)
        self._write()

    def _write(self) -> None:
        if self._file is None:
            return
        try:
            replace_file(self._file, [msgspec.json.encode(_Kept(self._agent, self.registered, self._resized))])
        except OSError as error:
            _log.warning("registered volumes cannot be kept", file=str(self._file), error=str(error))

    def _read(self) -> _Kept:
        if self._file is None:
            return _Kept(self._agent, [])
        try:
            return msgspec.json.decode(self._file.read_bytes(), type=_Kept)
        except FileNotFoundError:
            return _Kept(self._agent, [])
        except OSError as error:
            raise VolumeError(f"{self._file} cannot be read: {error.strerror}; it keeps registered volumes") from error
        except UNREADABLE as error:
            raise VolumeError(
                f"{self._file} names no volumes ({error}); remove it, and register its volumes again"
            ) from error


def require_askable(descriptor: VolumeDescriptor, *, may_harm: bool) -> None:
    """Raises `DescriptorError` for what a request may not name: a path that is not absolute or is one of the agent's
    own files, and, unless it `may_harm`, a kind that loses blocks on purpose."""
    path, name = Path(descriptor.path), f"volume {descriptor.id!r}:"
    if descriptor.path and not path.is_absolute():
        raise wrong(name, f"path {descriptor.path!r} is relative", "give it from / on", "path", descriptor.path)
    if path.name.startswith(OWN_FILES):
        raise wrong(name, f"{path.name!r} is a name of the agent's own", "choose another", "path", descriptor.path)
    if kind_named(descriptor.kind, descriptor.id).is_harmful and not may_harm:
        said = f"kind {descriptor.kind!r} loses blocks on purpose, and this agent takes none from others"
        remedy = "name another kind, or set allow_faulty = true in the agent's settings"
        raise wrong(name, said, remedy, "kind", descriptor.kind)


class VolumeOrders:
    """What others ask of an agent's volumes. Thread-safe: one order at a time."""

    def __init__(self, agent: StorageAgent, kept: KeptVolumes, *, may_harm: bool = False) -> None:
        """`may_harm`: kinds that lose blocks on purpose may be asked for too."""
        self._agent = agent
        self._kept = kept
        self._may_harm = may_harm
        self._lock = threading.Lock()

    def register(self, descriptor: VolumeDescriptor, *, term: int) -> VolumeStat:
        """As `StorageAgent.register_volume`; one that is registered as it is described stays so.

        Raises `VolumeError` also as `require_askable`.
        """
        require_askable(descriptor, may_harm=self._may_harm)
        with self._lock:
            same = _find(self._agent.stat().volumes, descriptor)
            stat = self._agent.register_volume(descriptor, term=term) if same is None else same
            self._kept.add(descriptor)
            return stat

    def unregister(self, volume: str, drain_s: float, *, term: int) -> None:
        """As `StorageAgent.unregister_volume`. One of the settings is there again after a restart."""
        with self._lock:
            self._agent.unregister_volume(volume, drain_s=drain_s, term=term)
            self._kept.remove(volume)

    def resize(self, volume: str, capacity_blocks: int, *, term: int) -> VolumeStat:
        """As `StorageAgent.resize_volume`."""
        with self._lock:
            stat = self._agent.resize_volume(volume, capacity_blocks, term=term)
            self._kept.resize(volume, capacity_blocks)
            return stat


def _find(volumes: Iterable[VolumeStat], descriptor: VolumeDescriptor) -> VolumeStat | None:
    return next((each for each in volumes if each.descriptor == descriptor), None)
