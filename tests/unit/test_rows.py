"""Sets of rows as arrays."""

from __future__ import annotations

import numpy as np

from advisor.policies.rows import NO_ROWS, Rows


def test_rows_are_in_or_not() -> None:
    rows = Rows(np.array([5, 0, 9, 5], np.int32))
    assert [row for row in range(12) if row in rows] == [0, 5, 9]
    assert 0 not in NO_ROWS
