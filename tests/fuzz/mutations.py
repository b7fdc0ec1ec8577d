"""Mutations that keep a message's structure: a fuzzer gets past magic, lengths and checksums to what lies behind.

Each takes bytes and a seeded source of randomness and gives other bytes; none ever raises. The fuzzer (`run.py`) and
the short run of the test suite (`tests/property/test_fuzz_seeds.py`) share them.
"""

from __future__ import annotations

import random
import struct
from collections.abc import Callable
from typing import Any, Final

import msgspec
from zlib_ng.zlib_ng import crc32

from advisor import segment_format
from event_plane.wire import CRC_OFFSET, HEADER

Mutate = Callable[[bytes, random.Random], bytes]

_EDGES: Final = (
    0, 1, -1, 127, 128, 255, 256, 65_535, 65_536, 2**31, 2**32 - 1, 2**53, 2**63 - 1, 2**63, 2**64 - 1, -(2**63),
)  # fmt: skip
_ODD_VALUES: Final[tuple[Any, ...]] = (
    None, True, False, *_EDGES, 0.5, -1.0, 1e308, float("inf"), "", "GPU", "x" * 300, b"", b"\xff" * 32, b"\x00" * 16,
    [], {}, [[]], [None], {"type": "BlockStored"}, {"": []}, ["AllBlocksCleared"], [[[[[[[[]]]]]]]],
)  # fmt: skip
_HEADER_FIELDS: Final[tuple[tuple[int, str], ...]] = (
    (4, "<B"), (5, "<B"), (6, "<H"), (8, "<Q"), (16, "<Q"), (24, "<Q"), (32, "<Q"), (40, "<Q"), (48, "<I"), (52, "<H"),
    (54, "<H"), (56, "<I"),
)  # fmt: skip
_DEPTH: Final = 3_000
"""Past any recursion limit."""
_DEEP_MESSAGEPACK: Final = msgspec.Raw(b"\x91" * _DEPTH + b"\xc0")
_DEEP_JSON: Final = msgspec.Raw(b"[" * _DEPTH + b"]" * _DEPTH)


def mutate_bytes(raw: bytes, random: random.Random) -> bytes:
    """Flips, overwrites, cuts, doubles or inserts a few bytes."""
    edited = bytearray(raw)
    for _ in range(random.randint(1, 4)):
        at = random.randrange(len(edited) + 1)
        match random.randrange(5):
            case 0 if at < len(edited):
                edited[at] ^= 1 << random.randrange(8)
            case 1 if at < len(edited):
                edited[at] = random.choice((0, 1, 0x7F, 0x80, 0xC1, 0xDD, 0xDF, 0xFF))
            case 2:
                del edited[at : at + random.randint(1, 16)]
            case 3:
                edited[at:at] = edited[at : at + random.randint(1, 64)]
            case _:
                edited[at:at] = random.randbytes(random.randint(1, 8))
    return bytes(edited)


def mutate_messagepack(raw: bytes, random: random.Random) -> bytes:
    """Edits values of a MessagePack message; bytes where it is none, and now and then."""
    return _mutate_tree(raw, random, msgspec.msgpack.decode, msgspec.msgpack.encode, _DEEP_MESSAGEPACK)


def mutate_json(raw: bytes, random: random.Random) -> bytes:
    """As `mutate_messagepack`, of JSON."""
    return _mutate_tree(raw, random, msgspec.json.decode, msgspec.json.encode, _DEEP_JSON)


def mutate_either(raw: bytes, random: random.Random) -> bytes:
    """JSON where it looks like it, MessagePack otherwise."""
    return (mutate_json if raw[:1] in (b"{", b"[") else mutate_messagepack)(raw, random)


def mutate_batch(raw: bytes, random: random.Random) -> bytes:
    """Edits header fields, records or the extension of one of our batches, and makes its CRC right again."""
    if len(raw) < HEADER.size:
        return mutate_bytes(raw, random)
    head, body = bytearray(raw[: HEADER.size]), raw[HEADER.size :]
    count, record_bytes, _, extension_bytes = struct.unpack_from("<IHHI", head, 48)
    records_end = min(count * record_bytes, len(body))
    match random.randrange(4):
        case 0:
            at, form = random.choice(_HEADER_FIELDS)
            bits = 8 * struct.calcsize(form)
            struct.pack_into(form, head, at, random.choice((*_EDGES, random.getrandbits(64))) % (1 << bits))
        case 1:
            body = mutate_bytes(body[:records_end], random) + body[records_end:]
        case 2:
            extension = mutate_messagepack(body[records_end:], random)
            body = body[:records_end] + extension
            struct.pack_into("<I", head, 56, len(extension))
        case _:
            body = mutate_bytes(body, random)
            extension_bytes = max(0, len(body) - records_end)
            struct.pack_into("<I", head, 56, extension_bytes)
    return with_crc(bytes(head) + body)


