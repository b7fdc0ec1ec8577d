"""What telling of each block costs: the pool's cycle without a publisher and with one, for `kvadvisor bench core`."""

from __future__ import annotations

import statistics
import time
from contextlib import closing

from event_plane.connect import open_publisher
from event_plane.figures import Figure
from event_plane.schema import Tier, producer_id
from event_plane.transport import Publisher
from kvbm_core.bench_pool import BATCH_BLOCKS, PAGE_TOKENS, batch_cycle, identities
from kvbm_core.events import BlockEvents, PublishHandle
from kvbm_core.identity import BlockIdentity
from kvbm_core.pool import BlockPool
from kvbm_core.reuse import reuse_order

POOL_BLOCKS = 4_096
ROUNDS = 30
ROUNDS_QUICK = 5
ROUND_BLOCKS = 4_096
BLOCK_BYTES = 1 << 20
_LOCATION = "device:0"


class _Told:
    """A full pool whose blocks are told of, or not. `thread_ns`: what the pool's caller pays; `all_ns`: the process."""

    def __init__(self, publisher: Publisher | None) -> None:
        self._publisher = publisher
        self._events = None if publisher is None else BlockEvents(publisher, BLOCK_BYTES, lambda: 1)
        handle = None if self._events is None else PublishHandle(self._events, Tier.G1, _LOCATION)
        self._cycle = batch_cycle(
            BlockPool(
                name="bench",
                blocks=POOL_BLOCKS,
                page_tokens=PAGE_TOKENS,
                reuse=reuse_order("lru", POOL_BLOCKS),
                duplicates="reject",
                on_store=_tell_nobody_of_store if handle is None else handle.stored,
                on_remove=_tell_nobody_of_remove if handle is None else handle.removed,
            )
        )
        self.thread_ns: list[float] = []
        self.all_ns: list[float] = []
        self.run(0)
        self.thread_ns.clear()
        self.all_ns.clear()

    def run(self, first: int) -> None:
        """Take `ROUND_BLOCKS` blocks through all steps, and have all of it published."""
        batches = [identities(BATCH_BLOCKS, at) for at in range(first, first + ROUND_BLOCKS, BATCH_BLOCKS)]
        thread_ns = 0
        began_ns = time.process_time_ns()
        for batch in batches:
            marks = self._cycle(batch)
            thread_ns += marks[-1] - marks[0]
            if self._events is not None:
                begun_ns = time.thread_time_ns()
                self._events.send()
                thread_ns += time.thread_time_ns() - begun_ns
        if self._events is not None and self._publisher is not None:
            self._events.flush()
            self._publisher.flush()
        self.thread_ns.append(thread_ns / ROUND_BLOCKS)
        self.all_ns.append((time.process_time_ns() - began_ns) / ROUND_BLOCKS)

    def close(self) -> None:
        if self._events is not None:
            self._events.close()


def event_figures(quick: bool) -> list[Figure]:
    """Times of the processor. A block is told of twice, by a Store and a Remove; nobody listens on the socket."""
    with (
        closing(open_publisher("zmq+tcp://127.0.0.1:0", producer=producer_id("bench"))) as publisher,
        closing(_Told(publisher)) as told,
        closing(_Told(None)) as untold,
    ):
        for number in range(1, 1 + (ROUNDS_QUICK if quick else ROUNDS)):
            for each in (untold, told):
                each.run(number * ROUND_BLOCKS)
    alone_ns, telling_ns = (statistics.median(each.thread_ns) for each in (untold, told))
    beside_ns = statistics.median(told.all_ns) - telling_ns - (statistics.median(untold.all_ns) - alone_ns)
    return [
        Figure("events: all steps without a publisher", alone_ns, "ns a block"),
        Figure("events: all steps with one, what the caller pays", telling_ns, "ns a block"),
        Figure("events: what the caller pays, with against without", telling_ns / alone_ns, "×"),
        Figure("events: to encode and send them, in other threads", beside_ns, "ns a block"),
    ]


def _tell_nobody_of_store(identity: BlockIdentity, copied: bool) -> None:
    """Without a publisher."""


def _tell_nobody_of_remove(identity: BlockIdentity) -> None:
    """Without a publisher."""
