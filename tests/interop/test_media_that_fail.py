"""Real media that answer EIO, turn read-only, lose their server or are full: named, others go on, and back again."""

from __future__ import annotations

import fcntl
import os
import shutil
import struct
import subprocess
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from storage_agent.bench_seaweed import BUCKET, SeaweedServer
from storage_agent.descriptor import OptionValue, VolumeDescriptor
from storage_agent.port import Result
from tests.contract.transports import wait_for
from tests.disks import disk_of, loop_device, loop_mount
from tests.watched_agent import BLOCK_BYTES, CAPACITY, Watched, block, descriptor, key

_EXT4_SHUTDOWN = 0x8004587D
"""Of `<linux/ext4.h>`: from then on every call is answered with EIO, until it is mounted again."""
_WITHOUT_LOG_FLUSH = 2


@pytest.fixture
def watched(tmp_path: Path) -> Iterator[Watched]:
    made = Watched(tmp_path)
    made.put(99, volume="other")
    yield made
    made.close()


def of_kind(kind: str, folder: Path) -> VolumeDescriptor:
    options = {"segment_bytes": 1 << 20} if kind == "directory" else {}
    return descriptor(folder / "v", kind=kind, options=options)


def fails(watched: Watched, number: int, *reasons: str) -> None:
    """A put is refused for one of the reasons, or because that was found already; others go on."""
    (outcome,) = watched.agent.put("v", [block(number)])
    assert outcome.result is Result.FAILED
    assert any(reason in outcome.reason for reason in reasons), outcome.reason
    assert watched.get(99) == [Result.HIT]
    assert watched.put(number, volume="other") == [Result.STORED]


def is_let_go(watched: Watched, *reasons: str) -> None:
    """After a while: it could not be opened again, and nobody believes that there is anything."""

    said: list[str] = []

    def is_absent() -> bool:
        stat = watched.stat()
        said.append(stat.degraded)
        return stat.mode == "absent" and "is being opened" not in stat.degraded

    wait_for(is_absent)
    assert any(reason in said[-1] for reason in reasons), said[-1]
    wait_for(lambda: watched.told() == set())


def serves_exactly(watched: Watched, *numbers: int) -> None:
    """After a while: these blocks, what was told is what is there, and no slot is held back."""
    wait_for(lambda: watched.stat().degraded == "" and watched.stat().blocks == len(numbers))
    assert watched.get(*numbers) == [Result.HIT] * len(numbers)
    assert watched.told() == set(numbers)
    stat = watched.stat()
    assert (stat.blocks, stat.slots_free) == (len(numbers), CAPACITY - len(numbers))


@pytest.mark.parametrize("kind", ["slab", "directory"])
def test_a_file_system_that_answers_eio_and_is_mounted_again(watched: Watched, tmp_path: Path, kind: str) -> None:
    with loop_mount(tmp_path) as (disk, mount, unmount):
        watched.agent.register_volume(of_kind(kind, disk))
        assert watched.put(1, 2) == [Result.STORED] * 2
        folder = os.open(disk, os.O_RDONLY)
        fcntl.ioctl(folder, _EXT4_SHUTDOWN, struct.pack("I", _WITHOUT_LOG_FLUSH))
        os.close(folder)
        fails(watched, 3, "Input/output error")
        is_let_go(watched, "Input/output error")
        assert watched.get(1) == [Result.MISS]
        unmount()
        mount()
        serves_exactly(watched, 1, 2)
        assert watched.put(4) == [Result.STORED]
        watched.agent.unregister_volume("v", drain_s=5.0)


@pytest.mark.parametrize("kind", ["slab", "directory"])
def test_a_file_system_that_turns_read_only_on_an_error(watched: Watched, tmp_path: Path, kind: str) -> None:
    """As ext4 does by itself: files that are open for writing stay open, and every write is refused."""
    with loop_mount(tmp_path) as (disk, mount, _):
        watched.agent.register_volume(of_kind(kind, disk))
        assert watched.put(1, 2) == [Result.STORED] * 2
        source = subprocess.run(["findmnt", "-no", "SOURCE", disk], capture_output=True, text=True, check=True)
        Path(f"/sys/fs/ext4/{Path(source.stdout.strip()).name}/trigger_fs_error").write_text("1")
        fails(watched, 3, "Read-only file system")
        is_let_go(watched, "Read-only file system")
        subprocess.run(["umount", disk], check=True)  # the agent keeps nothing open there
        mount()
        serves_exactly(watched, 1, 2)
        assert watched.put(4) == [Result.STORED]
        watched.agent.unregister_volume("v", drain_s=5.0)


def test_a_device_with_a_part_that_cannot_be_read_is_whole_without_it(watched: Watched, tmp_path: Path) -> None:
    """As with bad sectors, which a disk has back when they are written."""
    image = tmp_path / "device"
    image.write_bytes(bytes(4 << 20))
    with loop_device(image) as device, ExitStack() as leaving:
        watched.agent._allowed_roots = (tmp_path, device.parent)
        watched.agent.register_volume(descriptor(device))
        leaving.callback(watched.agent.unregister_volume, "v", drain_s=5.0)
        every = range(CAPACITY)
        assert watched.put(*every) == [Result.STORED] * CAPACITY
        os.truncate(image, 1 << 20)
        buffers = [memoryview(bytearray(BLOCK_BYTES)) for _ in every]
        found = watched.agent.get([key(number) for number in every], buffers)
        assert {outcome.result for outcome in found} == {Result.HIT, Result.FAILED}
        assert all("EIO" in outcome.reason for outcome in found if outcome.result is Result.FAILED)
        kept = {number for number, outcome in zip(every, found, strict=True) if outcome.result is Result.HIT}
        assert 20 < len(kept) < 40
        serves_exactly(watched, *sorted(kept))
        lost = sorted(set(every) - kept)
        assert watched.put(*lost) == [Result.STORED] * len(lost)
        serves_exactly(watched, *every)


