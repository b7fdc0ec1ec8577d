"""Which registered blocks a pool has, by key: finds them, keeps or refuses duplicates, tells when one comes or goes.

Pure; used under the pool's lock, so the callbacks must only note what happened.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

from kvbm_core.block import Slot
from kvbm_core.identity import BlockIdentity
from storage_agent.port import BlockKey

OnStore = Callable[[BlockIdentity, bool], None]
"""The key's first copy was registered; True where it is a copy of another tier's block."""
OnRemove = Callable[[BlockIdentity], None]
"""The key's last copy is gone."""


class BlockRegistry:
    """Registered slots by key. `allow` keeps later copies, and the key lives as long as one; `reject` does not."""

    def __init__(self, duplicates: Literal["allow", "reject"], on_store: OnStore, on_remove: OnRemove) -> None:
        self._duplicates = duplicates
        self._on_store = on_store
        self._on_remove = on_remove
        self._slots: dict[BlockKey, list[Slot]] = {}

    def add(self, identity: BlockIdentity, slot: Slot, copied: bool) -> Slot:
        """Register `slot`, and return it, or the slot that keeps the key where the duplicate is rejected."""
        slots = self._slots.get(identity.key)
        if slots is None:
            self._slots[identity.key] = [slot]
            self._on_store(identity, copied)
            return slot
        if self._duplicates == "reject":
            return slots[0]
        slots.append(slot)
        return slot

    def drop(self, identity: BlockIdentity, slot: Slot) -> bool:
        """Forget one copy. True when it was the key's last."""
        slots = self._slots[identity.key]
        slots.remove(slot)
        if slots:
            return False
        del self._slots[identity.key]
        self._on_remove(identity)
        return True

    def find(self, key: BlockKey) -> Slot | None:
        """A slot that holds the key; one in use where there is one, so that the others stay evictable."""
        slots = self._slots.get(key)
        if slots is None:
            return None
        return next((slot for slot in slots if slot.references), slots[0])

    def __contains__(self, key: object) -> bool:
        return key in self._slots

    def keys(self) -> list[BlockKey]:
        return list(self._slots)

    def identities(self) -> list[BlockIdentity]:
        """Of each key's first copy."""
        return [slots[0].identity for slots in self._slots.values() if slots[0].identity is not None]
