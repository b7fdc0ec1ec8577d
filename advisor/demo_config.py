"""The demo's engine side: its settings file, the files that the demo writes for it, and the figures it reports."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec

from advisor.demo_workload import DEFAULT_TENANTS, TenantSettings
from advisor.errors import AdvisorError


class EngineSettingsError(AdvisorError):
    """The engine's settings file cannot be used; names the file and the key."""


class WorkloadSettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How much is asked of the engine, and by whom."""

    requests_per_s: float = 20.0
    tenants: tuple[TenantSettings, ...] = DEFAULT_TENANTS


class EngineSettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The engine process. `agent_file` names the storage agent's own TOML file, relative to this one."""

    events_url: str
    """Where the core publishes; its agent's URL is in the agent's file."""
    agent_file: str
    core: dict[str, Any]
    """A `kvbm_core.config.KvbmConfig`; only the engine process knows the core."""
    workload: WorkloadSettings = WorkloadSettings()


def load_engine_settings(file: Path) -> EngineSettings:
    """Settings in the TOML `file`. Raises `EngineSettingsError` that names the file and the key."""
    try:
        settings = msgspec.toml.decode(file.read_bytes(), type=EngineSettings)
    except (OSError, msgspec.MsgspecError) as error:
        raise EngineSettingsError(f"{file}: {error}; correct the engine's settings there") from error
    if not 0.01 <= settings.workload.requests_per_s <= 10_000:
        raise EngineSettingsError(
            f"{file}: requests_per_s = {settings.workload.requests_per_s} is out of range: set it from 0.01 to 10000"
        )
    if not settings.workload.tenants:
        raise EngineSettingsError(f"{file}: workload.tenants is empty: name one, or leave it out for the demo's own")
    return settings


def demo_engine_toml(*, core_events_url: str, agent_file: str = "agent.toml") -> str:
    """The demo's engine settings: a model of 16 KiB a block, chats kept on the slow volume, agents on the fast one."""
    return f"""\
events_url = "{core_events_url}"
agent_file = "{agent_file}"

[core]
model = "demo-16k"
layers = 4
heads = 2
head_dim = 32
page_tokens = 16
dtype = "float16"
device_blocks = 256
host_blocks = 512
hash_secret = "known to everyone who reads the demo"

[core.disk]
volumes = ["slow"]
retention_s = 600.0

[core.disk.tenant_volumes]
forge = ["fast", "slow"]
harbor = ["fast", "slow"]

[workload]
requests_per_s = 20.0
"""


def demo_agent_toml(*, agent_events_url: str, command_url: str, block_bytes: int = 16_384) -> str:
    """The demo's storage agent: a small fast volume and a large slow one beside the settings file."""
    return f"""\
name = "demo-agent"
command_url = "{command_url}"
event_url = "{agent_events_url}"
allowed_roots = ["."]

[[volumes]]
id = "fast"
path = "fast.slab"
capacity_blocks = 1024
block_bytes_max = {block_bytes}
speed_rank = 0

[[volumes]]
id = "slow"
path = "slow.slab"
capacity_blocks = 8192
block_bytes_max = {block_bytes}
speed_rank = 1
"""


class EngineReport(msgspec.Struct, frozen=True, kw_only=True):
    """One line of JSON on the engine's standard output each second, and a last one: totals since its start.

    The blocks of all prompts are `blocks_device` + `blocks_host` + those of `blocks_volume` + `blocks_recomputed`.
    """

    elapsed_s: float
    done: bool = False
    """The trace has ended; the agent goes on serving."""
    requests: int = 0
    requests_cut: int = 0
    """Prompts that were cut because the device pool is smaller."""
    tokens_prompt: int = 0
    blocks_device: int = 0
    blocks_host: int = 0
    blocks_volume: dict[str, int] = {}
    """By volume."""
    blocks_recomputed: int = 0
    """Blocks of prompts that were found nowhere."""
    blocks_computed: int = 0
    """Those, and the blocks of answers."""
    wrong_blocks: int = 0
    """Blocks found whose bytes were not those that were computed for them. Must be 0."""
    gets_missed: int = 0
    """Blocks asked of the volumes that no volume had."""
    gets_failed: dict[str, int] = {}
    """Blocks that a volume has and could not give, by the agent's result."""
    gets_unused: dict[str, int] = {}
    """Blocks not loaded though nothing failed, by reason: they lay behind a missing one, or there was no room."""
    puts: dict[str, int] = {}
    """Blocks durable after a put, by volume."""
    puts_fell_back: dict[str, int] = {}
    """Blocks that went to the next volume because this one was full."""
    puts_refused: dict[str, int] = {}
    """Blocks that no volume took, by reason."""
    offload_skipped: dict[str, int] = {}
    """Blocks not offloaded, by reason."""
    offload_waiting: int = 0
    device_blocks_used: int = 0
    """Blocks active or inactive now."""
    host_blocks_used: int = 0
