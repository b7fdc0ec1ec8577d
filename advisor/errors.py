"""Errors of the advisor: each says what was wrong, with which value, and what to do."""

from __future__ import annotations

from collections.abc import Sequence


class AdvisorError(Exception):
    """Base of everything this room raises. `exit_status` is what the command line ends with (see `advisor.cli`)."""

    exit_status = 2


class LogError(AdvisorError):
    """The event log cannot be opened, read or appended to. Nothing was written."""


class SettingsError(AdvisorError):
    """Settings that cannot be used: one sentence, on a line of its own, for each key."""

    def __init__(self, problems: Sequence[str]) -> None:
        super().__init__("\n".join(problems))
        self.problems = tuple(problems)


class CommandError(AdvisorError):
    """A command that is registered but cannot be loaded."""


class OutputError(AdvisorError):
    """A file that a command was asked to write cannot be."""


class ActionRefused(AdvisorError):
    """What a person asked for cannot be done, and why."""


class FieldRefused(ActionRefused):
    """One field of what was asked for cannot be, whatever else is there. `field`: its dotted path; `value`: as it is
    shown, empty where it may be a secret."""

    def __init__(self, reason: str, field: str, value: str, remedy: str) -> None:
        super().__init__(reason)
        self.field, self.value, self.remedy = field, value, remedy


class Outdated(ActionRefused):
    """It was asked of something that was changed meanwhile."""


class NothingSuch(ActionRefused):
    """It names something that there is none of."""


class PictureBeingMade(AdvisorError):
    """What was asked for is read from a picture that is not taken yet: ask again in `wait_s`, a guess."""

    def __init__(self, reason: str, wait_s: float) -> None:
        super().__init__(reason)
        self.wait_s = wait_s
