"""Appends groups of batches to the log named first, printing each position that was acknowledged."""

from __future__ import annotations

import itertools
import sys

from advisor.entries import EntryKind, NewEntry
from advisor.log import SqlLog


def main(path: str) -> None:
    log = SqlLog(path)
    start = log.last_position()
    for group in itertools.count():
        entries = [
            NewEntry(kind=EntryKind.BATCH, payload=b"%d" % i * 1000, producer=1, epoch=start, sequence=group * 4 + i)
            for i in range(4)
        ]
        first = log.append(entries, recorded_us=0)
        sys.stdout.write(f"{first + 3}\n")
        sys.stdout.flush()


main(sys.argv[1])
