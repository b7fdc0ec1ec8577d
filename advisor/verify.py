"""`kvadvisor verify`: compare what the log says with what the volumes hold, after a crash or at any rest."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated

import msgspec
import typer
from rich.console import Console
from rich.table import Table

from advisor.entries import EntryKind, LogEntry, MoveStep, decode_control
from advisor.errors import AdvisorError
from advisor.fold import Fold, VolumeState
from advisor.index import Key
from advisor.log import SqlLog
from advisor.log_lock import require_unlocked
from advisor.moves import FREES_SOURCE, Trigger
from storage_agent.config import AgentSettings, load_settings, scan_volumes
from storage_agent.descriptor import VolumeDescriptor

ADVISOR_FILE = "advisor.toml"
AGENT_FILE = "agent.toml"
LOG_FILE = "log.db"
EXAMPLES_MAX = 5


class VerifyError(AdvisorError):
    """A folder that cannot be verified."""


class FoundFault(AdvisorError):
    """Blocks are lost, doubled or leaked; the table above says which."""

    exit_status = 1


@dataclass(slots=True)
class VolumeFinding:
    """One volume against the log. `unknown`, `torn` and `explained` are no faults.

    `torn`: a put that was cut off before it was acknowledged; its slot is free again at the next start. `explained`:
    placed by the log and gone, because a switch with source free, or a delete, was logged and carried out before its
    Remove could be.
    """

    volume: str
    slots: int = 0
    live: int = 0
    free: int = 0
    torn: int = 0
    logged: int = 0
    lost: list[Key] = field(default_factory=list)
    doubled: list[Key] = field(default_factory=list)
    leaked: int = 0
    unknown: int = 0
    explained: int = 0

    @property
    def faults(self) -> int:
        return len(self.lost) + len(self.doubled) + self.leaked


@dataclass(slots=True)
class Freed:
    """Blocks that a logged step allows to be gone from a volume, until a later Store there."""

    keys: dict[str, set[Key]] = field(default_factory=dict)

    def before(self, fold: Fold, entry: LogEntry) -> None:
        """Look at an entry that is about to be folded."""
        if entry.kind is not EntryKind.MOVE:
            return
        step = decode_control(entry.payload)
        if not isinstance(step, MoveStep) or step.trigger != Trigger.SWITCH:
            return
        for move_id in step.move_ids:
            move = fold.moves.open.get(move_id)
            if move is not None and move.kind in FREES_SOURCE:
                self.keys.setdefault(move.source, set()).add(move.key)


def verify(
    directory: Annotated[Path, typer.Argument(help="What `kvadvisor demo --dir` made, or a service's directory.")],
) -> None:
    """Check a stopped service's log against its volumes: nothing lost, doubled or leaked."""
    console = Console()
    if not directory.is_dir():
        raise VerifyError(f"{directory} is no folder: give the one of `demo --dir`, or `directory` of the settings")
    log_path = next((p for p in (directory / LOG_FILE, directory / "advisor" / LOG_FILE) if p.is_file()), None)
    agent_path = directory / AGENT_FILE
    if log_path is None and not agent_path.is_file():
        if any(directory.iterdir()):
            raise VerifyError(f"{directory} holds neither {LOG_FILE} nor {AGENT_FILE}: it was made by something else")
        console.print(f"{directory} is empty: nothing was logged, nothing can be lost")
        return
    fold, freed, entries = _fold(log_path)
    findings = [_compare(*scanned, fold, freed) for scanned in _scans(fold, agent_path)]
    fold.index.check()
    console.print(f"{directory}: {entries} log entries, {len(fold.index)} blocks, {len(fold.moves.open)} moves open")
    if findings:
        console.print(_table(findings))
    for finding in findings:
        for word, keys in (("lost", finding.lost), ("doubled", finding.doubled)):
            for key in keys[:EXAMPLES_MAX]:
                block = f"{key.sequence_hash:032x} of namespace {key.namespace_id:016x}"
                console.print(f"{word} on {finding.volume}: {block}")
    faults = sum(finding.faults for finding in findings)
    if faults:
        raise FoundFault(f"{faults} faults in {directory}: keep it as it is and report this, it should not happen")
    console.print("nothing lost, nothing doubled, nothing leaked")


