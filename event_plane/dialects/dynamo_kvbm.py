"""Events of Dynamo's block manager (its logical layer, subject `kvbm.events`): which blocks one instance registered.

A payload is the positional MessagePack `[change, instance_id]`: change is `{"Create": [hash]}`, `{"Remove": [hash]}` or
`"Shutdown"`; hashes and the id are 16 bytes big-endian. A positional lineage hash, high to low: mode (2 bits), position
(8, 16 or 24 bits by mode), the block's own u64, low bits of its parent's (54, 46 or 38).

The events tell no tier; the block manager's own memory is the host's, so they are kept in G2.
"""

from __future__ import annotations

from collections import Counter
from typing import Any, Final, Literal

import msgspec
import numpy as np

from event_plane.dialects.columns import MALFORMED, BadEventError, Columns, Halves, Places, checked_hashes, halves
from event_plane.dialects.protocol import Origin
from event_plane.dialects.reading import ColumnDialect
from event_plane.errors import DialectError
from event_plane.schema import Namespace, Tier
from event_plane.transport import Message

LOCATION: Final = "kvbm"
HASH_BYTES: Final = 16
PARENT_BITS: Final = (54, 46, 38)
"""By mode; the position has the rest of 62."""
_MODE_SHIFT: Final = np.uint64(62)


class _Change(msgspec.Struct, gc=False, forbid_unknown_fields=True):
    Create: list[bytes] | None = None
    Remove: list[bytes] | None = None


class _Payload(msgspec.Struct, array_like=True):
    change: _Change | Literal["Shutdown"]
    instance_id: bytes


class _Sender(msgspec.Struct, array_like=True):
    change: msgspec.Raw
    instance_id: bytes


_PAYLOADS: Final = msgspec.msgpack.Decoder(_Payload)
_SENDERS: Final = msgspec.msgpack.Decoder(_Sender)


class DynamoKvbmDialect(ColumnDialect):
    """See `Dialect`."""

    def __init__(self, *, namespace: Namespace, hash_root_shared: bool = False) -> None:
        super().__init__("dynamo-kvbm", namespace=namespace, hash_root_shared=hash_root_shared)

    def origin(self, message: Message) -> Origin:
        """The instance; the payload has no number, so the transport's counts. Raises `DialectError`."""
        return Origin(_sender(message.payload).instance_id.hex(), message.transport_sequence)

    def _read_typed(self, payload: bytes) -> tuple[Columns, int]:
        change = _PAYLOADS.decode(payload).change
        columns = Columns("Dynamo KVBM")
        if isinstance(change, str):
            columns.clear()
        elif (change.Create is None) == (change.Remove is None):
            raise BadEventError("unknown event type")
        else:
            _add(columns, change.Create, change.Remove)
        return columns, 0

    def _read_each(self, payload: bytes, skipped: Counter[str]) -> tuple[Columns, int]:
        """A payload is one event: it is read whole, or counted."""
        change = _sender(payload).change
        columns = Columns("Dynamo KVBM")
        try:
            _add_checked(columns, msgspec.msgpack.decode(change))
        except BadEventError as reason:
            skipped[str(reason)] += 1
        except MALFORMED as error:
            raise DialectError(
                f"change of a {len(payload)}-byte Dynamo KVBM payload cannot be read: {error}"
            ) from error
        return columns, 0


def _sender(payload: bytes) -> _Sender:
    try:
        return _SENDERS.decode(payload)
    except MALFORMED as error:
        raise DialectError(f"{len(payload)} bytes are no Dynamo KVBM payload [change, instance_id]: {error}") from error


def _add(columns: Columns, created: list[bytes] | None, removed: list[bytes] | None) -> None:
    hashes = created or removed
    if not hashes:
        raise BadEventError("no hashes")
    if set(map(len, hashes)) != {HASH_BYTES}:
        raise BadEventError("bad hash")
    place = columns.place(Tier.G2, LOCATION)
    if not created:
        columns.remove(hashes, place)
        return
    columns.store_tree(hashes, place, lineage)


def _add_checked(columns: Columns, change: Any) -> None:
    match change:
        case "Shutdown":
            columns.clear()
        case {"Create": created} if len(change) == 1:
            hashes = _checked_bytes(created)
            lineage(*halves(hashes))
            _add(columns, hashes, None)
        case {"Remove": removed} if len(change) == 1:
            _add(columns, None, _checked_bytes(removed))
        case _:
            raise BadEventError("unknown event type")


def _checked_bytes(given: object) -> list[bytes]:
    hashes = checked_hashes(given)
    if any(not isinstance(each, bytes) for each in hashes):
        raise BadEventError("bad hash")
    return [each for each in hashes if isinstance(each, bytes)]


def lineage(low: Halves, high: Halves) -> tuple[Places, Places]:
    """Positions, and by block where in the same arrays its parent is, -1 where it is not.

    Raises `BadEventError` for a hash of an unknown mode.
    """
    modes = (high >> _MODE_SHIFT).astype(np.int64)
    if (modes >= len(PARENT_BITS)).any():
        raise BadEventError("bad hash")
    parent_bits = np.array(PARENT_BITS, np.uint64)[modes]
    masks = (np.uint64(1) << parent_bits) - np.uint64(1)
    positions = (high >> parent_bits) & (np.uint64(1) << (np.uint64(62) - parent_bits)) - np.uint64(1)
    own = (high & masks) << (np.uint64(64) - parent_bits) | low >> parent_bits
    return positions.astype(np.int64), _parents(positions, own, parent_bits, low & masks)


def _parents(positions: Halves, own: Halves, parent_bits: Halves, parent_low: Halves) -> Places:
    """A parent stands one position before and ends in the bits that its child tells of it."""
    parents = np.full(len(positions), -1, np.int64)
    for bits in PARENT_BITS if parent_bits.min() < parent_bits.max() else (int(parent_bits[0]),):
        mask = np.uint64((1 << bits) - 1)
        shift = np.uint64(bits)
        keys = (positions + np.uint64(1)) << shift | own & mask
        order = np.argsort(keys, kind="stable")
        wanted = positions << shift | parent_low
        at = np.minimum(np.searchsorted(keys[order], wanted), len(keys) - 1)
        found = (keys[order][at] == wanted) & (parent_bits == bits) & (positions > 0)
        parents[found] = order[at][found]
    return parents
