"""What the admin view shows of recordings and takes: typed pictures at one moment, and the port that answers."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Literal, Protocol

from advisor.views import View

NAME_PATTERN = r"^[a-z0-9][a-z0-9._-]{0,63}$"
"""Of a recording: the name of its file. It leads nowhere but into the folder."""

RecordingState = Literal["recording", "done", "failed", "cut"]
RecordingFormat = Literal["parquet", "capture", "trace"]


class RequestsView(View):
    """The requests behind a recording's events, or of a trace. `blocks`: different ones; `accesses`: uses of them."""

    requests: int
    accesses: int
    blocks: int
    input_tokens: int
    block_tokens: int
    block_bytes: int
    """Of a whole block; 0: nobody told."""
    span_s: float


class EpochFiguresView(View):
    """One life of a producer. `missing`: sequences that the recording lacks, those declared lost included."""

    epoch: str
    """16 hex digits."""
    first_sequence: int
    last_sequence: int
    batches: int
    events: int
    gaps: int
    missing: int
    duplicates: int
    snapshots: int


class ProducerFiguresView(View):
    name: str
    producer: str
    """16 hex digits."""
    epochs: list[EpochFiguresView]
    """The last ten."""
    epochs_untold: int


class RecordingFiguresView(View):
    """What is in it, as `kvadvisor inspect --requests` counts it. Of a trace, `requests` alone."""

    batches: int
    events: int
    wire_bytes: int
    """Of all batches in the wire format."""
    first_us: int
    last_us: int
    """Times of reception where they are known, else the producers'; 0: none."""
    kinds: dict[str, int]
    """Batches by kind."""
    types: dict[str, dict[str, int]]
    """Events by type and tier."""
    locations: dict[str, int]
    """Events by storage location: the hundred with most."""
    namespaces: dict[str, int]
    """Events by `tenant/model` and what else is said of a namespace, likewise."""
    producers: list[ProducerFiguresView]
    """The first hundred."""
    producers_untold: int
    missing: int
    duplicates: int
    not_used: dict[str, int]
    """What could not be used, by reason."""
    requests: RequestsView


class RecordingView(View):
    name: str
    state: RecordingState
    """`cut`: what wrote it ended before it was whole; it cannot be read."""
    format: RecordingFormat | None
    """None: not known yet, or none that can be read."""
    note: str
    """Why it failed, or what it lacks; empty where all is well."""
    size_bytes: int
    """While it is recorded: of its file so far, and of what waits in memory for its next group, before it is packed."""
    events: int | None
    """None where the file does not say so itself: of a capture or a trace until they are counted (`figures`)."""
    batches: int | None
    from_position: int | None
    """Positions of its first and last batch: of the log that it was recorded from, else its own. None: not told."""
    to_position: int | None
    missed_entries: int
    """That retention had dropped from the log before they were recorded."""
    started_us: int
    """0: not known."""
    changed_us: int
    """When its file was last written."""
    actor: str
    """Who started or sent it; empty: not known, as after a restart."""


class RecordingDetailView(View):
    recording: RecordingView
    figures: RecordingFiguresView | None
    """None: they are being counted, or cannot be."""
    figures_note: str
    """Why there are none."""


class AdvisorUpload(Protocol):
    """A file that is being taken in. Used by one caller at a time; ends with `finish` or `discard`.

    Raises `advisor.recording_shelf.NoRoom` for a full disk.
    """

    def write(self, content: bytes) -> None:
        """Raises `advisor.recording_shelf.TooLarge` past the limit."""

    def finish(self) -> RecordingView:
        """Reads the whole of it, and then gives it its name; takes as long as that.

        Raises `event_plane.errors.RecordingError` for what is no recording: nothing is left of it then.
        """

    def discard(self) -> None:
        """Leave nothing of it, while `finish` runs too. Idempotent, and nothing after `finish`."""


class AdvisorRecordings(Protocol):
    """Raises `advisor.errors.NothingSuch` and `ActionRefused`; `actor` is logged."""

    @property
    def upload_bytes_max(self) -> int: ...
    def list(self) -> Sequence[RecordingView]:
        """Newest first."""

    def get(self, name: str) -> RecordingDetailView: ...
    def start(self, actor: str, name: str, *, seconds: float | None, events: int | None) -> RecordingView:
        """Records the log from here on, until it is stopped, or for so many seconds or events."""

    def stop(self, actor: str, name: str) -> RecordingView:
        """Returns when its file is whole."""

    def file(self, name: str) -> Path:
        """Of one that is whole."""

    def upload(self, actor: str, name: str) -> AdvisorUpload: ...
    def delete(self, actor: str, name: str) -> RecordingView:
        """What was deleted."""