def _fold(log_path: Path | None) -> tuple[Fold, Freed, int]:
    fold, freed = Fold(), Freed()
    if log_path is None:
        return fold, freed, 0
    require_unlocked(log_path)
    log = SqlLog(log_path, read_only=True)
    try:
        for entry in log.read():
            freed.before(fold, entry)
            fold.apply(entry)
            _forget_stored_again(fold, freed)
        return fold, freed, fold.position
    finally:
        log.close()


def _forget_stored_again(fold: Fold, freed: Freed) -> None:
    """Once a freed block's Remove is folded its excuse ends: a later Store there must be found."""
    for volume_id, keys in freed.keys.items():
        volume = fold.volumes.get(volume_id)
        if volume is not None and keys:
            keys.difference_update([key for key in keys if not _placed(fold, volume, key)])


def _placed(fold: Fold, volume: VolumeState, key: Key) -> bool:
    block = fold.index.get(key)
    return block is not None and volume.place in block.placements


Scanned = tuple[VolumeDescriptor, Iterable["Slot"]]


@dataclass(frozen=True, slots=True)
class Slot:
    state: str
    key: Key | None


def _scans(fold: Fold, agent_path: Path) -> Iterator[Scanned]:
    """The volumes of the agent's own file where there is one, else those that the log names."""
    if agent_path.is_file():
        settings = load_settings(agent_path)
    else:
        described = [msgspec.convert(v.descriptor, VolumeDescriptor) for v in fold.volumes.values()]
        settings = AgentSettings(
            name="verify",
            command_url="",
            event_url="",
            allowed_roots=[Path(d.path).parent for d in described],
            volumes=described,
        )
    # A volume that is not there yet was never announced either: the agent makes its file before anything else.
    made = [descriptor for descriptor in settings.volumes if Path(descriptor.path).exists()]
    for missing in (d for d in settings.volumes if d not in made):
        yield missing, []
    for descriptor, reports in scan_volumes(msgspec.structs.replace(settings, volumes=made)):
        yield descriptor, (Slot(str(r.state), Key(*r.key) if r.key is not None else None) for r in reports)


def _compare(descriptor: VolumeDescriptor, slots: Iterable[Slot], fold: Fold, freed: Freed) -> VolumeFinding:
    finding = VolumeFinding(descriptor.id)
    found: Counter[Key] = Counter()
    for slot in slots:
        finding.slots += 1
        if slot.state == "live" and slot.key is not None:
            finding.live += 1
            found[slot.key] += 1
        elif slot.state == "free":
            finding.free += 1
        elif slot.state == "torn":
            finding.torn += 1
    finding.leaked = finding.slots - finding.live - finding.free - finding.torn
    finding.doubled = sorted(key for key, count in found.items() if count > 1)
    volume = fold.volumes.get(descriptor.id)
    logged = {block.key for block in volume.place.blocks} if volume is not None else set()
    excused = freed.keys.get(descriptor.id, set())
    finding.logged = len(logged)
    finding.lost = sorted(logged - found.keys() - excused)
    finding.explained = len((logged - found.keys()) & excused)
    finding.unknown = len(found.keys() - logged)
    return finding


def _table(findings: list[VolumeFinding]) -> Table:
    table = Table(title="Volumes against the log", title_justify="left")
    table.add_column("slots")
    for finding in findings:
        table.add_column(finding.volume, justify="right")
    rows = {
        "in all": [f.slots for f in findings],
        "live": [f.live for f in findings],
        "free": [f.free for f in findings],
        "torn: a put cut off before its acknowledgement": [f.torn for f in findings],
        "in the log": [f.logged for f in findings],
        "unknown to the log": [f.unknown for f in findings],
        "gone as a logged move said": [f.explained for f in findings],
        "lost": [len(f.lost) for f in findings],
        "doubled": [len(f.doubled) for f in findings],
        "leaked": [f.leaked for f in findings],
    }
    for name, figures in rows.items():
        table.add_row(name, *(f"{figure:,}" for figure in figures))
    return table
