"""The example of remote memory, run as its reader would; and the manager's own pools, which it registers."""

from __future__ import annotations

import subprocess
import sys
from contextlib import closing
from pathlib import Path

import pytest

from event_plane.memory_transport import MemoryPublisher
from kvbm_core.config import KvbmConfig
from kvbm_core.errors import ConfigError
from kvbm_core.manager import KvBlockManager

EXAMPLE = Path(__file__).parents[2] / "examples" / "remote_memory.py"


def test_the_second_worker_reads_its_heads_out_of_the_firsts_memory() -> None:
    ran = subprocess.run([sys.executable, EXAMPLE], capture_output=True, text=True, timeout=120, check=False)
    assert ran.returncode == 0, ran.stderr
    assert ran.stdout.startswith("block ")
    assert ran.stdout.endswith(": heads [2.0, 3.0]\n")


def test_the_managers_own_tiers_are_had_by_name() -> None:
    config = KvbmConfig(layers=1, heads=1, head_dim=8, device_blocks=2, headroom_bytes=0, hash_secret="x" * 16)
    with closing(KvBlockManager(config, MemoryPublisher("memory://own-tiers", producer=1))) as manager:
        device = manager.own_tier("device")
        assert device.storage is manager.device
        assert device.pool.blocks == 2
        with pytest.raises(ConfigError, match="the core has no tier 'host' of its own: name one of device"):
            manager.own_tier("host")
