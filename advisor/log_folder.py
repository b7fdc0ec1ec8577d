"""Folders that a log lies in: made, and their names made durable."""

from __future__ import annotations

import os
from pathlib import Path

from advisor.errors import LogError
from advisor.log_faults import os_fault


def make_folder(folder: Path) -> None:
    """One that is there keeps its mode. Raises `LogError`."""
    try:
        # Whoever reads a log knows the hashes of all tenants.
        folder.mkdir(0o700, parents=True, exist_ok=True)
    except OSError as error:
        raise LogError(f"{folder} cannot be made ({error.strerror}): choose another directory") from error


def require_folder(folder: Path) -> None:
    """Raises `LogError` where there is no log to read."""
    if not folder.is_dir():
        raise LogError(f"there is no log at {folder}: check the directory")


def sync_folder(folder: Path) -> None:
    """Makes the names in it as durable as their files' content. Raises `LogError`."""
    try:
        descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
    except OSError as error:
        raise os_fault(folder, "sync", error) from error
