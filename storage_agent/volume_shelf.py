"""The volumes of an agent, and who uses them: a volume is closed only when nobody does any more."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from storage_agent.errors import VolumeError
from storage_agent.volume import Volume


class VolumeShelf:
    """Thread-safe."""

    def __init__(self, agent: str) -> None:
        """`agent` is named in errors."""
        self._agent = agent
        self._changed = threading.Condition()
        self._volumes: dict[str, Volume] = {}
        self._users: dict[int, int] = {}
        """By the identity of a volume that is used."""
        self._closing = False

    @property
    def is_closing(self) -> bool:
        return self._closing

    def volumes(self) -> list[Volume]:
        """All of them, in the order they came."""
        with self._changed:
            return list(self._volumes.values())

    def require_room_for(self, volume: str) -> None:
        """Raises `VolumeError` where it is there already, or the agent is closed."""
        with self._changed:
            if self._closing:
                raise VolumeError(f"volume {volume!r}: agent {self._agent!r} is closed")
            if volume in self._volumes:
                raise VolumeError(f"volume {volume!r} is registered already; unregister it first")

    def add(self, volumes: Sequence[Volume]) -> None:
        with self._changed:
            self._volumes |= {volume.descriptor.id: volume for volume in volumes}

    def take_out(self, volume: str, wait_s: float) -> Volume:
        """Nobody can use it any more, and nobody does. Raises `VolumeError`, with it there as before.

        Waits so long for those that use it; whoever comes meanwhile does not find it.
        """
        with self._changed:
            taken = self._volumes.get(volume)
            if taken is None:
                raise VolumeError(f"volume {volume!r} is not registered; this agent has {sorted(self._volumes)}")
            before = self._volumes
            self._volumes = {name: each for name, each in before.items() if name != volume}
            if not self._changed.wait_for(lambda: id(taken) not in self._users, wait_s):
                self._volumes = {**self._volumes, volume: taken}
                raise VolumeError(f"volume {volume!r} is in use; try again when its gets, puts and moves are done")
            return taken

    def replace(self, before: Volume, after: Volume, wait_s: float = 0.0) -> bool:
        """Whoever comes uses `after`; whether nobody uses `before` any more, within `wait_s`.

        False too where it was taken out meanwhile.
        """
        with self._changed:
            return self.replace_used(before, after) and self._changed.wait_for(
                lambda: id(before) not in self._users, wait_s
            )

    def replace_used(self, before: Volume, after: Volume) -> bool:
        """Whoever comes uses `after`, those that use `before` go on. False where it was taken out meanwhile."""
        with self._changed:
            name = before.descriptor.id
            if self._closing or self._volumes.get(name) is not before:
                return False
            self._volumes[name] = after
            return True

    def close(self) -> list[Volume]:
        """Wait until nobody uses any; the volumes, to be closed. Nothing the second time."""
        with self._changed:
            self._closing = True
            self._changed.wait_for(lambda: not self._users)
            volumes = list(self._volumes.values())
            self._volumes = {}
            return volumes

    @contextmanager
    def use(self, name: str) -> Iterator[Volume | None]:
        """A volume that stays open meanwhile; None where it is not registered."""
        with self._use([name]) as volumes:
            yield volumes[0] if volumes else None

    @contextmanager
    def use_registered(self, name: str) -> Iterator[Volume]:
        """As `use`. Raises `VolumeError` where it is not registered."""
        with self.use(name) as volume:
            if volume is None:
                raise VolumeError(f"volume {name!r} is not registered with agent {self._agent!r}; register it first")
            yield volume

    @contextmanager
    def use_all(self) -> Iterator[list[Volume]]:
        """Every volume, the fastest first; they stay open meanwhile."""
        with self._use(None) as volumes:
            yield sorted(volumes, key=lambda v: (v.descriptor.speed_rank, v.descriptor.id))

    @contextmanager
    def _use(self, names: list[str] | None) -> Iterator[list[Volume]]:
        with self._changed:
            wanted = list(self._volumes) if names is None else [name for name in names if name in self._volumes]
            volumes = [self._volumes[name] for name in wanted]
            for volume in volumes:
                self._users[id(volume)] = self._users.get(id(volume), 0) + 1
        try:
            yield volumes
        finally:
            with self._changed:
                for volume in volumes:
                    self._users[id(volume)] -= 1
                    if not self._users[id(volume)]:
                        del self._users[id(volume)]
                self._changed.notify_all()
