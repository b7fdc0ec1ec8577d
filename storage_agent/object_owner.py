"""Who may write a volume in an object store: one process at a time, by a record that is put under conditions.

The owner lets the record's beat rise; a process of another machine takes a volume over when the beat stood still for
the whole lease, one of the same machine at once when the owner is dead. An owner that cannot renew stops writing before
its lease is over, by its own clock, so no clock is compared with another's.
"""

from __future__ import annotations

import os
import socket
import threading
import time
from pathlib import Path

import msgspec
import structlog

from storage_agent.errors import BlockFormatError, TransferError, VolumeError
from storage_agent.object_bucket import Bucket
from storage_agent.object_format import Holder, OwnerRecord, owner_name, pack_owner, unpack_owner

GENERATIONS_A_LIFE = 1 << 40
"""Generations that an owner may use: the next one starts behind them where it was not told how far this one came."""
_BEATS_A_LEASE = 4
_LOOK_S = 0.5

_log = structlog.get_logger()
_held_here: set[str] = set()
"""Volumes that this process holds: a record in its name that is not among them is left from a close that failed."""
_held_lock = threading.Lock()


def this_process() -> Holder:
    pid = os.getpid()
    boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return Holder(socket.gethostname(), f"{boot} {os.readlink('/proc/self/ns/pid')}", pid, _started(pid))


class ObjectOwner:
    """The right to write one volume, kept alive by a thread of its own. Thread-safe."""

    def __init__(self, bucket: Bucket, prefix: str, volume: str, lease_s: float) -> None:
        self._bucket = bucket
        self._name = owner_name(prefix)
        self._what = f"volume {volume!r}: {bucket.place}/{prefix}"
        self._held_as = f"{bucket.place}/{prefix}"
        self._volume = volume
        self._lease_s = lease_s
        self._lock = threading.Lock()
        self._record: OwnerRecord | None = None
        self._tag = ""
        self._lost = ""
        self._valid_until_s = 0.0
        self._closing = threading.Event()
        self._keeper = threading.Thread(target=self._keep, name=f"owner-of-{volume}", daemon=True)

    def acquire(self) -> int:
        """Become the owner; the first generation that was never used.

        Raises `VolumeError`: another process is, or the record is of another volume; `TransferError`: no answer.
        """
        with _held_lock:
            if self._held_as in _held_here:
                raise VolumeError(f"{self._what} is open in this process; close it first")
            _held_here.add(self._held_as)
        try:
            generation_next = self._take()
        except (VolumeError, TransferError):
            self._forget()
            raise
        self._keeper.start()
        return generation_next

    def require(self) -> None:
        """Raises `TransferError` unless this process may write now."""
        with self._lock:
            if self._lost:
                raise TransferError(self._lost)
            if time.monotonic() >= self._valid_until_s:
                raise TransferError(f"{self._what} cannot be written: its lease of {self._lease_s} s was not renewed")

    def renew(self) -> None:
        """Raises `TransferError`: no answer, or another process is the owner, which `require` says from now on."""
        with self._lock:
            record = self._record
        if record is None:
            return
        if not self._put(msgspec.structs.replace(record, beat=record.beat + 1), self._tag):
            with self._lock:
                self._lost = f"{self._what} is owned by another process, which took it over; use its agent"
            raise TransferError(self._lost)

    def release(self, *, in_order: bool, generation_next: int) -> None:
        """Let others have it; where the server does not answer, the lease tells them. Idempotent.

        `generation_next`: none from it on was used; 0 where that is not known.
        """
        if self._closing.is_set():
            return
        self._closing.set()
        if self._keeper.is_alive():
            self._keeper.join()
        with self._lock:
            record, self._record = self._record, None
        if record is None:
            return
        try:
            if not self._lost:
                following = generation_next or record.generation_next
                closed = msgspec.structs.replace(
                    record, is_open=False, in_order=in_order, beat=record.beat + 1, generation_next=following
                )
                self._put(closed, self._tag)
        except TransferError as error:
            _log.warning("volume was not given back", volume=self._volume, error=str(error))
        finally:
            self._forget()

    def _take(self) -> int:
        found = self._bucket.get(self._name)
        before = self._read(found[0]) if found is not None else None
        tag = found[1] if found is not None else None
        if before is not None and tag is not None and before.is_open:
            self._require_dead(before, tag)
        generation_next = before.generation_next if before is not None else 1
        record = OwnerRecord(
            volume=self._volume,
            is_open=True,
            holder=this_process(),
            beat=before.beat + 1 if before is not None else 1,
            lease_s=self._lease_s,
            generation_next=generation_next + GENERATIONS_A_LIFE,
        )
        if not self._put(record, tag):
            raise VolumeError(f"{self._what} is owned by a process that took it just now; use that agent")
        if self._bucket.put_if(self._name, pack_owner(record), None) is not None:
            raise VolumeError(f"{self._what}: the server puts without looking at conditions, so two could own it")
        return generation_next

    def _forget(self) -> None:
        with _held_lock:
            _held_here.discard(self._held_as)

    def _keep(self) -> None:
        while not self._closing.wait(self._lease_s / _BEATS_A_LEASE):
            try:
                self.renew()
            except TransferError as error:
                _log.warning("volume's lease is not renewed", volume=self._volume, error=str(error))

    def _put(self, record: OwnerRecord, tag: str | None) -> bool:
        """Whether the record is ours now."""
        begun_s = time.monotonic()
        packed = pack_owner(record)
        put = self._bucket.put_if(self._name, packed, tag)
        if put is None:
            # An answer may have been lost, and the request made again after it had been carried out.
            there = self._bucket.get(self._name)
            if there is None or there[0] != packed:
                return False
            put = there[1]
        with self._lock:
            self._record, self._tag = record, put
            self._valid_until_s = begun_s + self._lease_s
        return True

    def _read(self, packed: bytes) -> OwnerRecord:
        try:
            record = unpack_owner(packed)
        except BlockFormatError as error:
            raise VolumeError(
                f"{self._what}/owner is not ours ({error}); it is left alone: give another prefix"
            ) from error
        if record.volume != self._volume:
            raise VolumeError(f"{self._what} belongs to volume {record.volume!r}; give another prefix")
        return record

    def _require_dead(self, record: OwnerRecord, tag: str) -> None:
        holder, me = record.holder, this_process()
        owned = f"{self._what} is owned by process {holder.pid} on {holder.host}; stop it first, or be its client"
        if holder == me:
            return
        if holder.machine == me.machine:
            if _started(holder.pid) == holder.started:
                raise VolumeError(owned)
            return
        deadline = time.monotonic() + record.lease_s
        while time.monotonic() < deadline:
            time.sleep(min(_LOOK_S, record.lease_s / _BEATS_A_LEASE))
            found = self._bucket.get(self._name)
            if found is None or found[1] != tag:
                raise VolumeError(owned)


def _started(pid: int) -> str:
    """When a process was started, in ticks since boot; empty where there is none."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return ""
    return stat.rpartition(")")[2].split()[19]
