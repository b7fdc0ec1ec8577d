"""Who a request comes from, by what it shows."""

from __future__ import annotations

from dataclasses import dataclass

from advisor.access.identity import Identity


@dataclass(frozen=True, slots=True)
class Doorkeeper:
    """`anonymous`: who comes in without showing anything; None: nobody does."""

    anonymous: Identity | None = None


NOBODY = Doorkeeper()
"""Lets nobody in."""
