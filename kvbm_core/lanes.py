"""What each path does with a batch: copy between memories, put to volumes, load from them. Runs in a path's threads.

A target is registered only after its bytes are known to be right. The guards that a batch holds are its fence: until
they are released nobody else is given the memory, however late a transfer ends.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import NamedTuple

from event_plane.errors import EventPlaneError
from event_plane.schema import Tier
from kvbm_core.accounting import Accounts
from kvbm_core.block import Guard, ImmutableBlock, MutableBlock
from kvbm_core.config import KvbmConfig
from kvbm_core.copier import COPY_FAILED, WRONG_BYTES, WRONG_BYTES_DETAIL, Copier
from kvbm_core.copies import copy_blocks
from kvbm_core.errors import PoolExhaustedError
from kvbm_core.identity import BlockIdentity
from kvbm_core.paths import TransferPath
from kvbm_core.storage import TensorStorage
from kvbm_core.tier_pool import TierPool
from kvbm_core.transfer import BEHIND_A_MISS, BlockOutcome, BlockTransfer
from kvbm_core.verification import BlockSums
from kvbm_core.volume_view import VolumeView
from storage_agent.errors import StorageAgentError
from storage_agent.port import BlockKey, Outcome, PutBlock, Result, StoragePort

NO_VOLUME = "no_volume"
"""The tier has no volume for the block's tenant."""

PutCheck = Callable[[Sequence[Guard], TensorStorage, Sequence[int]], Sequence[bool]]
"""Which blocks read, where they lie to be put, as they did when they came: their guards, that memory, their places."""

OnBatch = Callable[[], None]
"""Called when a batch has ended, before anybody hears of it: what it changed is announced first."""


class CopyLane:
    """Device ↔ host: whole blocks, which are registered in the target, or one layer of blocks, which are not."""

    def __init__(self, copier: Copier, on_batch: OnBatch) -> None:
        self._copier = copier
        self._on_batch = on_batch

    def run(self, batch: Sequence[BlockTransfer]) -> list[BlockOutcome]:
        """See `transfer.Lane.run`."""
        outcomes: dict[int, BlockOutcome] = {}
        for layer in dict.fromkeys(transfer.layer for transfer in batch):
            places = [place for place, transfer in enumerate(batch) if transfer.layer == layer]
            part = [batch[place] for place in places]
            moved = self._copier.copy(part) if layer is None else self._copier.copy_layer(part, layer)
            outcomes.update(zip(places, moved, strict=True))
        self._on_batch()
        return [outcomes[place] for place in range(len(batch))]


class Volumes(NamedTuple):
    """The agent's volumes as lanes use them."""

    storage: StoragePort
    views: tuple[VolumeView, ...]
    config: KvbmConfig
    accounts: Accounts

    def tier_of(self, volume: str) -> Tier:
        """By its name; a volume that no tier names is taken for a disk."""
        return next((view.tier for view in self.views if volume in view.volumes.all_volumes()), Tier.G3)

    def saw(self, key: BlockKey, volume: str) -> None:
        """The block was put there, or read from there."""
        for view in self.views:
            if volume in view.volumes.all_volumes():
                view.saw(key, volume)

    def missed(self, key: BlockKey) -> None:
        """No volume can give the block."""
        for view in self.views:
            view.missed(key)

    def absent(self, batch: Sequence[BlockTransfer]) -> dict[int, Outcome]:
        """Of the blocks that no volume would give now, what a read of them would be answered."""
        keys = [transfer.identity.key for transfer in batch]
        try:
            there = self.storage.holding(keys, self.config.wanted)
        except (StorageAgentError, EventPlaneError) as error:
            return {number: Outcome(key, Result.FAILED, reason=str(error)) for number, key in enumerate(keys)}
        return {
            number: Outcome(key, Result.MISS, reason="no volume holds it")
            for number, (key, volume) in enumerate(zip(keys, there, strict=True))
            if not volume
        }

    def read(
        self, path: TransferPath, batch: Sequence[BlockTransfer], near: TensorStorage, places: Sequence[int]
    ) -> list[Outcome]:
        """The agent's answers; a block of another size than ours is no hit, whatever its checksum says."""
        keys = [transfer.identity.key for transfer in batch]
        buffers = [near.payload(place) for place in places]
        started_s = time.perf_counter()
        try:
            answers = self.storage.get(keys, buffers, self.config.wanted)
        except (StorageAgentError, EventPlaneError) as error:
            return [Outcome(key, Result.FAILED, reason=str(error)) for key in keys]
        seconds = time.perf_counter() - started_s
        sizes = [answer.payload_bytes for answer in answers if answer.result is Result.HIT]
        if sizes:
            self.accounts.moved(path, len(sizes), sum(sizes), seconds)
        return [
            answer if answer.result is not Result.HIT or answer.payload_bytes == len(buffer) else _wrong_size(answer)
            for answer, buffer in zip(answers, buffers, strict=True)
        ]

    def not_read(self, path: TransferPath, transfer: BlockTransfer, answer: Outcome) -> BlockOutcome:
        """Of a block that no volume gave; its target comes back."""
        self.missed(transfer.identity.key)
        if answer.result is not Result.MISS:  # a block that is on no volume is no failure of the path
            self.accounts.failed(path, answer.result)
        return BlockOutcome(
            transfer.identity,
            place=answer.volume,
            reason=answer.result,
            detail=answer.reason,
            unused=transfer.target,
        )


