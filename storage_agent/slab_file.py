"""A slab's file without NIXL: made, opened, locked, resized. What `slab_volume` and `kvadvisor verify` both need."""

from __future__ import annotations

import fcntl
import os
import socket
import stat
from contextlib import suppress
from pathlib import Path

from storage_agent.block_header import PAGE_BYTES, ZERO_PAGE
from storage_agent.descriptor import VolumeDescriptor
from storage_agent.errors import BlockFormatError, VolumeError
from storage_agent.files import free_bytes, read_page, try_lock, write_page
from storage_agent.slab_format import (
    INTENTS_OFFSET,
    SESSION_OFFSET,
    SUPERBLOCK_OFFSETS,
    Intents,
    Session,
    Superblock,
    pack_intents,
    pack_session,
    unpack_intents,
    unpack_session,
    unpack_superblock,
)
from storage_agent.slab_making import device_bytes, make_slab_file, make_slab_on_device, write_superblock
from storage_agent.slot_classes import SlotClasses, classes_of


class SlabFile:
    """An open slab. `fd` is the one descriptor that everything uses; whoever opened it closes it last."""

    def __init__(self, path: Path, fd: int, superblock: Superblock, session: Session | None) -> None:
        self.path = path
        self.fd = fd
        self.superblock = superblock
        self.session = session
        """As found when opened; None where its page is damaged."""
        self.mode = "buffered"
        self.is_device = stat.S_ISBLK(os.fstat(fd).st_mode)

    @property
    def was_closed_in_order(self) -> bool:
        return self.session is not None and not self.session.is_open

    @property
    def table_path(self) -> Path | None:
        """Where the slot table is saved; None where it is not: a block device has no folder of its own."""
        return None if self.is_device else self.path.with_name(f"{self.path.name}.table")

    @property
    def is_in_place(self) -> bool:
        """Whether its path still means this file; unplugged or unmounted, it does not."""
        try:
            return os.path.samestat(os.fstat(self.fd), os.stat(self.path))
        except OSError:
            return False

    def probe_direct(self) -> None:
        """Switch to O_DIRECT where the file system takes it; sets `mode`."""
        flags = fcntl.fcntl(self.fd, fcntl.F_GETFL)
        try:
            fcntl.fcntl(self.fd, fcntl.F_SETFL, flags | os.O_DIRECT)
            read_page(self.fd, 0)
            self.mode = "O_DIRECT"
        except OSError:
            fcntl.fcntl(self.fd, fcntl.F_SETFL, flags)
            self.mode = "buffered"

    def use_page_cache(self) -> None:
        """No O_DIRECT from now on."""
        if self.mode == "O_DIRECT":
            fcntl.fcntl(self.fd, fcntl.F_SETFL, fcntl.fcntl(self.fd, fcntl.F_GETFL) & ~os.O_DIRECT)
            self.mode = "buffered"

    def write_session(self, session: Session) -> None:
        """Durable when it returns. Raises `OSError`."""
        write_page(self.fd, SESSION_OFFSET, pack_session(session))
        os.fdatasync(self.fd)

    def read_intents(self) -> Intents | None:
        """None where the page is damaged or of another size of slab. Raises `OSError`."""
        try:
            return unpack_intents(read_page(self.fd, INTENTS_OFFSET), self.superblock)
        except BlockFormatError:
            return None

    def write_intents(self, intents: Intents) -> None:
        """Not durable until the file is synced. Raises `OSError`."""
        write_page(self.fd, INTENTS_OFFSET, pack_intents(intents))

    def erase_headers(self, slots: list[int]) -> None:
        """Free `slots` on the volume. Durable when it returns. Raises `OSError`."""
        for slot in slots:
            write_page(self.fd, self.superblock.slot_offset(slot), ZERO_PAGE)
        if slots:
            os.fdatasync(self.fd)

    def resize(self, capacity_blocks: int) -> None:
        """Make room for, or give back, slots at the end; the others stay. Durable when it returns.

        Raises `VolumeError`, with the slab as large as it was.
        """
        before, wanted = self.superblock, self.superblock.resized(capacity_blocks)
        name = f"volume {before.volume_id!r}"
        if before.classes:
            raise VolumeError(f"{name} keeps its {before.capacity_blocks} slots: a slab of classes is not resized")
        try:
            if wanted.file_bytes > before.file_bytes:
                self._make_room(name, wanted)
            write_superblock(self.fd, wanted)
        except OSError as error:
            with suppress(OSError):  # one copy may say the new size already: neither may stay
                write_superblock(self.fd, wanted.resized(before.capacity_blocks))
            raise VolumeError(f"{name} cannot be resized to {capacity_blocks} blocks: {error.strerror}") from error
        self.superblock = wanted
        if not self.is_device:
            with suppress(OSError):  # what is past the end does no harm
                os.ftruncate(self.fd, wanted.file_bytes)

    def _make_room(self, name: str, wanted: Superblock) -> None:
        """Raises `VolumeError` where there is none, `OSError`."""
        before = self.superblock
        more_bytes = wanted.file_bytes - before.file_bytes
        end_bytes = device_bytes(self.fd) if self.is_device else os.fstat(self.fd).st_size
        room_bytes = end_bytes - before.file_bytes if self.is_device else free_bytes(self.fd)
        if room_bytes < more_bytes:
            raise VolumeError(f"{name} needs {more_bytes} bytes more, {room_bytes} are free")
        if not self.is_device:
            os.posix_fallocate(self.fd, before.file_bytes, more_bytes)
        # A resize cut short, or another life of the device, may have left bytes past the end.
        for slot in range(before.capacity_blocks, wanted.capacity_blocks):
            offset = wanted.slot_offset(slot)
            if offset + PAGE_BYTES <= end_bytes and read_page(self.fd, offset) != ZERO_PAGE:
                write_page(self.fd, offset, ZERO_PAGE)
        os.fsync(self.fd)

    def close(self) -> None:
        """Idempotent."""
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1


