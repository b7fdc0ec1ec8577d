"""How a command's log looks, and how much it tells: options of the command line."""

from __future__ import annotations

from enum import StrEnum


class LogFormat(StrEnum):
    """`console` for people, `json` (one object a line) for what collects logs."""

    CONSOLE = "console"
    JSON = "json"


class LogLevel(StrEnum):
    """The least that is told."""

    DEBUG = "debug"
    INFO = "info"
    WARNING = "warning"
    ERROR = "error"
