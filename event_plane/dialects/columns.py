"""From a foreign message's events to one batch: records are filled column by column, never one by one.

A dialect adds events with their hashes as the engine wrote them; `batch` lays everything out at once.
"""

from __future__ import annotations

import math
from array import array
from collections.abc import Callable, Mapping, Sequence
from operator import attrgetter
from typing import Any, Final, cast

import msgspec
import numpy as np
import numpy.typing as npt

from event_plane.errors import DialectError
from event_plane.schema import (
    DEPTH_UNKNOWN,
    EXTENSION_BYTES_MAX,
    LOCATION_ALL,
    NAMESPACE_ALL,
    RECORD_COUNT_MAX,
    RECORD_DTYPE,
    TIER_ALL,
    Batch,
    EventType,
    Namespace,
    RecordFlag,
    Records,
)

Hash = int | bytes
"""As an engine writes one: an integer from -2^63 to 2^64 - 1, or bytes of which the last 16 count, big-endian."""
Halves = npt.NDArray[np.uint64]
Places = npt.NDArray[np.int64]
Lineage = Callable[[Halves, Halves], tuple[Places, Places]]
"""From low and high halves to each block's depth, and where among them its parent is, -1 where it is not."""

MALFORMED: Final = (msgspec.MsgspecError, TypeError, ValueError, OverflowError, RecursionError)
"""What msgspec raises for bytes that are no such message."""
BAD_HASH: Final = "bad hash"
US_PER_S: Final = 1e6
US_PER_MS: Final = 1e3
U64_MAX: Final = 0xFFFF_FFFF_FFFF_FFFF
_I64_MIN: Final = -(1 << 63)
_HASH_BYTES: Final = 16
_EVENT_FIELDS: Final = 3
_EXTRA_BYTES_MAX: Final = EXTENSION_BYTES_MAX // 2
_LOCATIONS_MAX: Final = 1_024
_LOCATION_CHARACTERS_MAX: Final = 256
_EVENT_SEQUENCE_SHIFT: Final = 16
"""Foreign events have no numbers: sequence << 16 | place in the batch rises, since a batch has at most 2^16 records."""
_STORE, _REMOVE, _CLEAR = int(EventType.STORE), int(EventType.REMOVE), int(EventType.CLEAR)
_FIRST: Final = int(RecordFlag.FIRST)

assert RECORD_COUNT_MAX <= 1 << _EVENT_SEQUENCE_SHIFT
assert _LOCATIONS_MAX * _LOCATION_CHARACTERS_MAX * 4 + _EXTRA_BYTES_MAX < EXTENSION_BYTES_MAX


class BadEventError(Exception):
    """One event that makes no sense; its text is the reason it is counted under."""