def open_slab(descriptor: VolumeDescriptor, path: Path, *, may_overwrite: bool = False) -> SlabFile:
    """Open the slab at `path`, made first where there is none, and lock it against every other opener.

    `may_overwrite`: a block device that holds something else may be made one. Its capacity is the one that is found.
    Raises `VolumeError`: no room, another opener, not a slab, or a slab of another volume or block size.
    """
    if not path.parent.is_dir():
        raise VolumeError(f"volume {descriptor.id!r}: there is no folder {path.parent}; make it first")
    try:
        fd = make_slab_file(descriptor, path) if not path.exists() else _open_locked(descriptor, path)
    except OSError as error:
        raise VolumeError(f"volume {descriptor.id!r}: {path} cannot be opened: {error.strerror}") from error
    try:
        if stat.S_ISBLK(os.fstat(fd).st_mode) and not _superblocks(fd)[0]:
            make_slab_on_device(descriptor, path, fd, may_overwrite=may_overwrite)
        slab = _read_slab(descriptor, path, fd)
        slab.probe_direct()
    except OSError as error:
        os.close(fd)
        raise VolumeError(f"volume {descriptor.id!r}: {path} cannot be used: {error.strerror}") from error
    except VolumeError:
        os.close(fd)
        raise
    return slab


def open_slab_read_only(descriptor: VolumeDescriptor, path: Path) -> SlabFile:
    """Open the slab at `path` to look at it: takes no lock and writes nothing.

    Puts of an agent that has it open meanwhile may look torn. Raises `VolumeError` where there is no such slab.
    """
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
    except OSError as error:
        raise VolumeError(f"volume {descriptor.id!r}: {path} cannot be opened: {error.strerror}") from error
    try:
        return _read_slab(descriptor, path, fd)
    except VolumeError:
        os.close(fd)
        raise


