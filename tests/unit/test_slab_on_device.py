"""A slab on a real block device: a loop device, where root allows one."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from storage_agent.block_header import PAGE_BYTES, BlockHeader
from storage_agent.errors import VolumeError
from storage_agent.kinds import inspect_volume
from storage_agent.port import Result
from storage_agent.slab_format import Superblock
from storage_agent.volume import Volume
from storage_agent.volume_contract import (
    BLOCK_BYTES,
    CAPACITY,
    VolumeCase,
    VolumeContract,
    block,
    held,
    payload,
    read,
    results,
)

IMAGE_BYTES = 4 << 20


@pytest.fixture
def device(tmp_path: Path) -> Iterator[Path]:
    image = tmp_path / "image"
    image.write_bytes(bytes(IMAGE_BYTES))
    made = subprocess.run(["losetup", "--find", "--show", image], capture_output=True, text=True, check=False)
    if made.returncode:
        pytest.skip(f"no loop device can be had here: {made.stderr.strip()}")
    yield Path(made.stdout.strip())
    subprocess.run(["losetup", "--detach", made.stdout.strip()], check=True)


class TestSlabOnDevice(VolumeContract):
    @pytest.fixture
    def case(self, device: Path) -> VolumeCase:
        slab = Superblock("contract", CAPACITY, BLOCK_BYTES)

        def damage(volume: Volume, header: BlockHeader) -> None:
            with device.open("r+b") as file:
                file.seek(slab.slot_offset(header.slot) + PAGE_BYTES + 77)
                file.write(b"damage")
                file.flush()
                os.fsync(file.fileno())

        return VolumeCase(kind="slab", path=device, damage=damage)


def test_a_device_with_something_on_it_is_left_alone_until_that_is_given_up(device: Path) -> None:
    device.write_bytes(b"somebody's file system" * 1000)
    with (
        pytest.raises(VolumeError, match=r"holds something that is not a slab; .* format_device = true"),
        VolumeCase(kind="slab", path=device).opened(),
    ):
        pass
    assert device.read_bytes().startswith(b"somebody's file system")
    case = VolumeCase(kind="slab", path=device, options={"format_device": True})
    with case.opened() as volume:
        assert volume.stat().mode == "O_DIRECT"
        volume.put([block(1)])
        assert read(volume, 1)[1] == {1: payload(1)}
    with case.opened() as volume:
        assert held(volume) == {1}, "a slab that is there is opened, not made anew"


def test_what_another_slab_left_on_the_device_is_not_found_again(device: Path) -> None:
    with VolumeCase(kind="slab", path=device).opened() as volume:
        volume.put([block(n) for n in range(CAPACITY)])
    with device.open("r+b") as file:
        file.write(bytes(4 * 4096))
    with VolumeCase(kind="slab", path=device).opened() as volume:
        assert (held(volume), volume.stat().slots_free) == (set(), CAPACITY)
    inspection = inspect_volume(VolumeCase(kind="slab", path=device).descriptor(), [device.parent])
    assert {report.state for report in inspection.reports()} == {"free"}
    inspection.close()


def test_a_device_is_as_large_as_it_is(device: Path) -> None:
    case = VolumeCase(kind="slab", path=device)
    said = f"has {IMAGE_BYTES}: lower capacity_blocks or give a larger device"
    with pytest.raises(VolumeError, match=said), case.opened(capacity_blocks=10_000):
        pass
    with case.opened() as volume:
        with pytest.raises(VolumeError, match=r"needs \d+ bytes more, \d+ are free"):
            volume.resize(10_000)
        assert results(volume.put([block(n) for n in range(CAPACITY)])) == [Result.STORED] * CAPACITY
