"""Where an engine's connector finds its storage agent, as the engine's own configuration hands it over. Pure."""

from __future__ import annotations

from math import inf

import msgspec

from kvbm_core.errors import ConfigError


class AgentPlace(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """`agent_url`: its `command_url`; `volume`: which of its volumes takes what is put. Times in seconds."""

    agent_url: str
    volume: str
    tenant: str = "default"
    model: str = ""
    """Empty: as the engine calls it."""
    revision: str = ""
    hash_root: str = ""
    """Sets blocks apart that the rest does not: engines share blocks only where theirs is equal."""
    timeout_s: float = 30.0


TAKEN = (
    f"agent_url (the agent's command URL) and volume, and may have {', '.join(AgentPlace.__struct_fields__[2:])}"
)
"""The keys, as an error tells them."""


def read_place(found: object, where: str, taken: str = TAKEN) -> AgentPlace:
    """`where`: what the caller calls the place; `taken`: its keys, where the caller reads others too, or not all of
    these. Raises `ConfigError` that names the key and the place."""
    try:
        place = msgspec.convert(found, AgentPlace)
    except msgspec.ValidationError as error:
        raise ConfigError(f"{where}: {error}; it takes {taken}") from error
    if not place.agent_url or not place.volume:
        raise ConfigError(f"{where}: agent_url is {place.agent_url!r}, volume {place.volume!r}; name both")
    if not 0 < place.timeout_s < inf:
        raise ConfigError(f"{where}: timeout_s is {place.timeout_s}; wait some seconds for each answer, 30 by default")
    return place
