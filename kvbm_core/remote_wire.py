"""What workers tell each other of their registered memory and the blocks in it. Pure.

A frame is eight bytes of magic, the XXH3-64 of the rest, and MessagePack that starts with a version. How it travels is
the user's choice. Notes are short messages that NIXL delivers behind the bytes they speak of.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple, TypeVar

import msgspec

from event_plane.schema import Namespace
from kvbm_core.errors import LayoutFormatError
from kvbm_core.identity import BlockIdentity
from kvbm_core.remote_seal import seal_bytes
from kvbm_core.serialized_layout import BufferPlace, SerializedLayout, decode_layout
from storage_agent.block_header import checksum
from storage_agent.nixl_memory import MemoryPlace
from storage_agent.port import BlockKey

VERSION = 1
_LAYOUT_MAGIC = b"KVNIXLAY"
_SET_MAGIC = b"KVNIXSET"
_CHECKSUM = struct.Struct("<Q")
_U64_MAX = 0xFFFF_FFFF_FFFF_FFFF
_ADDRESS_MAX = 1 << 62
_METADATA_BYTES_MAX = 1 << 20

_Wire = TypeVar("_Wire")


@dataclass(frozen=True, slots=True)
class SerializedNixlBlockLayout:
    """A pool's layout and how to reach it: all that another worker needs to read the right bytes.

    `metadata` is NIXL's own. `seals` holds a seal for each exported block (`remote_seal`), all with `mark`.
    """

    layout: SerializedLayout
    place: MemoryPlace
    metadata: bytes
    mark: int
    seals: BufferPlace

    @property
    def seal_bytes(self) -> int:
        return seal_bytes(self.layout.heads)

    @property
    def seal_count(self) -> int:
        return self.seals.size_bytes // self.seal_bytes

    def seal_address(self, seal: int) -> int:
        return self.seals.address + seal * self.seal_bytes

    def encode(self) -> bytes:
        return _frame(_LAYOUT_MAGIC, self._wire())

    def _wire(self) -> _LayoutWire:
        return _LayoutWire(
            VERSION, self.layout.encode(), self.place.kind, self.place.device, self.metadata, self.mark, self.seals
        )


class ExportedBlock(NamedTuple):
    """Block number `block` of the pool, with the number of its seal and the generation that stands there."""

    block: int
    seal: int
    generation: int
    identity: BlockIdentity


@dataclass(frozen=True, slots=True)
class SerializedBlockSet:
    """Blocks of one worker's pool that peers may read, or write where `writable`."""

    layout: SerializedNixlBlockLayout
    writable: bool
    blocks: tuple[ExportedBlock, ...]

    def encode(self) -> bytes:
        namespaces = list(dict.fromkeys(block.identity.namespace for block in self.blocks))
        numbers = {namespace: number for number, namespace in enumerate(namespaces)}
        blocks = [_block_to_wire(block, numbers[block.identity.namespace]) for block in self.blocks]
        return _frame(_SET_MAGIC, _SetWire(VERSION, self.layout._wire(), self.writable, namespaces, blocks))


def decode_nixl_layout(raw: bytes) -> SerializedNixlBlockLayout:
    """Raises `LayoutFormatError` for bytes that are no such layout, or one that cannot be true."""
    body = _open_frame(raw, _LAYOUT_MAGIC, "a NIXL block layout")
    return _layout_from_wire(_decode(body, _LayoutWire, "a NIXL block layout"))


def decode_block_set(raw: bytes) -> SerializedBlockSet:
    """Raises `LayoutFormatError` for bytes that are no such set, or one that cannot be true."""
    wire = _decode(_open_frame(raw, _SET_MAGIC, "a block set"), _SetWire, "a block set")
    layout = _layout_from_wire(wire.layout)
    blocks = tuple(_block_from_wire(block, wire.namespaces, layout) for block in wire.blocks)
    if len({block.identity.key for block in blocks}) != len(blocks):
        raise LayoutFormatError(f"a block set of {len(blocks)} blocks names one twice: export it again")
    return SerializedBlockSet(layout, wire.writable, blocks)


class WrittenNote(msgspec.Struct, frozen=True, array_like=True, tag="written"):
    """Heads of the whole model from `first_head` on lie in these blocks: (generation, checksum of each head)."""

    mark: int
    first_head: int
    blocks: list[tuple[int, list[int]]]


class GivenUpNote(msgspec.Struct, frozen=True, array_like=True, tag="given_up"):
    """So many heads of the whole model will not be written into the blocks of these generations."""

    mark: int
    first_head: int
    heads: int
    generations: list[int]


Note = WrittenNote | GivenUpNote
_NOTES = msgspec.msgpack.Decoder(Note)


