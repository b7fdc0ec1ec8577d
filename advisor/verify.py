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

from advisor.checkpoint import cut_without_checkpoint, load_newest
from advisor.entries import EntryKind, LogEntry, MoveStep, decode_control
from advisor.errors import AdvisorError
from advisor.fold import Fold, VolumeState
from advisor.index import IndexSize, Key, PlaceKey
from advisor.log import read_decoded
from advisor.log_database import is_begun
from advisor.log_lock import lock_path, require_unlocked
from advisor.moves import FREES_SOURCE, MoveState, Trigger
from advisor.open_log import is_log_at, locked_path, log_place, open_log, settings_at
from advisor.settings import AdvisorSettings
from advisor.turnstile import Turnstile
from event_plane.schema import Batch, EventType, producer_id
from storage_agent.config import AgentSettings, load_settings, scan_volumes, was_closed_in_order
from storage_agent.descriptor import VolumeDescriptor
from storage_agent.inspection import SlotReport

ADVISOR_FILE = "advisor.toml"
AGENT_FILE = "agent.toml"
DEMO_NAME = "demo"
"""What a running demo locks in its folder."""
LOG_FILE = "log.db"
EXAMPLES_MAX = 5
INDEX_BYTES_MAX = 1 << 36
"""Reserved as address space for the index of a checkpoint, whatever the service's limit was."""


class VerifyError(AdvisorError):
    """A folder that cannot be verified."""


class FoundFault(AdvisorError):
    """Blocks are lost, doubled or leaked, or a volume is gone; the table above says which."""

    exit_status = 1


@dataclass(slots=True)
class VolumeFinding:
    """One volume against the log. `unknown`, `torn` and `explained` are no faults.

    `torn`: a put that was cut off before it was acknowledged; its slot is free again at the next start. In a volume
    that was closed in order nothing was cut off, and a slot neither free nor live is `leaked`. `explained`: placed by
    the log and gone, because a switch with source free, or a delete, was logged and carried out before its Remove
    could be.
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
    absent: str = ""
    """Its file, where that is not there though the log places blocks in it; they are not counted as lost."""

    @property
    def faults(self) -> int:
        return len(self.lost) + len(self.doubled) + self.leaked


@dataclass(slots=True)
class Freed:
    """Blocks that a logged step allows to be gone from a volume, until their Remove is folded."""

    keys: dict[str, set[Key]] = field(default_factory=dict)

    def already(self, fold: Fold) -> None:
        """Look at a state whose entries are gone: its moves that are past their switch give excuses."""
        for move in fold.moves.open.values():
            if move.kind in FREES_SOURCE and move.state is MoveState.SWITCHED:
                self.keys.setdefault(move.source, set()).add(move.key)

    def before(self, fold: Fold, entry: LogEntry) -> None:
        """Look at an entry that is about to be folded: a switch gives excuses."""
        if entry.kind is not EntryKind.MOVE:
            return
        step = decode_control(entry.payload)
        if not isinstance(step, MoveStep) or step.trigger != Trigger.SWITCH:
            return
        for move_id in step.move_ids:
            move = fold.moves.open.get(move_id)
            if move is not None and move.kind in FREES_SOURCE:
                self.keys.setdefault(move.source, set()).add(move.key)

    def after(self, fold: Fold, batch: Batch | None) -> None:
        """Look at an entry that was folded: a Remove ends an excuse, so that a later Store there must be found."""
        removed = _removed(batch) if batch is not None else {}
        for volume_id, keys in self.keys.items():
            volume = fold.volumes.get(volume_id)
            if volume is not None and keys:
                keys -= removed.get(volume_id, set())
                keys.difference_update([key for key in keys if not _placed(fold, volume, key)])


def _removed(batch: Batch) -> dict[str, set[Key]]:
    """By location. A block may be removed and stored again in one batch."""
    removed: dict[str, set[Key]] = {}
    for record in batch.records[batch.records["event_type"] == int(EventType.REMOVE)]:
        namespace, location = int(record["namespace"]), int(record["storage_location"])
        if namespace < len(batch.namespace_ids) and location < len(batch.locations):
            sequence_hash = int(record["sequence_hash_hi"]) << 64 | int(record["sequence_hash_lo"])
            key = Key(batch.namespace_ids[namespace], int(record["group"]), sequence_hash)
            removed.setdefault(batch.locations[location], set()).add(key)
    return removed


def _placed(fold: Fold, volume: VolumeState, key: Key) -> bool:
    block = fold.index.get(key)
    return block is not None and block.placed_in(volume.place) is not None


def verify(
    directory: Annotated[Path, typer.Argument(help="What `kvadvisor demo --dir` made, or a service's directory.")],
) -> None:
    """Check a stopped service's log against its volumes: nothing lost, doubled or leaked."""
    console = Console(markup=False)
    if not directory.is_dir():
        raise VerifyError(f"{directory} is no folder: give the one of `demo --dir`, or `directory` of the settings")
    require_unlocked(directory / DEMO_NAME)
    home = next((each for each in (directory, directory / "advisor") if is_log_at(each)), None)
    agent_path = directory / AGENT_FILE
    if home is None and not agent_path.is_file():
        if any(directory.iterdir()) and not lock_path(directory / DEMO_NAME).exists():
            raise VerifyError(f"{directory} holds neither {LOG_FILE} nor {AGENT_FILE}: it was made by something else")
        console.print(f"{directory} holds no log and no volumes yet: nothing can be lost", soft_wrap=True)
        return
    if home is not None:
        require_unlocked(locked_path(settings_at(home)))
    fold, freed = _fold(home)
    findings = [_compare(scanned, fold, freed) for scanned in _scans(fold, agent_path)]
    if home is not None:
        # Had a service begun meanwhile, its moves would look like losses.
        require_unlocked(locked_path(settings_at(home)))
    fold.index.check()
    figures = f"{fold.position} log entries, {len(fold.index)} blocks, {len(fold.moves.open)} moves open"
    console.print(f"{directory}: {figures}", soft_wrap=True)
    if findings:
        console.print(_table(findings))
    for finding in findings:
        for word, keys in (("lost", finding.lost), ("doubled", finding.doubled)):
            for key in keys[:EXAMPLES_MAX]:
                block = f"{key.sequence_hash:032x} of namespace {key.namespace_id:016x}"
                console.print(f"{word} on {finding.volume}: {block}")
    sentences = [
        f"volume {finding.volume}: its file {finding.absent} is not there; put it back,"
        " or start its agent, which makes an empty one"
        for finding in findings
        if finding.absent
    ]
    faults = sum(finding.faults for finding in findings)
    if faults:
        number = "1 fault" if faults == 1 else f"{faults} faults"
        sentences.append(f"{number} in {directory}: keep it as it is and report this, it should not happen")
    if sentences:
        raise FoundFault("\n".join(sentences))
    if fold.position == 0 and any(finding.live for finding in findings):
        console.print(f"{directory} has no log: nothing doubled, nothing leaked, and nobody can say what is lost")
    else:
        console.print("nothing lost, nothing doubled, nothing leaked")


