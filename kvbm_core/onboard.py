"""Toward the device: blocks found in the host or on volumes are brought in, in order, up to the first that is missing.

A block is registered only after its bytes are known to be right. A load that fails is a miss with a reason: the engine
computes the block again.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import StrEnum
from itertools import count, takewhile
from math import inf
from typing import NamedTuple

from event_plane.schema import Tier
from kvbm_core.accounting import Accounts, RequestAccount
from kvbm_core.block import Guard, ImmutableBlock, MutableBlock
from kvbm_core.config import KvbmConfig
from kvbm_core.estimate import LoadPlan, Verdict, plan_load
from kvbm_core.identity import BlockIdentity
from kvbm_core.lanes import Volumes
from kvbm_core.layered import OnUsed
from kvbm_core.paths import TransferPath
from kvbm_core.pool import BlockPool
from kvbm_core.tiers import Tiers
from kvbm_core.transfer import BEHIND_A_MISS, CANCELLED, BlockOutcome, BlockTransfer, Move, TransferManager, release
from storage_agent.port import BlockKey, Result

DEVICE = "G1"
HOST = "G2"
"""Sources of blocks that the device or the host had; every other source is a volume's id, which has no capitals.
`G1` is the core's first pool, also where an engine keeps its GPU's blocks itself."""
WAITED_IN_VAIN = "waited_in_vain"
"""Another request was loading it, and did not get it."""


_chains = count(1)
_CHUNKS_AHEAD = 4
"""Batches of one request under way at once; more only waits in queues, and is for nothing when one falls short."""


class Onboarded(NamedTuple):
    """What `onboard` brought: device guards of the leading blocks that could be had.

    `sources`: where each was, `G1`, `G2` or a volume's name. `unused`: targets that the caller gave and has back, in
    order. `ended`: why there are no more, empty where all were had. `account`: the request's columns.
    """

    blocks: list[ImmutableBlock]
    sources: list[str]
    unused: list[MutableBlock]
    ended: str
    plan: LoadPlan
    account: RequestAccount

    def release(self) -> None:
        """Give everything back, the root last, so that tails are evicted before what many share."""
        for guard in (*self.unused, *reversed(self.blocks)):
            guard.release()


class _Where(StrEnum):
    DEVICE = "device"
    WAITING = "waiting"
    HOST = "host"
    VOLUME = "volume"
    NOWHERE = "nowhere"


@dataclass(slots=True)
class _Place:
    """Where a block was found when it was asked for. `tier`: of the volume it was last seen on, None if of none."""

    identity: BlockIdentity
    where: _Where
    guard: ImmutableBlock | None = None
    path: TransferPath | None = None
    tier: Tier | None = None
    target: MutableBlock | None = None


class _Loads:
    """One call's moves, which end together as soon as one of them falls short."""

    def __init__(self, account: RequestAccount, ends_s: float, priority: int) -> None:
        self.chain = next(_chains)
        self.priority = priority
        self.account = account
        self.ends_s = ends_s
        self.given_up = asyncio.Event()
        self._moves: set[Move] = set()

    async def wait(self, move: Move) -> list[BlockOutcome]:
        self._moves.add(move)
        try:
            return await move.wait()
        finally:
            self._moves.discard(move)

    def give_up(self) -> None:
        self.given_up.set()
        for move in tuple(self._moves):
            move.give_up()


