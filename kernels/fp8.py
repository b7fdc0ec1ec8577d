"""Numbers of the 8-bit float e4m3 (finite, no infinities) that quantising needs."""

from __future__ import annotations

E4M3_MAX = 448.0
"""Its largest number."""

SCALE_MIN = 2.0**-100
"""No group's scale is smaller, so that its reciprocal is finite and groups of zeros stay zeros."""

RELATIVE_ERROR_MAX = 2.0**-4
"""Half a step of three mantissa bits."""

ABSOLUTE_ERROR_MAX_SCALES = 2.0**-10
"""Half a step among the numbers below 2^-6, times the scale of the group."""
