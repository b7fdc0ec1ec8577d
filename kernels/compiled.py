"""How the loops for the CPU are compiled."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numba


def compiled(function: Callable[..., Any]) -> Any:
    """Machine code that lets other threads run. Kept on disk, so that only the first process compiles, for a second."""
    njit: Any = numba.njit
    try:
        return njit(nogil=True, cache=True)(function)
    except RuntimeError:  # no folder to keep it in
        return njit(nogil=True)(function)
