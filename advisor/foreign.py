"""Foreign messages on their way to the gate: whose they are, and in which engine's dialect. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Final

from event_plane.dialects.known import DIALECTS, Detector, open_dialect
from event_plane.dialects.protocol import Dialect
from event_plane.schema import Namespace
from event_plane.transport import Message

AUTO: Final = "auto"
OURS: Final = "kvadvisor"
LIKELIEST: Final = "vllm"
"""What an engine is read as until its messages tell its dialect."""
UNTOLD_MESSAGES_MAX: Final = 4_096
"""Messages of one sender that are looked at; one that shows no dialect in so many stays `LIKELIEST`."""
SENDERS_MAX: Final = 65_536
"""Senders whose dialect is remembered; of more, each message is taken for `LIKELIEST`."""


@dataclass(frozen=True, slots=True)
class SourceFacts:
    """What configuration says about a subscription: tenant and model of a foreign stream, and its dialect.

    `dialect` is one of `DIALECTS`, `kvadvisor` for our own batches, or `auto`.
    """

    name: str
    dialect: str = AUTO
    namespace: Namespace = field(default_factory=Namespace)
    hash_root_shared: bool = False


class Senders:
    """Knows the dialect of each sender, which is a source and a topic, written `source/topic`."""

    def __init__(self) -> None:
        self._dialects: dict[tuple[str, str], Dialect] = {}
        self._told: dict[str, str] = {}
        self._looked_at: Counter[str] = Counter()
        self._detector = Detector()

    def told(self) -> dict[str, str]:
        """Dialect by sender, of those that are certain."""
        return dict(self._told)

    def load(self, told: dict[str, str]) -> None:
        """Take up what `told` gave."""
        self._told.update(told)

    def restore(self, name: str, namespaces: Iterable[Namespace]) -> None:
        """Learn from a producer's logged batch how it was read: its namespaces name the dialect."""
        sender = name.rpartition("/")[0]
        for scheme in {namespace.hash_scheme for namespace in namespaces}:
            if scheme == LIKELIEST:
                # It may have been read so for want of knowing better.
                self._looked_at.setdefault(sender, 1)
            elif scheme in DIALECTS and len(self._told) < SENDERS_MAX:
                self._told[sender] = scheme

    def dialect(self, facts: SourceFacts, message: Message) -> tuple[Dialect, bool]:
        """How to read `message`, and whether its sender's earlier ones were read otherwise, and so wrongly."""
        if facts.dialect != AUTO:
            return self._open(facts, facts.dialect), False
        sender = sender_name(facts.name, message)
        told = self._told.get(sender)
        if told is not None:
            return self._open(facts, told), False
        looked_at = self._looked_at[sender]
        found = None if looked_at >= UNTOLD_MESSAGES_MAX else self._detector.detect(message)
        if found is None:
            if sender in self._looked_at or len(self._looked_at) < SENDERS_MAX:
                self._looked_at[sender] += 1
            return self._open(facts, LIKELIEST), False
        self._looked_at.pop(sender, None)
        if len(self._told) < SENDERS_MAX:
            self._told[sender] = found
        return self._open(facts, found), looked_at > 0 and found != LIKELIEST

    def _open(self, facts: SourceFacts, name: str) -> Dialect:
        dialect = self._dialects.get((facts.name, name))
        if dialect is None:
            dialect = open_dialect(name, namespace=facts.namespace, hash_root_shared=facts.hash_root_shared)
            self._dialects[facts.name, name] = dialect
        return dialect


def sender_name(source: str, message: Message) -> str:
    """The part of a foreign producer's name before its last `/`."""
    topic = message.topic.decode("utf-8", "replace")
    return f"{source}/{topic}" if topic else source
