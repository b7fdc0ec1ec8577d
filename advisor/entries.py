"""Log entries: the only thing that changes the advisor's state (ARCHITECTURE.md, section 3)."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, Protocol

import msgspec

from storage_agent.port import Fragmentation


class EntryKind(StrEnum):
    BATCH = "batch"
    TICK = "tick"
    MOVE = "move"
    SETTINGS = "settings"
    VOLUME = "volume"
    OPERATOR = "operator"
    MEASUREMENT = "measurement"


class Tick(msgspec.Struct, frozen=True, tag="tick"):
    """Time, as the fold knows it: µs since the epoch. Every tick plans."""

    now_us: int


class OutcomeBatch(msgspec.Struct, frozen=True):
    """Names the batch that holds the events of a move's outcome."""

    producer: int
    epoch: int
    sequence: int


class MoveStep(msgspec.Struct, frozen=True, tag="move"):
    """Moves `move_ids` take `trigger` (see `advisor.moves.TRANSITIONS`). Logged before the next command is sent."""

    trigger: str
    move_ids: list[str]
    reason: str = ""
    outcome: OutcomeBatch | None = None


class DeletionStep(msgspec.Struct, frozen=True, tag="deletion"):
    """An agent was asked for every key of a deletion's wave on a volume: to `missing` of `asked` it answered `miss`.

    The others it still had, `found_bytes` in all, and freed. `reason`: why there is no such answer.
    """

    deletion: str
    volume: str
    wave: int
    asked: int = 0
    missing: int = 0
    found_bytes: int = 0
    reason: str = ""
    outcome: OutcomeBatch | None = None


class CompactionStep(msgspec.Struct, frozen=True, tag="compaction"):
    """A compaction takes `trigger` (see `advisor.compactions.TRANSITIONS`). Logged before the next command is sent.

    Of `advance`, what the command came to, and the volume's figures after it.
    """

    compaction: str
    trigger: str
    reason: str = ""
    moved_blocks: int = 0
    moved_bytes: int = 0
    freed_bytes: int = 0
    extents_before: int = 0
    extents_after: int = 0
    seconds: float = 0.0
    fragmentation: Fragmentation | None = None


class SettingsEntry(msgspec.Struct, frozen=True, tag="settings"):
    """The settings that the fold reads, whole, with the version of the policies they were made for.

    `file`: as the last start read them, of file and environment. `changed`: what an operator set otherwise, by field of
    `policy`, and `shadow`.
    """

    settings: dict[str, Any]
    policy_version: str
    term: int = 0
    file: dict[str, Any] = {}
    changed: dict[str, Any] = {}


class VolumeEntry(msgspec.Struct, frozen=True, tag="volume"):
    """A volume became known, changed, or went (`registered` False). `producer` is its owner's id.

    `away`: why it cannot be used now; empty where it can.
    """

    descriptor: dict[str, Any]
    agent: str
    producer: int
    registered: bool = True
    away: str = ""


class OperatorEntry(msgspec.Struct, frozen=True, tag="operator"):
    """A person's action: `pause` and `resume` of moves, on one volume or (volume empty) on all; `drain` of a volume and
    `undrain`; `watermarks` of one, as fractions of its capacity; `cancel` of one move or
    (move empty) of all that are open; `retry` of an aborted move; `approve` and `reject` of the plan `move` that waits;
    `apply` of one that is made at once; `delete` of a tenant, a namespace or in that a prefix (128-bit hash in hex),
    under the id `deletion`; `abandon` of a deletion; `enable` of a tenant that was deleted.

    Actions of `advisor.fold.NOTED_ACTIONS` change nothing in the fold: they stand in the log for the audit. `detail`:
    what else there is to say of it, for people; never a secret.
    """

    actor: str
    action: str
    volume: str = ""
    move: str = ""
    deletion: str = ""
    tenant: str = ""
    namespace_id: int = 0
    prefix: str = ""
    detail: str = ""
    low_watermark: float = 0.0
    high_watermark: float = 0.0


class LayoutEntry(msgspec.Struct, frozen=True, tag="layout"):
    """How the blocks of a volume lie, as its agent says."""

    volume: str
    fragmentation: Fragmentation


class Measurement(msgspec.Struct, frozen=True, tag="measurement"):
    """What a transfer took: bytes and seconds of one operation (`read`, `write`, `copy`) on a volume."""

    volume: str
    operation: str
    transferred_bytes: int
    seconds: float


