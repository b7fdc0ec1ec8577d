"""Who asks, and what they may do."""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum


class Scope(IntEnum):
    """What an identity may do. Each includes those before it."""

    READ = 1
    """See."""
    PLAN = 2
    """Approve plans, cancel and retry moves, run replays."""
    OPERATE = 3
    """Pause, drain and scrub volumes, record."""
    ADMIN = 4
    """Register volumes, change settings, delete blocks, read the audit."""

    @property
    def word(self) -> str:
        return self.name.lower()

    @classmethod
    def named(cls, word: str) -> Scope:
        """Raises `ValueError`."""
        for scope in cls:
            if scope.word == word:
                return scope
        raise ValueError(f"{word!r} is no scope: give one of {', '.join(each.word for each in cls)}")


@dataclass(frozen=True, slots=True)
class Identity:
    """Who a request comes from. `tenant`: it sees that tenant's blocks alone; empty: everything."""

    name: str
    scope: Scope
    tenant: str = ""

    def may(self, scope: Scope) -> bool:
        return self.scope >= scope


LOCAL = Identity("operator", Scope.ADMIN)
"""Whoever reaches a service that asks for no login: it is bound to this machine alone."""
