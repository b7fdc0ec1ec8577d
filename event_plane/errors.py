"""Errors of the event plane: each says what was wrong, with which value, and what to do."""

from __future__ import annotations


class EventPlaneError(Exception):
    """Base of everything this room raises. `exit_status` is what a command line ends with."""

    exit_status = 2


class WireError(EventPlaneError):
    """A batch that cannot be decoded: bad magic, version, CRC, or a limit. The batch is refused whole."""


class DialectError(EventPlaneError):
    """A foreign message that cannot be read at all. Single bad events are counted and skipped instead."""


class TransportError(EventPlaneError):
    """A socket that cannot be opened or used."""


class RecordingError(EventPlaneError):
    """A recording or trace that cannot be read; names the file, the place in it and the remedy."""
