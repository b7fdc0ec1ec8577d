"""What one payload shows of the engine that wrote it. Pure, and told from the payload alone."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Final

import msgspec

from event_plane.dialects import sglang, vllm
from event_plane.dialects.block_events import REMOVED, STORED
from event_plane.dialects.columns import MALFORMED
from event_plane.dialects.dynamo import strip_header

_I64_MAX: Final = (1 << 63) - 1
_MEDIUM: Final = {STORED: 6, REMOVED: 2}
"""Where the medium stands in an event that is an array, its tag counted, in both engines."""
_VLLM_ALONE: Final = ((8, list), (9, int))
"""Where an array has vLLM's extra keys and group; SGLang has texts there."""
_VLLM_FIELDS: Final = frozenset(vllm.FIELDS[STORED]) - frozenset(sglang.FLAVOUR.stored)
_SGLANG_FIELDS: Final = frozenset(sglang.FLAVOUR.stored) - frozenset(vllm.FIELDS[STORED])
_VLLM_MEDIA: Final = frozenset({"CPU", "FS", "OBJ", "STORAGE"})
_SGLANG_MEDIA: Final = frozenset({"CPU_PINNED", "DISK", "EXTERNAL"})


@dataclass(frozen=True, slots=True)
class Clue:
    """`dialect` where the form alone tells it. Else `block_events` says that the frames are vLLM's or SGLang's,
    `shown` whose marks its events bear and `hashes` how many blocks they name."""

    dialect: str | None = None
    block_events: bool = False
    shown: frozenset[str] = frozenset()
    hashes: int = 0


def clues(payload: bytes) -> Clue:
    """Nothing at all where the payload is of no known form."""
    try:
        inside = strip_header(payload)
        if inside[:64].lstrip()[:1] in (b"{", b"["):
            return Clue(_of_json(msgspec.json.decode(inside)))
        return _of_messagepack(msgspec.msgpack.decode(inside))
    except MALFORMED:
        return Clue()


def _of_json(read: Any) -> str | None:
    match read:
        case {"publisher_id": _, "payload": _}:
            return "dynamo"
        case {"event_id": _, "data": _} | [{"event_id": _, "data": _}, *_]:
            return "trtllm"
    return None


def _of_messagepack(read: Any) -> Clue:
    match read:
        case {"publisher_id": _, "payload": _}:
            return Clue("dynamo")
        case [{"Create": [*_]} | {"Remove": [*_]} | "Shutdown", bytes() | int()]:
            return Clue("dynamo-kvbm")
        case [int() | float() | None, [{"event_type": _}, *_], *_]:
            return Clue("mooncake")
        case [int() | float() | None, [*events], *rest]:
            return _of_block_events(events, ranked=bool(rest))
    return Clue()


def _of_block_events(events: list[Any], *, ranked: bool) -> Clue:
    shown: set[str] = set()
    hashes = 0
    # Without a rank it is 0.9.0 or 0.9.3 of vLLM, whose hashes were Python's own and signed: as SGLang's always are.
    if events and not ranked:
        shown.add("vllm")
    for event in events:
        match event:
            case {"type": str(tag), **fields}:
                shown |= _shown_by_fields(fields)
                medium, given = fields.get("medium"), fields.get("block_hashes")
            case [str(tag), given, *fields]:
                shown |= _shown_by_length(tag, len(event), event)
                at = _MEDIUM.get(tag, len(event))
                medium = event[at] if at < len(event) else None
            case _:
                continue
        named = given if isinstance(given, list) else []
        hashes += len(named)
        shown |= _shown_by_hashes(named, signed_says_sglang=ranked) | _shown_by_medium(medium)
    return Clue(block_events=True, shown=frozenset(shown), hashes=hashes)


def _shown_by_fields(fields: Mapping[Any, Any]) -> set[str]:
    shown = {"vllm"} if not _VLLM_FIELDS.isdisjoint(fields) else set()
    if not _SGLANG_FIELDS.isdisjoint(fields) or _are_pairs(fields.get("token_ids")):
        shown.add("sglang")
    return shown


def _shown_by_length(tag: str, length: int, event: list[Any]) -> set[str]:
    """An array longer than SGLang writes; one with token ids in pairs."""
    longest = {STORED: len(sglang.FLAVOUR.stored), REMOVED: len(sglang.FLAVOUR.removed)}
    shown = {"vllm"} if tag in longest and length > longest[tag] + 1 else set()
    if tag == STORED and length > 3 and _are_pairs(event[3]):
        shown.add("sglang")
    if tag == STORED and any(length > at and isinstance(event[at], kind) for at, kind in _VLLM_ALONE):
        shown.add("vllm")
    return shown


def _are_pairs(token_ids: object) -> bool:
    return isinstance(token_ids, list) and bool(token_ids) and isinstance(token_ids[0], list)


def _shown_by_hashes(hashes: Iterable[object], *, signed_says_sglang: bool) -> set[str]:
    shown = set()
    for each in hashes:
        if isinstance(each, bytes) or (isinstance(each, int) and each > _I64_MAX):
            shown.add("vllm")
        elif isinstance(each, int) and each < 0 and signed_says_sglang:
            shown.add("sglang")
    return shown


def _shown_by_medium(medium: object) -> set[str]:
    if not isinstance(medium, str):
        return set()
    shown = {"vllm"} if medium.upper() in _VLLM_MEDIA else set()
    return shown | ({"sglang"} if medium.upper() in _SGLANG_MEDIA else set())
