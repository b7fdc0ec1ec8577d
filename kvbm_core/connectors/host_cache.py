"""An engine's blocks in host memory and on volumes: the half of a connector that has the bytes.

The engine keeps its GPU's blocks itself; this finds blocks in the host or brings them there from volumes, copies them
into the engine's, layer by layer, and takes from it what it computed.
"""

from __future__ import annotations

import concurrent.futures
import threading
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from itertools import count
from typing import NamedTuple

import torch

from kvbm_core.block import Guard, ImmutableBlock, MutableBlock
from kvbm_core.connectors.host_loads import EndedLoad, HostLoads, recorded
from kvbm_core.connectors.lookup import LookupState, LookupTrigger, next_state
from kvbm_core.connectors.step_plan import Load, LoadMode, Save
from kvbm_core.copies import copy_tensors
from kvbm_core.errors import LayoutError, PoolExhaustedError
from kvbm_core.identity import BlockIdentity
from kvbm_core.manager import KvBlockManager
from kvbm_core.onboard import DEVICE, HOST, WAITED_IN_VAIN, Onboarded
from kvbm_core.storage import TensorStorage
from kvbm_core.verification import BlockSums

OPEN: dict[str, HostCache] = {}
"""By the engine's id: both halves of a connector are in one process and meet here."""


class Lookup:
    """A request's leading blocks, on their way to the host or held there. Used by the schedule's thread."""

    def __init__(self, cache: HostCache, wanted: Sequence[BlockIdentity], start: int) -> None:
        """`wanted` begins with block `start` of the request."""
        self.start = start
        self.wanted = len(wanted)
        self.state = LookupState.LOOKING
        self._cache = cache
        self._identities = wanted
        self._held = cache.manager.match(wanted)
        """Guards of what is in the host, in order."""
        self._coming: concurrent.futures.Future[Onboarded] | None = None
        self._fetch_rest()
        self._checked: concurrent.futures.Future[list[bool]] | None = None

    def blocks(self, wait_s: float = 0.0) -> list[ImmutableBlock] | None:
        """What can be had, from the first block on; None while it is on its way. Waits so long for it."""
        if self.state is LookupState.LOOKING:
            if self._coming is not None:
                try:
                    came = self._coming.result(wait_s)
                except concurrent.futures.TimeoutError:
                    return None
                self._coming = None
                self._held += came.blocks
                if came.ended == WAITED_IN_VAIN:
                    # Another request was fetching them and gave them up, or it was not there for that one.
                    self._fetch_rest()
                    return None
            if self._held:
                self._checked = self._checked or self._cache.check_soon(self._held)
                try:
                    right = self._checked.result(wait_s)
                except concurrent.futures.TimeoutError:
                    return None
                self._held = self._cache.leading_right(self._held, right)
            self.state = next_state(self.state, LookupTrigger.ARRIVE)
        return self._held

    def _fetch_rest(self) -> None:
        rest = self._identities[len(self._held) :]
        if rest and self._cache.has_volumes:
            self._coming = self._cache.manager.onboard_soon(rest)

    def take(self, first: int, count: int) -> list[ImmutableBlock]:
        """Guards of `count` blocks of the request from block `first` on; the others go back. Ends the lookup."""
        self.state = next_state(self.state, LookupTrigger.TAKE)
        start = first - self.start
        taken = self._held[start : start + count]
        _release([*self._held[:start], *self._held[start + count :]])
        self._held = []
        return taken

    def drop(self) -> None:
        """Let go of everything. Idempotent; a lookup whose blocks were taken must not be dropped."""
        self.state = next_state(self.state, LookupTrigger.DROP)
        _release(self._held)
        self._held = []
        if self._coming is not None and not self._coming.cancel():
            self._coming.add_done_callback(_release_late)
        self._coming = None


class _Stored(NamedTuple):
    """One step's blocks on their way to the host."""

    identities: list[BlockIdentity]
    engine_blocks: list[int]
    places: list[MutableBlock]


