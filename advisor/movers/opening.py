"""The mover that an agent's settings name."""

from __future__ import annotations

from advisor.movers.agent import ClientMover
from advisor.movers.port import MoverPort
from advisor.movers.published import PublishedMover
from advisor.settings import AgentSettings
from storage_agent.client import AgentClient


def open_mover(settings: AgentSettings) -> MoverPort:
    """An agent's connects when it is first asked. Raises `MoverUnusable` for a URL that plans cannot go to."""
    if settings.mover == "published":
        return PublishedMover(
            settings.name, settings.command_url, deadline_s=settings.deadline_s, credentials=settings.credentials
        )
    return ClientMover(lambda: AgentClient(settings.command_url, settings.timeout_s, settings.credentials))
