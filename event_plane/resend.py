"""What a publisher remembers of its batches: those it can send again, and how far they are acknowledged. Pure."""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Hashable
from itertools import islice

ACKNOWLEDGERS_MAX = 256
"""Subscribers whose acknowledgements are remembered; the one silent for longest is forgotten first."""


class ResendBuffer:
    """The newest encoded batches, consecutive, bounded by count and by bytes; the newest one always stays."""

    def __init__(self, batches_max: int, bytes_max: int) -> None:
        if batches_max < 1 or bytes_max < 1:
            raise ValueError(f"resend buffer of {batches_max} batches and {bytes_max} bytes: each must be at least 1")
        self._batches_max = batches_max
        self._bytes_max = bytes_max
        self._payloads: deque[bytes] = deque()
        self._first = 0
        self._bytes = 0

    def __len__(self) -> int:
        return len(self._payloads)

    @property
    def payload_bytes(self) -> int:
        """Bytes of what is buffered."""
        return self._bytes

    def append(self, sequence: int, payload: bytes) -> None:
        """Remember the next batch, forgetting the oldest past a bound."""
        if not self._payloads:
            self._first = sequence
        assert sequence == self._first + len(self._payloads)
        self._payloads.append(payload)
        self._bytes += len(payload)
        while len(self._payloads) > 1 and (len(self._payloads) > self._batches_max or self._bytes > self._bytes_max):
            self._bytes -= len(self._payloads.popleft())
            self._first += 1

    def since(self, sequence: int, count_max: int) -> list[tuple[int, bytes]]:
        """At most `count_max` buffered batches from `sequence` on, with their sequences, in order."""
        start = max(sequence - self._first, 0)
        rest = islice(self._payloads, start, start + count_max)
        return [(self._first + start + i, payload) for i, payload in enumerate(rest)]


class AckWindow:
    """How far behind the slowest acknowledging subscriber is. One that never acknowledged holds nobody back."""

    def __init__(self, batches_max: int) -> None:
        if batches_max < 1:
            raise ValueError(f"window of {batches_max} batches must be at least 1")
        self._batches_max = batches_max
        self._acknowledged: OrderedDict[Hashable, int] = OrderedDict()

    def __len__(self) -> int:
        """Subscribers that count."""
        return len(self._acknowledged)

    @property
    def acknowledged(self) -> int | None:
        """Sequence up to which every subscriber that counts has everything; None where none counts."""
        return min(self._acknowledged.values(), default=None)

    def acknowledge(self, subscriber: Hashable, sequence: int) -> None:
        """Everything up to `sequence` is durable at `subscriber`."""
        self._acknowledged[subscriber] = max(sequence, self._acknowledged.get(subscriber, sequence))
        self._acknowledged.move_to_end(subscriber)
        if len(self._acknowledged) > ACKNOWLEDGERS_MAX:
            self._acknowledged.popitem(last=False)

    def is_full(self, last_sequence: int) -> bool:
        """Whether more than the window lies between the slowest subscriber and `last_sequence`."""
        return any(last_sequence - sequence > self._batches_max for sequence in self._acknowledged.values())

    def forget_stragglers(self, last_sequence: int) -> None:
        """Stop counting the subscribers that keep the window full, until they acknowledge again."""
        for subscriber, sequence in list(self._acknowledged.items()):
            if last_sequence - sequence > self._batches_max:
                del self._acknowledged[subscriber]