class Columns:
    """Collects the events of one payload. Adding checks the places alone; `batch` checks every hash at once."""

    def __init__(self, dialect: str, flags: int = 0) -> None:
        """`dialect` is named in errors; `flags` are set in every record."""
        self._dialect = dialect
        self._flags = int(flags)
        self._events: list[int] = []
        """By event `_EVENT_FIELDS` numbers: shape, blocks, depth of the first."""
        self._shapes: dict[tuple[int, int, int, int], int] = {}
        """Numbers of what few events of a payload differ in: kind, flags, place and block tokens."""
        self._extra_of: dict[int, int] = {}
        """By event that has one, its extra."""
        self._parents: list[Hash | None] = []
        self._hashes: list[Hash] = []
        self._places: list[tuple[int, int, int, int]] = []
        self._locations: dict[str, int] = {}
        self._extra: list[Mapping[str, Any]] = []
        self._extra_bytes = 0
        self._trees: list[tuple[int, int, Lineage]] = []

    def place(self, tier: int, location: str, group: int = 0) -> int:
        """Number of a place, for `store` and `remove`. Ask once for each place of a payload.

        Raises `BadEventError` where its name, or one location more, would not fit into a batch.
        """
        self._places.append((int(tier), group, self._location(location), 0))
        return len(self._places) - 1

    def _location(self, location: str) -> int:
        if len(location) > _LOCATION_CHARACTERS_MAX:
            raise BadEventError("location too long")
        if len(self._locations) == _LOCATIONS_MAX and location not in self._locations:
            raise BadEventError("too many locations")
        return self._locations.setdefault(location, len(self._locations))

    def store(
        self,
        hashes: Sequence[Hash],
        place: int,
        parent: Hash | None,
        depth: int,
        block_tokens: int,
        extra: int = 0,
        flags: int = 0,
    ) -> None:
        """Each block follows the one before it and the first one `parent`. `depth` is the first one's, 0 at a root."""
        if extra:
            self._extra_of[len(self._parents)] = extra
        self._add((_STORE, self._flags | flags, place, block_tokens), hashes, parent, depth)

    def store_tree(self, hashes: Sequence[Hash], place: int, lineage: Lineage) -> None:
        """Blocks of one event that follow each other in any way, which their hashes tell."""
        self._trees.append((len(self._hashes), len(hashes), lineage))
        self.store(hashes, place, None, DEPTH_UNKNOWN, 0)

    def remove(self, hashes: Sequence[Hash], place: int) -> None:
        self._add((_REMOVE, self._flags, place, 0), hashes, None, DEPTH_UNKNOWN)

    def clear(self, tier: int = TIER_ALL, location: str | None = None) -> None:
        """Everything that the sender placed in `tier` and `location`; None: everywhere."""
        at = LOCATION_ALL if location is None else self._location(location)
        self._places.append((tier, 0, at, NAMESPACE_ALL))
        self._add((_CLEAR, self._flags, len(self._places) - 1, 0), (0,), None, DEPTH_UNKNOWN)

    def _add(self, shape: tuple[int, int, int, int], hashes: Sequence[Hash], parent: Hash | None, depth: int) -> None:
        shapes = self._shapes
        self._events += (shapes.setdefault(shape, len(shapes)), len(hashes), depth)
        self._parents.append(parent)
        self._hashes += hashes

    def extra(self, given: Mapping[str, Any]) -> int:
        """Number of what only a Store says: shown, never part of a key. Left out past half of a batch's extension."""
        said = {name: value for name, value in given.items() if says_something(value)}
        if not said:
            return 0
        if self._extra and self._extra[-1] == said:
            return len(self._extra)
        self._extra_bytes += len(msgspec.msgpack.encode(said))
        if self._extra_bytes > _EXTRA_BYTES_MAX:
            return 0
        self._extra.append(said)
        return len(self._extra)

    def batch(self, namespace: Namespace, *, producer: int, epoch: int, sequence: int, timestamp_us: int) -> Batch:
        """Raises `BadEventError` where a hash is none, `DialectError` for more blocks than a batch holds."""
        if len(self._hashes) > RECORD_COUNT_MAX:
            raise DialectError(
                f"{self._dialect} payload names {len(self._hashes)} blocks, a batch holds {RECORD_COUNT_MAX}"
            )
        first_event_sequence = sequence << _EVENT_SEQUENCE_SHIFT & U64_MAX
        records = self._records(first_event_sequence, timestamp_us)
        named = any(namespace_index == 0 for *_, namespace_index in self._places)
        return Batch(
            producer=producer,
            epoch=epoch,
            sequence=sequence,
            records=records,
            first_event_sequence=first_event_sequence,
            timestamp_us=timestamp_us,
            namespaces=(namespace,) if named else (),
            locations=tuple(self._locations),
            extra=tuple(self._extra),
        )

    def _records(self, first_event_sequence: int, timestamp_us: int) -> Records:
        if not self._events:
            return np.empty(0, RECORD_DTYPE)
        shapes, counts, depths = np.frombuffer(array("q", self._events), np.int64).reshape(-1, _EVENT_FIELDS).T
        starts = counts.cumsum() - counts
        templates = self._templates(timestamp_us)
        records = templates.repeat(len(self._hashes)) if len(templates) == 1 else templates[shapes].repeat(counts)
        records["flags"][starts] |= _FIRST
        for event, extra in self._extra_of.items():
            records["extra"][starts[event]] = extra
        records["event_sequence"] = np.arange(len(records), dtype=np.uint64) + np.uint64(first_event_sequence)
        depth_of_first = depths.repeat(counts)
        records["depth"] = depth_of_first
        low, high = halves(self._hashes)
        clears = 0 if _CLEAR not in self._kinds else np.count_nonzero(records["event_type"] == _CLEAR)
        if np.count_nonzero(low | high) != len(low) - clears:
            raise BadEventError(BAD_HASH)
        records["sequence_hash_lo"], records["sequence_hash_hi"] = low, high
        if _STORE in self._kinds:
            self._link(records, starts, low, high)
            if depths.min() < DEPTH_UNKNOWN:
                _deepen(records, starts.repeat(counts), depth_of_first)
        return records

    def _templates(self, timestamp_us: int) -> Records:
        """By shape, a record that has all that its events have in common."""
        templates = np.zeros(len(self._shapes), RECORD_DTYPE)
        templates["timestamp_us"] = timestamp_us
        for template, (kind, flags, place, block_tokens) in zip(templates, self._shapes, strict=True):
            template["event_type"], template["flags"], template["block_tokens"] = kind, flags, block_tokens
            tier, group, location, namespace = self._places[place]
            template["tier"], template["group"] = tier, group
            template["storage_location"], template["namespace"] = location, namespace
        return templates

    @property
    def _kinds(self) -> set[int]:
        return {kind for kind, *_ in self._shapes}

    def _link(self, records: Records, starts: Places, low: Halves, high: Halves) -> None:
        """Each block's parent: what is given of an event's first, and the block before of the others."""
        given_low, given_high = halves([0 if parent is None else parent for parent in self._parents])
        if np.count_nonzero(given_low | given_high) != len(self._parents) - self._parents.count(None):
            raise BadEventError(BAD_HASH)
        parent_low, parent_high = np.empty_like(low), np.empty_like(high)
        parent_low[1:], parent_high[1:] = low[:-1], high[:-1]
        parent_low[starts], parent_high[starts] = given_low, given_high
        own = parent_low == low
        if own.any():
            _unself(own & (parent_high == high), starts, parent_low, parent_high)
        if self._kinds != {_STORE}:
            others = records["event_type"] != _STORE
            parent_low[others], parent_high[others] = 0, 0
        records["parent_hash_lo"], records["parent_hash_hi"] = parent_low, parent_high
        for start, count, lineage in self._trees:
            tree = slice(start, start + count)
            _plant(records[tree], *lineage(low[tree], high[tree]))