def _fold(home: Path | None) -> tuple[Fold, Freed]:
    """The log in `home`, from its beginning, or from the newest good checkpoint where it was cut."""
    fold, freed = Fold(), Freed()
    if home is None:
        return fold, freed
    settings = settings_at(home)
    place = log_place(settings)
    if settings.log.kind == "sql" and not is_begun(settings.log_path):
        return fold, freed
    log = open_log(settings, read_only=True)
    try:
        if (first := log.first_position()) > 1:
            fold = _from_checkpoint(settings, place, first, log.last_position())
            freed.already(fold)
        for entry, batch in read_decoded(log, place, fold.position + 1):
            freed.before(fold, entry)
            fold.apply(entry, batch)
            freed.after(fold, batch)
        return fold, freed
    finally:
        log.close()


def _from_checkpoint(settings: AdvisorSettings, place: Path | str, first: int, last: int) -> Fold:
    folder = settings.checkpoints_path
    size = IndexSize.for_bytes(INDEX_BYTES_MAX)
    fold, _, passed_over = load_newest(folder, size, last, Turnstile(), first_position=first, set_aside=False)
    if fold.position < first - 1:
        raise cut_without_checkpoint(place, first, folder, passed_over)
    return fold


@dataclass(frozen=True, slots=True)
class Scanned:
    """A volume's slots as they lie on it, to be read once. `in_order`: its last opener closed it."""

    descriptor: VolumeDescriptor
    agent: str
    """Empty where only the log names the volume."""
    in_order: bool
    slots: Iterable[SlotReport]


def _scans(fold: Fold, agent_path: Path) -> Iterator[Scanned]:
    """The volumes of the agent's own file where there is one, else those that the log names."""
    if agent_path.is_file():
        settings = load_settings(agent_path)
    else:
        described = [msgspec.convert(v.descriptor, VolumeDescriptor) for v in fold.volumes.values()]
        settings = AgentSettings(
            name="",
            command_url="",
            event_url="",
            allowed_roots=[Path(d.path).parent for d in described],
            volumes=described,
        )
    # A volume that is not there yet was never announced either: the agent makes its file before anything else.
    for descriptor in settings.volumes:
        if not Path(descriptor.path).exists():
            yield Scanned(descriptor, settings.name, True, [])
            continue
        for _, reports in scan_volumes(msgspec.structs.replace(settings, volumes=[descriptor])):
            yield Scanned(descriptor, settings.name, was_closed_in_order(descriptor, settings), reports)


def _compare(scanned: Scanned, fold: Fold, freed: Freed) -> VolumeFinding:
    finding = VolumeFinding(scanned.descriptor.id)
    found: Counter[Key] = Counter()
    for slot in scanned.slots:
        finding.slots += 1
        if slot.state == "live" and slot.key is not None:
            finding.live += 1
            found[Key(*slot.key)] += 1
        elif slot.state == "free":
            finding.free += 1
        elif scanned.in_order:
            finding.leaked += 1
        else:
            finding.torn += 1
    finding.doubled = sorted(key for key, count in found.items() if count > 1)
    logged = _logged(scanned, fold)
    excused = freed.keys.get(scanned.descriptor.id, set())
    finding.logged = len(logged)
    if logged and not Path(scanned.descriptor.path).exists():
        finding.absent = scanned.descriptor.path
    else:
        finding.lost = sorted(logged - found.keys() - excused)
    finding.explained = len((logged - found.keys()) & excused)
    finding.unknown = len(found.keys() - logged)
    return finding


def _logged(scanned: Scanned, fold: Fold) -> set[Key]:
    """The blocks that the log places on a volume, also before the advisor has seen who owns it."""
    volume = fold.volumes.get(scanned.descriptor.id)
    if volume is not None:
        return _keys_in(fold, volume.place)
    place_key = PlaceKey(producer_id(scanned.agent), scanned.descriptor.tier, scanned.descriptor.id)
    place = fold.index.known_place(place_key)
    return _keys_in(fold, place) if place is not None else set()


def _keys_in(fold: Fold, place: int) -> set[Key]:
    index = fold.index
    return {index.block(row).key for row in index.coldest(place, index.place_figures(place).blocks)}


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
