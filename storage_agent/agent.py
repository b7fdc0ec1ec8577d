"""The storage agent: one owner of several volumes, in the process of its caller."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import TracebackType

from event_plane.schema import Namespace
from event_plane.transport import Publisher
from storage_agent import gpu_direct
from storage_agent.absent_volume import AbsentVolume
from storage_agent.announcer import Announcer
from storage_agent.block_header import BlockHeader
from storage_agent.buffers import require_one_each
from storage_agent.command_lane import CommandLane
from storage_agent.descriptor import VolumeDescriptor
from storage_agent.direct_path import put_blocks, read_blocks
from storage_agent.endpoints import Endpoint
from storage_agent.errors import CommandRefused, VolumeError
from storage_agent.kinds import prepare
from storage_agent.mending import VolumeMender
from storage_agent.port import (
    AgentStat,
    BlockKey,
    Buffer,
    CommandOutcome,
    CompactReport,
    Outcome,
    PutBlock,
    Result,
    ScrubReport,
    VolumeStat,
)
from storage_agent.shards import Shard
from storage_agent.sliced_read import can_be_read
from storage_agent.tenant_refusals import TenantRefusals
from storage_agent.term_fence import TermFence
from storage_agent.volume import Volume
from storage_agent.volume_shelf import VolumeShelf

MEND_INTERVAL_S = 5.0
LAID_OUT_MAX = 4096
"""Blocks that one command lays out."""
ABSENT_NAMED_MAX = 3
"""Volumes that cannot be used, named in the reason of a miss."""
_SEARCHES_MAX = 8
"""Times a search looks for blocks that moves may have carried past it."""


class StorageAgent:
    """Implements `port.StoragePort`. Thread-safe.

    Commands (copy, delete, move) on the same blocks run one after another; gets and puts run beside them and wait for
    at most one batch on a volume. What happens on the volumes is published through `publisher`, which the caller closes
    after the agent.
    """

    def __init__(
        self,
        name: str,
        *,
        publisher: Publisher | None,
        allowed_roots: Sequence[Path],
        endpoints: Mapping[str, Endpoint] | None = None,
        mend_interval_s: float = MEND_INTERVAL_S,
        state_folder: Path | None = None,
    ) -> None:
        """Volumes lie inside `allowed_roots` or on `endpoints`, nowhere else.

        The newest term and the refused tenants are kept in `state_folder`; without one they are forgotten at the end.
        Raises `TermError` and `RefusalError` where what lies there cannot be read.

        Degraded volumes are looked for so often, and opened anew; each waits longer after each time.
        """
        self.name = name
        self._endpoints = dict(endpoints or {})
        self._allowed_roots = tuple(allowed_roots)
        self._announcer = Announcer(name, publisher)
        self._terms = TermFence(name, state_folder)
        self._refusals = TenantRefusals(name, state_folder)
        self._refusing = threading.Lock()
        self._block_commands = CommandLane[CommandOutcome]()
        self._scrubs = CommandLane[ScrubReport]()
        self._compactions = CommandLane[CompactReport]()
        self._register_lock = threading.Lock()
        self._has_announced = False
        """Whether anything was, in this life. Guarded by the lock above."""
        self._shelf = VolumeShelf(name)
        self._mender = VolumeMender(self._shelf, self._announcer, self._open, mend_interval_s)
        self._mender.start()
        gpu_direct.start(self._allowed_roots)

    # Volumes

    def register_volume(self, descriptor: VolumeDescriptor, *, term: int = 0) -> VolumeStat:
        """See `AgentPort.register_volume`. The blocks found on the volume are published before this returns."""
        self._terms.require(term)
        return self.register_volumes([descriptor])[0]

    def register_volumes(
        self, descriptors: Sequence[VolumeDescriptor], *, absent_ok: bool = False
    ) -> list[VolumeStat]:
        """Open several volumes, all or none, and tell of them at once. Raises as `register_volume` does.

        The first that an agent registers it tells of by a snapshot, which takes the place of what its former life had
        announced; so register together what belongs together. With `absent_ok` a valid volume that cannot be opened
        is registered as degraded, and opened when it can be.
        """
        for descriptor in descriptors:
            prepare(descriptor, self._allowed_roots, self._endpoints)
        with self._register_lock, ExitStack() as undoing:
            opened: list[Volume] = []
            for descriptor in descriptors:
                if descriptor.id in [volume.descriptor.id for volume in opened]:
                    raise VolumeError(f"volume {descriptor.id!r} is given twice; leave one out")
                self._shelf.require_room_for(descriptor.id)
                opened.append(self._open_or_absent(descriptor) if absent_ok else self._open(descriptor))
                undoing.callback(opened[-1].close)
                self._mender.watch(opened[-1])
            undoing.pop_all()
            with self._announcer.ordering:
                self._shelf.add(opened)
                if self._has_announced:
                    for volume in self._announced(opened):
                        self._announcer.stored(volume.descriptor, volume.live_headers())
                else:
                    self.announce_snapshot()
            if not self._has_announced:
                self._has_announced = True
                self._announcer.serve_snapshots(self.announce_snapshot)
            return [volume.stat() for volume in opened]

    def announce_snapshot(self) -> None:
        """Publish what all volumes hold, in the place of everything announced so far; nothing once closed."""
        with self._announcer.ordering:
            if not self._shelf.is_closing:
                volumes = self._announced(self._shelf.volumes())
                self._announcer.snapshot((volume.descriptor, volume.live_headers()) for volume in volumes)

    def _announced(self, volumes: Sequence[Volume]) -> list[Volume]:
        """Those that are ours to tell of: what lies on the others their owners alone are asked for."""
        return [volume for volume in volumes if not self._announcer.is_silent(volume.descriptor.id)]

    def _open(self, descriptor: VolumeDescriptor) -> Volume:
        kind, opening = prepare(descriptor, self._allowed_roots, self._endpoints)
        self._announcer.set_silent(descriptor.id, kind.is_view)
        return kind.open(
            replace(
                opening,
                on_stored=partial(self._announcer.stored, descriptor),
                on_freed=partial(self._announcer.freed, descriptor),
                ordering=self._announcer.ordering,
            )
        )

    def _open_or_absent(self, descriptor: VolumeDescriptor) -> Volume:
        try:
            return self._open(descriptor)
        except VolumeError as error:
            return AbsentVolume(descriptor, str(error))

    def unregister_volume(self, volume: str, *, drain_s: float = 0.0, term: int = 0) -> None:
        """See `AgentPort.unregister_volume`. A Clear says that nothing is there any more."""
        self._terms.require(term)
        with self._register_lock:
            taken = self._shelf.take_out(volume, drain_s)
            taken.close()
            self._announcer.unregistered(taken.descriptor)

    def resize_volume(self, volume: str, capacity_blocks: int, *, term: int = 0) -> VolumeStat:
        """See `AgentPort.resize_volume`."""
        self._terms.require(term)
        with self._shelf.use_registered(volume) as opened:
            return opened.resize(capacity_blocks)

    def close(self) -> None:
        """Wait for what is under way, close every volume, send what waits. Blocks stay. Idempotent."""
        self._mender.stop()
        for volume in self._shelf.close():
            volume.close()
        self._announcer.close()

    def __enter__(self) -> StorageAgent:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def stat(self) -> AgentStat:
        """See `AgentPort.stat`."""
        with self._shelf.use_all() as volumes:
            return AgentStat(
                agent=self.name,
                producer=self._announcer.producer,
                epoch=self._announcer.epoch,
                volumes=[volume.stat() for volume in self._announced(volumes)],
                gpu_direct=gpu_direct.said(),
                refused_tenants=self._refusals.tenants,
                views=[volume.stat() for volume in volumes if self._announcer.is_silent(volume.descriptor.id)],
            )

    # For those that move bytes themselves

    def volumes(self) -> list[Volume]:
        """All that are registered; use one within `use_volume` only."""
        return self._shelf.volumes()

    def use_volume(self, name: str) -> AbstractContextManager[Volume]:
        """A volume that stays open meanwhile. Raises `VolumeError` where it is not registered."""
        return self._shelf.use_registered(name)

    def count_reads(self, volume: VolumeDescriptor, headers: Sequence[BlockHeader]) -> None:
        """Blocks were read by another process: tell of it as of a get."""
        self._announcer.accessed(volume, headers)

    # Blocks

    def put(self, volume: str, blocks: Sequence[PutBlock]) -> list[Outcome]:
        """See `StoragePort.put`. Raises nothing but a closed publisher's `TransportError`."""
        with self._shelf.use(volume) as target:
            if target is None:
                return self._all_failed([block.key for block in blocks], volume)
            if not self._refusals and not target.descriptor.tenants:
                return put_blocks(target, blocks)
            refused = {
                number: outcome
                for number, block in enumerate(blocks)
                if (outcome := self.refusal(block.key, block.namespace, target.descriptor)) is not None
            }
            taken = [number for number in range(len(blocks)) if number not in refused]
            stored = put_blocks(target, [blocks[number] for number in taken])
            refused |= dict(zip(taken, stored, strict=True))
            return [refused[number] for number in range(len(blocks))]

    def refusal(self, key: BlockKey, namespace: Namespace, volume: VolumeDescriptor) -> Outcome | None:
        """Why a block is not taken because of whose it is; None where it is."""
        reason = self._refusals.reason(namespace.tenant)
        if not reason and volume.tenants and namespace.tenant not in volume.tenants:
            reason = f"volume {volume.id} is not for tenant {namespace.tenant!r}: put it elsewhere, or add the tenant"
        return Outcome(key, Result.FAILED, volume.id, reason=reason) if reason else None

    def get(
        self, keys: Sequence[BlockKey], buffers: Sequence[Buffer], wanted: Shard | None = None
    ) -> list[Outcome]:
        """See `StoragePort.get`. A buffer that is no span is written only with whole verified bytes, at its start.

        `corrupt` where every copy was. Raises `ValueError` unless there are as many buffers as keys, and `TypeError`
        for a `wanted` that is no `Shard`.
        """
        require_one_each(len(keys), len(buffers))
        if wanted is not None and not isinstance(wanted, Shard):
            raise TypeError(f"wanted is of type {type(wanted).__name__}; give Shard")
        # The buffer that a fast copy failed to fill may be filled from a slower one.
        outcomes: dict[int, Outcome] = {}
        closed: set[int] = set()
        with self._shelf.use_all() as volumes:
            for _ in _searches(volumes):
                for volume in volumes:
                    self._get_from(volume, keys, buffers, wanted, outcomes, closed)
                if len(outcomes) == len(keys):
                    break
            nowhere = _why_nowhere(volumes)
        return [outcomes.get(index) or Outcome(key, Result.MISS, reason=nowhere) for index, key in enumerate(keys)]

    def _get_from(
        self,
        volume: Volume,
        keys: Sequence[BlockKey],
        buffers: Sequence[Buffer],
        shard: Shard | None,
        outcomes: dict[int, Outcome],
        closed: set[int],
    ) -> None:
        """`closed`: what may be written still by a read that failed; nothing else goes there."""
        wanted = [
            index
            for index in range(len(keys))
            if index not in outcomes or not (outcomes[index].result.ok or index in closed)
        ]
        if not wanted:
            return
        results = read_blocks(volume, [keys[index] for index in wanted], [buffers[index] for index in wanted], shard)
        hits: list[BlockHeader] = []
        for index, result in zip(wanted, results, strict=True):
            if result.outcome.result is Result.MISS:
                continue
            outcomes[index] = result.outcome
            if result.in_doubt:
                closed.add(index)
            if result.outcome.result is Result.HIT and result.header is not None:
                hits.append(result.header)
        self._announcer.accessed(volume.descriptor, hits)

    def holding(self, keys: Sequence[BlockKey], wanted: Shard | None = None) -> list[str]:
        """The fastest of its own volumes that would give each block to a `get` now; empty where none would.

        No use of a block is counted.
        """
        found: dict[int, str] = {}
        with self._shelf.use_all() as volumes:
            own = self._announced(volumes)
            for _ in _searches(own):
                for volume in own:
                    for index in [index for index in range(len(keys)) if index not in found]:
                        header = volume.live_header(keys[index])
                        if header is not None and can_be_read(header, wanted):
                            found[index] = volume.descriptor.id
                if len(found) == len(keys):
                    break
        return [found.get(index, "") for index in range(len(keys))]

    # Commands

    def copy(
        self, command_id: str, keys: Sequence[BlockKey], source: str, target: str, *, term: int = 0
    ) -> CommandOutcome:
        """See `AgentPort.copy`. `present` for a block that `target` holds already; that copy was verified too."""
        return self._answer(command_id, term, keys, lambda: self._copy(keys, source, target))

    def delete(self, command_id: str, volume: str, keys: Sequence[BlockKey], *, term: int = 0) -> CommandOutcome:
        """See `AgentPort.delete`."""
        return self._answer(command_id, term, keys, lambda: self._delete(keys, volume))

    def move(
        self, command_id: str, keys: Sequence[BlockKey], source: str, target: str, *, keep: bool, term: int = 0
    ) -> CommandOutcome:
        """See `AgentPort.move`. At every moment at least one copy can be read."""

        def run() -> list[Outcome]:
            outcomes = self._copy(keys, source, target)
            if not keep:
                good = [outcome.key for outcome in outcomes if outcome.result.ok]
                kept = {o.key: o for o in self._delete(good, source) if o.result not in (Result.DELETED, Result.MISS)}
                outcomes = [kept.get(outcome.key, outcome) for outcome in outcomes]
            return outcomes

        return self._answer(command_id, term, keys, run)

    def scrub(self, command_id: str, volume: str, *, term: int = 0) -> ScrubReport:
        """See `AgentPort.scrub`. Raises `VolumeError`."""

        def carry_out() -> ScrubReport:
            self._terms.require(term)
            with self._shelf.use_registered(volume) as opened:
                report = opened.scrub()
            self._announcer.flush()
            return report

        self._terms.require(term)
        return self._scrubs.run(command_id, carry_out)

    def compact(
        self, command_id: str, volume: str, keys: Sequence[BlockKey] = (), *, term: int = 0
    ) -> CompactReport:
        """See `AgentPort.compact`. Raises `VolumeError`, and `CommandRefused` for more keys than it takes."""
        if len(keys) > LAID_OUT_MAX:
            raise CommandRefused(f"{len(keys)} blocks are to be laid out, at most {LAID_OUT_MAX} go; ask in parts")

        def carry_out() -> CompactReport:
            self._terms.require(term)
            with self._shelf.use_registered(volume) as opened:
                return _compacted(opened, keys)

        self._terms.require(term)
        return self._compactions.run(command_id, carry_out)

    def refuse_tenants(self, tenants: Sequence[str], *, term: int = 0) -> None:
        """See `AgentPort.refuse_tenants`. What is under way is not stopped."""
        with self._refusing:  # an older advisor's list never takes the place of a newer one's
            self._terms.require(term)
            self._refusals.replace(tenants)

    def _answer(
        self, command_id: str, term: int, keys: Sequence[BlockKey], run: Callable[[], list[Outcome]]
    ) -> CommandOutcome:
        def carry_out() -> CommandOutcome:
            self._terms.require(term)  # a newer one may have come while this waited
            started = time.monotonic()
            return CommandOutcome(
                command_id=command_id,
                outcomes=run(),
                producer=self._announcer.producer,
                epoch=self._announcer.epoch,
                sequence=self._announcer.flush(),
                seconds=time.monotonic() - started,
            )

        self._terms.require(term)
        return self._block_commands.run(command_id, carry_out, keys)

    def _copy(self, keys: Sequence[BlockKey], source: str, target: str) -> list[Outcome]:
        with self._shelf.use(source) as from_volume, self._shelf.use(target) as to_volume:
            if from_volume is None:
                return self._all_failed(keys, source)
            if to_volume is None:
                return self._all_failed(keys, target)
            if from_volume is to_volume:
                return [Outcome(k, Result.FAILED, source, reason="source and target are one volume") for k in keys]
            batch = min(from_volume.batch_slots, to_volume.batch_slots)
            outcomes: list[Outcome] = []
            for start in range(0, len(keys), batch):
                outcomes += _copy_batch(keys[start : start + batch], from_volume, to_volume)
            return outcomes

    def _delete(self, keys: Sequence[BlockKey], volume: str) -> list[Outcome]:
        with self._shelf.use(volume) as opened:
            return self._all_failed(keys, volume) if opened is None else opened.delete(keys)

    def _all_failed(self, keys: Sequence[BlockKey], volume: str) -> list[Outcome]:
        reason = f"volume {volume!r} is not registered with agent {self.name!r}"
        return [Outcome(key, Result.FAILED, volume, reason=reason) for key in keys]


