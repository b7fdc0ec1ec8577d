"""Whether a log is whole: every entry decodes, none is missing, and its checkpoints can be used."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

from advisor import checkpoint
from advisor.entries import EventLog
from advisor.errors import LogError
from advisor.log import read_decoded


@dataclass(slots=True)
class LogFindings:
    """What was read up to the first fault. `faults`: a sentence each."""

    first_position: int = 1
    last_position: int = 0
    entries: Counter[str] = field(default_factory=Counter)
    """By kind."""
    events: int = 0
    checkpoints: list[int] = field(default_factory=list)
    """Positions of the good ones, newest first."""
    faults: list[str] = field(default_factory=list)


def check_log(log: EventLog, place: Path | str, checkpoints: Path) -> LogFindings:
    """Read all of it. Raises `LogError` only where the log cannot be opened for reading at all."""
    findings = LogFindings(first_position=log.first_position())
    expected = findings.first_position
    last = log.last_position()
    try:
        for entry, batch in read_decoded(log, place):
            if entry.position != expected:
                missing = f"position {expected} of {place} is missing, {entry.position} follows"
                findings.faults.append(f"{missing}: restore a backup of the log (`kvadvisor log restore`)")
                break
            expected += 1
            findings.entries[str(entry.kind)] += 1
            findings.events += 0 if batch is None else len(batch.records)
            findings.last_position = entry.position
    except LogError as fault:
        findings.faults.append(str(fault))
    if not findings.faults and findings.last_position < last:
        findings.faults.append(f"{place} should end at position {last} and ends at {findings.last_position}")
    for position in checkpoint.positions(checkpoints):
        if why := checkpoint.fault_of(checkpoint.checkpoint_path(checkpoints, position)):
            findings.faults.append(f"{why}: delete it; a start passes over it")
        elif position > last:
            findings.faults.append(f"the checkpoint of position {position} is ahead of {place}, which ends at {last}")
        else:
            findings.checkpoints.append(position)
    reached = max(findings.checkpoints, default=0)
    if findings.first_position > 1 and reached < findings.first_position - 1:
        findings.faults.append(
            str(checkpoint.cut_without_checkpoint(place, findings.first_position, checkpoints, []))
        )
    return findings
