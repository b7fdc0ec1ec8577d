"""Which registered blocks a pool has, by key, and who is told when a key comes or goes.

Pure; used under the pool's lock, so the callbacks must only note what happened.
"""

from __future__ import annotations

from collections.abc import Callable

from kvbm_core.block import Slot
from kvbm_core.identity import BlockIdentity
from storage_agent.port import BlockKey

OnStore = Callable[[BlockIdentity, bool], None]
"""A key was registered; True where it is a copy of another tier's block."""
OnRemove = Callable[[BlockIdentity], None]
"""A key's block is gone."""


class BlockRegistry:
    """The one slot of each key; a second copy is known to its guards alone."""

    def __init__(self, on_store: OnStore, on_remove: OnRemove) -> None:
        self._on_store = on_store
        self._on_remove = on_remove
        self._slots: dict[BlockKey, Slot] = {}
        self.find = self._slots.get
        """The slot of a key, or None."""

    def add(self, identity: BlockIdentity, slot: Slot, copied: bool) -> Slot:
        """Register `slot`, and return it, or the slot that had the key before and keeps it."""
        first = self._slots.setdefault(identity.key, slot)
        if first is slot:
            self._on_store(identity, copied)
        return first

    def drop(self, identity: BlockIdentity) -> None:
        del self._slots[identity.key]
        self._on_remove(identity)

    def __contains__(self, key: object) -> bool:
        return key in self._slots

    def keys(self) -> list[BlockKey]:
        return list(self._slots)

    def identities(self) -> list[BlockIdentity]:
        return [slot.identity for slot in self._slots.values() if slot.identity is not None]
