"""A slab's file without NIXL: made, opened, locked, scanned. What `slab_volume` and `kvadvisor verify` both need."""

from __future__ import annotations

import errno
import fcntl
import mmap
import os
import stat
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from storage_agent.descriptor import VolumeDescriptor
from storage_agent.errors import CorruptBlock, SlabFormatError, VolumeError
from storage_agent.port import BlockKey
from storage_agent.slab_format import (
    PAGE_BYTES,
    ZERO_PAGE,
    Session,
    SlotHeader,
    Superblock,
    check_slot,
    pack_session,
    pack_superblock,
    page_ceiling,
    unpack_session,
    unpack_slot_header,
    unpack_superblock,
)

_SESSION_OFFSET = PAGE_BYTES


@dataclass(frozen=True, slots=True)
class SlotReport:
    """One slot as it lies on the volume.

    `torn`: neither free nor live. A put or delete cut short leaves that, and so does damage; recovery frees it.
    `key`, `generation` and `payload_bytes` are set for a live slot, and for a torn one whose header is whole.
    """

    slot: int
    state: Literal["free", "live", "torn"]
    key: BlockKey | None = None
    generation: int = 0
    payload_bytes: int = 0
    reason: str = ""
    """Why a slot is torn, else empty."""


class SlabFile:
    """An open slab. `fd` is the one descriptor that everything uses; whoever opened it closes it last."""

    def __init__(self, path: Path, fd: int, superblock: Superblock, session: Session | None) -> None:
        self.path = path
        self.fd = fd
        self.superblock = superblock
        self.session = session
        """As found when opened; None where its page is damaged."""
        self.mode = "buffered"

    def probe_direct(self) -> None:
        """Switch to O_DIRECT where the file system takes it; sets `mode`."""
        flags = fcntl.fcntl(self.fd, fcntl.F_GETFL)
        try:
            fcntl.fcntl(self.fd, fcntl.F_SETFL, flags | os.O_DIRECT)
            _read_page(self.fd, 0)
            self.mode = "O_DIRECT"
        except OSError:
            fcntl.fcntl(self.fd, fcntl.F_SETFL, flags)
            self.mode = "buffered"

    def write_session(self, session: Session) -> None:
        """Durable when it returns. Raises `OSError`."""
        _write_page(self.fd, _SESSION_OFFSET, pack_session(session))
        os.fdatasync(self.fd)

    def erase_headers(self, slots: list[int]) -> None:
        """Free `slots` on the volume. Durable when it returns. Raises `OSError`."""
        for slot in slots:
            _write_page(self.fd, self.superblock.slot_offset(slot), ZERO_PAGE)
        if slots:
            os.fdatasync(self.fd)

    def scan(self, *, check_payloads: bool) -> Iterator[tuple[SlotReport, SlotHeader | None]]:
        """Every slot in order, from the volume alone. A live one comes with its header.

        Without `check_payloads` a slot is called live by its header. A slot that cannot be read is torn.
        """
        superblock = self.superblock
        with mmap.mmap(-1, superblock.slot_bytes) as buffer:
            for slot in range(superblock.capacity_blocks):
                try:
                    yield self._scan_slot(slot, buffer, check_payloads)
                except OSError as error:
                    yield SlotReport(slot, "torn", reason=f"slot {slot} cannot be read: {error.strerror}"), None

    def _scan_slot(
        self, slot: int, buffer: mmap.mmap, check_payloads: bool
    ) -> tuple[SlotReport, SlotHeader | None]:
        offset = self.superblock.slot_offset(slot)
        with memoryview(buffer) as view, view[:PAGE_BYTES] as header_view:
            _read_into(self.fd, header_view, offset)
            page = bytes(header_view)
            try:
                header = unpack_slot_header(page, slot)
            except SlabFormatError as error:
                return SlotReport(slot, "torn", reason=str(error)), None
            if header is None:
                return SlotReport(slot, "free"), None
            reason = ""
            if header.payload_bytes > self.superblock.block_bytes_max:
                reason = f"slot {slot} says {header.payload_bytes} bytes, more than it has room for"
            elif check_payloads:
                length = page_ceiling(header.payload_bytes)
                with view[PAGE_BYTES : PAGE_BYTES + length] as payload_view:
                    if length:
                        _read_into(self.fd, payload_view, offset + PAGE_BYTES)
                    try:
                        with payload_view[: header.payload_bytes] as payload:
                            check_slot(page, payload, header)
                    except CorruptBlock as error:
                        reason = str(error)
        report = SlotReport(
            slot, "torn" if reason else "live", header.key, header.generation, header.payload_bytes, reason
        )
        return report, None if reason else header

    def close(self) -> None:
        """Idempotent."""
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1


