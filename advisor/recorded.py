"""One reader for everything that was recorded: captures, Parquet recordings and the advisor's own log, as batches."""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from advisor.entries import LogEntry
from advisor.foreign import SourceFacts
from advisor.intake import Intake, Taken
from advisor.log import read_decoded
from advisor.open_log import is_log_at, log_place, open_log, settings_at
from event_plane.errors import RecordingError
from event_plane.parquet import read_parquet
from event_plane.parquet_rows import RecordedBatch
from event_plane.recording import capture_dialect, detect_format, message_of, read_capture
from event_plane.schema import Batch

_SQLITE_MAGIC = b"SQLite format 3\x00"


@dataclass(slots=True)
class Reading:
    """What a recording held, counted while it is read. `refused`: what could not be used, by reason."""

    messages: int = 0
    duplicates: int = 0
    refused: Counter[str] = field(default_factory=Counter)


def is_log(path: Path) -> bool:
    """Whether `path` is an advisor's directory or settings file, or its `log.db`."""
    if path.suffix == ".toml" or path.is_dir():
        return path.is_file() or is_log_at(path)
    try:
        with path.open("rb") as file:
            return file.read(len(_SQLITE_MAGIC)) == _SQLITE_MAGIC
    except OSError:
        return False


@contextlib.contextmanager
def opened_log(path: Path) -> Iterator[Iterator[tuple[LogEntry, Batch | None]]]:
    """The entries of the log at `path`, each with its batch if it is one. Raises `LogError` or `SettingsError`."""
    settings = settings_at(path)
    with contextlib.closing(open_log(settings, read_only=True)) as log:
        yield read_decoded(log, log_place(settings), log.first_position())


def read_recorded(path: Path, reading: Reading) -> Iterator[RecordedBatch]:
    """The batches of a recording or a log, each producer's in order, each once.

    A capture passes the gate, as live messages do: what it lacks is declared lost by a `lost` batch. Raises
    `RecordingError` for a file that is damaged or that none of ours reads, `LogError` for a log.
    """
    if is_log(path):
        yield from _read_log(path, reading)
    elif (kind := detect_format(path)) == "parquet":
        for recorded in read_parquet(path):
            reading.messages += 1
            yield recorded
    elif kind == "capture":
        yield from _read_capture(path, reading)
    else:
        raise RecordingError(f"{path} is a trace of requests, which holds no events: `kvadvisor replay` runs it")


def _read_log(path: Path, reading: Reading) -> Iterator[RecordedBatch]:
    with opened_log(path) as entries:
        for entry, batch in entries:
            if batch is not None:
                reading.messages += 1
                yield RecordedBatch(batch, entry.source, entry.position, entry.recorded_us)


def _read_capture(path: Path, reading: Reading) -> Iterator[RecordedBatch]:
    intake = Intake([SourceFacts(path.name, capture_dialect(path))])
    position = 0
    for taken in _taken(path, intake, reading):
        for accepted in taken.accepted:
            position += 1
            yield RecordedBatch(accepted.batch, accepted.entry.source, position)
    reading.duplicates = sum(intake.duplicates.values())
    reading.refused += intake.refused
    if intake.lost:
        reading.refused["batch that the file lacks"] = sum(intake.lost.values())


def _taken(path: Path, intake: Intake, reading: Reading) -> Iterator[Taken]:
    for frames in read_capture(path):
        message = message_of(frames, path.name)
        if message is None:
            sizes = ", ".join(str(len(frame)) for frame in frames)
            raise _damaged(path, reading.messages, f"frames of {sizes} bytes")
        taken = intake.offer(message, 0)
        if taken.unreadable:
            raise _damaged(path, reading.messages, taken.unreadable[0].detail)
        reading.messages += 1
        yield taken
    # A file cannot fill a gap: what is still held is released after its gap is declared lost.
    yield intake.give_up(path.name, 0)


def _damaged(path: Path, message: int, what: str) -> RecordingError:
    return RecordingError(f"{path}: message {message} is damaged ({what}): record it again")
