"""The budget check at start: what it refuses, and that doing what it says is enough."""

from __future__ import annotations

import resource
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvbm_core.budget import MachineFacts, Refusal, check_budget, require_budget
from kvbm_core.config import KvbmConfig, PathLimits, TierVolumes
from kvbm_core.errors import BudgetError
from kvbm_core.machine import read_machine
from kvbm_core.paths import TransferPath
from storage_agent.descriptor import VolumeDescriptor
from tests.examples import examples

GIB = 1 << 30
BASE: dict[str, Any] = {
    "layers": 32,
    "heads": 8,
    "head_dim": 128,
    "page_tokens": 16,
    "device_blocks": 100,
    "host_blocks": 1_000,
    "headroom_bytes": GIB,
    "hash_secret": "a secret of the tests",
}
BLOCK = 32 * 2 * 16 * 8 * 128 * 2
ROOMY = MachineFacts(host_available_bytes=1 << 44, locked_bytes_max=None, device_free_bytes=1 << 40)


def volume(name: str, capacity_blocks: int, block_bytes_max: int = BLOCK) -> VolumeDescriptor:
    return VolumeDescriptor(id=name, path=name, capacity_blocks=capacity_blocks, block_bytes_max=block_bytes_max)


def facts(**changes: Any) -> MachineFacts:
    return MachineFacts(
        **{"host_available_bytes": 1 << 44, "locked_bytes_max": None, "device_free_bytes": 1 << 40} | changes
    )


def told(config: KvbmConfig, machine: MachineFacts, *volumes: VolumeDescriptor) -> list[tuple[str, str, float]]:
    found = check_budget(config, machine, {each.id: each for each in volumes})
    return [(each.setting, each.bound, each.to) for each in found]


def test_a_host_pool_that_leaves_the_engine_too_little_is_told_its_size() -> None:
    config = KvbmConfig(**BASE)
    assert config.block_bytes == BLOCK
    machine = facts(host_available_bytes=900 * BLOCK + GIB)
    assert told(config, machine) == [("host_blocks", "at most", 900)]
    with pytest.raises(BudgetError, match=r"keeps 1073741824 .*: change host_blocks, now 1000, to at most 900"):
        require_budget(config, machine)
    require_budget(msgspec.structs.replace(config, host_blocks=900), machine)


def test_memory_in_the_place_of_a_gpu_counts_as_host_memory() -> None:
    config = KvbmConfig(**BASE | {"host_blocks": 0})
    assert told(config, facts(host_available_bytes=40 * BLOCK + GIB, device_free_bytes=None)) == [
        ("device_blocks", "at most", 40)
    ]
    assert told(config, facts(device_free_bytes=60 * BLOCK)) == [("device_blocks", "at most", 60)]


