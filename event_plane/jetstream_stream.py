"""The stream that `jetstream://` keeps batches in: its settings, how safe it is, and where in it a batch lies.

Batches of a producer lie on the subject `kvadvisor.<stream>.<producer, 16 hex digits>`, epoch after epoch. Positions
are the stream's own sequences, from 1.
"""

from __future__ import annotations

import asyncio
import urllib.error
import urllib.request
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Final
from urllib.parse import parse_qsl, urlsplit

import msgspec
import structlog
from nats.js import JetStreamContext
from nats.js.api import (
    DiscardPolicy,
    RawStreamMsg,
    RetentionPolicy,
    StorageType,
    StreamConfig,
)
from nats.js.errors import NotFoundError

from event_plane.errors import TransportError
from event_plane.nats_connection import PlaceUnusable
from event_plane.nats_requests import read_headers
from event_plane.transport import PlaneUrl

DUPLICATE_WINDOW_S: Final = 120.0
IN_FLIGHT_MAX: Final = 64
"""Batches sent whose acknowledgement is awaited: how far the stream's order may stray from the producer's."""
API_WAIT_S: Final = 5.0
_MONITOR_WAIT_S = 2.0
_EPOCHS_MAX = 4096
"""Lives of one producer that are looked through for one; then everything is read again, which does no harm."""

_log = structlog.get_logger()


@dataclass(frozen=True, slots=True)
class StreamOptions:
    """What the URL says after `?` about the stream, with the defaults."""

    max_bytes: int = 1 << 30
    """The oldest batches go when the stream holds more."""
    max_age_s: float = 0.0
    """They go likewise at this age; 0: at none."""
    replicas: int = 1
    monitor: str = ""
    """The server's monitoring address, `http://host:8222`: asked whether it syncs before it acknowledges."""


def stream_options(place: PlaneUrl) -> StreamOptions:
    """Raises `TransportError` naming the option that is unknown or out of range."""
    given = dict(parse_qsl(place.query, keep_blank_values=True))
    known = StreamOptions.__dataclass_fields__
    if unknown := next((name for name in given if name not in known), None):
        raise TransportError(f"event URL {place} has unknown option {unknown!r}: use {', '.join(known)}")
    try:
        options = msgspec.convert(given, StreamOptions, strict=False)
    except msgspec.ValidationError as error:
        raise TransportError(f"event URL {place} has an option that cannot be read: {error}") from error
    if options.max_bytes < 1 or options.max_age_s < 0 or not 1 <= options.replicas <= 5:
        raise TransportError(f"event URL {place}: max_bytes is 1 or more, max_age_s 0 or more, replicas 1 to 5")
    if options.monitor and urlsplit(options.monitor).scheme not in ("http", "https"):
        raise TransportError(f"event URL {place}: monitor {options.monitor!r} is no http:// or https:// address")
    return options


def subject_of(stream: str) -> str:
    """What `batch_subject` and `request_subject` of a stream begin with."""
    return f"kvadvisor.{stream}"


def stream_config(stream: str, options: StreamOptions) -> StreamConfig:
    """The stream as we make it."""
    return StreamConfig(
        name=stream,
        subjects=[f"{subject_of(stream)}.*"],
        storage=StorageType.FILE,
        retention=RetentionPolicy.LIMITS,
        discard=DiscardPolicy.OLD,
        max_bytes=options.max_bytes,
        max_age=options.max_age_s,
        max_msgs=-1,
        max_msgs_per_subject=-1,
        max_consumers=-1,
        duplicate_window=min(DUPLICATE_WINDOW_S, options.max_age_s or DUPLICATE_WINDOW_S),
        num_replicas=options.replicas,
        allow_direct=True,
        deny_delete=False,
    )


_NEEDED: Final = ("subjects", "storage", "retention", "discard", "allow_direct")
"""Settings without which a stream loses what it acknowledged, or cannot be read as we do."""
_WISHED: Final = ("max_bytes", "max_age", "max_msgs", "max_msgs_per_subject", "duplicate_window", "num_replicas")


@dataclass(frozen=True, slots=True)
class Differences:
    """Settings of an existing stream that are not ours, each as `name is X, not Y`. Those in `fatal` forbid its use."""

    fatal: tuple[str, ...] = ()
    tolerated: tuple[str, ...] = ()


def differences(found: StreamConfig, wanted: StreamConfig) -> Differences:
    """How a stream that is there differs from the one that we would make."""

    def differing(names: tuple[str, ...]) -> tuple[str, ...]:
        return tuple(
            f"{name} is {_said(getattr(found, name))}, not {_said(getattr(wanted, name))}"
            for name in names
            if (getattr(found, name) or 0) != (getattr(wanted, name) or 0)
        )

    return Differences(differing(_NEEDED), differing(_WISHED))


def _said(value: object) -> object:
    return getattr(value, "value", value)


