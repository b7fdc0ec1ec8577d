"""Sets of rows of the index, as arrays hold them."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt


class Rows:
    """Which rows are in `rows`, i4; made at the first question: half a million rows as a Python set cost 50 ms."""

    def __init__(self, rows: npt.NDArray[Any]) -> None:
        self._rows = rows
        self._is_in: npt.NDArray[np.bool_] | None = None

    def __contains__(self, row: int) -> bool:
        if self._is_in is None:
            self._is_in = np.zeros(int(self._rows.max(initial=-1)) + 1, np.bool_)
            self._is_in[self._rows] = True
        return row < len(self._is_in) and bool(self._is_in[row])


NO_ROWS = Rows(np.zeros(0, np.int32))
