"""`TransferManager`: carries blocks along the paths between tiers, in one event loop on a thread of its own.

The loop only decides; bytes are moved by each path's own threads, at most `concurrency` batches at once. Callers are
coroutines of that loop (`start`, `move`), or any thread (`submit`, `wait_for`).
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import threading
from collections.abc import Callable, Coroutine, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from math import inf
from typing import Any, NamedTuple, Protocol, TypeVar

from kvbm_core.block import Guard, ImmutableBlock, MutableBlock
from kvbm_core.errors import ManagerClosedError, TransferQueueFullError
from kvbm_core.identity import BlockIdentity
from kvbm_core.paths import TransferPath
from kvbm_core.progress import NO_GATE, Gate, ModelProgress
from kvbm_core.transfer_queue import IDLE, Entry, QueueDepth, TransferQueue, TransferState

T = TypeVar("T")

DEADLINE = "deadline"
CANCELLED = "cancelled"
BEHIND_A_MISS = "behind_a_miss"
"""There, but of no use, since an earlier block of its request could not be had."""
QUEUE_FULL = "queue_full"


@dataclass(slots=True, eq=False)
class BlockTransfer:
    """One block to move. The transfer owns its guards until it ends: what may still be read or written is not reused.

    `source`: None where it is loaded from a volume. `target`: where to, or None for a place that the path chooses.
    `layer`: that layer alone, of a target that is registered when all are there; its guards are shared with the other
    layers' transfers and go when the last of them does. None: the whole block.
    `chain`: of its request's blocks, which are of use in their order only; one that fails makes those behind it
    useless. 0: it stands alone.
    """

    identity: BlockIdentity
    source: Guard | None = None
    target: MutableBlock | None = None
    layer: int | None = None
    chain: int = 0

    @property
    def source_index(self) -> int:
        assert self.source is not None, "a transfer between two memories has a source"
        return self.source.index

    @property
    def target_index(self) -> int:
        assert self.target is not None, "a copy's target is chosen before it begins"
        return self.target.index

    def release_source(self) -> None:
        """Nobody reads the source any more."""
        if self.source is not None and self.layer is None:
            self.source.release()


class BlockOutcome(NamedTuple):
    """What became of one block's transfer.

    `block`: a guard of the registered target, where it went well and the path registers. `place`: the tier or volume
    that was read or written. `reason`: empty where it went well, else a word that is counted; `detail` is a sentence.
    `unused`: the target that was chosen and not written, now the caller's. `was_there`: nothing had to be moved.
    """

    identity: BlockIdentity
    block: ImmutableBlock | None = None
    place: str = ""
    reason: str = ""
    detail: str = ""
    unused: MutableBlock | None = None
    was_there: bool = False

    @property
    def ok(self) -> bool:
        return not self.reason


class Lane(Protocol):
    """Moves batches along one path, in any thread. Raises nothing that can go wrong with a block."""

    def run(self, batch: Sequence[BlockTransfer]) -> list[BlockOutcome]:
        """One outcome a transfer, in order. Blocks while bytes move."""


class LaneLimits(NamedTuple):
    """Sizes of a path: blocks that may wait, blocks of a batch, batches at once."""

    blocks_max: int
    batch_blocks: int
    concurrency: int


class Move:
    """Blocks on their way along one path, from `TransferManager.start`. Used in the loop's thread."""

    def __init__(self, loop: asyncio.AbstractEventLoop, count: int, give_up: Callable[[Move], None]) -> None:
        self._done: asyncio.Future[None] = loop.create_future()
        self._outcomes: list[BlockOutcome | None] = [None] * count
        self._left = count
        self._give_up = give_up
        self.entries: list[Entry[_Queued]] = []
        if not count:
            self._done.set_result(None)

    async def wait(self) -> list[BlockOutcome]:
        """One outcome a block, in order, when all have ended or were given up. Cancelled, it gives all of them up.

        Once only: the outcomes' guards are the caller's alone.
        """
        try:
            await self._done
        except BaseException:  # cancelled, or a fault of this program: either way nobody waits for the rest
            self.give_up()
            for outcome in self._outcomes:
                if outcome is not None:
                    release(outcome)
            raise
        outcomes, self._outcomes = self._outcomes, []
        return [outcome for outcome in outcomes if outcome is not None]

    def give_up(self) -> None:
        """End it now: what has not ended is `cancelled`, with its target where nothing can still write it."""
        self._give_up(self)

    def end(self, place: int, outcome: BlockOutcome) -> None:
        """For the path: one block has ended."""
        self._outcomes[place] = outcome
        self._left -= 1
        if not self._left and not self._done.done():
            self._done.set_result(None)

    def fail(self, error: BaseException) -> None:
        """For the path: a lane raised what it must not raise."""
        if not self._done.done():
            self._done.set_exception(error)