def open_slab(descriptor: VolumeDescriptor, path: Path) -> SlabFile:
    """Open the slab at `path`, made first where there is none, and lock it against every other opener.

    Raises `VolumeError`: no room, another opener, not a slab, or a slab of another volume or size.
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


def wanted_superblock(descriptor: VolumeDescriptor) -> Superblock:
    return Superblock(descriptor.id, descriptor.capacity_blocks, descriptor.block_bytes_max)


def _open_locked(descriptor: VolumeDescriptor, path: Path) -> int:
    fd = os.open(path, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
    if not _try_lock(fd):
        pid = _pid_of_holder(fd)
        os.close(fd)
        raise VolumeError(
            f"volume {descriptor.id!r}: {path} is open in process {pid}; close it there, or use another path"
        )
    return fd


def _create(descriptor: VolumeDescriptor, path: Path) -> int:
    """Make the file under another name, whole and durable, and give it its own last: no half-made slab is ever seen."""
    draft = path.with_name(f".{path.name}.creating")
    fd = os.open(draft, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    is_ours = False
    try:
        # Between the open and the lock another creator may have finished with this very file.
        is_ours = _try_lock(fd) and _is_same_file(fd, draft)
        if not is_ours or path.exists():
            raise VolumeError(
                f"volume {descriptor.id!r}: {path} is being made by another process; try again when it is done"
            )
        _fill_draft(descriptor, path, fd)
        os.rename(draft, path)
        _sync_folder(path.parent)
    except (OSError, VolumeError):
        if is_ours and _is_same_file(fd, draft):
            os.unlink(draft)
        os.close(fd)
        raise
    return fd


def _fill_draft(descriptor: VolumeDescriptor, path: Path, fd: int) -> None:
    superblock = wanted_superblock(descriptor)
    os.ftruncate(fd, 0)
    free_bytes = _free_bytes(fd)
    if free_bytes < superblock.file_bytes:
        raise _no_room(descriptor, path, superblock.file_bytes, free_bytes)
    try:
        os.posix_fallocate(fd, 0, superblock.file_bytes)
    except OSError as error:
        if error.errno == errno.ENOSPC:
            raise _no_room(descriptor, path, superblock.file_bytes, free_bytes) from error
        raise VolumeError(
            f"volume {descriptor.id!r}: {superblock.file_bytes} bytes cannot be set aside for {path}: {error.strerror}"
        ) from error
    _write_page(fd, 0, pack_superblock(superblock))
    _write_page(fd, _SESSION_OFFSET, pack_session(Session(is_open=False, pid=0, generation_next=1)))
    os.fsync(fd)


def _read_slab(descriptor: VolumeDescriptor, path: Path, fd: int) -> SlabFile:
    name = f"volume {descriptor.id!r}"
    try:
        status = os.fstat(fd)
        if not stat.S_ISREG(status.st_mode):
            raise VolumeError(f"{name}: {path} is not a regular file; give a path where a file can be made")
        try:
            superblock = unpack_superblock(_read_page(fd, 0))
        except SlabFormatError as error:
            raise VolumeError(
                f"{name}: {path} is not a slab ({error}); it is left alone: move it away or give another path"
            ) from error
        wanted = wanted_superblock(descriptor)
        if superblock != wanted:
            raise VolumeError(
                f"{name}: {path} was made as {superblock.volume_id!r} for {superblock.capacity_blocks} blocks of "
                f"{superblock.block_bytes_max} bytes, asked for are {wanted.volume_id!r}, {wanted.capacity_blocks} "
                f"and {wanted.block_bytes_max}; restore the settings or give another path"
            )
        if status.st_size < superblock.file_bytes:
            raise VolumeError(
                f"{name}: {path} has {status.st_size} of {superblock.file_bytes} bytes; restore or remove it"
            )
        return SlabFile(path, fd, superblock, _read_session(fd))
    except OSError as error:
        raise VolumeError(f"{name}: {path} cannot be read: {error.strerror}") from error


def _read_session(fd: int) -> Session | None:
    try:
        return unpack_session(_read_page(fd, _SESSION_OFFSET))
    except SlabFormatError:
        return None


def _pid_of_holder(fd: int) -> str:
    session = _read_session(fd)
    return str(session.pid) if session is not None and session.is_open else "unknown"


def _try_lock(fd: int) -> bool:
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _is_same_file(fd: int, path: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(fd), os.stat(path, follow_symlinks=False))
    except FileNotFoundError:
        return False


def _free_bytes(fd: int) -> int:
    status = os.fstatvfs(fd)
    return status.f_bavail * status.f_frsize


def _no_room(descriptor: VolumeDescriptor, path: Path, needed_bytes: int, free_bytes: int) -> VolumeError:
    return VolumeError(
        f"volume {descriptor.id!r} needs {needed_bytes} bytes, {path.parent} has {free_bytes} free: "
        "lower capacity_blocks or free some space"
    )


def _sync_folder(folder: Path) -> None:
    fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def _read_page(fd: int, offset: int) -> bytes:
    with mmap.mmap(-1, PAGE_BYTES) as buffer, memoryview(buffer) as view:  # aligned, as O_DIRECT wants it
        _read_into(fd, view, offset)
        return bytes(view)


def _read_into(fd: int, view: memoryview, offset: int) -> None:
    done = os.preadv(fd, [view], offset)
    if done != len(view):
        raise OSError(errno.EIO, f"{done} of {len(view)} bytes at byte {offset}")


def _write_page(fd: int, offset: int, page: bytes) -> None:
    with mmap.mmap(-1, PAGE_BYTES) as buffer, memoryview(buffer) as view:
        view[:] = page
        done = os.pwritev(fd, [view], offset)
        if done != PAGE_BYTES:
            raise OSError(errno.EIO, f"{done} of {PAGE_BYTES} bytes at byte {offset}")