def halves(hashes: Sequence[Hash]) -> tuple[Halves, Halves]:
    """Low and high halves, 0 for a hash of 0. Raises `BadEventError` for one that is none."""
    try:
        low = np.frombuffer(array("Q", cast(Sequence[int], hashes)), np.uint64)
    except OverflowError:
        pass
    except TypeError:
        if set(map(type, hashes)) == {bytes}:
            return _halves_of_bytes(cast(Sequence[bytes], hashes))
    else:
        return low, np.zeros_like(low)
    return _halves_of_mixed(hashes)


def _halves_of_bytes(hashes: Sequence[bytes]) -> tuple[Halves, Halves]:
    if len(set(map(len, hashes))) == 1 and len(hashes[0]) >= _HASH_BYTES and not len(hashes[0]) % 8:
        words = np.frombuffer(b"".join(hashes), ">u8").reshape(len(hashes), -1)
        return words[:, -1].astype(np.uint64), words[:, -2].astype(np.uint64)
    return _halves_of_mixed(hashes)


def _halves_of_mixed(hashes: Sequence[Hash]) -> tuple[Halves, Halves]:
    try:
        low = np.frombuffer(array("q", cast(Sequence[int], hashes)), np.uint64)
    except (OverflowError, TypeError):
        whole = [_whole(each) for each in hashes]
        return (
            np.array([each & U64_MAX for each in whole], np.uint64),
            np.array([each >> 64 for each in whole], np.uint64),
        )
    return low, np.zeros_like(low)


def _whole(given: Hash) -> int:
    """128 bits. An integer is the low half, signed in some engines; of bytes the last 16 count."""
    if isinstance(given, bytes):
        return int.from_bytes(given[-_HASH_BYTES:], "big")
    if _I64_MIN <= given <= U64_MAX:
        return given & U64_MAX
    raise BadEventError(BAD_HASH)


def checked_hash(given: object) -> Hash:
    """`given` where it is a hash, and not 0. Raises `BadEventError`."""
    match given:
        case bool():
            pass
        case int() if given and _I64_MIN <= given <= U64_MAX:
            return given
        case bytes() if any(given[-_HASH_BYTES:]):
            return given
    raise BadEventError(BAD_HASH)


