"""Copies between two of the core's memories, held to checksums."""

from __future__ import annotations

import time
from collections.abc import Sequence
from itertools import groupby

from kvbm_core.accounting import Accounts
from kvbm_core.block import PRIORITY_DEFAULT, ImmutableBlock
from kvbm_core.copies import copy_blocks
from kvbm_core.errors import PoolExhaustedError
from kvbm_core.paths import TransferPath
from kvbm_core.pool import BlockPool
from kvbm_core.tier_pool import TierPool
from kvbm_core.transfer import BlockOutcome, BlockTransfer
from kvbm_core.verification import BlockSums

COPY_FAILED = "copy_failed"
"""The device or its memory refused; the detail says how."""
WRONG_BYTES = "wrong_bytes"
"""What was copied does not read as it should. It is registered nowhere, and a host block is forgotten."""
WRONG_BYTES_DETAIL = "its checksum is not the one it came in with"


class Copier:
    """One direction between the device and near memory, which is the host's or the staging buffer. Thread-safe."""

    def __init__(
        self, path: TransferPath, source: TierPool, target: TierPool, accounts: Accounts, sums: BlockSums | None
    ) -> None:
        """`sums`: of the near memory; None where copies are not verified."""
        self.path = path
        self.source = source
        self.target = target
        self._accounts = accounts
        self._sums = sums

    def copy(self, batch: Sequence[BlockTransfer]) -> list[BlockOutcome]:
        """Copy whole blocks into their targets, or into blocks that the target pool gives, and register them there.

        One outcome each, in order. A target that was not written well comes back in it.
        """
        no_room = give_targets(batch, self.target.pool)
        moving = [transfer for transfer in batch if transfer.target is not None]
        failure = self._copy(moving)
        right = [] if failure else self.right(moving)
        good = [each for each, is_right in zip(moving, right, strict=False) if is_right]
        registered = iter(register_targets(good, self.target.pool))
        verdicts = iter(right)
        outcomes = []
        for transfer in batch:
            if transfer.target is None:
                outcomes.append(self._failed(transfer, f"{self.target.name}_exhausted", no_room))
            elif failure:
                outcomes.append(self._failed(transfer, COPY_FAILED, failure))
            elif next(verdicts):
                outcomes.append(BlockOutcome(transfer.identity, next(registered)))
            else:
                outcomes.append(self._failed(transfer, WRONG_BYTES, WRONG_BYTES_DETAIL))
        return outcomes

    def right(self, batch: Sequence[BlockTransfer]) -> list[bool]:
        """Which of the copied blocks read as they should. A host block that does not is forgotten."""
        if self._sums is None or not batch:
            return [True] * len(batch)
        sources = [transfer.source_index for transfer in batch]
        targets = [transfer.target_index for transfer in batch]
        if self.path is TransferPath.DEVICE_TO_HOST:
            return list(map(bool, self._sums.take_copies(self.source.storage, sources, targets)))
        right = list(map(bool, self._sums.check_copies(sources, self.target.storage, targets)))
        for transfer, is_right in zip(batch, right, strict=True):
            if not is_right and isinstance(transfer.source, ImmutableBlock):
                self.source.pool.forget(transfer.source)
        return right

    def copy_layer(self, batch: Sequence[BlockTransfer], layer: int) -> list[BlockOutcome]:
        """Copy one layer of blocks into their targets, and register nothing."""
        failure = self._copy(batch, layer)
        if failure:
            return [self._failed(transfer, COPY_FAILED, failure) for transfer in batch]
        return [BlockOutcome(transfer.identity) for transfer in batch]

    def _copy(self, batch: Sequence[BlockTransfer], layer: int | None = None) -> str:
        """Empty, or why nothing was copied."""
        if not batch:
            return ""
        layout = self.source.storage.layout
        block_bytes = layout.block_bytes if layer is None else layout.block_bytes // layout.layers
        started_s = time.perf_counter()
        try:
            copy_blocks(
                self.source.storage,
                [transfer.source_index for transfer in batch],
                self.target.storage,
                [transfer.target_index for transfer in batch],
                layer,
            )
        except RuntimeError as error:  # what torch raises when a device fails
            return str(error)
        seconds = time.perf_counter() - started_s
        blocks = len(batch) if layer is None else 0
        self._accounts.moved(self.path, blocks, len(batch) * block_bytes, seconds)
        return ""

    def _failed(self, transfer: BlockTransfer, reason: str, detail: str) -> BlockOutcome:
        self._accounts.failed(self.path, reason)
        return BlockOutcome(transfer.identity, reason=reason, detail=detail, unused=transfer.target)


def give_targets(batch: Sequence[BlockTransfer], pool: BlockPool) -> str:
    """A place for each transfer that brought none, the first ones where not all find room; why, if so."""
    without = [transfer for transfer in batch if transfer.target is None]
    no_room = ""
    for wanted in (len(without), _room(pool, len(without))):
        try:
            places = pool.allocate(wanted).blocks
        except PoolExhaustedError as error:
            no_room = str(error)
            continue
        for transfer, place in zip(without, places, strict=False):
            transfer.target = place
        break
    return no_room


def register_targets(batch: Sequence[BlockTransfer], pool: BlockPool) -> list[ImmutableBlock]:
    """Guards of the targets, each with its source's priority; the targets' guards end."""
    targets = [transfer.target for transfer in batch if transfer.target is not None]
    completed = pool.complete_many(targets, [transfer.identity for transfer in batch])
    registered = []
    for priority, group in groupby(zip(map(_priority, batch), completed, strict=True), key=lambda pair: pair[0]):
        registered += pool.register_many([block for _, block in group], copied=True, priority=priority)
    return registered


def _room(pool: BlockPool, wanted: int) -> int:
    occupancy = pool.occupancy()
    return min(wanted, occupancy.inactive + occupancy.reset)


def _priority(transfer: BlockTransfer) -> int:
    return transfer.source.priority if isinstance(transfer.source, ImmutableBlock) else PRIORITY_DEFAULT
