"""Sizes, layouts, and identities of blocks."""

from __future__ import annotations

from typing import Any

import msgspec
import numpy as np
import pytest

from event_plane.hashing import salt, sequence_hashes
from kvbm_core.config import KvbmConfig, TierVolumes
from kvbm_core.errors import ConfigError
from kvbm_core.sequence import TokenBlockSequence

SMALL: dict[str, Any] = {
    "layers": 4,
    "heads": 2,
    "head_dim": 32,
    "device_blocks": 8,
    "host_blocks": 16,
    "hash_secret": "a secret of the tests",
}


def test_a_block_of_the_demo_has_16_kib_and_no_disk_tier_is_on() -> None:
    config = KvbmConfig(**SMALL)
    assert config.block_bytes == 16_384
    assert config.volumes_of("acme") == ()


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"layers": 0}, "layers = 0 is out of range: set it from 1 to 1024"),
        ({"outer": 3}, "outer = 3 is out of range: set it from 1 to 2"),
        ({"device_blocks": 0}, "device_blocks = 0 is out of range"),
        ({"dtype": "fp4"}, "dtype = 'fp4' is unknown: set one of float16, bfloat16, float32, int8, "),
        ({"alignment_bytes": 3}, "alignment_bytes = 3 splits an element of float16: set a multiple of 2"),
        ({"page_tokens": 65_535, "head_dim": 1_024}, "lower page_tokens, now 65535"),
        ({"hash_secret": "short"}, "hash_secret has 5 characters: set at least 16"),
    ],
)
def test_a_configuration_that_cannot_work_names_the_number_to_change(change: dict[str, Any], text: str) -> None:
    with pytest.raises(ConfigError, match=text):
        KvbmConfig(**SMALL | change)


def test_a_bad_number_in_a_file_is_a_validation_error_with_the_same_sentence() -> None:
    with pytest.raises(msgspec.ValidationError, match="heads = 0 is out of range"):
        msgspec.convert(SMALL | {"heads": 0}, KvbmConfig)
    with pytest.raises(msgspec.ValidationError, match="unknown field `head`"):
        msgspec.convert(SMALL | {"head": 1}, KvbmConfig)


def test_a_tenant_may_have_volumes_of_its_own() -> None:
    disk = TierVolumes(volumes=("slow",), tenant_volumes={"forge": ("fast", "slow"), "guest": ()}, retention_s=60.0)
    config = KvbmConfig(**SMALL, disk=disk, remote=TierVolumes(volumes=("bucket",), retention_s=3_600.0))
    assert config.volumes_of("acme") == ("slow", "bucket")
    assert config.volumes_of("forge") == ("fast", "slow", "bucket")
    assert config.volumes_of("guest") == ("bucket",)
    assert disk.all_volumes() == ("slow", "fast")


def test_a_sequence_names_its_full_blocks_in_the_prefix_tree() -> None:
    config = KvbmConfig(**SMALL, adapter="lora-a")
    tokens = np.arange(40, dtype=np.uint32)
    sequence = TokenBlockSequence(config, "acme", tokens)
    expected = sequence_hashes(tokens, 16, salt("lora-a", "acme"), config.secret_of("acme"))
    assert [block.key.sequence_hash for block in sequence.blocks] == expected
    (third,) = sequence.extend(range(40, 48))
    assert third.depth == 2
    assert third.parent_hash == expected[1]
    assert third.prefix_hash == expected[0]
    assert sequence.blocks[0].parent_hash == 0
    assert third.key.namespace_id == config.namespace_of("acme").namespace_id
    assert third.block_tokens == 16


def test_tenants_never_share_a_hash() -> None:
    config = KvbmConfig(**SMALL)
    acme = TokenBlockSequence(config, "acme", range(16)).blocks[0].key
    harbor = TokenBlockSequence(config, "harbor", range(16)).blocks[0].key
    assert acme.namespace_id != harbor.namespace_id
    assert acme.sequence_hash & (2**64 - 1) != harbor.sequence_hash & (2**64 - 1)
    assert acme.sequence_hash >> 64 != harbor.sequence_hash >> 64
    other_secret = KvbmConfig(**SMALL | {"hash_secret": "another secret of the tests"})
    forged = TokenBlockSequence(other_secret, "acme", range(16)).blocks[0].key
    assert forged.sequence_hash >> 64 != acme.sequence_hash >> 64