class Onboarder:
    """`onboard` is a coroutine of the transfers' loop."""

    def __init__(
        self,
        tiers: Tiers,
        volumes: Volumes | None,
        transfers: TransferManager,
        accounts: Accounts,
        config: KvbmConfig,
        on_used: OnUsed,
    ) -> None:
        """`volumes`: None where there are none."""
        self._device = tiers.device
        self._host = tiers.host
        self._volumes = volumes
        self._transfers = transfers
        self._accounts = accounts
        self._config = config
        self._on_used = on_used
        self._loading: dict[BlockKey, asyncio.Event] = {}
        """Blocks on their way to the device, which other requests wait for instead of loading them again."""

    async def onboard(
        self,
        identities: Sequence[BlockIdentity],
        targets: Sequence[MutableBlock] | None = None,
        budget_s: float = inf,
        priority: int = 0,
    ) -> Onboarded:
        """Bring in the leading `identities` that can be had in time; the caller releases the guards.

        `targets`: one reset device block for each, written in their order; those not needed come back. One that a
        load in doubt may still write does not. `priority`: lower goes first where requests wait for one path. Raises
        `ValueError` for another number of targets, `BlockStateError` for one that is no empty block of the device;
        all of them are the caller's then.
        """
        given = None if targets is None else take_targets(self._device.pool, targets, len(identities))
        account = RequestAccount(
            asked=len(identities),
            tokens_asked=len(identities) * self._config.page_tokens,
            bytes_asked=len(identities) * self._config.block_bytes,
        )
        loads = _Loads(account, self._transfers.now_s() + budget_s, priority)
        places = self._locate(identities)
        if given is not None:
            for place, target in zip(places, given, strict=True):
                place.target = target
        plan = self._plan(places, budget_s)
        try:
            outcomes = await self._load(places[: plan.blocks], loads)
        except BaseException:  # cancelled: what was not begun goes back
            for place in places:
                _drop(_take_guard(place))
                _drop(_take_target(place))
            raise
        found = self._settle(places, outcomes, plan, account, keeps_targets=given is not None)
        self._accounts.served(account)
        return found

    def estimate(self, identities: Sequence[BlockIdentity], budget_s: float = inf) -> LoadPlan:
        """What `onboard` would load now, and why; nothing is moved."""
        places = self._locate(identities)
        for place in places:
            _drop(place.guard)
        return self._plan(places, budget_s)

    def is_loading(self, key: BlockKey) -> bool:
        """Whether a block is on its way to the device."""
        return key in self._loading

    def _locate(self, identities: Sequence[BlockIdentity]) -> list[_Place]:
        """Where each block is, with guards of those in the core's own tiers, so that none is evicted meanwhile."""
        places = []
        on_device = self._device.pool.scan([identity.key for identity in identities])
        absent = [identity.key for identity, guard in zip(identities, on_device, strict=True) if guard is None]
        in_host = iter(self._host.pool.scan(absent) if self._host is not None else [None] * len(absent))
        for identity, guard in zip(identities, on_device, strict=True):
            if guard is not None:
                places.append(_Place(identity, _Where.DEVICE, guard))
                continue
            copy = next(in_host)
            if identity.key in self._loading:
                _drop(copy)
                places.append(_Place(identity, _Where.WAITING))
            elif copy is not None:
                places.append(_Place(identity, _Where.HOST, copy, TransferPath.HOST_TO_DEVICE, Tier.G2))
            else:
                places.append(self._on_volumes(identity))
        return places

    def _on_volumes(self, identity: BlockIdentity) -> _Place:
        """The tier of volumes that the block was last seen on; else the first there is, which the agent searches all
        of anyway."""
        if self._volumes is None:
            return _Place(identity, _Where.NOWHERE)
        for view in self._volumes.views:
            if view.where(identity.key):
                return _Place(identity, _Where.VOLUME, None, view.load_path, view.tier)
        return _Place(identity, _Where.VOLUME, None, self._volumes.views[0].load_path)

    def _plan(self, places: Sequence[_Place], budget_s: float) -> LoadPlan:
        """For the leading blocks that may be somewhere."""
        paths: list[tuple[TransferPath, ...]] = []
        for place in takewhile(lambda place: place.where is not _Where.NOWHERE, places):
            if place.path is None:
                paths.append(())
            elif place.path is TransferPath.HOST_TO_DEVICE:
                paths.append((place.path,))
            else:
                paths.append((place.path, TransferPath.HOST_TO_DEVICE))
        return plan_load(
            paths,
            self._accounts.rates(),
            block_bytes=self._config.block_bytes,
            block_tokens=self._config.page_tokens,
            prefill_tokens_per_s=self._config.prefill_tokens_per_s,
            budget_s=budget_s,
            batch_blocks=self._config.transfer_blocks,
        )

    async def _load(self, places: Sequence[_Place], loads: _Loads) -> list[BlockOutcome]:
        """Outcomes of the leading places, up to the batch in which one falls short, and those that were begun."""
        outcomes: list[BlockOutcome] = []
        chunks = iter(self._chunks(places))
        under_way: deque[asyncio.Task[list[BlockOutcome]]] = deque()
        try:
            while True:
                while len(under_way) < _CHUNKS_AHEAD and not loads.given_up.is_set():
                    chunk = next(chunks, None)
                    if chunk is None:
                        break
                    under_way.append(asyncio.create_task(self._bring(chunk, loads)))
                if not under_way:
                    return outcomes
                ended = await asyncio.shield(under_way[0])
                under_way.popleft()
                outcomes += ended
                if not all(outcome.ok for outcome in ended):
                    loads.give_up()
        except BaseException:  # cancelled, or a fault of this program: nobody takes what was found
            loads.give_up()
            for late in await asyncio.gather(*under_way, return_exceptions=True):
                outcomes += late if isinstance(late, list) else []
            for outcome in outcomes:
                release(outcome)
            raise

    def _chunks(self, places: Sequence[_Place]) -> Iterator[list[_Place]]:
        """Stretches of blocks that go one way, of one batch at most."""
        chunk: list[_Place] = []
        for place in places:
            if chunk and (
                (chunk[0].where, chunk[0].path) != (place.where, place.path)
                or len(chunk) == self._config.transfer_blocks
            ):
                yield chunk
                chunk = []
            chunk.append(place)
        if chunk:
            yield chunk

    async def _bring(self, chunk: Sequence[_Place], loads: _Loads) -> list[BlockOutcome]:
        """Get one chunk onto the device. Takes over the places' guards and targets."""
        if chunk[0].where is _Where.DEVICE:
            return [_as_it_is(place) for place in chunk]
        if chunk[0].where is _Where.WAITING:
            return [await self._await_other(place, loads) for place in chunk]
        here = asyncio.Event()
        for place in chunk:
            self._loading[place.identity.key] = here
        try:
            return await self._move(chunk, loads)
        finally:
            for place in chunk:
                if self._loading.get(place.identity.key) is here:
                    del self._loading[place.identity.key]
            here.set()

    async def _move(self, chunk: Sequence[_Place], loads: _Loads) -> list[BlockOutcome]:
        path = chunk[0].path
        assert path is not None, "a block that must be moved has a path"
        transfers = [
            BlockTransfer(place.identity, _take_guard(place), _take_target(place), chain=loads.chain)
            for place in chunk
        ]
        if path is not TransferPath.REMOTE_TO_HOST:
            outcomes = await self._timed(path, transfers, loads)
            if path is TransferPath.HOST_TO_DEVICE:
                outcomes = [outcome._replace(place=HOST) for outcome in outcomes]
            return outcomes
        fetched = await self._timed(path, transfers, loads)
        onward = [BlockTransfer(each.identity, each.block, each.unused) for each in fetched if each.block is not None]
        if loads.given_up.is_set():
            return [_behind(each) if each.ok else each for each in fetched]
        moved = iter(await self._timed(TransferPath.HOST_TO_DEVICE, onward, loads))
        return [each if each.block is None else next(moved)._replace(place=each.place) for each in fetched]

    async def _timed(
        self, path: TransferPath, transfers: Sequence[BlockTransfer], loads: _Loads
    ) -> list[BlockOutcome]:
        started_s = self._transfers.now_s()
        due_s = min(loads.ends_s, started_s + self._config.limits_of(path).deadline_s)
        move = self._transfers.start(path, transfers, priority=loads.priority, deadline_s=due_s)
        outcomes = await loads.wait(move)
        moved = sum(outcome.ok for outcome in outcomes)
        if moved:
            loads.account.moved(path, moved * self._config.block_bytes, self._transfers.now_s() - started_s)
        return outcomes

    async def _await_other(self, place: _Place, loads: _Loads) -> BlockOutcome:
        """Another request is loading the block: take what it gets."""
        target = _take_target(place)
        here = self._loading.get(place.identity.key)
        if here is not None:
            left_s = loads.ends_s - self._transfers.now_s()
            waits = [asyncio.create_task(here.wait()), asyncio.create_task(loads.given_up.wait())]
            try:
                await asyncio.wait(waits, timeout=None if left_s == inf else left_s, return_when="FIRST_COMPLETED")
            finally:
                for wait in waits:
                    wait.cancel()
        block = self._device.pool.acquire(place.identity.key)
        reason = "" if block is not None else WAITED_IN_VAIN
        return BlockOutcome(place.identity, block, DEVICE, reason, "another request did not get it", target)

    def _settle(
        self,
        places: Sequence[_Place],
        outcomes: Sequence[BlockOutcome],
        plan: LoadPlan,
        account: RequestAccount,
        *,
        keeps_targets: bool,
    ) -> Onboarded:
        """Sort out what was found: guards of the leading blocks, columns for all, and targets that go back."""
        blocks: list[ImmutableBlock] = []
        sources: list[str] = []
        unused: list[MutableBlock] = []
        ended = "" if plan.blocks == len(places) else plan.verdict
        whole = next((n for n, outcome in enumerate(outcomes) if not outcome.ok), len(outcomes))
        if whole < len(outcomes):
            ended = outcomes[whole].reason
        elif plan.blocks < len(places) and places[plan.blocks].where is _Where.NOWHERE:
            ended = Result.MISS
        for number, place in enumerate(places):
            outcome = outcomes[number] if number < len(outcomes) else _untouched(place, plan, number)
            if number > whole and (outcome.ok or outcome.reason == CANCELLED):
                outcome = _behind(outcome)
            self._count(place, outcome, account)
            if outcome.block is not None:
                blocks.append(outcome.block)
                sources.append(outcome.place)
            if outcome.unused is not None:
                if keeps_targets:
                    unused.append(outcome.unused)
                else:
                    outcome.unused.release()
        for found_in, tier in ((DEVICE, self._device.storage.tier), (HOST, Tier.G2)):
            used = [block for block, source in zip(blocks, sources, strict=True) if source == found_in]
            self._on_used(tier, used)
        account.tokens_matched = len(blocks) * self._config.page_tokens
        return Onboarded(blocks, sources, unused, ended, plan, account)

    def _count(self, place: _Place, outcome: BlockOutcome, account: RequestAccount) -> None:
        """Put one block into its columns."""
        match place.where:
            case _Where.DEVICE:
                account.ready += 1
                return
            case _Where.WAITING:
                account.waiting += 1
                return
            case _Where.NOWHERE:
                account.absent += 1
                return
        if outcome.reason == Result.MISS:
            account.absent += 1
            return
        tier = place.tier
        if place.where is _Where.VOLUME and outcome.place and self._volumes is not None:
            tier = self._volumes.tier_of(outcome.place)
        if tier is None:
            account.untried += 1
        else:
            account.found[tier] += 1
            if outcome.ok:
                account.loaded[outcome.place] += 1
            else:
                account.not_loaded[outcome.reason] += 1