def checked_integer(given: object) -> int:
    """A hash of an engine that writes them as integers alone. Raises `BadEventError`."""
    checked = checked_hash(given)
    if isinstance(checked, bytes):
        raise BadEventError(BAD_HASH)
    return checked


def checked_hashes(given: object) -> list[Hash]:
    """Raises `BadEventError` where it is no list of hashes, or an empty one."""
    match given:
        case [_, *_]:
            return [checked_hash(each) for each in given]
        case []:
            raise BadEventError("no hashes")
    raise BadEventError("bad hashes")


def checked_unsigned(fields: Mapping[Any, Any], name: str, maximum: int) -> int:
    """Field `name`, 0 where it is absent or nil. Raises `BadEventError` naming the field."""
    given = fields.get(name)
    if given is None:
        return 0
    if isinstance(given, bool) or not isinstance(given, int) or not 0 <= given <= maximum:
        raise BadEventError(f"bad {name}")
    return given


def microseconds(timestamp: float | int | None, per_unit: float) -> int:
    """0 where the engine's clock says nothing that makes sense. `per_unit`: µs in the engine's unit."""
    if timestamp is None or not math.isfinite(timestamp) or not 0 <= timestamp * per_unit <= U64_MAX:
        return 0
    return min(round(timestamp * per_unit), U64_MAX)


class NamespaceRule:
    """Namespace of a foreign stream: tenant, model and revision as configured, and the engine's life.

    Nothing else of what is configured is used: the engine says the rest. `hash_root_shared`: hashes mean the same in
    every life of the engine, so its epochs share one namespace.
    """

    def __init__(self, configured: Namespace, hash_scheme: str, *, hash_root_shared: bool) -> None:
        self._shared = hash_root_shared
        self._namespace = Namespace(
            tenant=configured.tenant,
            model=configured.model,
            revision=configured.revision,
            hash_scheme=hash_scheme,
            hash_root=configured.hash_root,
        )

    def of(self, producer: int, epoch: int) -> Namespace:
        if self._shared:
            return self._namespace
        return msgspec.structs.replace(self._namespace, hash_root=f"{producer:016x}/{epoch:x}")


def _unself(
    own: npt.NDArray[np.bool_], starts: Places, parent_low: Halves, parent_high: Halves
) -> None:
    """A block that follows itself is not its own parent: it keeps the one it had, or none that is known."""
    first = set(starts.tolist())
    for at in np.flatnonzero(own).tolist():
        parent_low[at], parent_high[at] = (0, 0) if at in first else (parent_low[at - 1], parent_high[at - 1])


def _deepen(records: Records, starts: Places, depths: Places) -> None:
    """Count depths on from an event's first block, whose place and depth are given; below a root the prefix is known.

    A Remove has no depth.
    """
    known = np.flatnonzero(depths != DEPTH_UNKNOWN)
    records["depth"][known] = (depths + np.arange(len(records)) - starts)[known]
    rooted = np.flatnonzero(depths == 0)
    for half in ("lo", "hi"):
        records[f"prefix_hash_{half}"][rooted] = records[f"sequence_hash_{half}"][starts[rooted]]


def _plant(records: Records, depths: Places, parents: Places) -> None:
    """What is known of the blocks of one tree: parents among them, depths, and that a root is its own prefix."""
    for half in ("lo", "hi"):
        hashes = records[f"sequence_hash_{half}"]
        records[f"parent_hash_{half}"] = np.where(parents < 0, 0, hashes[parents])
        records[f"prefix_hash_{half}"] = np.where(depths == 0, hashes, 0)
    records["depth"] = depths


def says_something(given: Any) -> bool:
    """False for nil, an empty text and a list of nils."""
    if type(given) in (list, tuple):
        return bool(given.count(None) < len(given))
    return given is not None and given != ""


def anything_said(events: Sequence[object], names: Sequence[str]) -> bool:
    """False where `Columns.extra` would find nothing in any of `events`, told without asking it for each."""
    for name in names:
        values = list(map(attrgetter(name), events))
        if values.count(None) < len(values) and any(map(says_something, values)):
            return True
    return False