def test_a_device_that_turns_read_only(watched: Watched, tmp_path: Path) -> None:
    image = tmp_path / "device"
    image.write_bytes(bytes(4 << 20))
    with loop_device(image) as device, ExitStack() as leaving:
        watched.agent._allowed_roots = (tmp_path, device.parent)
        watched.agent.register_volume(descriptor(device))
        leaving.callback(watched.agent.unregister_volume, "v", drain_s=5.0)
        assert watched.put(1) == [Result.STORED]
        subprocess.run(["blockdev", "--setro", device], check=True)
        fails(watched, 2, "Operation not permitted")
        is_let_go(watched, "Operation not permitted")
        subprocess.run(["blockdev", "--setrw", device], check=True)
        serves_exactly(watched, 1)
        assert watched.put(3) == [Result.STORED]


@pytest.fixture
def bindfs(tmp_path: Path) -> Iterator[tuple[Path, Callable[[], None], Callable[[], None]]]:
    """A FUSE mount, how to mount it and how to kill its server."""
    program, unmount = shutil.which("bindfs"), shutil.which("fusermount3")
    if program is None or unmount is None:
        pytest.skip("bindfs is not installed")
    beneath, mounted = tmp_path / "beneath", tmp_path / "fuse"
    beneath.mkdir()
    mounted.mkdir()
    servers: list[subprocess.Popen[bytes]] = []

    def start() -> None:
        server = subprocess.Popen([program, "-f", beneath, mounted], stderr=subprocess.PIPE)
        servers.append(server)
        wait_for(lambda: mounted.is_mount() or server.poll() is not None)
        if server.poll() is not None:
            assert server.stderr is not None
            pytest.skip(f"bindfs cannot mount here: {server.stderr.read().decode().strip()}")

    def kill() -> None:
        servers[-1].kill()
        servers[-1].wait()

    start()
    yield mounted, start, kill
    subprocess.run([unmount, "-u", "-z", mounted], check=False, capture_output=True)
    for server in servers:
        server.kill()
        server.wait()
        assert server.stderr is not None
        server.stderr.close()


def test_a_file_system_whose_server_is_killed_and_comes_back(
    watched: Watched, bindfs: tuple[Path, Callable[[], None], Callable[[], None]]
) -> None:
    mounted, start, kill = bindfs
    watched.agent.register_volume(of_kind("directory", mounted))
    assert watched.put(1, 2) == [Result.STORED] * 2
    kill()
    seen = ("Transport endpoint is not connected", "is not there; bring it back", "is gone, or another file")
    fails(watched, 3, *seen)  # which of them depends on what the kernel has cached
    is_let_go(watched, *seen)
    subprocess.run(["fusermount3", "-u", "-z", mounted], check=True)
    start()
    serves_exactly(watched, 1, 2)
    watched.agent.unregister_volume("v", drain_s=5.0)


# Full. A directory: `test_volume_mending`. A capacity that is used up, on every kind: `volume_contract`.


def fill(disk: Path, *, but_bytes: int = 0) -> Path:
    filler = disk / "filler"
    with filler.open("wb") as file:
        status = os.fstatvfs(file.fileno())
        os.posix_fallocate(file.fileno(), 0, status.f_bavail * status.f_frsize - but_bytes)
    return filler


def test_a_slab_on_a_full_disk_has_its_room_and_cannot_grow(watched: Watched, tmp_path: Path) -> None:
    with disk_of(tmp_path / "disk", 4) as disk:
        watched.agent.register_volume(descriptor(disk / "v"))
        fill(disk)
        every = range(CAPACITY)
        assert watched.put(*every) == [Result.STORED] * CAPACITY
        with pytest.raises(Exception, match=r"needs \d+ bytes more, 0 are free"):
            watched.agent.resize_volume("v", 2 * CAPACITY)
        serves_exactly(watched, *every)
        assert watched.put(CAPACITY) == [Result.FULL]
        watched.agent.unregister_volume("v", drain_s=5.0)


def test_an_object_server_on_a_full_disk(watched: Watched, tmp_path: Path) -> None:
    """It serves what it has, takes deletes, and takes blocks again when there is room."""
    with disk_of(tmp_path / "disk", 24) as disk, ExitStack() as leaving:
        server = SeaweedServer(disk)
        leaving.callback(server.kill)
        server.start()
        watched.agent._endpoints["store"] = server.endpoint
        options: dict[str, OptionValue] = {"endpoint": "store", "bucket": BUCKET}
        watched.agent.register_volume(descriptor("", kind="object", options=options))
        assert watched.put(1, 2) == [Result.STORED] * 2
        filler = fill(disk, but_bytes=256 * 1024)  # its own books go on
        stored = {1, 2}
        for number in range(10, 50):
            (outcome,) = watched.agent.put("v", [block(number)])
            if outcome.result is Result.FAILED:
                break
            stored.add(number)
        assert f"{server.endpoint.url}/{BUCKET} does not put v/blocks/" in outcome.reason
        fails(watched, 3, "does not put v/blocks/", "is being opened again")
        wait_for(lambda: watched.stat().degraded == "")
        assert watched.get(*stored) == [Result.HIT] * len(stored)
        assert watched.agent.delete("", "v", [key(2)]).outcomes[0].result is Result.DELETED
        filler.unlink()
        wait_for(lambda: watched.put(4) == [Result.STORED])
        serves_exactly(watched, *stored - {2}, 4)
        watched.agent.unregister_volume("v", drain_s=5.0)