def take_targets(
    pool: BlockPool, targets: Sequence[MutableBlock], count: int, *, taken: int | None = None
) -> list[MutableBlock]:
    """The first `taken`, or all, of the empty blocks that a caller gives for `count` others, under our own guards.

    Raises `ValueError` for another number of them, `BlockStateError` as `BlockPool.take_over` does; none is taken then.
    """
    if len(targets) != count:
        raise ValueError(f"{len(targets)} targets for {count} blocks: give one for each")
    return pool.take_over(targets[:taken])


def _untouched(place: _Place, plan: LoadPlan, number: int) -> BlockOutcome:
    """Of a block that nobody tried to load: the plan spoke against it, or an earlier one could not be had."""
    _drop(_take_guard(place))
    reason = BEHIND_A_MISS if number < plan.blocks or plan.verdict is Verdict.ALL else plan.verdict
    return BlockOutcome(place.identity, reason=reason, unused=_take_target(place))


def _as_it_is(place: _Place) -> BlockOutcome:
    """Of a block that is on the device."""
    return BlockOutcome(place.identity, _take_guard(place), DEVICE, unused=_take_target(place))


def _behind(outcome: BlockOutcome) -> BlockOutcome:
    """There, but an earlier block is not: its guard goes back, and it may be found where it is now."""
    _drop(outcome.block)
    return outcome._replace(block=None, reason=BEHIND_A_MISS)


def _take_guard(place: _Place) -> ImmutableBlock | None:
    guard, place.guard = place.guard, None
    return guard


def _take_target(place: _Place) -> MutableBlock | None:
    target, place.target = place.target, None
    return target


def _drop(guard: Guard | None) -> None:
    if guard is not None:
        guard.release()
