"""Copies between two of the core's memories."""

from __future__ import annotations

import time
from collections.abc import Sequence
from itertools import groupby

from kvbm_core.accounting import Accounts
from kvbm_core.block import PRIORITY_DEFAULT, ImmutableBlock
from kvbm_core.copies import copy_blocks
from kvbm_core.errors import PoolExhaustedError
from kvbm_core.paths import TransferPath
from kvbm_core.tier_pool import TierPool
from kvbm_core.transfer import BlockOutcome, BlockTransfer

COPY_FAILED = "copy_failed"
"""The device or its memory refused; the detail says how."""


class Copier:
    """One direction between two memories. Thread-safe."""

    def __init__(self, path: TransferPath, source: TierPool, target: TierPool, accounts: Accounts) -> None:
        self.path = path
        self.source = source
        self.target = target
        self._accounts = accounts

    def copy(self, batch: Sequence[BlockTransfer]) -> list[BlockOutcome]:
        """Copy whole blocks into their targets, or into blocks that the target pool gives, and register them there.

        One outcome each, in order. A target that was not written comes back in it.
        """
        no_room = self._give_targets(batch)
        moving = [transfer for transfer in batch if transfer.target is not None]
        failure = self._copy(moving)
        registered = iter([] if failure else self._register(moving))
        outcomes = []
        for transfer in batch:
            if transfer.target is None:
                outcomes.append(self._failed(transfer, f"{self.target.name}_exhausted", no_room))
            elif failure:
                outcomes.append(self._failed(transfer, COPY_FAILED, failure)._replace(unused=transfer.target))
            else:
                outcomes.append(BlockOutcome(transfer.identity, next(registered)))
        return outcomes

    def copy_layer(self, batch: Sequence[BlockTransfer], layer: int) -> list[BlockOutcome]:
        """Copy one layer of blocks into their targets, and register nothing."""
        failure = self._copy(batch, layer)
        if failure:
            return [self._failed(transfer, COPY_FAILED, failure) for transfer in batch]
        return [BlockOutcome(transfer.identity) for transfer in batch]

    def _give_targets(self, batch: Sequence[BlockTransfer]) -> str:
        """A place for each transfer that brought none, the first ones where not all find room; why, if so."""
        without = [transfer for transfer in batch if transfer.target is None]
        no_room = ""
        for wanted in (len(without), self._room(len(without))):
            try:
                places = self.target.pool.allocate(wanted).blocks
            except PoolExhaustedError as error:
                no_room = str(error)
                continue
            for transfer, place in zip(without, places, strict=False):
                transfer.target = place
            break
        return no_room

    def _room(self, wanted: int) -> int:
        occupancy = self.target.pool.occupancy()
        return min(wanted, occupancy.inactive + occupancy.reset)

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

    def _register(self, batch: Sequence[BlockTransfer]) -> list[ImmutableBlock]:
        """Guards of the targets, each with its source's priority; the targets' guards end."""
        pool = self.target.pool
        targets = [transfer.target for transfer in batch if transfer.target is not None]
        completed = pool.complete_many(targets, [transfer.identity for transfer in batch])
        registered = []
        for priority, group in groupby(zip(map(_priority, batch), completed, strict=True), key=lambda pair: pair[0]):
            registered += pool.register_many([block for _, block in group], copied=True, priority=priority)
        return registered

    def _failed(self, transfer: BlockTransfer, reason: str, detail: str) -> BlockOutcome:
        self._accounts.failed(self.path, reason)
        return BlockOutcome(transfer.identity, reason=reason, detail=detail)


def _priority(transfer: BlockTransfer) -> int:
    return transfer.source.priority if isinstance(transfer.source, ImmutableBlock) else PRIORITY_DEFAULT
