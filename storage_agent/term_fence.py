"""Which advisor may command an agent: the one of the newest term that was heard of, in this life or an earlier one."""

from __future__ import annotations

import threading
from pathlib import Path

import msgspec
import structlog

from event_plane.schema import producer_id
from storage_agent.errors import UNREADABLE, StaleTerm, TermError
from storage_agent.files import replace_file

NO_TERM = 0
"""Of callers that are no advisor: a person, or the process that the agent is part of."""
TERM_MAX = 2**63 - 1

_log = structlog.get_logger()


class _Kept(msgspec.Struct, frozen=True):
    """What the file holds, in JSON. `agent` is for people."""

    agent: str
    newest_term: int


class TermFence:
    """Thread-safe. A term is on disk before the first command of it is carried out."""

    def __init__(self, agent: str, state_folder: Path | None = None) -> None:
        """Remembers for its own life where no folder is given. Raises `TermError` for a file that holds no term."""
        self._agent = agent
        self._file = None if state_folder is None else state_folder / f".kvadvisor-{producer_id(agent):016x}.term"
        self._lock = threading.Lock()
        self._newest = NO_TERM
        self._kept = NO_TERM
        """What is on disk, as far as is known."""
        self._unkept = NO_TERM
        """Of which term it was said that it cannot be kept."""
        try:
            self._take_up_kept()
        except OSError as error:
            raise TermError(f"{self._file} cannot be read: {error.strerror}; it keeps the newest term") from error

    def require(self, term: int) -> None:
        """Take `term` as the newest if it is. Raises `StaleTerm` where a newer one was heard of.

        Where the file cannot be written the term counts all the same, for this life, and each command of it tries
        again: a full or lost disk must not keep an advisor from freeing blocks.
        """
        if term == NO_TERM:
            return
        if not NO_TERM < term <= TERM_MAX:
            raise TermError(f"the command is of term {term}; terms are 1 to {TERM_MAX}, and 0 is of no advisor")
        with self._lock:
            if term > self._kept:
                self._look_again(term)
            if term < self._newest:
                raise StaleTerm(
                    f"the command is of term {term}, an advisor of term {self._newest} has taken over; stop this one, "
                    f"or{self._remedy()} restart the agent if the advisor's log was begun anew"
                )
            self._newest = term
            if term > self._kept:
                self._keep(term)

    def _look_again(self, term: int) -> None:
        """The folder may not have been mounted before."""
        try:
            self._take_up_kept()
        except OSError as error:
            self._say_unkept(term, error)

    def _take_up_kept(self) -> None:
        """Raises `OSError`, or `TermError` for a file that holds no term."""
        if self._file is None:
            return
        try:
            content = self._file.read_bytes()
        except FileNotFoundError:
            return
        try:
            kept = msgspec.json.decode(content, type=_Kept).newest_term
        except UNREADABLE as error:
            raise TermError(f"{self._file} holds no term ({error}); remove it if no older advisor runs") from error
        self._kept = kept
        self._newest = max(self._newest, kept)

    def _keep(self, term: int) -> None:
        if self._file is not None:
            try:
                replace_file(self._file, [msgspec.json.encode(_Kept(self._agent, term))])
            except OSError as error:
                self._say_unkept(term, error)
                return
        self._kept = term

    def _say_unkept(self, term: int, error: OSError) -> None:
        if term != self._unkept:
            self._unkept = term
            _log.warning("the newest term cannot be kept", file=str(self._file), term=term, error=str(error))

    def _remedy(self) -> str:
        return f" remove {self._file} and" if self._file is not None else ""