class PutLane:
    """Host → the volumes of one tier; or device → them, through a staging buffer, where there is no host tier and the
    device is no host memory itself."""

    def __init__(
        self,
        path: TransferPath,
        view: VolumeView,
        near: TierPool,
        device: TierPool | None,
        volumes: Volumes,
        check: PutCheck | None = None,
    ) -> None:
        """`near`: the host's memory; or the staging buffer, and then blocks come from `device`.

        A block that does not pass `check` is not put, and forgotten where it came from.
        """
        self.check = check
        self._path = path
        self._view = view
        self._near = near
        self._device = device
        self._volumes = volumes

    def run(self, batch: Sequence[BlockTransfer]) -> list[BlockOutcome]:
        """See `transfer.Lane.run`. `place` is the volume that has the block now."""
        identities = [transfer.identity for transfer in batch]
        if self._device is None:
            return self._put_right(batch, [transfer.source_index for transfer in batch])
        staged: list[MutableBlock] = []
        try:
            staged = self._near.pool.allocate(len(batch)).blocks
            places = [place.index for place in staged]
            copy_blocks(self._device.storage, [each.source_index for each in batch], self._near.storage, places)
            return self._put_right(batch, places)
        except PoolExhaustedError as error:
            return self._all_failed(identities, f"{self._near.name}_exhausted", str(error))
        except RuntimeError as error:  # what torch raises when a device fails
            return self._all_failed(identities, COPY_FAILED, str(error))
        finally:
            self._near.pool.release_many(staged)

    def _put_right(self, batch: Sequence[BlockTransfer], places: Sequence[int]) -> list[BlockOutcome]:
        sources = [transfer.source for transfer in batch if transfer.source is not None]
        right = [True] * len(batch) if self.check is None else self.check(sources, self._near.storage, places)
        good = [number for number, is_right in enumerate(right) if is_right]
        put = iter(self._put([batch[number].identity for number in good], [places[number] for number in good]))
        return [next(put) if is_right else self._wrong(each) for each, is_right in zip(batch, right, strict=True)]

    def _wrong(self, transfer: BlockTransfer) -> BlockOutcome:
        if isinstance(transfer.source, ImmutableBlock):
            (self._device or self._near).pool.forget(transfer.source)
        self._volumes.accounts.failed(self._path, WRONG_BYTES)
        return BlockOutcome(transfer.identity, reason=WRONG_BYTES, detail=WRONG_BYTES_DETAIL)

    def _put(self, identities: Sequence[BlockIdentity], places: Sequence[int]) -> list[BlockOutcome]:
        """Put each block to the first of its tenant's volumes that takes it."""
        blocks = [self._put_block(identity, place) for identity, place in zip(identities, places, strict=True)]
        by_volumes: dict[tuple[str, ...], list[int]] = {}
        for number, identity in enumerate(identities):
            volumes = self._view.volumes.volumes_of(identity.namespace.tenant)
            by_volumes.setdefault(volumes, []).append(number)
        answers: dict[int, Outcome] = {}
        for volumes, waiting in by_volumes.items():
            for volume in volumes:
                answers.update(zip(waiting, self._ask(volume, [blocks[number] for number in waiting]), strict=True))
                waiting = [number for number in waiting if answers[number].result is Result.FULL]
                if waiting and volume != volumes[-1]:
                    self._volumes.accounts.put_fell_back(volume, len(waiting))
        return [self._outcome(identity, answers.get(number)) for number, identity in enumerate(identities)]

    def _ask(self, volume: str, blocks: Sequence[PutBlock]) -> list[Outcome]:
        if not blocks:
            return []
        started_s = time.perf_counter()
        try:
            answers = self._volumes.storage.put(volume, blocks)
        except (StorageAgentError, EventPlaneError) as error:
            return [Outcome(block.key, Result.FAILED, volume=volume, reason=str(error)) for block in blocks]
        stored = [
            block.payload.nbytes
            for block, answer in zip(blocks, answers, strict=True)
            if answer.result in (Result.STORED, Result.PARTIAL)
        ]
        if stored:
            self._volumes.accounts.moved(self._path, len(stored), sum(stored), time.perf_counter() - started_s)
        return answers

    def _outcome(self, identity: BlockIdentity, answer: Outcome | None) -> BlockOutcome:
        """Of the last volume that was asked, if there was one."""
        accounts = self._volumes.accounts
        if answer is None:
            return BlockOutcome(identity, reason=NO_VOLUME, detail="its tenant has no volume on this tier")
        # A shard is durable; the block is there once the other workers' shards are.
        if answer.result.ok or answer.result is Result.PARTIAL:
            self._volumes.saw(identity.key, answer.volume)
            accounts.put(answer.volume)
            return BlockOutcome(identity, place=answer.volume, was_there=answer.result is Result.PRESENT)
        accounts.put_refused(answer.result)
        accounts.failed(self._path, answer.result)
        return BlockOutcome(identity, place=answer.volume, reason=answer.result, detail=answer.reason)

    def _put_block(self, identity: BlockIdentity, place: int) -> PutBlock:
        config = self._volumes.config
        return PutBlock(
            key=identity.key,
            namespace=identity.namespace,
            payload=self._near.storage.payload(place),
            parent_hash=identity.parent_hash,
            depth=identity.depth,
            block_tokens=identity.block_tokens,
            span=config.shard_span,
            layout=config.block_layout,
        )

    def _all_failed(self, identities: Sequence[BlockIdentity], reason: str, detail: str) -> list[BlockOutcome]:
        self._volumes.accounts.failed(self._path, reason, len(identities))
        return [BlockOutcome(identity, reason=reason, detail=detail) for identity in identities]


