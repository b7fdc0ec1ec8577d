"""Slabs made: as a file that is never seen half-made, or on a block device that its owner gave up for it."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import numpy as np

from storage_agent.block_header import PAGE_BYTES, ZERO_PAGE
from storage_agent.descriptor import VolumeDescriptor
from storage_agent.errors import VolumeError
from storage_agent.files import free_bytes, read_page, sync_folder, try_lock, write_page
from storage_agent.slab_format import (
    INTENTS_OFFSET,
    NO_TABLE,
    SESSION_OFFSET,
    SLOTS_OFFSET,
    SUPERBLOCK_OFFSETS,
    Intents,
    Regions,
    Session,
    Superblock,
    pack_intents,
    pack_session,
    pack_superblock,
)
from storage_agent.slot_classes import classes_of


def make_slab_file(descriptor: VolumeDescriptor, path: Path) -> int:
    """Make the file under another name, whole and durable, and give it its own last: no half-made slab is ever seen."""
    draft = path.with_name(f".{path.name}.creating")
    fd = os.open(draft, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    is_ours = False
    try:
        # Between the open and the lock another creator may have finished with this very file.
        is_ours = try_lock(fd) and _is_same_file(fd, draft)
        if not is_ours or path.exists():
            raise VolumeError(
                f"volume {descriptor.id!r}: {path} is being made by another process; try again when it is done"
            )
        _fill(descriptor, path, fd)
        os.rename(draft, path)
        sync_folder(path.parent)
    except BaseException:
        if is_ours and _is_same_file(fd, draft):
            os.unlink(draft)
        os.close(fd)
        raise
    return fd


def _fill(descriptor: VolumeDescriptor, path: Path, fd: int) -> None:
    superblock = _draw_superblock(descriptor)
    os.ftruncate(fd, 0)
    free = free_bytes(fd)
    if free < superblock.file_bytes:
        raise _no_room(descriptor, path, superblock.file_bytes, free)
    try:
        os.posix_fallocate(fd, 0, superblock.file_bytes)
    except OSError as error:
        if error.errno == errno.ENOSPC:
            raise _no_room(descriptor, path, superblock.file_bytes, free) from error
        raise VolumeError(
            f"volume {descriptor.id!r}: {superblock.file_bytes} bytes cannot be set aside for {path}: {error.strerror}"
        ) from error
    _write_first_pages(fd, superblock, np.zeros(superblock.regions, dtype=np.bool_))


def write_superblock(fd: int, superblock: Superblock) -> None:
    """Both copies, each durable before the next. Raises `OSError`."""
    for offset in SUPERBLOCK_OFFSETS:
        write_page(fd, offset, pack_superblock(superblock))
        os.fdatasync(fd)


def make_slab_on_device(descriptor: VolumeDescriptor, path: Path, fd: int, *, may_overwrite: bool) -> None:
    """Write the first pages of a slab to a locked device. Every slot is looked at when it is opened.

    Raises `VolumeError` where it is too small, or holds something and `may_overwrite` is not said; `OSError`.
    """
    first_pages = [read_page(fd, offset) for offset in range(0, SLOTS_OFFSET, PAGE_BYTES)]
    if not may_overwrite and any(page != ZERO_PAGE for page in first_pages):
        raise VolumeError(
            f"volume {descriptor.id!r}: {path} holds something that is not a slab; it is left alone: give another "
            "device, or say format_device = true in the volume's options to lose what is on it"
        )
    superblock = _draw_superblock(descriptor)
    if (size_bytes := device_bytes(fd)) < superblock.file_bytes:
        raise VolumeError(
            f"volume {descriptor.id!r} needs {superblock.file_bytes} bytes, {path} has {size_bytes}: "
            "lower capacity_blocks or give a larger device"
        )
    _write_first_pages(fd, superblock, np.ones(superblock.regions, dtype=np.bool_))


def device_bytes(fd: int) -> int:
    """Size of a block device."""
    return os.lseek(fd, 0, os.SEEK_END)


def _draw_superblock(descriptor: VolumeDescriptor) -> Superblock:
    mark = int.from_bytes(os.urandom(8), "little")
    return Superblock(
        descriptor.id,
        descriptor.capacity_blocks,
        descriptor.block_bytes_max,
        mark,
        classes=classes_of(descriptor),
    )


def _write_first_pages(fd: int, superblock: Superblock, changed: Regions) -> None:
    write_page(fd, SESSION_OFFSET, pack_session(Session(is_open=False, pid=0, generation_next=1)))
    write_page(fd, INTENTS_OFFSET, pack_intents(Intents(NO_TABLE, NO_TABLE, superblock.region_slots, changed)))
    os.fsync(fd)
    write_superblock(fd, superblock)


def _is_same_file(fd: int, path: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(fd), os.stat(path, follow_symlinks=False))
    except FileNotFoundError:
        return False


def _no_room(descriptor: VolumeDescriptor, path: Path, needed_bytes: int, free: int) -> VolumeError:
    return VolumeError(
        f"volume {descriptor.id!r} needs {needed_bytes} bytes, {path.parent} has {free} free: "
        "lower capacity_blocks or free some space"
    )
