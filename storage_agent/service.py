"""The agent's command socket: commands in, outcomes out, over ZeroMQ on this host or NATS from others."""

from __future__ import annotations

from types import TracebackType

from event_plane.credentials import NO_CREDENTIALS, Credentials
from storage_agent.agent import StorageAgent
from storage_agent.command_desk import CommandDesk
from storage_agent.command_nats import SCHEME as NATS_SCHEME
from storage_agent.command_nats import NatsCommandListener
from storage_agent.command_zmq import ZmqCommandListener
from storage_agent.data_desk import DataDesk
from storage_agent.registered_volumes import KeptVolumes, VolumeOrders


class AgentService:
    """Serves one agent's commands on `command_url` until `close`. The agent itself stays open."""

    def __init__(
        self,
        agent: StorageAgent,
        command_url: str,
        credentials: Credentials = NO_CREDENTIALS,
        kept: KeptVolumes | None = None,
        *,
        may_harm: bool = False,
    ) -> None:
        """Takes commands when it returns; over NATS as soon as the server is there.

        `credentials` are shown to the NATS server. `kept`: where it is remembered which volumes others register and
        resize; without it they are forgotten at the end. `may_harm`: others may register kinds that lose blocks on
        purpose. Raises `ServiceError`: a URL that cannot be used or is in use.
        """
        self._data = DataDesk(agent)
        orders = VolumeOrders(agent, kept if kept is not None else KeptVolumes(agent.name), may_harm=may_harm)
        self._desk = CommandDesk(agent, self._data, orders, agent.name)
        self._listener: ZmqCommandListener | NatsCommandListener
        try:
            if command_url.startswith(NATS_SCHEME):
                self._listener = NatsCommandListener(command_url, self._desk.take, agent.name, credentials)
            else:
                self._listener = ZmqCommandListener(command_url, self._desk.take, agent.name)
        except BaseException:
            self._desk.close()
            self._data.close()
            raise
        self.command_url = self._listener.url
        """Where it listens, with the port that was chosen where `command_url` ended in `:*`."""

    def close(self) -> None:
        """Finish and answer the commands under way, forget those that wait, close the socket. Idempotent."""
        self._data.close()  # first: who waits for memory to be lent is refused
        self._desk.close()
        self._listener.close()

    def __enter__(self) -> AgentService:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
