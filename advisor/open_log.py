"""Opens the event log that the settings name: the one place that knows which kinds there are."""

from __future__ import annotations

import os
from pathlib import Path

from advisor.entries import EventLog
from advisor.errors import LogError
from advisor.log import SqlLog
from advisor.log_database import database_path
from advisor.log_folder import make_folder
from advisor.log_postgres import is_postgres
from advisor.log_queries import LogQueries, SegmentQueries, SqlQueries
from advisor.segment_catalogue import CATALOGUE
from advisor.segment_log import SegmentLog
from advisor.settings import AdvisorSettings, LogSettings, load_settings

SEGMENTS = "segments"


def segments_path(settings: AdvisorSettings) -> Path:
    """The folder of the segments."""
    return settings.directory / SEGMENTS


def log_place(settings: AdvisorSettings) -> Path | str:
    """Where the log is: a file, a folder of segments, or a URL of PostgreSQL. Raises `LogError`."""
    if settings.log.kind == "segments":
        if settings.log.url:
            raise LogError("log.url is of log.kind = \"sql\", and log.kind is \"segments\": take one of the two out")
        return segments_path(settings)
    if is_postgres(settings.log.url):
        return settings.log.url
    return database_path(settings.log.url or settings.log_path)


def locked_path(settings: AdvisorSettings) -> Path:
    """What a writer of a log in files locks. Raises `LogError`."""
    place = Path(log_place(settings))
    return place / CATALOGUE if settings.log.kind == "segments" else place


def open_log(settings: AdvisorSettings, *, read_only: bool = False) -> EventLog:
    """The log, locked for writing or only to be read. Raises `LogError`.

    Refuses to begin an empty one where the directory holds the log of another kind: it would look as if all was lost.
    """
    place = log_place(settings)
    if not read_only:
        _refuse_other_kind(settings, place)
        make_folder(settings.directory)
    if settings.log.kind == "segments":
        return SegmentLog(Path(place), read_only=read_only)
    return SqlLog(place, password_file=settings.log.password_file, read_only=read_only)


def open_queries(settings: AdvisorSettings, log: EventLog) -> LogQueries:
    """For the service's event loop, beside the `log` that it writes. Raises `LogError`."""
    if isinstance(log, SegmentLog):
        return SegmentQueries(log)
    return SqlQueries(log_place(settings), password_file=settings.log.password_file)


def _refuse_other_kind(settings: AdvisorSettings, place: Path | str) -> None:
    others = {"sql": settings.log_path, "segments": segments_path(settings)}
    if Path(place).exists():
        return
    for kind, path in others.items():
        if path != place and path.exists():
            raise LogError(
                f"{path} holds this directory's log, and log.kind or log.url names another, {place}: set log.kind ="
                f" {kind!r} without log.url, or give the other log a directory of its own"
            )


def settings_at(place: Path) -> AdvisorSettings:
    """Of the service whose settings file or directory `place` is; a directory's log is of the kind that lies there.

    Raises `LogError` where it is neither, `SettingsError` for a file that cannot be used.
    """
    if place.is_dir():
        here = place.absolute()
        if (here / SEGMENTS).is_dir() and not (here / "log.db").exists():
            return AdvisorSettings(directory=here, log=LogSettings(kind="segments"))
        return AdvisorSettings(directory=here)
    if not place.is_file():
        raise LogError(f"there is nothing at {place}: give a service's directory, or its settings file")
    if place.suffix == ".toml":
        return load_settings(place, os.environ)
    return AdvisorSettings(directory=place.absolute().parent, log=LogSettings(url=f"sqlite:///{place.absolute()}"))


def is_log_at(place: Path) -> bool:
    """Whether `place` is a directory that holds a log of SQLite or of segments."""
    return (place / "log.db").is_file() or (place / SEGMENTS / CATALOGUE).is_file()
