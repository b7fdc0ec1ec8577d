"""Sizes, layouts, and identities of blocks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

from event_plane.hashing import salt, sequence_hashes
from kvbm_core.config import PATH_LIMITS, KvbmConfig, PathLimits, TierVolumes
from kvbm_core.errors import ConfigError
from kvbm_core.paths import TransferPath
from kvbm_core.sequence import TokenBlockSequence
from storage_agent.shards import check_layout, check_span

SMALL: dict[str, Any] = {
    "layers": 4,
    "heads": 2,
    "head_dim": 32,
    "device_blocks": 8,
    "host_blocks": 16,
    "hash_secret": "a secret of the tests",
}
DISK = TierVolumes(volumes=("slow",), retention_s=60.0)


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
        ({"host_bytes": 1 << 20}, "host_blocks and host_bytes are both set: set one of them"),
        ({"device_blocks": 0, "device_bytes": 16_383}, "device_bytes = 16383 holds no block of 16384 bytes"),
        ({"tensor_parallel_size": 3}, "tensor_parallel_size = 3 does not divide 2 heads, nor they it: set a divisor"),
        ({"tensor_parallel_rank": 1}, "tensor_parallel_rank = 1 is out of range: set it from 0 to 0"),
        ({"heads": 512, "head_dim": 1, "tensor_parallel_size": 512}, "makes 512 shards of a block: set at most 256"),
        (
            {"device_layout": "layer_separate_block_first", "device_order": "universal"},
            "device_order = 'universal' has no layer_separate_block_first layout: set device_order to NHD or HND",
        ),
        ({"disk": DISK, "remote": DISK}, "disk and remote both name volume 'slow': name it in one of them"),
        ({"prefill_tokens_per_s": float("nan")}, "prefill_tokens_per_s = nan is out of range"),
    ],
)
def test_a_configuration_that_cannot_work_names_the_number_to_change(change: dict[str, Any], text: str) -> None:
    with pytest.raises(ConfigError, match=text):
        KvbmConfig(**SMALL | change)


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"volumes": ()}, "volumes is empty: name a volume, or leave the tier out"),
        ({"volumes": ("fast", "fast")}, "volumes of 'volumes' name one twice: fast, fast; name each once"),
        ({"tenant_volumes": {"acme": ("slow", "slow")}}, "volumes of 'acme' name one twice"),
        ({"retention_s": 0.5}, "retention_s = 0.5 is out of range: set it from 1.0"),
        ({"latency_ms": 0.0}, "latency_ms = 0.0 is out of range"),
    ],
)
def test_a_tier_of_volumes_that_cannot_work_names_the_number_to_change(change: dict[str, Any], text: str) -> None:
    with pytest.raises(ConfigError, match=text):
        TierVolumes(**{"volumes": ("slow",), "retention_s": 60.0} | change)


def test_a_bad_number_in_a_file_is_a_validation_error_with_the_same_sentence() -> None:
    with pytest.raises(msgspec.ValidationError, match="heads = 0 is out of range"):
        msgspec.convert(SMALL | {"heads": 0}, KvbmConfig)
    with pytest.raises(msgspec.ValidationError, match="unknown field `head`"):
        msgspec.convert(SMALL | {"head": 1}, KvbmConfig)


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"disk": {"volumes": ["slow"]}}, "missing required field `retention_s` - at `\\$.disk`"),
        ({"disk": {"volumes": ["slow"], "retention_s": 60.0, "retain_s": 1}}, "unknown field `retain_s`"),
        ({"transfers": {"host_to_disc": {}}}, "Invalid enum value 'host_to_disc' - at `key` in `\\$.transfers`"),
        ({"transfers": {"host_to_disk": {"concurrency": 0}}}, "concurrency = 0 is out of range: set it from 1 to 256"),
        ({"reuse": "mru"}, "Invalid enum value 'mru' - at `\\$.reuse`"),
        ({"device_layout": "contiguous"}, "Invalid enum value 'contiguous' - at `\\$.device_layout`"),
    ],
)
def test_a_setting_that_is_not_known_is_an_error(change: dict[str, Any], text: str) -> None:
    with pytest.raises(msgspec.ValidationError, match=text):
        msgspec.convert(SMALL | change, KvbmConfig)


def test_a_path_has_its_own_limits_or_those_of_its_kind() -> None:
    config = msgspec.convert(SMALL | {"transfers": {"host_to_disk": {"concurrency": 7}}}, KvbmConfig)
    assert config.limits_of(TransferPath.HOST_TO_DISK) == PathLimits(concurrency=7, deadline_s=10.0)
    assert config.limits_of(TransferPath.DEVICE_TO_DISK) == PathLimits(concurrency=2, deadline_s=30.0)
    assert set(PATH_LIMITS) == set(TransferPath)


@pytest.mark.parametrize(
    ("layout", "alignment_bytes", "footprint_bytes"),
    [
        ("fully_contiguous", 1, 16_384),
        ("fully_contiguous", 65_536, 65_536),
        ("layer_separate_block_first", 8_192, 4 * 8_192),
        ("layer_separate_outer_first", 8_192, 8 * 8_192),
    ],
)
def test_a_size_in_bytes_becomes_the_whole_blocks_that_fit(
    layout: str, alignment_bytes: int, footprint_bytes: int
) -> None:
    sizes = {"device_blocks": 0, "device_bytes": 6 * footprint_bytes - 1, "host_blocks": 0, "host_bytes": 3 << 20}
    config = msgspec.convert(
        SMALL | sizes | {"device_layout": layout, "alignment_bytes": alignment_bytes}, KvbmConfig
    )
    assert (config.device_blocks, config.device_bytes) == (5, 0)
    assert config.device_pool_layout.total_bytes == 5 * footprint_bytes
    host = config.host_pool_layout
    assert host is not None
    assert host.blocks == (3 << 20) // host.block_stride_bytes
    assert msgspec.convert(msgspec.to_builtins(config), KvbmConfig) == config
    assert msgspec.structs.replace(config, device_blocks=2).device_blocks == 2


@pytest.mark.parametrize(
    ("heads", "size", "shards", "first_copies"),
    [
        (8, 1, [0], [0]),
        (8, 4, [0, 1, 2, 3], [0, 1, 2, 3]),
        (2, 4, [0, 0, 1, 1], [0, 2]),
        (1, 3, [0, 0, 0], [0]),
    ],
)
def test_workers_share_the_heads_and_hold_the_same_where_there_are_fewer(
    heads: int, size: int, shards: list[int], first_copies: list[int]
) -> None:
    workers = [
        KvbmConfig(**SMALL | {"heads": heads, "tensor_parallel_rank": rank, "tensor_parallel_size": size})
        for rank in range(size)
    ]
    assert [worker.shard.index for worker in workers] == shards
    assert [worker.tensor_parallel_rank for worker in workers if worker.holds_first_copy] == first_copies
    whole = KvbmConfig(**SMALL | {"heads": heads}).block_bytes
    for worker in workers:
        assert worker.shard.count == len(set(shards))
        assert worker.block_bytes * worker.shard.count == whole == worker.block_layout.block_bytes
        assert worker.shard_heads * worker.shard.count == heads
        check_span(worker.shard_span, worker.block_bytes, worker.block_layout)
        check_layout(worker.block_layout)


def test_what_lies_on_volumes_has_the_hosts_order() -> None:
    config = KvbmConfig(**SMALL | {"device_order": "HND"})
    assert [axis.name for axis in config.block_layout.axes] == ["layers", "outer", "heads", "tokens", "head_dim"]
    config = KvbmConfig(**SMALL | {"device_order": "HND", "host_order": "universal"})
    assert config.device_pool_layout.order == "HND"
    assert [(axis.name, axis.extent) for axis in config.block_layout.axes] == [
        ("heads", 2),
        ("layers", 4),
        ("outer", 2),
        ("tokens", 16),
        ("head_dim", 32),
    ]


@pytest.mark.parametrize(
    ("kind", "order", "shape", "strides"),
    [
        ("fully_contiguous", "NHD", (8, 4, 2, 16, 66), (10_240, 2_112, 1_056, 66, 1)),
        ("fully_contiguous", "HND", (8, 4, 2, 2, 528), (10_240, 2_112, 1_056, 528, 1)),
        ("fully_contiguous", "universal", (8, 2, 4, 2, 528), (10_240, 4_224, 1_056, 528, 1)),
        ("layer_separate_block_first", "NHD", (8, 2, 16, 66), (4_096, 1_056, 66, 1)),
        ("layer_separate_outer_first", "HND", (2, 8, 2, 528), (8 * 2_048, 2_048, 528, 1)),
    ],
)
def test_a_layouts_tensor_has_the_shape_of_its_order_and_blocks_at_multiples_of_the_alignment(
    kind: Any, order: Any, shape: tuple[int, ...], strides: tuple[int, ...]
) -> None:
    config = KvbmConfig(
        **SMALL | {"head_dim": 33, "alignment_bytes": 4_096, "device_layout": kind, "device_order": order}
    )
    layout = config.device_pool_layout
    assert layout.block_bytes == 4 * 2 * 16 * 66 * 2
    assert (layout.shape, layout.strides) == (shape, strides)
    assert layout.total_bytes % (8 * 4_096) == 0


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


@pytest.mark.parametrize("settings", [KvbmConfig, TierVolumes, PathLimits])
def test_every_setting_is_documented(settings: type[msgspec.Struct]) -> None:
    page = (Path(__file__).parents[2] / "docs/kvbm.md").read_text()
    section = page.split("## Configuration")[1].split("\n## ")[0]
    assert [name for name in settings.__struct_fields__ if f"`{name}`" not in section] == []