def open_slab_as_client(descriptor: VolumeDescriptor, path: Path) -> SlabFile:
    """Open the slab at `path` beside its owner, which says what may be written. Raises `VolumeError`."""
    try:
        fd = os.open(path, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
    except OSError as error:
        raise VolumeError(
            f"volume {descriptor.id!r}: its owner has it at {path}, which cannot be opened here: {error.strerror}; "
            "run on the owner's host with the same folder and user, or use a volume of kind 'remote'"
        ) from error
    try:
        slab = _read_slab(descriptor, path, fd)
    except VolumeError:
        os.close(fd)
        raise
    slab.probe_direct()
    return slab


def _open_locked(descriptor: VolumeDescriptor, path: Path) -> int:
    fd = os.open(path, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
    if not try_lock(fd):
        holder = _holder(fd)
        os.close(fd)
        raise VolumeError(
            f"volume {descriptor.id!r}: {path} is open in {holder}; close it there, use another path, "
            "or be a client of that agent (storage_agent.slab_client.SlabClient with its command_url)"
        )
    return fd


def _read_slab(descriptor: VolumeDescriptor, path: Path, fd: int) -> SlabFile:
    name = f"volume {descriptor.id!r}"
    try:
        status = os.fstat(fd)
        is_device = stat.S_ISBLK(status.st_mode)
        if not (is_device or stat.S_ISREG(status.st_mode)):
            raise VolumeError(
                f"{name}: {path} is neither a regular file nor a block device; give a path where a file can be made"
            )
        superblock = _read_superblock(fd, f"{name}: {path}")
        found = (superblock.volume_id, superblock.block_bytes_max)
        if found != (descriptor.id, descriptor.block_bytes_max):
            raise VolumeError(
                f"{name}: {path} was made as {superblock.volume_id!r} for blocks of {superblock.block_bytes_max} "
                f"bytes, asked for are {descriptor.id!r} and {descriptor.block_bytes_max}; restore the settings or "
                "give another path"
            )
        if superblock.classes != (asked := classes_of(descriptor)):
            raise VolumeError(
                f"{name}: {path} was made with classes {_in_words(superblock.classes)}, asked for are "
                f"{_in_words(asked)}; restore the settings, or give another path and move the blocks there"
            )
        size_bytes = device_bytes(fd) if is_device else status.st_size
        if size_bytes < superblock.file_bytes:
            raise VolumeError(f"{name}: {path} has {size_bytes} of {superblock.file_bytes} bytes; restore or remove it")
        return SlabFile(path, fd, superblock, _read_session(fd))
    except OSError as error:
        raise VolumeError(f"{name}: {path} cannot be read: {error.strerror}") from error


def _in_words(classes: SlotClasses) -> str:
    return ", ".join(f"{each.blocks} of {each.block_bytes} bytes" for each in classes) or "none: all slots are equal"


def _read_superblock(fd: int, what: str) -> Superblock:
    """The newer of the two copies that are whole."""
    found, reason = _superblocks(fd)
    if not found:
        raise VolumeError(f"{what} is not a slab ({reason}); it is left alone: move it away or give another path")
    return max(found, key=lambda superblock: superblock.edition)


def _superblocks(fd: int) -> tuple[list[Superblock], str]:
    """The copies that are whole, and why the first other is not."""
    found: list[Superblock] = []
    reason = ""
    for offset in SUPERBLOCK_OFFSETS:
        try:
            found.append(unpack_superblock(read_page(fd, offset)))
        except BlockFormatError as error:
            reason = reason or str(error)
    return found, reason


def _read_session(fd: int) -> Session | None:
    try:
        return unpack_session(read_page(fd, SESSION_OFFSET))
    except BlockFormatError:
        return None


def session_of_this_process(*, is_open: bool, generation_next: int) -> Session:
    return Session(is_open, os.getpid(), generation_next, socket.gethostname())


def _holder(fd: int) -> str:
    session = _read_session(fd)
    if session is None or not session.is_open:
        return "another process"
    return f"process {session.pid} on {session.host}"
