"""Appends groups of batches to the log named first, printing each position that was acknowledged.

Arguments: `sqlite` PATH, `segments` FOLDER, or `postgres` URL PASSWORD_FILE.
"""

from __future__ import annotations

import itertools
import sys
from pathlib import Path

import structlog

from advisor.entries import EntryKind, EventLog, NewEntry
from advisor.log import SqlLog
from advisor.segment_log import SegmentLog

GROUP = 4
SEGMENT_BYTES = 40_000


def opened(kind: str, place: str, password_file: str = "") -> EventLog:
    match kind:
        case "sqlite":
            return SqlLog(place)
        case "segments":
            return SegmentLog(Path(place), segment_bytes=SEGMENT_BYTES)
    return SqlLog(place, password_file=Path(password_file))


def main(arguments: list[str]) -> None:
    # Standard output is what the test reads.
    structlog.configure(logger_factory=structlog.PrintLoggerFactory(sys.stderr))
    log = opened(*arguments)
    start = log.last_position()
    for group in itertools.count():
        entries = [
            NewEntry(
                kind=EntryKind.BATCH, payload=b"%d" % i * 1000, producer=1, epoch=start, sequence=group * GROUP + i
            )
            for i in range(GROUP)
        ]
        first = log.append(entries, recorded_us=0)
        sys.stdout.write(f"{first + GROUP - 1}\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main(sys.argv[1:])
