"""Disks that end or go away: small file systems of their own, and a limit on the size of a file."""

from __future__ import annotations

import os
import resource
import shutil
import subprocess
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest


@contextmanager
def disk_of(folder: Path, size_mib: int) -> Iterator[Path]:
    """`folder`, which is made, as a file system of `size_mib` MiB. The test is skipped where none can be mounted."""
    folder.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", f"size={size_mib}m", "tmpfs", str(folder)]
    try:
        subprocess.run(mount, check=True, capture_output=True, text=True)
    except FileNotFoundError:
        pytest.skip("a small tmpfs is mounted here, and there is no program mount")
    except subprocess.CalledProcessError as refused:
        pytest.skip(f"a small tmpfs is mounted here, which needs root: {refused.stderr.strip()}")
    try:
        yield folder
    finally:
        subprocess.run(["umount", "--lazy", folder], check=True)  # a test that fails may have files open


@contextmanager
def file_size_limit(limit_bytes: int) -> Iterator[None]:
    """Writes past `limit_bytes` fail with EFBIG meanwhile, as on a file system that has such a limit."""
    former = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit_bytes, former[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, former)


@contextmanager
def loop_mount(folder: Path) -> Iterator[tuple[Path, Callable[[], object], Callable[[], object]]]:
    """An ext4 of 32 MiB, mounted, and how to mount and unmount it while it is in use. An error makes it read-only."""
    image, disk = folder / "image", folder / "mounted"
    disk.mkdir()
    image.touch()
    os.truncate(image, 32 << 20)
    if os.geteuid() != 0 or shutil.which("mkfs.ext4") is None:
        pytest.skip("a file system on a loop device needs root and mkfs.ext4")
    subprocess.run(["mkfs.ext4", "-q", "-F", image], check=True)
    mount = ["mount", "-o", "loop,errors=remount-ro", image, disk]
    made = subprocess.run(mount, check=False, capture_output=True)
    if made.returncode != 0:
        pytest.skip(f"no loop mount here: {made.stderr.decode().strip()}")
    unmount = ["umount", "--lazy", disk]
    try:
        yield disk, lambda: subprocess.run(mount, check=True), lambda: subprocess.run(unmount, check=True)
    finally:
        subprocess.run(unmount, check=False, capture_output=True)


@contextmanager
def loop_device(image: Path) -> Iterator[Path]:
    """A block device of the file `image`; where the file is cut, reading answers EIO."""
    made = subprocess.run(
        ["losetup", "--find", "--show", "--direct-io=on", image], capture_output=True, text=True, check=False
    )
    if made.returncode:
        pytest.skip(f"no loop device can be had here: {made.stderr.strip()}")
    device = Path(made.stdout.strip())
    try:
        yield device
    finally:
        # A device that a test left read-only would be so for whoever gets it next.
        subprocess.run(["blockdev", "--setrw", device], check=True)
        subprocess.run(["losetup", "--detach", device], check=True)
