"""What vLLM's connector is told in `kv_connector_extra_config`. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec

from kvbm_core.config import TierVolumes
from kvbm_core.connectors.step_plan import LoadMode
from kvbm_core.errors import ConfigError


class VllmSettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A key that is not here is an error. Raises `ConfigError`."""

    host_bytes: int
    """Host memory for blocks that left the GPU."""
    load: LoadMode = LoadMode.ASYNC
    agent_url: str = ""
    """`command_url` of the storage agent that owns the volumes."""
    disk: TierVolumes | None = None
    remote: TierVolumes | None = None
    tenant: str = "default"
    model: str = ""
    """In the place of the engine's name of its model, where two engines name the same one differently."""
    revision: str = ""
    """Of the weights. Engines that share volumes share blocks of one model and revision only."""
    event_url: str = ""
    """Where Store, Remove and Access of the host's blocks are published; empty: nowhere."""
    producer: str = "connector"
    """Name that this engine's events carry; one of its own for each engine."""
    desk_url: str = ""
    """`http://127.0.0.1:PORT` to answer at, with metrics and where a block is; empty: nowhere."""
    core: dict[str, Any] = {}
    """Other keys of `KvbmConfig`, e.g. `offload_policy`, `reuse`, `prefill_tokens_per_s`."""

    def __post_init__(self) -> None:
        if self.host_bytes < 1:
            raise ConfigError(f"host_bytes = {self.host_bytes} holds no block: set the bytes of host memory to use")
        has_volumes = self.disk is not None or self.remote is not None
        if has_volumes != bool(self.agent_url):
            lacks = "agent_url" if has_volumes else "disk or remote"
            raise ConfigError(f"{lacks} is not set: volumes need both, agent_url and a tier's volumes")


def read_settings(extra: Mapping[str, Any]) -> VllmSettings:
    """Raises `ConfigError` that names the key."""
    try:
        return msgspec.convert(dict(extra), VllmSettings)
    except msgspec.ValidationError as error:
        raise ConfigError(f"kv_connector_extra_config cannot be used: {error}") from error
