"""The mover that an agent's settings name."""

from __future__ import annotations

from advisor.movers.agent import ClientMover
from advisor.movers.port import MoverPort
from advisor.settings import AgentSettings
from storage_agent.client import AgentClient


def open_mover(settings: AgentSettings) -> MoverPort:
    """Connects when it is first asked."""
    return ClientMover(lambda: AgentClient(settings.command_url, settings.timeout_s, settings.credentials))