def _searches(volumes: Sequence[Volume]) -> Iterator[None]:
    """Once, and again where a block may have been carried past the search: it was retired somewhere meanwhile."""
    for _ in range(_SEARCHES_MAX):
        retired_before = sum(volume.retired_total for volume in volumes)
        yield
        if retired_before == sum(volume.retired_total for volume in volumes):
            return


def _why_nowhere(volumes: Sequence[Volume]) -> str:
    """Why a block is a miss that none of the volumes gave."""
    absent = [volume for volume in volumes if isinstance(volume, AbsentVolume)]
    if not absent:
        return "no volume holds it"
    why = "; ".join(f"{volume.descriptor.id!r}: {volume.reason}" for volume in absent[:ABSENT_NAMED_MAX])
    if len(absent) == len(volumes):
        return f"no volume can be used now: {why}"
    return f"no volume that can be used now holds it; not looked at: {why}"


def _compacted(volume: Volume, keys: Sequence[BlockKey]) -> CompactReport:
    if keys:
        return volume.lay_out(keys)
    freed_bytes = volume.compact()
    return CompactReport(freed_bytes, fragmentation=volume.stat().fragmentation)


def _copy_batch(keys: Sequence[BlockKey], source: Volume, target: Volume) -> list[Outcome]:
    outcomes: dict[int, Outcome] = {}
    # The source may be freed on our word, so a copy that is there already is read and checked as a fresh one is.
    present = target.read(keys, lambda number, header, payload: "")
    for index, result in enumerate(present):
        if result.outcome.result is Result.HIT:
            outcomes[index] = Outcome(
                keys[index], Result.PRESENT, target.descriptor.id, result.outcome.payload_bytes
            )
    wanted = [index for index in range(len(keys)) if index not in outcomes]
    blocks: dict[int, PutBlock] = {}

    def take(number: int, header: BlockHeader, payload: memoryview) -> str:
        blocks[wanted[number]] = PutBlock(
            key=header.key,
            namespace=header.namespace,
            payload=memoryview(bytes(payload)),
            parent_hash=header.parent_hash,
            depth=header.depth,
            block_tokens=header.block_tokens,
            span=header.span,
            layout=header.layout,
        )
        return ""

    for index, result in zip(wanted, source.read([keys[index] for index in wanted], take), strict=True):
        if index not in blocks:
            outcomes[index] = result.outcome
    written = target.put(list(blocks.values()), read_back=True)
    for index, outcome in zip(blocks, written, strict=True):
        stored = outcome.result is Result.STORED
        outcomes[index] = (
            Outcome(outcome.key, Result.COPIED, outcome.volume, outcome.payload_bytes) if stored else outcome
        )
    return [outcomes[index] for index in range(len(keys))]