class _Queued(NamedTuple):
    transfer: BlockTransfer
    move: Move
    place: int

    def end(self, outcome: BlockOutcome) -> None:
        self.move.end(self.place, outcome)


class _PathQueue:
    """One path in the loop: its queue, its threads and its next deadline. Used by the loop's thread alone."""

    def __init__(
        self,
        path: TransferPath,
        lane: Lane,
        limits: LaneLimits,
        loop: asyncio.AbstractEventLoop,
        on_failure: Callable[[TransferPath, str], None],
    ) -> None:
        self.queue = TransferQueue[_Queued](
            entries_max=limits.blocks_max, batch_entries=limits.batch_blocks, batches_max=limits.concurrency
        )
        self.executor = ThreadPoolExecutor(limits.concurrency, thread_name_prefix=f"kvbm-{path}")
        self.progress = ModelProgress(layers=0)
        self._path = path
        self._lane = lane
        self._loop = loop
        self._on_failure = on_failure
        self._alarm: asyncio.TimerHandle | None = None

    def pump(self) -> None:
        """Start what may run now, and see that deadlines are kept."""
        while batch := self.queue.take(self.progress):
            transfers = [entry.item.transfer for entry in batch]
            running = self._loop.run_in_executor(self.executor, self._lane.run, transfers)
            running.add_done_callback(partial(self._ended, batch))
        self._set_alarm()

    def give_up(self, entries: Sequence[Entry[_Queued]]) -> None:
        """Nobody waits for these any more."""
        for entry in entries:
            if self.queue.cancel(entry):
                self._abandon(entry, CANCELLED)
        self.pump()

    def _expire(self) -> None:
        self._alarm = None
        for entry in self.queue.expire(self._loop.time()):
            self._abandon(entry, DEADLINE)
        self.pump()

    def _abandon(self, entry: Entry[_Queued], reason: str) -> None:
        transfer = entry.item.transfer
        if reason != CANCELLED:
            self._on_failure(self._path, reason)
        if entry.state is TransferState.IN_DOUBT:
            entry.item.end(BlockOutcome(transfer.identity, reason=reason, detail="it is under way and was given up"))
            return
        transfer.release_source()
        detail = "it was given up before its turn came"
        entry.item.end(BlockOutcome(transfer.identity, reason=reason, detail=detail, unused=transfer.target))

    def _ended(self, batch: list[Entry[_Queued]], running: asyncio.Future[list[BlockOutcome]]) -> None:
        error = running.exception()
        awaited = set(map(id, self.queue.finish(batch)))
        if error is not None:
            for entry in batch:
                entry.item.move.fail(error)
        else:
            for entry, outcome in zip(batch, running.result(), strict=True):
                if id(entry) in awaited:
                    entry.item.end(outcome)
                else:
                    release(outcome)
        for entry in reversed(batch):  # the root last, so that its pool evicts tails first
            entry.item.transfer.release_source()
        self.pump()

    def _set_alarm(self) -> None:
        due_s = self.queue.next_deadline_s()
        if self._alarm is not None:
            if self._alarm.when() == due_s:
                return
            self._alarm.cancel()
        self._alarm = None if due_s == inf else self._loop.call_at(due_s, self._expire)