async def ensure_stream(js: JetStreamContext, stream: str, options: StreamOptions) -> tuple[str, ...]:
    """Make the stream unless it is there. Returns what differs of one that is there and may.

    Raises `PlaceUnusable` for a stream that cannot be used as it is, and nats-py's errors.
    """
    wanted = stream_config(stream, options)
    try:
        info = await js.stream_info(stream)
    except NotFoundError:
        info = await js.add_stream(wanted)
    found = differences(info.config, wanted)
    if found.fatal:
        raise PlaceUnusable(
            f"stream {stream} was made with other settings ({'; '.join(found.fatal)}): name another stream, or delete"
            " this one if nothing in it is needed"
        )
    return found.tolerated


def sync_warning(monitor: str) -> str:
    """Why a batch that the server acknowledged may still be lost, and what to do; empty where it cannot. Does I/O."""
    remedy = "set `jetstream { sync_interval: always }` in its configuration"
    if not monitor:
        return (
            "whether the NATS server syncs to disk before it acknowledges cannot be told from here: "
            f"{remedy}, and add ?monitor=http://host:8222 to the URL to have it checked"
        )
    address = f"{monitor.rstrip('/')}/varz"
    try:
        with urllib.request.urlopen(address, timeout=_MONITOR_WAIT_S) as answer:
            varz = msgspec.json.decode(answer.read(1 << 20), type=_Varz)
    except (OSError, urllib.error.URLError, msgspec.MsgspecError, ValueError) as error:
        return f"the NATS server's monitoring at {address} does not say whether it syncs ({error}): {remedy}"
    config = varz.jetstream.config
    if config.sync_always:
        return ""
    return (
        f"the NATS server acknowledges before its fsync, which comes every {config.sync_interval / 1e9:.0f} s: what it"
        f" took since is lost with its power; {remedy}"
    )


class _StoreConfig(msgspec.Struct):
    sync_always: bool = False
    sync_interval: int = 0


class _StoreVarz(msgspec.Struct):
    config: _StoreConfig = msgspec.field(default_factory=_StoreConfig)


class _Varz(msgspec.Struct):
    """The part of nats-server's `/varz` that is read here."""

    jetstream: _StoreVarz


@dataclass(frozen=True, slots=True)
class Stored:
    """A batch in the stream: its position, and which one of its producer it is."""

    position: int
    epoch: int
    sequence: int
    payload: bytes


NextStored = Callable[[int], Awaitable[Stored | None]]
"""The first batch of one producer at or past a position; None where there is none."""


def next_stored(js: JetStreamContext, stream: str, subject: str) -> NextStored:
    """Reads `stream` through its direct interface. A message that is no batch of ours is stepped over."""

    async def read(position: int) -> Stored | None:
        while True:
            try:
                message: RawStreamMsg = await js.get_msg(
                    stream, seq=max(position, 1), subject=subject, next=True, direct=True
                )
            except NotFoundError:
                return None
            identity = read_headers(message.headers)
            assert message.seq is not None
            if identity is not None:
                return Stored(message.seq, identity[1], identity[2], message.data or b"")
            position = message.seq + 1

    return read


async def first_unlogged(read: NextStored, epoch: int, sequence: int, end: int) -> int:
    """Where to go on reading one producer whose batch (epoch, sequence) is the last that the log holds.

    `end`: the stream's last position plus one, which is returned where the log has everything. A log that ends in a
    life which the stream does not hold gets the producer's first batch: what it has already is dropped as known.
    """
    first = await read(1)
    at = first
    for _ in range(_EPOCHS_MAX):
        if at is None:
            break
        if at.epoch == epoch:
            return await _bisect(read, at.position, end, lambda one: one.epoch != epoch or one.sequence > sequence)
        life = at.epoch
        at = await read(await _bisect(read, at.position, end, lambda one, life=life: one.epoch != life))
    return end if first is None else first.position


async def first_of_life(read: NextStored, epoch: int, sequence: int, end: int) -> int:
    """Where the batches from `sequence` on of the producer's life `epoch`, its last one, begin."""
    return await _bisect(read, 1, end, lambda one: one.epoch == epoch and one.sequence >= sequence)


async def _bisect(read: NextStored, low: int, high: int, reached: Callable[..., bool]) -> int:
    """The lowest position whose next batch has `reached`, which never turns back; `high` where none has."""
    end = high
    while low < high:
        middle = (low + high) // 2
        one = await read(middle)
        if one is None or reached(one):
            high = middle
        else:
            low = one.position + 1
    # Past a producer's last batch others may lie, however many: nothing of it is to be read before the end.
    return end if await read(low) is None else low


class StreamCare:
    """Makes the stream, and says once what may go wrong with it."""

    def __init__(self, place: PlaneUrl) -> None:
        self.options: StreamOptions = stream_options(place)
        self._stream = place.path
        self._said = False

    async def see_to(self, js: JetStreamContext) -> None:
        """Raises `PlaceUnusable` for a stream that cannot be used as it is, and nats-py's errors."""
        tolerated = await ensure_stream(js, self._stream, self.options)
        if self._said:
            return
        self._said = True
        if tolerated:
            _log.warning(
                "the stream was made with other settings: `nats stream edit` changes them",
                stream=self._stream,
                differs="; ".join(tolerated),
            )
        if warning := await asyncio.to_thread(sync_warning, self.options.monitor):
            _log.warning(warning, stream=self._stream)
