"""Who asks, for tests of what each may see."""

from __future__ import annotations

from typing import Any

from advisor.access.doorkeeper import Doorkeeper
from advisor.access.identity import Identity, Scope


def entering(scope: Scope, tenant: str = "", name: str = "ann") -> dict[str, Any]:
    """Parts of an app whose every request comes from this identity."""
    return {"doorkeeper": Doorkeeper(anonymous=Identity(name, scope, tenant))}
