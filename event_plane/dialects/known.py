"""The dialects by name, and how a foreign producer's is told from its messages."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from event_plane.dialects.detection import Clue, clues
from event_plane.dialects.dynamo import DynamoDialect
from event_plane.dialects.dynamo_kvbm import DynamoKvbmDialect
from event_plane.dialects.mooncake import MooncakeDialect
from event_plane.dialects.protocol import Dialect
from event_plane.dialects.sglang import SglangDialect
from event_plane.dialects.trtllm import TrtllmDialect
from event_plane.dialects.vllm import VllmDialect
from event_plane.errors import DialectError
from event_plane.schema import Namespace
from event_plane.transport import Message

DIALECTS: Final[dict[str, Callable[..., Dialect]]] = {
    "vllm": VllmDialect,
    "sglang": SglangDialect,
    "trtllm": TrtllmDialect,
    "dynamo": DynamoDialect,
    "dynamo-kvbm": DynamoKvbmDialect,
    "mooncake": MooncakeDialect,
}

SENDERS_MAX: Final = 4096
"""Senders whose dialect is still looked for; past it the one that was seen first is begun anew."""
HASHES_MAX: Final = 256
"""Block hashes without a clue after which a sender is taken for vLLM: SGLang's would have had a negative one."""


def open_dialect(name: str, *, namespace: Namespace, hash_root_shared: bool = False) -> Dialect:
    """The dialect `name`, of an engine with tenant, model and revision of `namespace`. Raises `DialectError`."""
    opening = DIALECTS.get(name)
    if opening is None:
        raise DialectError(f"there is no dialect {name!r}: choose one of {', '.join(DIALECTS)}")
    return opening(namespace=namespace, hash_root_shared=hash_root_shared)


class Detector:
    """Tells each sender's dialect. A sender is a source and a topic; what it showed is kept until it can be told.

    Whoever asks keeps what was told: a sender that was is begun anew.
    """

    def __init__(self) -> None:
        self._seen: dict[tuple[str, bytes], tuple[set[str], int]] = {}

    def detect(self, message: Message) -> str | None:
        """Name of the dialect; None where `message`, and what came before from its sender, cannot tell it yet.

        vLLM and SGLang write the same frames: it takes a field or hash that only one of them has. One that shows both
        engines' is never told, and needs its dialect configured.
        """
        found: Clue = clues(message.payload)
        if found.dialect is not None:
            return found.dialect
        if not found.block_events:
            return None
        sender = (message.source, message.topic)
        shown, hashes = self._seen.pop(sender, (set(), 0))
        shown |= found.shown
        hashes += found.hashes
        if len(shown) == 1:
            return next(iter(shown))
        if not shown and hashes >= HASHES_MAX:
            return "vllm"
        if len(self._seen) >= SENDERS_MAX:
            del self._seen[next(iter(self._seen))]
        self._seen[sender] = (shown, hashes)
        return None
