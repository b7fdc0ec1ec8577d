"""How many examples Hypothesis tries: few in `make test`, all in `make test-long`."""

from __future__ import annotations

import os
from typing import Final

LONG: Final = os.environ.get("KVADVISOR_LONG", "") not in ("", "0")
FEW: Final = 20


def examples(most: int) -> int:
    """`most` in a long run; in a short one a quarter of them, but `FEW` where there are as many."""
    return most if LONG else max(min(most, FEW), most // 4)
