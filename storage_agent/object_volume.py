"""Volumes of kind `object`: blocks packed into objects of an S3 bucket, bytes through NIXL."""

from __future__ import annotations

import re
import threading
import time
from collections.abc import Iterator
from typing import Annotated

import msgspec

from event_plane.errors import TransportError
from storage_agent.block_header import BlockHeader
from storage_agent.descriptor import wrong
from storage_agent.errors import BlockFormatError, TransferError, VolumeError
from storage_agent.inspection import SlotFinding, SlotReport
from storage_agent.kinds import Opening, VolumeKind, slot_kind
from storage_agent.object_bucket import Bucket
from storage_agent.object_format import OwnerRecord, owner_name, unpack_owner
from storage_agent.object_scan import FoundObject, check_block, list_volume, scan_objects
from storage_agent.object_store import ObjectStore
from storage_agent.slot_store import SlotStore
from storage_agent.slot_volume import SlotVolume

_SWEEPS_A_LIFE = 10
_SWEEP_S_MIN = 0.1
_SWEEP_S_MAX = 60.0
_BUCKET = re.compile(r"[a-z0-9][a-z0-9.-]{1,61}[a-z0-9]")
_PREFIX = re.compile(r"[A-Za-z0-9_=.-]+(/[A-Za-z0-9_=.-]+)*")


