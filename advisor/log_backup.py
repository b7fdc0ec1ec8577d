"""Copies of a log that is in use, and logs made of them.

A backup is a folder: `log.db` or `segments/`, the newest good checkpoint, and `backup.json`. The checkpoint is copied
first and the log after it, so the log has all that follows the checkpoint, up to one position.
"""

from __future__ import annotations

import os
import shutil
import sqlite3
from contextlib import closing
from pathlib import Path
from typing import Literal

import msgspec

from advisor import checkpoint
from advisor.errors import AdvisorError, LogError
from advisor.log_check import check_log
from advisor.log_database import reader_url
from advisor.log_folder import make_folder, sync_folder
from advisor.open_log import SEGMENTS, log_place, open_log, settings_at
from advisor.segment_catalogue import CATALOGUE
from advisor.segment_log import SegmentLog
from advisor.settings import AdvisorSettings

NOTE = "backup.json"
CHECKPOINTS = "checkpoints"
ATTEMPTS = 5
COPY_BYTES = 4 << 20
PAGES = 256
"""Of SQLite, copied in one hold of its lock."""


class BackupError(AdvisorError):
    """A backup that cannot be made or restored. What was begun is left, without its `backup.json`."""


class Backup(msgspec.Struct, frozen=True):
    """What `backup.json` says. The log holds `first_position` to `position`; `checkpoint` 0: none was made yet."""

    kind: Literal["sql", "segments"]
    first_position: int
    position: int
    checkpoint: int
    format: int = 1


def back_up(settings: AdvisorSettings, folder: Path) -> Backup:
    """Copy log and checkpoint into `folder`, which must be empty or absent. The service may run meanwhile.

    Raises `BackupError` or `LogError`.
    """
    place = log_place(settings)
    if not isinstance(place, Path):
        raise BackupError(
            f"{place} is backed up by PostgreSQL: first copy {settings.checkpoints_path}, then `pg_dump -Fc` the"
            " database, so that the log has all that follows the checkpoint"
        )
    if folder.exists() and any(folder.iterdir()):
        raise BackupError(f"{folder} is not empty: give each backup a folder of its own")
    # A log that is absent or of another version is refused here, before anything is made that stands in the way later.
    open_log(settings, read_only=True).close()
    make_folder(folder)
    for _ in range(ATTEMPTS):
        try:
            backup = _copied(settings, place, folder)
        except FileNotFoundError:
            # A checkpoint or a segment got another name, or was dropped, while its turn came.
            backup = None
        except OSError as error:
            raise BackupError(f"{folder} cannot be written ({error.strerror}): free some space there") from error
        if backup is not None and backup.first_position <= backup.checkpoint + 1:
            _write_note(folder, backup)
            return backup
        for begun in (folder / SEGMENTS, folder / CHECKPOINTS):
            shutil.rmtree(begun, ignore_errors=True)
    raise BackupError(f"{place} was cut again and again while it was copied: allow it more in log.retention_bytes")


def restore(folder: Path, target: Path) -> Backup:
    """Make a service's directory of a backup: `target` must be empty or absent. What was copied is checked.

    Raises `BackupError` or `LogError`.
    """
    try:
        backup = msgspec.json.decode((folder / NOTE).read_bytes(), type=Backup)
    except OSError as error:
        told = f"{folder} holds no whole backup ({NOTE}: {error.strerror})"
        raise BackupError(f"{told}: give a folder that `kvadvisor log backup` made") from error
    except msgspec.MsgspecError as error:
        raise BackupError(f"{folder / NOTE} cannot be understood ({error}): another version wrote it") from error
    if target.exists() and any(target.iterdir()):
        raise BackupError(f"{target} is not empty: restore into an empty directory and start the service there")
    make_folder(target)
    try:
        for name in ("log.db", SEGMENTS, CHECKPOINTS):
            source = folder / name
            if source.is_dir():
                (target / name).mkdir()
                for path in source.iterdir():
                    copy_file(path, target / name / path.name)
                sync_folder(target / name)
            elif source.exists():
                copy_file(source, target / name)
    except OSError as error:
        raise BackupError(f"{target} cannot be written ({error.strerror}): free some space there") from error
    sync_folder(target)
    settings = settings_at(target)
    with closing(open_log(settings, read_only=True)) as log:
        findings = check_log(log, log_place(settings), settings.checkpoints_path)
    if findings.faults or findings.last_position != backup.position:
        told = "\n".join(findings.faults) or f"it ends at position {findings.last_position}, not at {backup.position}"
        raise BackupError(f"the backup {folder} is not whole: {told}")
    return backup


