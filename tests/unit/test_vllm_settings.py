"""What the connector for vLLM says of settings that it cannot use; without vLLM."""

from __future__ import annotations

from typing import Any

import pytest

from kvbm_core.config import KvbmConfig
from kvbm_core.connectors.vllm_settings import CORE_KEYS, HOST_BYTES_MAX, read_settings
from kvbm_core.errors import ConfigError

EXAMPLE = "set a whole number of bytes, 17179869184 for 16 GiB"


@pytest.mark.parametrize(
    ("extra", "told"),
    [
        ({}, f"kv_connector_extra_config has no host_bytes: {EXAMPLE}"),
        ({"host_bytes": 1.5e9}, f"host_bytes = 1500000000.0 cannot be used: Expected `int`, got `float`; {EXAMPLE}"),
        ({"host_bytes": "16GiB"}, f"host_bytes = '16GiB' cannot be used: Expected `int`, got `str`; {EXAMPLE}"),
        ({"host_bytes": 0}, f"host_bytes = 0 holds no block: {EXAMPLE}"),
        ({"host_bytes": 1 << 70}, f"host_bytes = {1 << 70} is more than the {HOST_BYTES_MAX} that can be used"),
        ({"host_byte": 1, "host_bytes": 1}, "kv_connector_extra_config has no key host_byte; it takes host_bytes"),
    ],
)
def test_what_it_takes_is_told_with_the_value(extra: dict[str, Any], told: str) -> None:
    with pytest.raises(ConfigError) as caught:
        read_settings(extra)
    assert str(caught.value).startswith(told)


@pytest.mark.parametrize(
    ("extra", "name", "taken"),
    [
        ({"load": "layer-wise"}, "load = 'layer-wise'", "async, layerwise"),
        ({"disk": {"volumes": ["v"]}}, "disk = {'volumes': ['v']}", "volumes, tenant_volumes, retention_s"),
        ({"core": {"offload_policy": "every"}}, "core.offload_policy = 'every'", "all, presence, presence_frequency"),
        ({"core": {"transfers": {"disk": {}}}}, "core.transfers = {'disk': {}}", "device_to_host, host_to_device"),
        ({"core": {"offload": 1}}, "core has no key offload", ", ".join(CORE_KEYS)),
    ],
)
def test_a_word_that_is_not_known_is_answered_with_those_that_are(
    extra: dict[str, Any], name: str, taken: str
) -> None:
    with pytest.raises(ConfigError) as caught:
        read_settings({"host_bytes": 1, **extra})
    assert str(caught.value).startswith(name)
    assert f"; it takes {taken}" in str(caught.value)


@pytest.mark.parametrize("key", ["host_blocks", "host_bytes", "device_blocks", "device_bytes", "device_layout"])
def test_pools_are_sized_by_host_bytes_of_the_connector_alone(key: str) -> None:
    with pytest.raises(ConfigError, match=f"^core.{key} cannot be set: .* host_bytes of the connector, beside core"):
        read_settings({"host_bytes": 1, "core": {key: 1}})


def test_the_keys_of_core_that_an_error_names_are_the_cores() -> None:
    assert set(CORE_KEYS) <= set(KvbmConfig.__struct_fields__)
    core = {"transfers": {"disk_to_device": {"deadline_s": 2.0}}, "reuse": "fifo", "prefill_tokens_per_s": 9}
    assert read_settings({"host_bytes": 1, "core": core}).core == core