class HostCache:
    """`find`, `hold` and `reset` are the schedule's, the rest is the worker's; they may be one thread or two."""

    def __init__(
        self, manager: KvBlockManager, layers: Sequence[torch.Tensor], mode: LoadMode = LoadMode.ASYNC
    ) -> None:
        """`manager` is one of `device_memory = "host"`, `outer` 1 and order HND, and stays the caller's to close.

        `layers`: the engine's blocks, a tensor `[blocks, heads, tokens, head_dim]` for each layer. Raises `LayoutError`
        for tensors that are not those of its configuration.
        """
        config = manager.config
        expected = (config.shard_heads, config.page_tokens, config.head_dim)
        for number, layer in enumerate(layers):
            if layer.dim() != 4 or tuple(layer.shape[1:]) != expected:
                raise LayoutError(
                    f"layer {number} has blocks of shape {tuple(layer.shape[1:])}, {expected} were configured: the "
                    f"engine splits blocks, or its layers differ; neither is served"
                )
        if len(layers) != config.layers:
            raise LayoutError(f"the engine has {len(layers)} layers of blocks, {config.layers} were configured")
        self.manager = manager
        self.has_volumes = any(True for _ in config.tiers())
        self.mode = mode
        self._layers = tuple(layers)
        # [blocks, 1, tokens, heads, head_dim] as [blocks, heads, tokens, head_dim]
        self._host = tuple(each[:, 0].permute(0, 2, 1, 3) for each in manager.device.layer_tensors)
        self._sums = BlockSums(manager.device)
        self._sealed: dict[int, BlockIdentity] = {}
        """By block, what the sum was taken of: the very object that the block was registered with."""
        manager.check_puts(self._right_to_put)
        manager.note_loads(self.seal)
        self._owned = ExitStack()
        self._lock = threading.Lock()
        self._counts: Counter[str] = Counter()
        self._tickets = count(1)
        self._held: dict[int, list[ImmutableBlock]] = {}
        self._saving = concurrent.futures.ThreadPoolExecutor(1, "kvbm-connector-save")
        self._checking = concurrent.futures.ThreadPoolExecutor(1, "kvbm-connector-check")
        self._loads = HostLoads(self._host, self._layers, self._right, mode)
        self._storing: _Stored | None = None
        self._stored_layers: dict[int, concurrent.futures.Future[None]] = {}
        self._offloads: set[concurrent.futures.Future[int]] = set()

    # The schedule's

    def find(self, wanted: Sequence[BlockIdentity], start: int) -> Lookup:
        """Begin to get blocks into the host; `wanted` begins with block `start` of its request."""
        with self._lock:
            self._counts["asked_blocks"] += len(wanted)
        return Lookup(self, wanted, start)

    def check_soon(self, blocks: Sequence[ImmutableBlock]) -> concurrent.futures.Future[list[bool]]:
        """Which blocks may be promised: those that are still what they were when they came.

        An engine that waits for loads outside of its steps takes a promise back without harm: there they are checked
        once, when they are copied, and only the sums of what has just come are taken here.
        """
        if self.mode is LoadMode.ASYNC and not self._unsealed(blocks):
            known: concurrent.futures.Future[list[bool]] = concurrent.futures.Future()
            known.set_result([True] * len(blocks))
            return known
        return self._checking.submit(self._may_be_promised, tuple(blocks))

    def leading_right(self, blocks: list[ImmutableBlock], right: Sequence[bool]) -> list[ImmutableBlock]:
        """Guards of those before the first that is wrong; the others go back, and no wrong one is found again."""
        whole = right.index(False) if False in right else len(blocks)
        pool = self.manager.own_tier("host").pool
        for block, is_right in zip(blocks, right, strict=True):
            if not is_right:
                pool.forget(block)
        self._count("wrong_blocks", right.count(False))
        _release(blocks[whole:])
        return blocks[:whole]

    def hold(self, request: str, blocks: list[ImmutableBlock], engine_blocks: Sequence[int]) -> Load:
        """Keep found blocks until the worker has copied them; takes over the guards."""
        ticket = next(self._tickets)
        with self._lock:
            self._held[ticket] = blocks
            self._counts["found_blocks"] += len(blocks)
        return Load(ticket, request, tuple(block.index for block in blocks), tuple(engine_blocks))

    def seal(self, blocks: Sequence[ImmutableBlock]) -> None:
        """What these blocks are now is what they must be when they are copied on, where that was not said before."""
        fresh = self._unsealed(blocks)
        if fresh:
            self._sums.take([block.index for block in fresh])
            self._sealed.update((block.index, block.identity) for block in fresh)

    def reset(self) -> None:
        """Forget every block of the host. Raises `BlockStateError` while one is in use."""
        self.manager.reset("host")

    # The worker's

    def begin_load(self, loads: Sequence[Load]) -> None:
        """Begin to copy, and to look whether blocks are what they were when they came."""
        self._loads.begin(loads)

    def wait_layer(self, layer: int) -> None:
        """Until a layer of everything that this step waits for is there."""
        self._loads.wait_layer(layer)

    def finish_load(self, wait_s: float = 0.0) -> list[EndedLoad]:
        """Loads that are over, each once; their host blocks are let go. Waits so long for the next one, and for all of
        the step where they are layerwise."""
        pool = self.manager.own_tier("host").pool
        ended = self._loads.ended(wait_s)
        for load, wrong, failed in ended:
            with self._lock:
                held = self._held.pop(load.ticket)
            for block, engine_block in zip(held, load.engine_blocks, strict=True):
                if engine_block in wrong:
                    pool.forget(block)
            _release(held)
            self._count("loaded_blocks", len(held) - len(failed))
            self._count("wrong_blocks", len(wrong))
            self._count("load_failed_blocks", len(failed))
        return ended

    def save_layer(self, layer: int, saves: Sequence[Save]) -> None:
        """The engine has computed a layer of the step: begin to copy it. Layers come in any order, each once."""
        if self._storing is None:
            self._storing = self._begin_save(saves)
        stored = self._storing
        if stored.places and layer not in self._stored_layers:
            ready = recorded(self._layers[layer])
            self._stored_layers[layer] = self._saving.submit(self._save_layer, layer, stored, ready)

    def finish_save(self, saves: Sequence[Save], is_spoilt: bool = False) -> None:
        """The step's layers are computed: register what was copied, and let volumes have it. `is_spoilt`: the step may
        have computed on what did not come, and nothing of it is kept."""
        for layer in range(len(self._layers)):
            self.save_layer(layer, saves)
        stored, self._storing = self._storing, None
        layers, self._stored_layers = self._stored_layers, {}
        concurrent.futures.wait(layers.values())
        if stored is None or not stored.places:
            return
        if is_spoilt:
            self._count("not_saved_after_failure_blocks", len(stored.places))
            for place in stored.places:
                place.release()
            return
        for future in layers.values():
            future.result()
        registered = self.manager.register_many(self.manager.complete(stored.places, stored.identities))
        self.seal(registered)
        _release(registered)
        self._count("saved_blocks", len(registered))
        if self.has_volumes:
            offload = self.manager.offload_soon(len(registered))
            self._offloads.add(offload)
            offload.add_done_callback(self._offloads.discard)

    def settle(self) -> None:
        """Until what was saved so far is on its volumes, or was refused."""
        concurrent.futures.wait(tuple(self._offloads))

    def counts(self) -> dict[str, int]:
        """Blocks since the start: asked for, found, loaded, saved; `wrong` in host memory; `load_failed`, those and
        others that did not get to the engine; not saved, by reason; `volume_` with a reason for those that a volume
        did not give."""
        totals = self.manager.totals()
        with self._lock:
            counts = dict(self._counts)
        for source, blocks in totals.requests.loaded.items():
            if _is_volume(source):
                counts["from_volumes_blocks"] = counts.get("from_volumes_blocks", 0) + blocks
        for reason, blocks in totals.requests.not_loaded.items():
            counts[f"volume_{reason}_blocks"] = blocks
        return counts

    def owning(self, opened: ExitStack) -> HostCache:
        """Closes what was opened for it at its own end; itself."""
        self._owned = opened
        return self

    def close(self) -> None:
        """End what is under way, and close what it owns. Idempotent."""
        self._loads.close()
        for threads in (self._checking, self._saving):
            threads.shutdown(wait=True, cancel_futures=True)
        for held in self._held.values():
            _release(held)
        self._held.clear()
        self.settle()
        self._owned.close()

    def _unsealed(self, blocks: Sequence[ImmutableBlock]) -> list[ImmutableBlock]:
        return [block for block in blocks if not self._is_sealed(block)]

    def _may_be_promised(self, blocks: Sequence[ImmutableBlock]) -> list[bool]:
        known = [number for number, block in enumerate(blocks) if self._is_sealed(block)]
        self.seal(blocks)
        if self.mode is LoadMode.ASYNC:
            return [True] * len(blocks)
        right = dict(zip(known, self._right([blocks[number].index for number in known]), strict=True))
        return [right.get(number, True) for number in range(len(blocks))]

    def _right(self, places: Sequence[int]) -> list[bool]:
        return list(map(bool, self._sums.check_copies(places, self.manager.device, places)))

    def _right_to_put(
        self, blocks: Sequence[Guard], staging: TensorStorage, places: Sequence[int]
    ) -> Sequence[bool]:
        """A `lanes.PutCheck`: what changed in the host since it was saved comes to no volume."""
        sealed = [n for n, block in enumerate(blocks) if self._is_sealed(block)]
        indices = [blocks[n].index for n in sealed]
        checked = self._sums.check_copies(indices, staging, [places[n] for n in sealed])
        right = dict(zip(sealed, map(bool, checked), strict=True))
        self._count("wrong_blocks", list(right.values()).count(False))
        return [right.get(n, True) for n in range(len(blocks))]

    def _is_sealed(self, block: Guard) -> bool:
        return isinstance(block, ImmutableBlock) and self._sealed.get(block.index) is block.identity

    def _begin_save(self, saves: Sequence[Save]) -> _Stored:
        """Places for the step's blocks that the host does not have."""
        wanted = {
            identity.key: (identity, engine_block)
            for save in saves
            for identity, engine_block in zip(save.identities, save.engine_blocks, strict=True)
        }
        pool = self.manager.own_tier("host").pool
        missing = [pair for key, pair in wanted.items() if not pool.has(key)]
        self._count("present_blocks", len(wanted) - len(missing))
        while missing:
            try:
                places = self.manager.allocate(len(missing)).blocks
            except PoolExhaustedError:
                # Tails first: without its beginning a chain is of no use.
                self._count("not_saved_host_full_blocks", len(missing) - len(missing) // 2)
                missing = missing[: len(missing) // 2]
                continue
            return _Stored([identity for identity, _ in missing], [block for _, block in missing], places)
        return _Stored([], [], [])

    def _save_layer(self, layer: int, stored: _Stored, ready: Callable[[], None]) -> None:
        ready()
        places = [place.index for place in stored.places]
        copy_tensors(self._layers[layer], stored.engine_blocks, self._host[layer], places)

    def _count(self, name: str, blocks: int) -> None:
        if blocks:
            with self._lock:
                self._counts[name] += blocks


def _is_volume(source: str) -> bool:
    return source not in (DEVICE, HOST)


def _release(blocks: Sequence[ImmutableBlock]) -> None:
    """The root last, so that tails are evicted before what many share."""
    for block in reversed(blocks):
        block.release()


def _release_late(coming: concurrent.futures.Future[Onboarded]) -> None:
    if not coming.cancelled() and coming.exception() is None:
        coming.result().release()