def with_crc(raw: bytes) -> bytes:
    """A batch whose CRC is that of its bytes."""
    head, body = raw[:CRC_OFFSET], raw[HEADER.size :]
    return head + crc32(body, crc32(head)).to_bytes(4, "little") + body


def mutate_frames(raw: bytes, random: random.Random) -> bytes:
    """Edits one frame of a capture's last message, lengths kept true; bytes otherwise."""
    frames = _last_message(raw)
    if not frames or random.random() < 0.3:
        return mutate_bytes(raw, random)
    which = random.randrange(len(frames))
    frames[which] = mutate_messagepack(frames[which], random)
    return raw + struct.pack("<I", len(frames)) + b"".join(struct.pack("<I", len(f)) + f for f in frames)


def mutate_segment(raw: bytes, random: random.Random) -> bytes:
    """Edits one frame of a log's segment, its length and checksums made right again; bytes now and then."""
    frames = segment_frames(raw)
    if not frames or random.random() < 0.2:
        return mutate_bytes(raw, random)
    which = random.randrange(len(frames))
    (body_bytes, position, first), body = frames[which]
    body = mutate_bytes(body, random)
    match random.randrange(6):
        case 0:
            position = random.choice((*_EDGES, position + 1)) % (1 << 64)
        case 1:
            first = random.choice((*_EDGES, first + 1)) % (1 << 64)
        case 2:
            body_bytes = random.choice(_EDGES) % (1 << 32)
        case _:
            body_bytes = len(body)
    frames[which] = (body_bytes, position, first), body
    return b"".join(segment_head(*head, body) + body for head, body in frames)


def segment_frames(raw: bytes) -> list[tuple[tuple[int, int, int], bytes]]:
    """Of each frame: (bytes after the head, position, first position of the append), and those bytes."""
    frames, at = [], 0
    while at + segment_format.HEAD.size <= len(raw):
        _, body_bytes, position, first, _, _ = segment_format.HEAD.unpack_from(raw, at)
        at += segment_format.HEAD.size
        frames.append(((body_bytes, position, first), raw[at : at + body_bytes]))
        at += body_bytes
    return frames


def segment_head(body_bytes: int, position: int, first: int, body: bytes) -> bytes:
    """A frame's head, its checksums right."""
    head = segment_format.HEAD.pack(segment_format.MAGIC, body_bytes, position, first, crc32(body), 0)[:-4]
    return head + crc32(head).to_bytes(4, "little")


def _last_message(raw: bytes) -> list[bytes]:
    at, frames = 0, []
    try:
        while at < len(raw):
            (count,) = struct.unpack_from("<I", raw, at)
            at += 4
            frames = []
            for _ in range(min(count, 16)):
                (length,) = struct.unpack_from("<I", raw, at)
                frames.append(raw[at + 4 : at + 4 + length])
                at += 4 + length
    except struct.error:
        return []
    return frames


def _mutate_tree(
    raw: bytes,
    random: random.Random,
    decode: Callable[[bytes], Any],
    encode: Callable[[Any], bytes],
    deep: msgspec.Raw,
) -> bytes:
    if random.random() < 0.2:
        return mutate_bytes(raw, random)
    try:
        tree = decode(raw)
        for _ in range(random.randint(1, 3)):
            tree = _edited(tree, random, (*_ODD_VALUES, deep))
        return encode(tree)
    except (msgspec.MsgspecError, TypeError, ValueError, OverflowError, RecursionError):
        return mutate_bytes(raw, random)


def _edited(node: Any, random: random.Random, odd: tuple[Any, ...]) -> Any:
    """`node` with one change somewhere inside it, to or by one of the `odd` values."""
    if isinstance(node, list) and node and random.random() < 0.85:
        at = random.randrange(len(node))
        match random.randrange(8):
            case 0:
                return node[:at] + node[at + 1 :]
            case 1:
                return node[: at + 1] + node[at:]
            case 2:
                return [*node[:at], random.choice(odd), *node[at:]]
        return [*node[:at], _edited(node[at], random, odd), *node[at + 1 :]]
    if isinstance(node, dict) and node and random.random() < 0.85:
        key = random.choice(list(node))
        match random.randrange(8):
            case 0:
                return {k: v for k, v in node.items() if k != key}
            case 1:
                return node | {random.choice(("", "type", "medium", 7)): random.choice(odd)}
        return node | {key: _edited(node[key], random, odd)}
    if isinstance(node, int) and random.random() < 0.5:
        return node + random.choice(_EDGES)
    if isinstance(node, (bytes, str)) and node and random.random() < 0.3:
        return node[: random.randrange(len(node))]
    return random.choice(odd)
