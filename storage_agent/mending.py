"""Degraded volumes opened anew: a medium that comes back is reconciled with what was told of it, without a restart.

Opening is what makes a volume whole: slots held back are free again, what a fault left torn is freed, and the
difference to what was announced is announced. So there is no second way of repair.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass

import structlog

from event_plane.errors import TransportError
from storage_agent.absent_volume import AbsentVolume
from storage_agent.announcer import Announcer
from storage_agent.block_header import BlockHeader
from storage_agent.descriptor import VolumeDescriptor
from storage_agent.errors import VolumeError
from storage_agent.volume import Volume
from storage_agent.volume_shelf import VolumeShelf

BACK_OFF_MAX_S = 300.0
_DRAIN_S = 30.0
"""How long those who use a degraded volume are waited for, before it is left as it is until the next time."""

_log = structlog.get_logger()
FileIdentity = tuple[int, int]


@dataclass(slots=True)
class _Watched:
    """A volume and its file as they were opened last, and when it is tried again."""

    volume: Volume
    file: FileIdentity | None
    pause_s: float
    due_s: float = 0.0
    opening: threading.Thread | None = None


class VolumeMender(threading.Thread):
    """Looks at every volume once an `interval_s` and opens anew those that need it, with back-off.

    Each is opened by a thread of its own: one that takes long keeps no other waiting.
    """

    def __init__(
        self,
        shelf: VolumeShelf,
        announcer: Announcer,
        reopen: Callable[[VolumeDescriptor], Volume],
        interval_s: float,
    ) -> None:
        """`reopen` raises `VolumeError`."""
        super().__init__(name="volume-mender", daemon=True)
        self._shelf = shelf
        self._announcer = announcer
        self._reopen = reopen
        self._interval_s = interval_s
        self._stopping = threading.Event()
        self._watched: dict[str, _Watched] = {}

    def run(self) -> None:
        while not self._stopping.wait(self._interval_s):
            self._look_after_all()

    def stop(self) -> None:
        """Returns when nothing is being opened any more."""
        self._stopping.set()
        if self.is_alive():
            self.join()
        for watched in self._watched.values():
            if watched.opening is not None:
                watched.opening.join()

    def watch(self, volume: Volume) -> None:
        """It was just opened, and is on the shelf or about to be."""
        self._watched[volume.descriptor.id] = _Watched(volume, _file_of(volume.descriptor), self._interval_s)

    def _look_after_all(self) -> None:
        for volume in self._shelf.volumes():
            watched = self._watched.get(volume.descriptor.id)
            if watched is not None and watched.volume is volume:
                self._look_after(watched)

    def _look_after(self, watched: _Watched) -> None:
        if watched.opening is not None and watched.opening.is_alive():
            return
        reason = self._complaint(watched)
        if not reason:
            watched.pause_s = self._interval_s
        elif time.monotonic() >= watched.due_s:
            name = f"mending-{watched.volume.descriptor.id}"
            watched.opening = threading.Thread(target=self._mend, args=(watched, reason), name=name, daemon=True)
            watched.opening.start()

    def _mend(self, watched: _Watched, reason: str) -> None:
        with suppress(TransportError):  # the publisher was closed under us; puts and deletes say so to their callers
            watched.volume = self._open_anew(watched.volume, reason)
        if not isinstance(watched.volume, AbsentVolume):
            watched.file = _file_of(watched.volume.descriptor)
        watched.due_s = time.monotonic() + watched.pause_s
        watched.pause_s = min(2 * watched.pause_s, BACK_OFF_MAX_S)

    def _complaint(self, watched: _Watched) -> str:
        """Why a volume must be opened anew, or ''."""
        descriptor = watched.volume.descriptor
        with self._shelf.use(descriptor.id) as used:
            if used is not watched.volume:
                return ""
            if descriptor.path and not isinstance(used, AbsentVolume) and _file_of(descriptor) != watched.file:
                return f"{descriptor.path} is gone, or another file has its name"
            return used.stat().degraded

    def _open_anew(self, before: Volume, reason: str) -> Volume:
        """What serves in its place now: itself, where it is still used."""
        descriptor = before.descriptor
        meanwhile = AbsentVolume(descriptor, f"it is being opened again: {reason}", before.live_headers)
        if not self._shelf.replace(before, meanwhile, _DRAIN_S):
            self._shelf.replace(meanwhile, before)
            return before
        with self._shelf.use(descriptor.id) as used:  # so nobody takes it out before it is opened
            announced = self._announced(before)
            before.close()
            if used is not meanwhile:  # somebody just did
                return before
            try:
                after = self._open(descriptor)
            except VolumeError as error:
                after = AbsentVolume(descriptor, str(error))
            with self._announcer.ordering:
                if not self._shelf.replace_used(meanwhile, after):
                    after.close()  # who takes it out may give up waiting for us: then it is opened once more
                    return meanwhile
                self._announcer.reconciled(descriptor, announced, self._announced(after))
        if not isinstance(after, AbsentVolume):
            _log.info("volume serves again", volume=descriptor.id, reason=reason)
        elif not isinstance(before, AbsentVolume):
            _log.warning("volume cannot be used", volume=descriptor.id, reason=reason, error=after.stat().degraded)
        return after

    def _announced(self, volume: Volume) -> list[BlockHeader]:
        """Of a view nothing is: its owner is not asked what lies there."""
        return [] if self._announcer.is_silent(volume.descriptor.id) else volume.live_headers()

    def _open(self, descriptor: VolumeDescriptor) -> Volume:
        # Made anew in the folder of a file system that is not mounted, it would fill another one.
        if descriptor.path and _file_of(descriptor) is None:
            raise VolumeError(
                f"volume {descriptor.id!r}: {descriptor.path} is not there; bring it back, or restart the agent to "
                "have it made anew"
            )
        return self._reopen(descriptor)


def _file_of(descriptor: VolumeDescriptor) -> FileIdentity | None:
    """Which file or folder a path means now; None where there is none."""
    if not descriptor.path:
        return None
    try:
        status = os.stat(descriptor.path)
    except OSError:
        return None
    return status.st_dev, status.st_ino
