"""How a payload is read: as it should be, in one go; else event by event, so that a bad one is counted and skipped."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import Counter

from event_plane.dialects.columns import MALFORMED, BadEventError, Columns, NamespaceRule
from event_plane.schema import Batch, Namespace


class ColumnDialect(ABC):
    """A dialect whose events go into `Columns`. Both ways to read give equal batches of events that are good."""

    name: str

    def __init__(self, name: str, *, namespace: Namespace, hash_root_shared: bool) -> None:
        """`namespace` as configured; `hash_root_shared`: see `NamespaceRule`."""
        self.name = name
        self._namespaces = NamespaceRule(namespace, name, hash_root_shared=hash_root_shared)

    def decode(self, payload: bytes, *, producer: int, epoch: int, sequence: int) -> tuple[Batch, Counter[str]]:
        """See `Dialect.decode`."""
        skipped: Counter[str] = Counter()

        def laid_out(columns: Columns, timestamp_us: int) -> Batch:
            namespace = self._namespaces.of(producer, epoch)
            return columns.batch(
                namespace, producer=producer, epoch=epoch, sequence=sequence, timestamp_us=timestamp_us
            )

        try:
            return laid_out(*self._read_typed(payload)), skipped
        except (*MALFORMED, BadEventError):
            return laid_out(*self._read_each(payload, skipped)), skipped

    @abstractmethod
    def _read_typed(self, payload: bytes) -> tuple[Columns, int]:
        """The events and the payload's time in µs. Raises one of `MALFORMED` or `BadEventError` for any bad event."""

    @abstractmethod
    def _read_each(self, payload: bytes, skipped: Counter[str]) -> tuple[Columns, int]:
        """The same, with bad events counted in `skipped`. Raises `DialectError` for what is no payload at all."""