def decode_note(raw: bytes) -> Note | None:
    """None for what is no note: anybody who has the metadata can send one."""
    try:
        return _NOTES.decode(raw)
    except msgspec.MsgspecError:
        return None


def encode_note(note: Note) -> bytes:
    return msgspec.msgpack.encode(note)


class _LayoutWire(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    version: int
    layout: bytes
    kind: Literal["DRAM", "VRAM"]
    device: int
    metadata: bytes
    mark: int
    seals: BufferPlace


class _BlockWire(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """Hashes as low and high 64 bits: MessagePack has no longer integers."""

    block: int
    seal: int
    generation: int
    namespace: int
    group: int
    sequence: tuple[int, int]
    parent: tuple[int, int]
    prefix: tuple[int, int]
    depth: int


class _SetWire(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    version: int
    layout: _LayoutWire
    writable: bool
    namespaces: list[Namespace]
    blocks: list[_BlockWire]


class _Versioned(msgspec.Struct, frozen=True, array_like=True):
    version: int


def _frame(magic: bytes, wire: msgspec.Struct) -> bytes:
    body = msgspec.msgpack.encode(wire)
    return magic + _CHECKSUM.pack(checksum(body)) + body


def _open_frame(raw: bytes, magic: bytes, what: str) -> bytes:
    start = len(magic) + _CHECKSUM.size
    if len(raw) < start or not raw.startswith(magic):
        raise LayoutFormatError(f"{len(raw)} bytes are not {what}: they start with {raw[: len(magic)]!r}")
    body = raw[start:]
    (written,) = _CHECKSUM.unpack(raw[len(magic) : start])
    if written != checksum(body):
        raise LayoutFormatError(f"{len(raw)} bytes of {what} were changed on the way: send them again")
    return body


def _decode(body: bytes, kind: type[_Wire], what: str) -> _Wire:
    try:
        version = msgspec.msgpack.decode(body, type=_Versioned).version
        if version != VERSION:
            raise LayoutFormatError(f"{what} of version {version}: this release reads {VERSION}; update the older")
        return msgspec.msgpack.decode(body, type=kind)
    except msgspec.MsgspecError as error:
        raise LayoutFormatError(f"{len(body)} bytes are not {what}: {error}") from error


def _layout_from_wire(wire: _LayoutWire) -> SerializedNixlBlockLayout:
    found = SerializedNixlBlockLayout(
        decode_layout(wire.layout), MemoryPlace(wire.kind, wire.device), wire.metadata, wire.mark, wire.seals
    )
    _check_range("mark", wire.mark, _U64_MAX)
    _check_range("device", wire.device, 1_023)
    _check_range("metadata bytes", len(wire.metadata), _METADATA_BYTES_MAX)
    _check_range("seals' address", wire.seals.address, _ADDRESS_MAX)
    _check_range("seals' size", wire.seals.size_bytes, _ADDRESS_MAX)
    return found


def _block_to_wire(block: ExportedBlock, namespace: int) -> _BlockWire:
    identity = block.identity
    return _BlockWire(
        block.block,
        block.seal,
        block.generation,
        namespace,
        identity.key.group,
        _halves(identity.key.sequence_hash),
        _halves(identity.parent_hash),
        _halves(identity.prefix_hash),
        identity.depth,
    )


def _block_from_wire(
    wire: _BlockWire, namespaces: Sequence[Namespace], layout: SerializedNixlBlockLayout
) -> ExportedBlock:
    _check_range("block", wire.block, layout.layout.blocks - 1)
    _check_range("seal", wire.seal, layout.seal_count - 1)
    _check_range("generation", wire.generation, _U64_MAX)
    _check_range("namespace", wire.namespace, len(namespaces) - 1)
    _check_range("group", wire.group, 255)
    _check_range("depth", wire.depth, 0xFFFF_FFFF)
    namespace = namespaces[wire.namespace]
    identity = BlockIdentity(
        BlockKey(namespace.namespace_id, wire.group, _whole("sequence hash", wire.sequence)),
        namespace,
        _whole("parent hash", wire.parent),
        _whole("prefix hash", wire.prefix),
        wire.depth,
        layout.layout.page_tokens,
    )
    return ExportedBlock(wire.block, wire.seal, wire.generation, identity)


def _halves(number: int) -> tuple[int, int]:
    return number & _U64_MAX, number >> 64


def _whole(name: str, halves: tuple[int, int]) -> int:
    for half in halves:
        _check_range(name, half, _U64_MAX)
    return halves[1] << 64 | halves[0]


def _check_range(name: str, value: int, high: int) -> None:
    if not 0 <= value <= high:
        raise LayoutFormatError(f"{name} = {value} is not from 0 to {high}: it was not exported by this release")
