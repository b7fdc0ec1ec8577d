"""What the connector for vLLM refuses, and how its settings are read; without vLLM."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from kvbm_core.connectors.step_plan import LoadMode
from kvbm_core.connectors.vllm_settings import read_settings
from kvbm_core.connectors.vllm_support import RIVALS, VllmFacts, refusals, require_support, rival_sentence
from kvbm_core.errors import ConfigError, EngineSupportError

SERVED = VllmFacts(
    version="0.32.0+cpu",
    workers=1,
    executor="uni",
    groups=("full_attention",),
    block_tokens=32,
    hash_tokens=32,
    hash_algorithm="sha256",
    has_fixed_seed=False,
    has_volumes=True,
    offloading_gib=None,
    load_failure_policy="recompute",
    load=LoadMode.ASYNC,
    steps_at_once=2,
)


def test_an_engine_of_the_support_matrix_is_served() -> None:
    assert refusals(SERVED) == []


@pytest.mark.parametrize(
    ("changed", "told"),
    [
        ({"version": "0.31.4"}, "vLLM 0.31.4 was not tested with this connector: use 0.32"),
        ({"workers": 2}, "2 workers share this engine's blocks"),
        ({"executor": "mp"}, "'mp', so the engine's worker is in another process .* VLLM_ENABLE_V1_MULTIPROCESSING=0"),
        ({"groups": ("full_attention", "sliding_window")}, "cache groups are full_attention, sliding_window"),
        ({"groups": ()}, "cache groups are none"),
        ({"hash_tokens": 16}, "blocks of 32 tokens are hashed by 16"),
        ({"offloading_gib": 4.0}, "a block's life has one owner"),
        ({"hash_algorithm": "xxhash"}, "xxhash hashes have a root of their own in each process"),
        ({"load_failure_policy": "fail"}, "kv_load_failure_policy is 'fail'"),
        ({"load": LoadMode.LAYERWISE}, "set async_scheduling to false, or load to 'async'"),
    ],
)
def test_what_is_not_served_is_refused_in_a_sentence(changed: dict[str, Any], told: str) -> None:
    with pytest.raises(EngineSupportError, match=told):
        require_support(replace(SERVED, **changed))


def test_hashes_with_a_root_of_their_own_are_served_without_volumes_or_with_a_fixed_seed() -> None:
    alone = replace(SERVED, hash_algorithm="xxhash", has_volumes=False)

    assert refusals(alone) == []
    assert refusals(replace(alone, has_volumes=True, has_fixed_seed=True)) == []


def test_a_step_waits_for_its_layers_where_it_is_planned_after_the_one_before_has_ended() -> None:
    assert refusals(replace(SERVED, load=LoadMode.LAYERWISE, steps_at_once=1)) == []


def test_everything_that_speaks_against_an_engine_is_told_at_once() -> None:
    assert len(refusals(replace(SERVED, version="0.9.0", workers=8, load_failure_policy="fail"))) == 3


@pytest.mark.parametrize("connector", RIVALS)
def test_each_rival_is_named(connector: str) -> None:
    assert rival_sentence(connector).startswith(f"{RIVALS[connector]} is configured beside")


@pytest.mark.parametrize(
    ("extra", "told"),
    [
        ({}, "host_bytes"),
        ({"host_bytes": 0}, "host_bytes = 0 holds no block"),
        ({"host_bytes": 1, "hots": 2}, "hots"),
        ({"host_bytes": 1, "agent_url": "ipc:///a"}, "disk or remote is not set"),
        ({"host_bytes": 1, "disk": {"volumes": ["v"], "retention_s": 9.0}}, "agent_url is not set"),
        ({"host_bytes": 1, "agent_url": "ipc:///a", "disk": {"volumes": []}}, "disk"),
    ],
)
def test_settings_that_cannot_be_used_name_the_key(extra: dict[str, Any], told: str) -> None:
    with pytest.raises(ConfigError, match=told):
        read_settings(extra)


def test_volumes_of_two_tiers_are_read() -> None:
    tiers = {name: {"volumes": [volume], "retention_s": 9.0} for name, volume in (("disk", "v"), ("remote", "w"))}

    settings = read_settings({"host_bytes": 8, "agent_url": "ipc:///a", **tiers})

    assert settings.disk is not None
    assert settings.remote is not None
    assert (settings.disk.volumes, settings.remote.volumes, settings.tenant) == (("v",), ("w",), "default")
