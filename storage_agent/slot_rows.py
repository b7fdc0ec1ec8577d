"""Headers of many slots as rows of one array, so that a million of them are saved, loaded and counted at once. Pure."""

from __future__ import annotations

import struct
from collections.abc import Iterable

import msgspec
import numpy as np
import numpy.typing as npt

from event_plane.schema import Namespace
from storage_agent.block_header import BlockHeader
from storage_agent.errors import BlockFormatError
from storage_agent.port import BlockKey
from storage_agent.shards import BlockLayout, ShardSpan

ROW = np.dtype(
    [
        ("namespace_id", "<u8"),
        ("hash_lo", "<u8"),
        ("hash_hi", "<u8"),
        ("group", "u1"),
        ("reserved", "u1"),
        ("block_tokens", "<u2"),
        ("depth", "<u4"),
        ("parent_lo", "<u8"),
        ("parent_hi", "<u8"),
        ("payload_bytes", "<u4"),
        ("shard_bytes", "<u4"),
        ("shard_first", "<u2"),
        ("shard_count", "<u2"),
        ("namespace", "<u4"),
        ("checksum", "<u8"),
        ("generation", "<u8"),
        ("layout", "<u4"),
        ("page", "<u4"),
    ]
)
"""96 bytes. A row without payload bytes is a free slot; `layout` 0 is none. `page`: where it lies, if elsewhere."""
_FIELDS = struct.Struct("<QQQBBHIQQIIHHIQQII")
"""A row's fields: three times as fast to read and write one by as numpy is."""
assert _FIELDS.size == ROW.itemsize
_HEADER_OF = tuple.__new__
"""Of fields in order; half as long as the class's own."""
_FREE_ROW = bytes(_FIELDS.size)
KEY_BYTES = 25
"""The first bytes of a row are its key, as `block_header.pack_key` writes it."""

_MASK64 = 0xFFFF_FFFF_FFFF_FFFF
Rows = npt.NDArray[np.void]


class _Names(msgspec.Struct, frozen=True, array_like=True):
    namespaces: list[Namespace]
    layouts: list[BlockLayout]


class SlotRows:
    """Rows of `len(rows)` slots, with the namespaces and layouts that they name by number. Not thread-safe."""

    def __init__(self, rows: Rows, namespaces: Iterable[Namespace] = (), layouts: Iterable[BlockLayout] = ()) -> None:
        self.rows = rows
        self._packed = rows.view(np.uint8).data
        self.namespaces = list(namespaces)
        self.layouts = list(layouts)
        self._namespace_numbers = {namespace: number for number, namespace in enumerate(self.namespaces)}
        self._layout_numbers = {layout: number for number, layout in enumerate(self.layouts)}

    @classmethod
    def empty(cls, capacity: int) -> SlotRows:
        return cls(np.zeros(capacity, dtype=ROW))

    @classmethod
    def of(cls, capacity: int, headers: Iterable[BlockHeader]) -> SlotRows:
        made = cls.empty(capacity)
        for header in headers:
            made.set(header)
        return made

    @classmethod
    def unpack(cls, rows: memoryview, names: memoryview) -> SlotRows:
        """What `pack` made, whole. Raises `BlockFormatError` for anything else."""
        try:
            known = msgspec.msgpack.decode(names, type=_Names)
            return cls(np.frombuffer(rows, dtype=ROW).copy(), known.namespaces, known.layouts)
        except (msgspec.MsgspecError, ValueError) as error:
            raise BlockFormatError(f"rows of slots cannot be read: {error}") from error

    def pack(self) -> tuple[memoryview, bytes]:
        """The rows, without a copy, and the names that they use."""
        names = msgspec.msgpack.encode(_Names(self.namespaces, self.layouts))
        return self.rows.view(np.uint8).data, names

    def __len__(self) -> int:
        return len(self.rows)

    def set(self, header: BlockHeader) -> None:
        """Write the row of `header.slot`."""
        key, span = header.key, header.span
        shard_bytes, first, count = (span.shard_bytes, span.first, span.count) if span is not None else (0, 0, 0)
        _FIELDS.pack_into(
            self._packed, header.slot * _FIELDS.size,
            key.namespace_id, key.sequence_hash & _MASK64, key.sequence_hash >> 64, key.group, 0,
            header.block_tokens, header.depth, header.parent_hash & _MASK64, header.parent_hash >> 64,
            header.payload_bytes, shard_bytes, first, count, self._namespace_number(header.namespace),
            header.payload_checksum, header.generation, self._layout_number(header.layout), 0,
        )  # fmt: skip

    def clear(self, slot: int) -> None:
        self._packed[slot * _FIELDS.size : (slot + 1) * _FIELDS.size] = _FREE_ROW

    def header(self, slot: int, key: BlockKey | None = None) -> BlockHeader:
        """What a live slot holds; `key` where the caller knows it."""
        (
            namespace_id, hash_lo, hash_hi, group, _, block_tokens, depth, parent_lo, parent_hi, payload_bytes,
            shard_bytes, first, count, namespace, checksum, generation, layout, _,
        ) = _FIELDS.unpack_from(self._packed, slot * _FIELDS.size)  # fmt: skip
        return _HEADER_OF(
            BlockHeader,
            (
                slot,
                key if key is not None else BlockKey(namespace_id, group, hash_hi << 64 | hash_lo),
                self.namespaces[namespace],
                parent_hi << 64 | parent_lo,
                depth,
                block_tokens,
                payload_bytes,
                checksum,
                generation,
                ShardSpan(shard_bytes, first, count) if count else None,
                self.layouts[layout - 1] if layout else None,
            ),
        )

    def live_slots(self) -> npt.NDArray[np.intp]:
        return np.flatnonzero(self.rows["payload_bytes"])

    def packed_keys(self, slots: npt.NDArray[np.intp]) -> list[bytes]:
        """Keys of `slots`, as `block_header.pack_key` writes them."""
        live = self.rows if len(slots) == len(self.rows) else self.rows[slots]
        whole = live.view(np.uint8).reshape(-1, ROW.itemsize)
        keys: list[bytes] = np.ascontiguousarray(whole[:, :KEY_BYTES]).view(f"V{KEY_BYTES}").ravel().tolist()
        return keys

    def payload_bytes(self) -> int:
        return int(self.rows["payload_bytes"].sum(dtype=np.uint64))

    def resize(self, capacity: int) -> None:
        """Rows past the end are dropped, rows to come are free."""
        resized = np.zeros(capacity, dtype=ROW)
        kept = min(capacity, len(self.rows))
        resized[:kept] = self.rows[:kept]
        self.rows = resized
        self._packed = resized.view(np.uint8).data

    def copy(self) -> SlotRows:
        return SlotRows(self.rows.copy(), self.namespaces, self.layouts)

    def _namespace_number(self, namespace: Namespace) -> int:
        number = self._namespace_numbers.setdefault(namespace, len(self.namespaces))
        if number == len(self.namespaces):
            self.namespaces.append(namespace)
        return number

    def _layout_number(self, layout: BlockLayout | None) -> int:
        if layout is None:
            return 0
        number = self._layout_numbers.setdefault(layout, len(self.layouts))
        if number == len(self.layouts):
            self.layouts.append(layout)
        return number + 1
