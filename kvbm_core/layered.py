"""Transfers layer by layer, beside the model's own work on the other layers.

A load brings layer 0 first, so that the model may begin before the rest has come. A store takes each layer to the host
as soon as the model has finished it. Blocks are registered when all of their layers are there and right.
"""

from __future__ import annotations

import concurrent.futures
from collections.abc import Callable, Sequence
from typing import Protocol

from event_plane.schema import Tier
from kvbm_core.accounting import Accounts, RequestAccount
from kvbm_core.block import ImmutableBlock
from kvbm_core.copier import WRONG_BYTES, Copier, register_targets
from kvbm_core.progress import Gate
from kvbm_core.transfer import BEHIND_A_MISS, BlockOutcome, BlockTransfer, TransferManager


class LayerMoves:
    """All layers of some blocks on their way along one path. Their guards belong to it and to what is under way: one
    that nobody registers goes when the last of these does."""

    def __init__(
        self,
        transfers: TransferManager,
        copier: Copier,
        blocks: Sequence[BlockTransfer],
        gates: Sequence[Gate],
        *,
        wait_s: float,
    ) -> None:
        """`blocks` have a source and a target each. Layer n goes once `gates[n]` is passed; all within `wait_s`."""
        self._transfers = transfers
        self._copier = copier
        self.blocks = tuple(blocks)
        self._in_doubt: set[int] = set()
        """Blocks that a layer's transfer was given up for while it ran."""
        due_s = transfers.now_s() + wait_s
        self._layers: list[concurrent.futures.Future[list[BlockOutcome]]] = [
            transfers.submit(
                transfers.move(
                    copier.path,
                    [BlockTransfer(each.identity, each.source, each.target, layer) for each in blocks],
                    deadline_s=due_s,
                    gate=gate,
                )
            )
            for layer, gate in enumerate(gates)
        ]

    def wait_layer(self, layer: int) -> bool:
        """Until a layer has come, or was given up. Whether it is there, of every block."""
        return all(outcome.ok for outcome in self._transfers.wait_for(self._layers[layer]))

    def settled(self) -> list[str]:
        """Until all layers have ended; for each block, why it is not there, or empty where it is and right."""
        reasons = [""] * len(self.blocks)
        for layer in self._layers:
            outcomes = self._transfers.wait_for(layer)
            for number, outcome in enumerate(outcomes):
                reasons[number] = reasons[number] or outcome.reason
                if not outcome.ok and outcome.unused is None:
                    self._in_doubt.add(number)
        there = [number for number, reason in enumerate(reasons) if not reason]
        for number, is_right in zip(there, self._copier.right([self.blocks[n] for n in there]), strict=True):
            reasons[number] = "" if is_right else WRONG_BYTES
        return reasons

    def let_go(self) -> None:
        """What was not registered goes back; of what is in doubt, once the last transfer has let go of it too."""
        for number, block in enumerate(self.blocks):
            if number not in self._in_doubt:
                for guard in (block.source, block.target):
                    if guard is not None:
                        guard.release()
        self.blocks = ()
        self._layers.clear()


class OnUsed(Protocol):
    """Told of blocks that a request got, which are on the device now, and of the tier that they were on."""

    def __call__(self, tier: Tier, blocks: Sequence[ImmutableBlock]) -> None: ...


class LayeredLoad:
    """Blocks of the host on their way to the device. From `KvBlockManager.onboard_by_layer`."""

    def __init__(self, moves: LayerMoves, copier: Copier, accounts: Accounts, on_used: OnUsed) -> None:
        self._moves = moves
        self._copier = copier
        self._accounts = accounts
        self._on_used = on_used

    def places(self) -> list[int]:
        """Device blocks that are being written, in order: the engine reads a layer of them once it has come."""
        return [block.target_index for block in self._moves.blocks]

    def wait_layer(self, layer: int) -> bool:
        """Until a layer is there, of every block; False where it could not be had, and blocks must be computed."""
        return self._moves.wait_layer(layer)

    def finish(self) -> list[ImmutableBlock]:
        """Until all have come: device guards of the leading blocks that are whole and right, registered. Once only."""
        blocks, reasons = self._moves.blocks, self._moves.settled()
        whole = next((number for number, reason in enumerate(reasons) if reason), len(reasons))
        registered = register_targets(blocks[:whole], self._copier.target.pool)
        block_bytes, tokens = self._copier.source.storage.layout.block_bytes, self._copier.source.pool.page_tokens
        account = RequestAccount(
            asked=len(blocks),
            tokens_asked=len(blocks) * tokens,
            tokens_matched=whole * tokens,
            bytes_asked=len(blocks) * block_bytes,
        )
        account.found[Tier.G2] += len(blocks)
        account.loaded[Tier.G2.name] += whole
        account.not_loaded.update(reason or BEHIND_A_MISS for reason in reasons[whole:])
        account.bytes_moved[self._copier.path] += whole * block_bytes
        self._accounts.served(account)
        self._on_used(Tier.G2, registered)
        self._moves.let_go()
        return registered


class LayeredStore:
    """Blocks that the model is computing, on their way to the host. From `KvBlockManager.offload_by_layer`."""

    def __init__(
        self,
        moves: LayerMoves,
        copier: Copier,
        register: Callable[[Sequence[BlockTransfer], Sequence[bool]], list[ImmutableBlock]],
        follow: Callable[[Sequence[ImmutableBlock]], None],
    ) -> None:
        """`register` makes the device's blocks findable, told which the host has got; `follow` takes the host's on."""
        self._moves = moves
        self._copier = copier
        self._register = register
        self._follow = follow

    def places(self) -> list[int]:
        """Device blocks that the model writes, in order."""
        return [block.source_index for block in self._moves.blocks]

    def finish(self) -> list[ImmutableBlock]:
        """After the iteration's end: device guards of all blocks, registered. Once only.

        Those that reached the host are registered there too and go on to volumes; the others wait for offload as if
        they had never begun.
        """
        blocks, reasons = self._moves.blocks, self._moves.settled()
        stored = [not reason for reason in reasons]
        registered = self._register(blocks, stored)
        there = [block for block, is_there in zip(blocks, stored, strict=True) if is_there]
        self._follow(register_targets(there, self._copier.target.pool))
        self._moves.let_go()
        return registered