def test_a_headroom_larger_than_the_machine_is_the_number_to_change() -> None:
    config = KvbmConfig(**BASE | {"headroom_bytes": 20 * GIB})
    assert told(config, facts(host_available_bytes=10 * GIB)) == [("headroom_bytes", "at most", 10 * GIB - BLOCK)]
    assert told(config, facts(host_available_bytes=BLOCK // 2)) == [("page_tokens", "at most", 8)]


def test_the_disk_path_needs_staging_and_batches_for_what_is_under_way() -> None:
    disk = TierVolumes(volumes=("fast",), retention_s=60.0, rate_bytes_s=10e9, latency_ms=20.0)
    blocks = -(-200_000_000 // BLOCK)
    assert blocks == 96
    small = KvbmConfig(**BASE | {"host_blocks": 0, "disk": disk})
    assert told(small, ROOMY) == [
        ("staging_blocks", "at least", 96),
        ("transfers.device_to_disk.concurrency", "at least", 3),
        ("transfers.disk_to_device.concurrency", "at least", 3),
    ]
    wide = {
        TransferPath.DEVICE_TO_DISK: PathLimits(concurrency=3),
        TransferPath.DISK_TO_DEVICE: PathLimits(concurrency=4),
    }
    assert told(msgspec.structs.replace(small, staging_blocks=96, transfers=wide), ROOMY) == []
    assert told(KvbmConfig(**BASE | {"host_blocks": 96, "disk": disk, "transfer_blocks": 48}), ROOMY) == []
    remote = KvbmConfig(**BASE | {"host_blocks": 95, "remote": disk, "transfer_blocks": 48})
    assert told(remote, ROOMY) == [("host_blocks", "at least", 96)]


def test_the_staging_buffer_has_a_block_for_each_batch_that_may_be_under_way() -> None:
    slow, far = (TierVolumes(volumes=(name,), retention_s=60.0) for name in ("slow", "far"))
    config = KvbmConfig(**BASE | {"host_blocks": 0, "staging_blocks": 7, "disk": slow, "remote": far})
    assert told(config, ROOMY) == [("staging_blocks", "at least", 8)]
    alone = {path: PathLimits(concurrency=1) for path in (TransferPath.DEVICE_TO_DISK, TransferPath.DISK_TO_DEVICE)}
    assert told(msgspec.structs.replace(config, transfers=alone), ROOMY) == []
    assert told(msgspec.structs.replace(config, host_blocks=7), ROOMY) == []


def test_volumes_must_take_a_block_and_hold_what_comes_within_the_retention() -> None:
    disk = TierVolumes(volumes=("slow",), tenant_volumes={"acme": ("fast",)}, retention_s=3_600.0)
    config = KvbmConfig(**BASE | {"disk": disk, "prefill_tokens_per_s": 16_000.0})
    assert told(config, ROOMY, volume("slow", 3_000_000), volume("fast", 600_000)) == []
    assert told(config, ROOMY, volume("slow", 1_000_000), volume("fast", 800_000, BLOCK - 1)) == [
        ("block_bytes_max of volume 'fast'", "at least", BLOCK),
        ("disk.retention_s", "at most", 1_800),
    ]
    assert told(config, ROOMY, volume("slow", 900), volume("fast", 99)) == [
        ("capacity_blocks of volume 'fast'", "at least", 99 + 3_600_000 - 999)
    ]
    # A volume that is not there yet may have any room.
    assert told(config, ROOMY, volume("slow", 1)) == []


def test_locked_memory_is_compared_where_something_locks() -> None:
    config = KvbmConfig(**BASE)
    assert told(config, facts(locked_bytes_max=8 << 20)) == [
        ("the limit of locked memory in KiB (`ulimit -l`)", "at least", 1_000 * BLOCK // 1_024)
    ]


sizes = st.integers(1, 400)


@settings(max_examples=examples(150), deadline=None)
@given(
    st.fixed_dictionaries(
        {
            "device_blocks": sizes,
            "host_blocks": st.integers(0, 400),
            "staging_blocks": sizes,
            "headroom_bytes": st.integers(0, 1 << 18),
            "transfer_blocks": st.integers(1, 64),
            "prefill_tokens_per_s": st.sampled_from([0.0, 100.0, 1e6]),
        }
    ),
    st.sampled_from([0.0, 1e5, 1e7]),
    st.builds(
        MachineFacts,
        host_available_bytes=st.integers(4_096, 1 << 19),
        locked_bytes_max=st.none() | st.integers(1_024, 1 << 18),
        device_free_bytes=st.none() | st.integers(1_024, 1 << 19),
    ),
)
def test_doing_what_the_refusals_say_ends_in_none_or_in_a_wish_for_more_than_there_is(
    sizes: dict[str, Any], rate_bytes_s: float, machine: MachineFacts
) -> None:
    disk = TierVolumes(volumes=("slow",), retention_s=1_000.0, rate_bytes_s=rate_bytes_s)
    config = KvbmConfig(**BASE | {"layers": 2, "heads": 1, "head_dim": 8, "page_tokens": 8} | sizes, disk=disk)
    slow = {"slow": volume("slow", 1_000, 512)}
    floors: dict[str, float] = {}
    for _ in range(8):
        found = check_budget(config, machine, slow)
        if not found:
            return
        for refusal in found:
            assert (refusal.to < refusal.now) == (refusal.bound == "at most")
            if refusal.bound == "at least":
                floors[refusal.setting] = refusal.to
            elif refusal.setting in floors and refusal.to < floors[refusal.setting]:
                return  # the rate asks for more memory than there is: both sentences say so
            if refusal.to < 1 and refusal.setting.endswith("_blocks"):
                return  # the device has no room for a single block
            config, machine, slow = follow(refusal, config, machine, slow)
    pytest.fail(f"still refused: {found}")


def follow(
    refusal: Refusal, config: KvbmConfig, machine: MachineFacts, volumes: dict[str, VolumeDescriptor]
) -> tuple[KvbmConfig, MachineFacts, dict[str, VolumeDescriptor]]:
    setting, to = refusal.setting, refusal.to
    replace = msgspec.structs.replace
    match setting.split("."):
        case ["transfers", path, _]:
            limits = config.transfers | {TransferPath(path): PathLimits(concurrency=int(to))}
            return replace(config, transfers=limits), machine, volumes
        case ["disk", "retention_s"]:
            assert config.disk is not None
            return replace(config, disk=replace(config.disk, retention_s=to)), machine, volumes
        case [name] if name in config.__struct_fields__:
            return replace(config, **{name: int(to)}), machine, volumes
    if setting.endswith("of volume 'slow'"):
        return config, machine, {"slow": replace(volumes["slow"], **{setting.split()[0]: int(to)})}
    raised = MachineFacts(
        host_available_bytes=machine.host_available_bytes,
        locked_bytes_max=int(to) * 1_024,
        device_free_bytes=machine.device_free_bytes,
    )
    return config, raised, volumes


def test_this_machine_has_memory_and_tells_how_much() -> None:
    found = read_machine()
    meminfo = Path("/proc/meminfo").read_text()
    assert 0 < found.host_available_bytes <= int(meminfo.split("MemTotal:")[1].split()[0]) * 1_024


def machine_of(folder: Path, files: dict[str, str]) -> MachineFacts:
    for name, text in files.items():
        file = folder / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)
    return read_machine(folder)


@pytest.mark.parametrize(
    ("groups", "room"),
    [
        ({}, 8 << 20),
        ({"proc/self/cgroup": "0::/a/b\n", "sys/fs/cgroup/a/b/memory.max": "max\n"}, 8 << 20),
        (
            {
                "proc/self/cgroup": "0::/a/b\n",
                "sys/fs/cgroup/a/b/memory.max": "max\n",
                "sys/fs/cgroup/a/b/memory.current": "10\n",
                "sys/fs/cgroup/a/memory.max": "6000000\n",
                "sys/fs/cgroup/a/memory.current": "2000000\n",
                "sys/fs/cgroup/a/memory.stat": "anon 1\ninactive_file 500000\n",
            },
            4_500_000,
        ),
        (
            {
                "proc/self/cgroup": "4:memory:/gone\n3:cpu:/\n",
                "sys/fs/cgroup/memory/memory.limit_in_bytes": "3000000\n",
                "sys/fs/cgroup/memory/memory.usage_in_bytes": "1000000\n",
                "sys/fs/cgroup/memory/memory.stat": "inactive_file 1\ntotal_inactive_file 100\n",
            },
            2_000_100,
        ),
    ],
)
def test_the_tightest_control_group_bounds_what_is_available(
    tmp_path: Path, groups: dict[str, str], room: int
) -> None:
    found = machine_of(tmp_path, {"proc/meminfo": "MemTotal: 9000 kB\nMemAvailable: 8192 kB\n"} | groups)
    assert found.host_available_bytes == room
    assert found.locked_bytes_max is None


@pytest.mark.parametrize("capabilities", ["0000000000000000", "0000000000004000"])
def test_locked_memory_is_bounded_where_a_network_adapter_locks_it_and_the_process_may_not_pass_the_limit(
    tmp_path: Path, capabilities: str
) -> None:
    found = machine_of(
        tmp_path,
        {
            "proc/meminfo": "MemAvailable: 8192 kB\n",
            "proc/self/status": f"Name:\tpython\nCapEff:\t{capabilities}\n",
            "sys/class/infiniband/mlx5_0/node_type": "1\n",
        },
    )
    soft, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    limit = None if soft == resource.RLIM_INFINITY or int(capabilities, 16) else soft
    assert found.locked_bytes_max == limit
