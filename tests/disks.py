"""Disks that end: a small file system of its own, and a limit on the size of a file."""

from __future__ import annotations

import resource
import subprocess
from collections.abc import Iterator
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
        subprocess.run(["umount", folder], check=True)


@contextmanager
def file_size_limit(limit_bytes: int) -> Iterator[None]:
    """Writes past `limit_bytes` fail with EFBIG meanwhile, as on a file system that has such a limit."""
    former = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit_bytes, former[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, former)
