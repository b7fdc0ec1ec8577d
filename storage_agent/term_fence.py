"""Which advisor may command an agent: the one of the newest term that was heard of."""

from __future__ import annotations

import threading

from storage_agent.errors import StaleTerm

NO_TERM = 0
"""Of callers that are no advisor: a person, or the process that the agent is part of."""


class TermFence:
    """Thread-safe. Remembers for the agent's life."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._newest = NO_TERM

    def require(self, term: int) -> None:
        """Take `term` as the newest if it is. Raises `StaleTerm` where a newer one was heard of."""
        if term == NO_TERM:
            return
        with self._lock:
            if term < self._newest:
                raise StaleTerm(
                    f"the command is of term {term}, an advisor of term {self._newest} has taken over; stop this one, "
                    "or restart the agent if the advisor's log was begun anew"
                )
            self._newest = term