def _copied(settings: AdvisorSettings, place: Path, folder: Path) -> Backup:
    """Raises `FileNotFoundError` where the service took something away meanwhile."""
    position = _copy_checkpoint(settings.checkpoints_path, folder / CHECKPOINTS)
    if settings.log.kind == "segments":
        make_folder(folder / SEGMENTS)
        _copy_segments(place, folder / SEGMENTS)
        copied = AdvisorSettings(directory=folder, log=settings.log)
    else:
        _copy_database(place, folder / "log.db")
        copied = AdvisorSettings(directory=folder)
    sync_folder(folder)
    with closing(open_log(copied, read_only=True)) as log:
        return Backup(settings.log.kind, log.first_position(), log.last_position(), position)


def _copy_checkpoint(source: Path, target: Path) -> int:
    """The newest good one; returns its position, 0 where there is none."""
    for position in checkpoint.positions(source):
        path = checkpoint.checkpoint_path(source, position)
        if not checkpoint.fault_of(path):
            make_folder(target)
            copy_file(path, target / path.name, link=True)
            sync_folder(target)
            return position
    return 0


def _copy_segments(source: Path, target: Path) -> None:
    with closing(SegmentLog(source, read_only=True)) as log:
        files = log.files()
    for path, whole_bytes in files:
        if whole_bytes is None:
            copy_file(path, target / path.name, link=True)
        else:
            _copy_start(path, target / path.name, whole_bytes)
    # The catalogue last: a term that is in no entry yet is in it.
    _copy_database(source / CATALOGUE, target / CATALOGUE)
    sync_folder(target)


def _copy_start(source: Path, target: Path, count_bytes: int) -> None:
    """The whole appends of the segment that is written to."""
    with open(source, "rb") as written, open(target, "wb") as copy:
        while count_bytes and (piece := written.read(min(count_bytes, COPY_BYTES))):
            copy.write(piece)
            count_bytes -= len(piece)
        copy.flush()
        os.fsync(copy.fileno())


def _copy_database(source: Path, target: Path) -> None:
    """By SQLite's own online backup: consistent, and the writer goes on."""
    if not source.is_file():
        raise LogError(f"there is no log at {source}: check the directory")
    url = reader_url(source)
    target.unlink(missing_ok=True)
    try:
        with (
            closing(sqlite3.connect(f"{url.database}?mode=ro", uri=True)) as reading,
            closing(sqlite3.connect(target)) as writing,
        ):
            reading.backup(writing, pages=PAGES, sleep=0.001)
    except sqlite3.Error as error:
        raise BackupError(f"{source} cannot be copied to {target} ({error}): check space and permissions") from error
    _sync_file(target)


def copy_file(source: Path, target: Path, *, link: bool = False) -> None:
    """Durable but for its name. With `link` of a file that no longer changes, no second copy where that is possible."""
    if link:
        try:
            os.link(source, target)
            return
        except FileNotFoundError:
            raise
        except OSError:
            pass  # another file system, or one without links
    shutil.copyfile(source, target)
    _sync_file(target)


def _sync_file(path: Path) -> None:
    with open(path, "rb") as file:
        os.fsync(file.fileno())


def _write_note(folder: Path, backup: Backup) -> None:
    try:
        (folder / NOTE).write_bytes(msgspec.json.format(msgspec.json.encode(backup)) + b"\n")
        _sync_file(folder / NOTE)
    except OSError as error:
        raise BackupError(f"{folder / NOTE} cannot be written ({error.strerror}): free some space there") from error
    sync_folder(folder)
