"""Volumes → the device's pool, where that is host memory in which blocks lie as they do on volumes."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from kvbm_core.block import ImmutableBlock
from kvbm_core.copier import give_targets, register_targets
from kvbm_core.lanes import OnBatch, Volumes
from kvbm_core.paths import TransferPath
from kvbm_core.tier_pool import TierPool
from kvbm_core.transfer import BEHIND_A_MISS, BlockOutcome, BlockTransfer
from storage_agent.port import Outcome, Result

OnLoaded = Callable[[Sequence[ImmutableBlock]], None]


class DirectLoadLane:
    """Reads each block into its target, which is registered: whoever read it held its bytes to their checksum."""

    def __init__(self, path: TransferPath, device: TierPool, volumes: Volumes, on_batch: OnBatch) -> None:
        self.on_loaded: OnLoaded | None = None
        """Called with what a batch brought, in its thread, before anybody else hears of it."""
        self._path = path
        self._device = device
        self._volumes = volumes
        self._on_batch = on_batch

    def run(self, batch: Sequence[BlockTransfer]) -> list[BlockOutcome]:
        """See `transfer.Lane.run`. `place` is the volume that gave the block.

        A block that is nowhere, or behind such a one of its chain, takes no place: what may be of use keeps it.
        """
        outcomes: dict[int, BlockOutcome] = {}
        broken: set[int] = set()
        answers = self._volumes.absent(batch)
        for number, transfer in enumerate(batch):
            self._sort_out(number, transfer, answers.get(number), outcomes, broken)
        reading = self._with_targets([n for n in range(len(batch)) if n not in outcomes], batch, outcomes)
        if reading:
            self._read(reading, batch, outcomes, broken)
        self._on_batch()
        return [outcomes[number] for number in range(len(batch))]

    def _with_targets(
        self, numbers: Sequence[int], batch: Sequence[BlockTransfer], outcomes: dict[int, BlockOutcome]
    ) -> list[int]:
        """Those of the transfers for which there is room."""
        no_room = give_targets([batch[number] for number in numbers], self._device.pool)
        without = [number for number in numbers if batch[number].target is None]
        if without:
            reason = f"{self._device.name}_exhausted"
            self._volumes.accounts.failed(self._path, reason, len(without))
            for number in without:
                outcomes[number] = BlockOutcome(batch[number].identity, reason=reason, detail=no_room)
        return [number for number in numbers if number not in outcomes]

    def _read(
        self,
        numbers: Sequence[int],
        batch: Sequence[BlockTransfer],
        outcomes: dict[int, BlockOutcome],
        broken: set[int],
    ) -> None:
        transfers = [batch[number] for number in numbers]
        places = [transfer.target_index for transfer in transfers]
        answers = self._volumes.read(self._path, transfers, self._device.storage, places)
        hits: dict[int, str] = {}
        for number, transfer, answer in zip(numbers, transfers, answers, strict=True):
            self._sort_out(number, transfer, None if answer.result is Result.HIT else answer, outcomes, broken)
            if number not in outcomes:
                hits[number] = answer.volume
        registered = register_targets([batch[number] for number in hits], self._device.pool)
        if self.on_loaded is not None and registered:
            self.on_loaded(registered)
        for (number, volume), block in zip(hits.items(), registered, strict=True):
            outcomes[number] = BlockOutcome(batch[number].identity, block, volume)

    def _sort_out(
        self,
        number: int,
        transfer: BlockTransfer,
        missed: Outcome | None,
        outcomes: dict[int, BlockOutcome],
        broken: set[int],
    ) -> None:
        """Note the outcome of a block that was missed, or comes behind one of its chain that was; in order."""
        if missed is not None:
            broken.add(transfer.chain)
            outcomes[number] = self._volumes.not_read(self._path, transfer, missed)
        elif transfer.chain and transfer.chain in broken:
            outcomes[number] = BlockOutcome(transfer.identity, reason=BEHIND_A_MISS, unused=transfer.target)
