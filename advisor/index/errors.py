"""What the index can refuse or find wrong."""

from __future__ import annotations

from advisor.errors import AdvisorError


class IndexFault(Exception):
    """An invariant of the index does not hold: a fault in this program, never in its input."""


class IndexFull(AdvisorError):
    """Something does not fit below the index's memory limit. Nothing was changed."""


class IndexDamaged(AdvisorError):
    """A saved index that cannot be used: cut, altered or of another format. Use the one before it, or fold the log."""
