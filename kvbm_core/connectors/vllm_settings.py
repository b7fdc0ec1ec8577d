"""What vLLM's connector is told in `kv_connector_extra_config`. Pure."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from enum import StrEnum
from typing import Any, Literal, get_args, get_origin

import msgspec

from kvbm_core.config import BLOCK_BYTES_MAX, BLOCKS_MAX, KvbmConfig, TierVolumes
from kvbm_core.connectors.step_plan import LoadMode
from kvbm_core.errors import ConfigError

HOST_BYTES_MAX = BLOCKS_MAX * BLOCK_BYTES_MAX
CORE_KEYS = (
    "offload_policy",
    "offload_frequency_min",
    "offload_queue_blocks",
    "reuse",
    "duplicates",
    "verify_copies",
    "transfer_blocks",
    "transfers",
    "onboard_budget_ms",
    "prefill_tokens_per_s",
    "headroom_bytes",
)
"""Keys of `KvbmConfig` to choose from under an engine, which says the others itself."""
_BYTES_EXAMPLE = "set a whole number of bytes, 17179869184 for 16 GiB"


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
        if not 1 <= self.host_bytes <= HOST_BYTES_MAX:
            wrong = "holds no block" if self.host_bytes < 1 else f"is more than the {HOST_BYTES_MAX} that can be used"
            raise ConfigError(f"host_bytes = {self.host_bytes} {wrong}: {_BYTES_EXAMPLE}")
        has_volumes = self.disk is not None or self.remote is not None
        if has_volumes != bool(self.agent_url):
            lacks = "agent_url" if has_volumes else "disk or remote"
            raise ConfigError(f"{lacks} is not set: volumes need both, agent_url and a tier's volumes")


def read_settings(extra: Mapping[str, Any]) -> VllmSettings:
    """Raises `ConfigError` that names the key, its value and what it takes."""
    if "host_bytes" not in extra:
        raise ConfigError(f"kv_connector_extra_config has no host_bytes: {_BYTES_EXAMPLE}")
    kinds = _kinds(VllmSettings)
    _require_keys("kv_connector_extra_config", extra, kinds, kinds)
    settings = VllmSettings(**{key: _converted(key, value, kinds[key]) for key, value in extra.items()})
    _require_core(settings.core)
    return settings


def _require_core(core: Mapping[str, Any]) -> None:
    kinds = _kinds(KvbmConfig)
    for key in core:
        if key.startswith("device_") or key in ("host_blocks", "host_bytes"):
            raise ConfigError(
                f"core.{key} cannot be set: the engine has the GPU's blocks, and host_bytes of the connector, beside "
                f"core, sizes the host's: set that"
            )
    _require_keys("core", core, kinds, CORE_KEYS)
    for key, value in core.items():
        _converted(f"core.{key}", value, kinds[key])


def _require_keys(where: str, given: Mapping[str, Any], known: Collection[str], told: Collection[str]) -> None:
    """`told`: the keys that an error names."""
    unknown = sorted(set(given) - set(known))
    if unknown:
        raise ConfigError(f"{where} has no key {', '.join(unknown)}; it takes {', '.join(told)}")


def _converted(name: str, value: object, kind: Any) -> Any:
    try:
        return msgspec.convert(value, kind)
    except msgspec.ValidationError as error:
        taken = f"; it takes {', '.join(_taken(kind))}" if _taken(kind) else ""
        remedy = f"; {_BYTES_EXAMPLE}" if name == "host_bytes" else taken
        raise ConfigError(f"{name} = {value!r} cannot be used: {error}{remedy}") from error


def _kinds(settings: type[msgspec.Struct]) -> dict[str, Any]:
    return {field.name: field.type for field in msgspec.structs.fields(settings)}


def _taken(kind: Any) -> list[str]:
    """The words that a value of this type is made of: an enum's values, a struct's keys. None for numbers and text."""
    if isinstance(kind, type) and issubclass(kind, StrEnum):
        return list(kind)
    if isinstance(kind, type) and issubclass(kind, msgspec.Struct):
        return list(kind.__struct_fields__)
    if get_origin(kind) is Literal:
        return list(get_args(kind))
    return [word for part in get_args(kind) for word in _taken(part)]