class TransferManager:
    """Queues and threads of all paths. `start` and `move` are for its loop; everything else for any thread.

    A transfer past its deadline is an outcome with that reason at once. Its thread goes on, and keeps the block that
    it may still write until it has ended; a block that it then finds good is registered for whoever asks next.
    """

    def __init__(
        self,
        lanes: Mapping[TransferPath, tuple[Lane, LaneLimits]],
        *,
        on_failure: Callable[[TransferPath, str], None],
    ) -> None:
        """`on_failure` is told, in the loop's thread, of every block given up for its deadline."""
        self._loop = asyncio.new_event_loop()
        self._paths = {
            path: _PathQueue(path, lane, limits, self._loop, on_failure) for path, (lane, limits) in lanes.items()
        }
        self._on_failure = on_failure
        self._tasks: set[asyncio.Task[Any]] = set()
        self._closing = False
        self._state_lock = threading.Lock()
        self._thread = threading.Thread(target=self._loop.run_forever, name="kvbm-transfers", daemon=True)
        self._thread.start()

    def now_s(self) -> float:
        """The clock of deadlines."""
        return self._loop.time()

    def start(
        self,
        path: TransferPath,
        transfers: Sequence[BlockTransfer],
        *,
        priority: int = 0,
        deadline_s: float = inf,
        gate: Gate = NO_GATE,
    ) -> Move:
        """Queue blocks on one path. Takes over the transfers' guards. `deadline_s` by `now_s`. In the loop's thread."""
        lane = self._paths[path]
        move = Move(self._loop, len(transfers), lambda move: lane.give_up(move.entries))
        for place, transfer in enumerate(transfers):
            queued = _Queued(transfer, move, place)
            try:
                entry = lane.queue.push(queued, priority=priority, deadline_s=deadline_s, gate=gate)
            except TransferQueueFullError as error:
                self._on_failure(path, QUEUE_FULL)
                transfer.release_source()
                queued.end(
                    BlockOutcome(transfer.identity, reason=QUEUE_FULL, detail=str(error), unused=transfer.target)
                )
            else:
                move.entries.append(entry)
        lane.pump()
        return move

    async def move(
        self,
        path: TransferPath,
        transfers: Sequence[BlockTransfer],
        *,
        priority: int = 0,
        deadline_s: float = inf,
        gate: Gate = NO_GATE,
    ) -> list[BlockOutcome]:
        """`start`, and wait."""
        return await self.start(path, transfers, priority=priority, deadline_s=deadline_s, gate=gate).wait()

    def submit(
        self, work: Coroutine[Any, Any, T], discard: Callable[[T], None] | None = None
    ) -> concurrent.futures.Future[T]:
        """Run a coroutine in the loop; cancelling the future cancels it. Raises `ManagerClosedError` once closed, and
        the future of what `close` has cut off gives it.

        `discard` is given what the coroutine returned although the future had been cancelled.
        """
        future = concurrent.futures.Future[T]()
        with self._state_lock:
            if not self._closing and self._thread.is_alive():
                self._loop.call_soon_threadsafe(self._begin, work, future, discard)
                return future
        work.close()
        raise ManagerClosedError

    def wait_for(self, future: concurrent.futures.Future[T]) -> T:
        """What a future of `submit` gives. Not in the loop's own thread, which would wait for itself."""
        assert threading.current_thread() is not self._thread, "the transfer loop cannot wait for itself: await instead"
        try:
            return future.result()
        except BaseException:  # an interrupt must not leave the work going on unwatched
            future.cancel()
            raise

    def progressed(self, progress: ModelProgress) -> None:
        """The model has come so far: what waited for that may go."""
        with self._state_lock:
            if not self._closing:
                self._loop.call_soon_threadsafe(self._take_progress, progress)

    def depths(self) -> dict[TransferPath, QueueDepth]:
        """What waits and runs on each path, a moment ago."""
        return {path: lane.queue.depth() for path, lane in self._paths.items()}

    def close(self) -> None:
        """Cancel what waits, let what runs come to its end, stop the threads. Idempotent."""
        with self._state_lock:
            if self._closing:
                return
            self._closing = True
        if not self._thread.is_alive():  # this process was forked, and its parent has the threads
            return
        asyncio.run_coroutine_threadsafe(self._cancel_all(), self._loop).result()
        for lane in self._paths.values():
            lane.executor.shutdown(wait=True)
        asyncio.run_coroutine_threadsafe(self._settled(), self._loop).result()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    def _begin(
        self,
        work: Coroutine[Any, Any, T],
        future: concurrent.futures.Future[T],
        discard: Callable[[T], None] | None,
    ) -> None:
        task = self._loop.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(partial(self._finish, future, discard))
        future.add_done_callback(lambda future: self._pass_on_cancel(task) if future.cancelled() else None)

    def _finish(
        self,
        future: concurrent.futures.Future[T],
        discard: Callable[[T], None] | None,
        task: asyncio.Task[T],
    ) -> None:
        self._tasks.discard(task)
        try:
            if task.cancelled():  # by `close`, unless the future was cancelled, which then takes no exception
                future.set_exception(ManagerClosedError())
            elif (error := task.exception()) is not None:
                future.set_exception(error)
            else:
                future.set_result(task.result())
        except concurrent.futures.InvalidStateError:  # it was cancelled meanwhile: nobody takes what there is
            if discard is not None and not task.cancelled() and task.exception() is None:
                discard(task.result())

    def _pass_on_cancel(self, task: asyncio.Task[Any]) -> None:
        """A future was cancelled, in any thread."""
        with suppress(RuntimeError):  # the loop is closed: everything has been cancelled
            self._loop.call_soon_threadsafe(task.cancel)

    async def _cancel_all(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _settled(self) -> None:
        """Every thread has ended, and posted what came of its last batch."""
        while any(lane.queue.depth() != IDLE for lane in self._paths.values()):  # noqa: ASYNC110 - a few turns at most
            await asyncio.sleep(0)

    def _take_progress(self, progress: ModelProgress) -> None:
        for lane in self._paths.values():
            lane.progress = progress
            lane.pump()


def release(outcome: BlockOutcome) -> None:
    """Nobody takes this outcome: what it holds goes back to its pool."""
    for guard in (outcome.block, outcome.unused):
        if guard is not None:
            guard.release()
