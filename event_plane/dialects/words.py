"""Our batches as the numbered messages of another engine's stream."""

from __future__ import annotations

from collections.abc import Iterator

from event_plane.dialects.outgoing import Restater, Style, dynamo_payload, in_payloads, vllm_payload
from event_plane.played import Played
from event_plane.schema import Batch


class Words:
    """Says batches in another engine's messages, numbered from 0. Pure but for what `Restater` keeps."""

    def __init__(self, style: Style, topic: bytes, publisher: int = 0, *, json: bool = False) -> None:
        """`publisher` and `json` (else MessagePack) mean something in Dynamo's envelopes alone."""
        self._style = style
        self._topic = topic
        self._publisher = publisher
        self._json = json
        self._restater = Restater(style)
        self._sequence = 0
        self._events = 0

    def say(self, batch: Batch, at_us: int) -> Iterator[Played]:
        """The messages that tell what `batch` changes; `at_us` is when, where it does not say."""
        timestamp_us = batch.timestamp_us or at_us
        for changes in in_payloads(self._restater.take(batch)):
            if self._style == "vllm":
                payload = vllm_payload(changes, timestamp_us)
            else:
                payload = dynamo_payload(
                    changes,
                    timestamp_us,
                    publisher=self._publisher,
                    sequence=self._sequence,
                    first_event=self._events,
                    json=self._json,
                )
            yield Played(timestamp_us, payload, self._sequence, topic=self._topic)
            self._sequence += 1
            self._events += len(changes)

    def nothing(self) -> Played:
        """A message that is never sent: it says what topic the others have."""
        return Played(0, b"", 0, topic=self._topic)
