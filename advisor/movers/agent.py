"""Moves by a storage agent of ours."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

from advisor.movers.port import MoveCommand, Phase
from storage_agent.client import AgentClient
from storage_agent.errors import AgentUnreachable, CommandRefused
from storage_agent.port import AgentPort, AgentStat, CommandOutcome


class AgentMover:
    """Implements `MoverPort` over an agent in this process, which is the embedder's to close."""

    def __init__(self, agent: AgentPort) -> None:
        self._agent = agent

    def stat(self) -> AgentStat:
        """See `MoverPort.stat`."""
        return self._agent.stat()

    def carry_out(self, command: MoveCommand) -> CommandOutcome:
        """See `MoverPort.carry_out`."""
        return ask_agent(self._agent, command)

    def refuse_tenants(self, tenants: Sequence[str], *, term: int) -> None:
        """See `storage_agent.port.AgentPort.refuse_tenants`."""
        self._agent.refuse_tenants(tenants, term=term)

    def close(self) -> None:
        """Nothing."""


class ClientMover:
    """Implements `MoverPort` over an agent's command socket: a client for each command under way, one for `stat`.

    A client asks one thing at a time, and a slow store must not keep the others waiting.
    """

    def __init__(self, open_client: Callable[[], AgentClient]) -> None:
        self._open_client = open_client
        self._stat_client = open_client()
        self._lock = threading.Lock()
        self._idle: list[AgentClient] = []
        self._opened = [self._stat_client]
        self._closed = False

    def stat(self) -> AgentStat:
        """See `MoverPort.stat`. An agent that refuses to say is one that cannot be reached."""
        try:
            return self._stat_client.stat()
        except CommandRefused as fault:
            raise AgentUnreachable(str(fault)) from fault

    def carry_out(self, command: MoveCommand) -> CommandOutcome:
        """See `MoverPort.carry_out`."""
        with self._client() as client:
            return ask_agent(client, command)

    def refuse_tenants(self, tenants: Sequence[str], *, term: int) -> None:
        """See `storage_agent.port.AgentPort.refuse_tenants`."""
        with self._client() as client:
            client.refuse_tenants(tenants, term=term)

    def close(self) -> None:
        """See `MoverPort.close`."""
        with self._lock:
            self._closed = True
            opened, self._opened, self._idle = self._opened, [], []
        for client in opened:
            client.close()

    @contextmanager
    def _client(self) -> Iterator[AgentClient]:
        with self._lock:
            if self._closed:
                raise AgentUnreachable("the service is stopping: no more is asked of the agent")
            client = self._idle.pop() if self._idle else self._open_client()
            if client not in self._opened:
                self._opened.append(client)
        try:
            yield client
        finally:
            with self._lock:
                if not self._closed:
                    self._idle.append(client)


def ask_agent(agent: AgentPort, command: MoveCommand) -> CommandOutcome:
    """A copy that is there already is read and verified as a fresh one, so `check` is a copy too."""
    match command.phase:
        case Phase.COPY | Phase.CHECK:
            return agent.copy(
                command.command_id, command.keys, command.source, command.target, term=command.term
            )
        case Phase.FREE:
            return agent.delete(command.command_id, command.source, command.keys, term=command.term)
