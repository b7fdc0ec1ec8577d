"""A slab's file without NIXL: made, opened, locked, resized. What `slab_volume` and `kvadvisor verify` both need."""

from __future__ import annotations

import errno
import fcntl
import os
import socket
import stat
from pathlib import Path

import numpy as np

from storage_agent.block_header import PAGE_BYTES, ZERO_PAGE
from storage_agent.descriptor import VolumeDescriptor
from storage_agent.errors import BlockFormatError, VolumeError
from storage_agent.files import free_bytes, read_page, sync_folder, try_lock, write_page
from storage_agent.slab_format import (
    INTENTS_OFFSET,
    NO_TABLE,
    SESSION_OFFSET,
    SUPERBLOCK_OFFSETS,
    Intents,
    Session,
    Superblock,
    pack_intents,
    pack_session,
    pack_superblock,
    unpack_intents,
    unpack_session,
    unpack_superblock,
)


class SlabFile:
    """An open slab. `fd` is the one descriptor that everything uses; whoever opened it closes it last."""

    def __init__(self, path: Path, fd: int, superblock: Superblock, session: Session | None) -> None:
        self.path = path
        self.fd = fd
        self.superblock = superblock
        self.session = session
        """As found when opened; None where its page is damaged."""
        self.mode = "buffered"

    @property
    def was_closed_in_order(self) -> bool:
        return self.session is not None and not self.session.is_open

    @property
    def table_path(self) -> Path:
        """Where the slot table is saved."""
        return self.path.with_name(f"{self.path.name}.table")

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
        try:
            if wanted.file_bytes > before.file_bytes:
                more_bytes = wanted.file_bytes - before.file_bytes
                if free_bytes(self.fd) < more_bytes:
                    raise VolumeError(f"{name} needs {more_bytes} bytes more, {free_bytes(self.fd)} are free")
                os.posix_fallocate(self.fd, before.file_bytes, more_bytes)
                self._zero_headers(before.capacity_blocks, wanted)
                os.fsync(self.fd)
            write_superblock(self.fd, wanted)
            self.superblock = wanted
            os.ftruncate(self.fd, wanted.file_bytes)
        except OSError as error:
            raise VolumeError(f"{name} cannot be resized to {capacity_blocks} blocks: {error.strerror}") from error

    def _zero_headers(self, first: int, wanted: Superblock) -> None:
        """A resize cut short may have left bytes of another time past the end."""
        end = os.fstat(self.fd).st_size
        for slot in range(first, wanted.capacity_blocks):
            offset = wanted.slot_offset(slot)
            if offset + PAGE_BYTES <= end and read_page(self.fd, offset) != ZERO_PAGE:
                write_page(self.fd, offset, ZERO_PAGE)

    def close(self) -> None:
        """Idempotent."""
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1


def open_slab(descriptor: VolumeDescriptor, path: Path) -> SlabFile:
    """Open the slab at `path`, made first where there is none, and lock it against every other opener.

    Its capacity is the one that is found. Raises `VolumeError`: no room, another opener, not a slab, or a slab of
    another volume or block size.
    """
    if not path.parent.is_dir():
        raise VolumeError(f"volume {descriptor.id!r}: there is no folder {path.parent}; make it first")
    try:
        fd = _create(descriptor, path) if not path.exists() else _open_locked(descriptor, path)
    except OSError as error:
        raise VolumeError(f"volume {descriptor.id!r}: {path} cannot be opened: {error.strerror}") from error
    try:
        slab = _read_slab(descriptor, path, fd)
        slab.probe_direct()
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


def _create(descriptor: VolumeDescriptor, path: Path) -> int:
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
        _fill_draft(descriptor, path, fd)
        os.rename(draft, path)
        sync_folder(path.parent)
    except (OSError, VolumeError):
        if is_ours and _is_same_file(fd, draft):
            os.unlink(draft)
        os.close(fd)
        raise
    return fd


def _fill_draft(descriptor: VolumeDescriptor, path: Path, fd: int) -> None:
    mark = int.from_bytes(os.urandom(8), "little")
    superblock = Superblock(descriptor.id, descriptor.capacity_blocks, descriptor.block_bytes_max, mark)
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
    write_superblock(fd, superblock)
    write_page(fd, SESSION_OFFSET, pack_session(Session(is_open=False, pid=0, generation_next=1)))
    untouched = np.zeros(superblock.regions, dtype=np.bool_)
    write_page(fd, INTENTS_OFFSET, pack_intents(Intents(NO_TABLE, NO_TABLE, superblock.region_slots, untouched)))
    os.fsync(fd)


def write_superblock(fd: int, superblock: Superblock) -> None:
    """Both copies, each durable before the next. Raises `OSError`."""
    for offset in SUPERBLOCK_OFFSETS:
        write_page(fd, offset, pack_superblock(superblock))
        os.fdatasync(fd)


def _read_slab(descriptor: VolumeDescriptor, path: Path, fd: int) -> SlabFile:
    name = f"volume {descriptor.id!r}"
    try:
        status = os.fstat(fd)
        if not stat.S_ISREG(status.st_mode):
            raise VolumeError(f"{name}: {path} is not a regular file; give a path where a file can be made")
        superblock = _read_superblock(fd, f"{name}: {path}")
        found = (superblock.volume_id, superblock.block_bytes_max)
        if found != (descriptor.id, descriptor.block_bytes_max):
            raise VolumeError(
                f"{name}: {path} was made as {superblock.volume_id!r} for blocks of {superblock.block_bytes_max} "
                f"bytes, asked for are {descriptor.id!r} and {descriptor.block_bytes_max}; restore the settings or "
                "give another path"
            )
        if status.st_size < superblock.file_bytes:
            raise VolumeError(
                f"{name}: {path} has {status.st_size} of {superblock.file_bytes} bytes; restore or remove it"
            )
        return SlabFile(path, fd, superblock, _read_session(fd))
    except OSError as error:
        raise VolumeError(f"{name}: {path} cannot be read: {error.strerror}") from error


def _read_superblock(fd: int, what: str) -> Superblock:
    """The newer of the two copies that are whole."""
    found: list[Superblock] = []
    reason = ""
    for offset in SUPERBLOCK_OFFSETS:
        try:
            found.append(unpack_superblock(read_page(fd, offset)))
        except BlockFormatError as error:
            reason = reason or str(error)
    if not found:
        raise VolumeError(f"{what} is not a slab ({reason}); it is left alone: move it away or give another path")
    return max(found, key=lambda superblock: superblock.edition)


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
