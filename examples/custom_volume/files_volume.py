"""Volumes of kind `files`: a file for each block in one folder. The shortest store that keeps the contract.

A store moves bytes between slots and a medium, and checks them. Which block is in which slot, who may read it, what is
announced and counted is `storage_agent.slot_volume`'s, the same for every kind.
"""

from __future__ import annotations

import fcntl
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Annotated

import msgspec

from storage_agent.block_header import PAGE_BYTES, BlockHeader, check_header, check_parts, pack_header, unpack_header
from storage_agent.errors import BlockFormatError, CorruptBlock, TransferError, VolumeError
from storage_agent.kinds import Opening, slot_kind
from storage_agent.slot_rows import SlotRows
from storage_agent.slot_store import Recovered, SlotRead, SlotWrite, Take


class FilesOptions(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Checked before a volume is opened: an unknown option, or a number out of range, is named in the error."""

    batch_slots: Annotated[int, msgspec.Meta(ge=1, le=1024)] = 64


class FilesStore:
    """Implements `storage_agent.slot_store.SlotStore`. The volume never has two calls at work on one slot."""

    mode = "buffered"
    upkeep_due = False

    def __init__(self, volume: str, folder: Path, capacity_blocks: int, options: FilesOptions) -> None:
        """Raises `VolumeError`."""
        self.batch_slots = options.batch_slots
        self._folder = folder
        self._capacity = capacity_blocks
        try:
            folder.mkdir(exist_ok=True)
            self._folder_fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
        except OSError as error:
            raise VolumeError(f"volume {volume!r}: {folder} cannot be opened: {error.strerror}") from error
        try:
            fcntl.flock(self._folder_fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            os.close(self._folder_fd)
            raise VolumeError(f"volume {volume!r}: {folder} is open in another process; close it there") from error

    def recover(self) -> Recovered:
        """A draft is a put cut short; a file that is not whole is freed."""
        headers: list[BlockHeader] = []
        for path in sorted(self._folder.iterdir()):
            try:
                slot = int(path.stem)
                page = path.read_bytes()[:PAGE_BYTES] if path.suffix == ".block" else b""
                header, _ = unpack_header(page, slot, place=slot, mark=0)
            except (ValueError, BlockFormatError):
                path.unlink()
                continue
            headers.append(header)
        capacity = max([self._capacity, *(header.slot + 1 for header in headers)])
        return Recovered(SlotRows.of(capacity, headers), 1)

    def write(self, writes: Sequence[SlotWrite]) -> None:
        """Under another name; a whole file appears at once."""
        pages = [pack_header(write.header, write.checksums, place=write.header.slot, mark=0) for write in writes]
        try:
            for write, page in zip(writes, pages, strict=True):
                draft = self._folder / f"{write.header.slot}.draft"
                with draft.open("wb") as file:
                    file.write(page)
                    file.write(write.payload)
                    file.flush()
                    os.fsync(file.fileno())
                draft.rename(self._path(write.header))
        except OSError as error:
            raise TransferError(f"write failed in {self._folder}: {error.strerror}") from error

    def sync(self) -> None:
        """Make the names last."""
        try:
            os.fsync(self._folder_fd)
        except OSError as error:
            raise TransferError(f"{self._folder} cannot be synced: {error.strerror}", in_doubt=True) from error

    def read(self, reads: Sequence[SlotRead], take: Take) -> None:
        try:
            found = [self._path(read.header).read_bytes() for read in reads]
        except OSError as error:
            raise TransferError(f"read failed in {self._folder}: {error.strerror}") from error
        for number, (read, content) in enumerate(zip(reads, found, strict=True)):
            start = PAGE_BYTES + read.offset
            payload = memoryview(content)[start : start + read.payload_bytes]
            fault: CorruptBlock | None = None
            try:
                checksums = check_header(content[:PAGE_BYTES], read.header, place=read.header.slot, mark=0)
                check_parts(payload, read.header, checksums, read.first)
            except CorruptBlock as caught:
                fault = caught
            take(number, fault, payload)

    def erase(self, headers: Sequence[BlockHeader]) -> None:
        try:
            for header in headers:
                self._path(header).unlink(missing_ok=True)
        except OSError as error:
            raise TransferError(f"erasing failed in {self._folder}: {error.strerror}") from error
        self.sync()

    def forget_cached(self, headers: Sequence[BlockHeader]) -> None:
        """The page cache answers: this example does not ask the device."""

    def resize(self, capacity_blocks: int) -> None:
        """A folder takes as many files as it is given."""

    def compact(self) -> int:
        """Files do not fragment."""
        return 0

    def upkeep(self, copy_table: Callable[[], tuple[SlotRows, list[int]]]) -> None:
        """Recovery reads the folder."""

    def close(self, *, in_order: bool, generation_next: int) -> None:
        if self._folder_fd >= 0:
            os.close(self._folder_fd)
            self._folder_fd = -1

    def _path(self, header: BlockHeader) -> Path:
        return self._folder / f"{header.slot}.block"


def _open_store(opening: Opening) -> FilesStore:
    options = opening.options
    assert isinstance(options, FilesOptions)
    descriptor = opening.descriptor
    return FilesStore(descriptor.id, opening.required_path, descriptor.capacity_blocks, options)


KIND = slot_kind(FilesOptions, _open_store)