Control = (
    Tick
    | MoveStep
    | DeletionStep
    | CompactionStep
    | SettingsEntry
    | VolumeEntry
    | OperatorEntry
    | LayoutEntry
    | Measurement
)

_ENCODER = msgspec.msgpack.Encoder()
_DECODER: msgspec.msgpack.Decoder[Control] = msgspec.msgpack.Decoder(Control)


def encode_control(control: Control) -> bytes:
    """Canonical bytes of every entry but a batch."""
    return _ENCODER.encode(control)


def decode_control(payload: bytes) -> Control:
    """Raises `msgspec.DecodeError`, and nothing else, on bytes that are no control entry."""
    try:
        return _DECODER.decode(payload)
    except RecursionError as error:
        raise msgspec.DecodeError(f"values are nested too deep in {len(payload)} bytes: {error}") from error


_KINDS: dict[type, EntryKind] = {
    Tick: EntryKind.TICK,
    MoveStep: EntryKind.MOVE,
    DeletionStep: EntryKind.MOVE,
    CompactionStep: EntryKind.MOVE,
    SettingsEntry: EntryKind.SETTINGS,
    VolumeEntry: EntryKind.VOLUME,
    OperatorEntry: EntryKind.OPERATOR,
    LayoutEntry: EntryKind.MEASUREMENT,
    Measurement: EntryKind.MEASUREMENT,
}


@dataclass(frozen=True, slots=True)
class NewEntry:
    """An entry to append. `producer`, `epoch` and `sequence` are set for batches alone and are unique together.

    `source` names the subscription a batch came by; `foreign_crc` is the CRC-32 of a foreign payload as received.
    """

    kind: EntryKind
    payload: bytes
    producer: int | None = None
    epoch: int | None = None
    sequence: int | None = None
    source: str = ""
    foreign_crc: int | None = None


@dataclass(frozen=True, slots=True)
class LogEntry:
    """An entry in the log. `recorded_us` is when it was appended, for people; the fold never reads it."""

    position: int
    kind: EntryKind
    payload: bytes
    producer: int | None = None
    epoch: int | None = None
    sequence: int | None = None
    source: str = ""
    foreign_crc: int | None = None
    recorded_us: int = 0


def logged(position: int, entry: NewEntry, recorded_us: int) -> LogEntry:
    """The entry as it stands in the log."""
    return LogEntry(
        position=position,
        kind=entry.kind,
        payload=entry.payload,
        producer=entry.producer,
        epoch=entry.epoch,
        sequence=entry.sequence,
        source=entry.source,
        foreign_crc=entry.foreign_crc,
        recorded_us=recorded_us,
    )


def control_entry(control: Control) -> NewEntry:
    return NewEntry(kind=_KINDS[type(control)], payload=encode_control(control))


@dataclass(frozen=True, slots=True)
class LogStat:
    """Positions as `first_position` and `last_position` give them; bytes on disk, times in µs, 0 where none is kept."""

    first_position: int
    last_position: int
    stored_bytes: int
    first_recorded_us: int
    last_recorded_us: int


class Appendable(Protocol):
    """What the writer thread needs of a log; positions are consecutive from 1."""

    def append(self, entries: Sequence[NewEntry], recorded_us: int) -> int:
        """Append all or nothing in one transaction and return the first position. Durable when it returns.

        Raises `LogError` (a full disk, a second writer, a batch already there): the caller stops, nothing was written.
        """

    def last_position(self) -> int:
        """Of the newest entry ever appended; 0 before the first."""


class EventLog(Appendable, Protocol):
    """An append-only log. Used by one writer thread."""

    def read(self, from_position: int = 1, to_position: int | None = None) -> Iterator[LogEntry]:
        """Entries in order, paged in short transactions."""

    def first_position(self) -> int:
        """Of the oldest entry kept; one more than `last_position` when none is."""

    def prune(self, through: int) -> int:
        """Drop entries up to `through`, or fewer where the log drops in larger pieces. Returns how many went.

        Never drops the newest entry. From any thread. A reader that is under way sees no hole: it ends or goes on.
        """

    def stat(self) -> LogStat:
        """Figures of this moment. From any thread."""

    def next_term(self, started_us: int, host: str, pid: int, version: str) -> int:
        """Record a start of the advisor and return its term, one more than the last."""

    def close(self) -> None:
        """Idempotent."""