class LoadLane:
    """Volumes → host, registered there; and on to the device, where the path goes there.

    Without a host tier `near` is the staging buffer, whose blocks are registered nowhere and go once the device has
    them.
    """

    def __init__(
        self,
        path: TransferPath,
        near: TierPool,
        to_device: Copier | None,
        volumes: Volumes,
        on_batch: OnBatch,
        *,
        keeps: bool,
        sums: BlockSums | None,
    ) -> None:
        """`keeps`: the near memory is the host tier. `sums`: of the near memory, where copies are verified."""
        assert keeps or to_device is not None, "what is loaded must stay somewhere"
        self._path = path
        self._near = near
        self._to_device = to_device
        self._volumes = volumes
        self._on_batch = on_batch
        self._keeps = keeps
        self._sums = sums

    def run(self, batch: Sequence[BlockTransfer]) -> list[BlockOutcome]:
        """See `transfer.Lane.run`. `place` is the volume that gave the block."""
        try:
            places = self._near.pool.allocate(len(batch)).blocks
        except PoolExhaustedError as error:
            reason = f"{self._near.name}_exhausted"
            self._volumes.accounts.failed(self._path, reason, len(batch))
            return [BlockOutcome(each.identity, reason=reason, detail=str(error), unused=each.target) for each in batch]
        try:
            answers = self._volumes.read(self._path, batch, self._near.storage, [place.index for place in places])
            hits = [number for number, answer in enumerate(answers) if answer.result is Result.HIT]
            near = self._keep([batch[n].identity for n in hits], [places[n] for n in hits])
            outcomes = self._onward(batch, dict(zip(hits, near, strict=True)))
            return [
                outcomes[number]._replace(place=answer.volume)
                if answer.result is Result.HIT
                else self._volumes.not_read(self._path, transfer, answer)
                for number, (transfer, answer) in enumerate(zip(batch, answers, strict=True))
            ]
        finally:
            self._near.pool.release_many(places)  # those that were kept have other guards now
            self._on_batch()

    def _keep(self, identities: Sequence[BlockIdentity], places: Sequence[MutableBlock]) -> Sequence[Guard]:
        """The blocks as the next step reads them: registered in the host tier, or as they lie in the buffer."""
        if self._sums is not None and places:
            self._sums.take([place.index for place in places])
        if not self._keeps:
            return places
        pool = self._near.pool
        return pool.register_many(pool.complete_many(places, identities), copied=True)

    def _onward(self, batch: Sequence[BlockTransfer], near: dict[int, Guard]) -> dict[int, BlockOutcome]:
        """Of the blocks that were read well: copied on to the device, or kept where they are.

        One behind a miss of its chain is not copied on: it would push out of the device what may be of use.
        """
        if self._to_device is None:
            return {
                number: BlockOutcome(batch[number].identity, guard, unused=batch[number].target)
                for number, guard in near.items()
                if isinstance(guard, ImmutableBlock)
            }
        broken: set[int] = set()
        outcomes: dict[int, BlockOutcome] = {}
        onward: dict[int, BlockTransfer] = {}
        for number, transfer in enumerate(batch):
            if number not in near:
                broken.add(transfer.chain)
            elif transfer.chain and transfer.chain in broken:
                outcomes[number] = BlockOutcome(transfer.identity, reason=BEHIND_A_MISS, unused=transfer.target)
            else:
                onward[number] = BlockTransfer(transfer.identity, near[number], transfer.target)
        try:
            moved = self._to_device.copy(list(onward.values()))
            outcomes.update(zip(onward, moved, strict=True))
            return outcomes
        finally:
            self._near.pool.release_many(list(near.values())[::-1])  # the root last, so that tails are evicted first


def _wrong_size(answer: Outcome) -> Outcome:
    reason = f"it has {answer.payload_bytes} bytes there, which is not this layout's size"
    return Outcome(answer.key, Result.FAILED, volume=answer.volume, reason=reason)