class ObjectOptions(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Where the objects lie and how they are packed. `endpoint` names one of the agent's configuration."""

    endpoint: str
    bucket: str
    prefix: str = ""
    """Of the volume's own; its id where it is empty."""
    object_bytes: Annotated[int, msgspec.Meta(ge=1 << 16, le=1 << 30)] = 4 * 1024 * 1024
    """Size that blocks are packed up to; a larger block has an object of its own."""
    time_to_live_s: Annotated[float, msgspec.Meta(ge=0, le=10 * 365 * 86400)] = 0.0
    """How long a block may stay after its put; 0: until it is deleted. Kept to a tenth of it, a minute at most."""
    lease_s: Annotated[float, msgspec.Meta(ge=1, le=3600)] = 30.0
    """How long the volume stays with a host that is gone, before another may open it."""


class ObjectVolume(SlotVolume):
    """A `SlotVolume` whose blocks have a time to live."""

    def __init__(self, opening: Opening, store: SlotStore, objects: ObjectStore) -> None:
        """See `SlotVolume`. `objects` is what `store` lies on, and knows when blocks were put."""
        super().__init__(
            opening.descriptor,
            store,
            on_stored=opening.on_stored,
            on_freed=opening.on_freed,
            ordering=opening.ordering,
        )
        self._objects = objects
        self._time_to_live_s = _options(opening).time_to_live_s
        self._closing = threading.Event()
        self._sweeper = threading.Thread(target=self._sweep, name=f"expiry-of-{opening.descriptor.id}", daemon=True)
        if self._time_to_live_s:
            self._sweeper.start()

    def close(self) -> None:
        """See `Volume.close`."""
        self._closing.set()
        if self._sweeper.is_alive():
            self._sweeper.join()
        super().close()

    def delete_expired(self) -> list[BlockHeader]:
        """Delete what was put longer ago than the time to live, and say what it was."""
        headers = self._objects.expired(int((time.time() - self._time_to_live_s) * 1000))
        old = [header for header in headers if self.live_header(header.key) == header]
        self.delete([header.key for header in old])
        return old

    def _sweep(self) -> None:
        pause_s = min(_SWEEP_S_MAX, max(_SWEEP_S_MIN, self._time_to_live_s / _SWEEPS_A_LIFE))
        try:
            while not self._closing.wait(pause_s):
                self.delete_expired()
        except TransportError:
            return  # the publisher was closed under us; puts and deletes say so to their callers


class ObjectInspection:
    """Implements `inspection.Inspection`: a slot for each block that is not free, then free ones to the capacity.

    An object that cannot be used at all is one torn slot.
    """

    def __init__(self, opening: Opening) -> None:
        """Raises `VolumeError`: no such volume, or no answer."""
        self._descriptor = opening.descriptor
        self._bucket, self._prefix = _place(opening)
        try:
            found = self._bucket.get(owner_name(self._prefix))
        except TransferError as error:
            raise VolumeError(f"volume {self._descriptor.id!r} cannot be looked at: {error}") from error
        if found is None:
            raise VolumeError(f"volume {self._descriptor.id!r}: {self._bucket.place}/{self._prefix} holds no volume")
        try:
            self._record: OwnerRecord = unpack_owner(found[0])
        except BlockFormatError as error:
            raise VolumeError(f"volume {self._descriptor.id!r}: {self._prefix}/owner is not ours: {error}") from error
        if self._record.volume != self._descriptor.id:
            raise VolumeError(
                f"{self._bucket.place}/{self._prefix} belongs to volume {self._record.volume!r}, not "
                f"{self._descriptor.id!r}; correct the prefix"
            )

    @property
    def was_closed_in_order(self) -> bool:
        """See `Inspection.was_closed_in_order`."""
        return not self._record.is_open and self._record.in_order

    def reports(self) -> Iterator[SlotReport]:
        """See `Inspection.reports`. Raises `VolumeError` where the server does not answer."""
        slot = 0
        try:
            listing = list_volume(self._bucket, self._prefix)
            for found in scan_objects(self._bucket, self._prefix, listing, self._descriptor.block_bytes_max):
                for report in self._of_object(found, slot):
                    yield report
                    slot += 1
        except TransferError as error:
            raise VolumeError(f"volume {self._descriptor.id!r} cannot be looked at: {error}") from error
        yield from (SlotReport(free, "free") for free in range(slot, self._descriptor.capacity_blocks))

    def close(self) -> None:
        """Nothing."""

    def _of_object(self, found: FoundObject, first_slot: int) -> Iterator[SlotReport]:
        if found.index is None:
            yield SlotReport(first_slot, "torn", reason=found.fault)
            return
        held = [number for number in range(len(found.index)) if number not in found.freed]
        for slot, number in enumerate(held, first_slot):
            header = found.index.block(number).header
            fault = check_block(self._bucket, self._prefix, found, number)
            state: SlotFinding = "torn" if fault else "live"
            yield SlotReport(slot, state, header.key, header.generation, header.payload_bytes, fault)


def _options(opening: Opening) -> ObjectOptions:
    assert isinstance(opening.options, ObjectOptions)
    return opening.options


def _place(opening: Opening) -> tuple[Bucket, str]:
    """Raises `VolumeError`: no such endpoint in the configuration, or a name that no bucket or prefix has."""
    options, volume = _options(opening), opening.descriptor.id
    endpoint = opening.endpoints.get(options.endpoint)
    if endpoint is None:
        known = sorted(opening.endpoints) or "none"
        said = f"endpoint {options.endpoint!r} is not configured, {known} are"
        remedy = f"add [endpoints.{options.endpoint}] to the agent's settings"
        raise wrong(f"volume {volume!r}:", said, remedy, "options.endpoint", options.endpoint)
    prefix = options.prefix or volume
    if not _BUCKET.fullmatch(options.bucket):
        said = f"{options.bucket!r} is no name of a bucket"
        raise wrong(f"volume {volume!r}:", said, "correct option bucket", "options.bucket", options.bucket)
    if not _PREFIX.fullmatch(prefix) or ".." in prefix:
        said = f"prefix {prefix!r} is not letters, digits and '_=.-' between single slashes"
        raise wrong(f"volume {volume!r}:", said, "correct it", "options.prefix", prefix)
    return Bucket(volume, endpoint, options.bucket), prefix


def _open_store(opening: Opening) -> ObjectStore:
    options = _options(opening)
    bucket, prefix = _place(opening)
    return ObjectStore(
        opening.descriptor,
        bucket,
        prefix,
        object_bytes=options.object_bytes,
        lease_s=options.lease_s,
        deadline_s=opening.deadline_s,
    )


def _volume_on(opening: Opening, store: SlotStore, own: SlotStore) -> ObjectVolume:
    assert isinstance(own, ObjectStore)
    return ObjectVolume(opening, store, own)


KIND: VolumeKind = slot_kind(
    ObjectOptions, _open_store, inspect=ObjectInspection, path="none", volume_on=_volume_on
)
