"""The whole manager under random use, several threads at once included, against what it publishes and a plain model."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from event_plane.schema import BatchKind, EventType, Tier
from kvbm_core.block import ImmutableBlock
from kvbm_core.errors import BlockStateError, PoolExhaustedError
from kvbm_core.identity import BlockIdentity
from kvbm_core.transfer_queue import IDLE
from tests.core_room import DISK, REMOTE, CoreRoom, low

DOCUMENTS, BLOCKS = 4, 4
document = st.integers(0, DOCUMENTS - 1)
length = st.integers(1, BLOCKS)
step = st.tuples(st.sampled_from(["serve", "serve", "offload", "match"]), document, length)


class Reader:
    """Folds what is published as a subscriber would: tier → hashes placed there. Refuses what makes no sense."""

    def __init__(self) -> None:
        self.placed: dict[int, set[int]] = {Tier.G1: set(), Tier.G2: set()}
        self.batches = 0
        self._snapshot: dict[int, set[int]] = {}

    def read(self, room: CoreRoom) -> None:
        batches = room.published()
        for batch in batches[self.batches :]:
            if batch.kind is BatchKind.SNAPSHOT_BEGIN:
                self._snapshot = {Tier.G1: set(), Tier.G2: set()}
            elif batch.kind is BatchKind.SNAPSHOT_END:
                # It says what the events before it led to, and nothing else.
                assert self._snapshot == self.placed
            for record in batch.records:
                if batch.kind is BatchKind.SNAPSHOT_CHUNK:
                    self._snapshot[int(record["tier"])].add(int(record["sequence_hash_lo"]))
                else:
                    self._take(record["event_type"], self.placed[int(record["tier"])], int(record["sequence_hash_lo"]))
        self.batches = len(batches)

    def _take(self, event_type: int, placed: set[int], block: int) -> None:
        if event_type == EventType.STORE:
            assert block not in placed, "a block is stored twice"
            placed.add(block)
        else:
            assert block in placed, "a block is removed or used that is not there"
            if event_type == EventType.REMOVE:
                placed.remove(block)


def until(condition: Callable[[], bool]) -> None:
    deadline_s = time.monotonic() + 60.0
    while not condition():
        assert time.monotonic() < deadline_s
        time.sleep(0.001)


class ManagerMachine(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.held: list[ImmutableBlock] = []
        self.on_volumes: set[BlockIdentity] = set()
        self.reader = Reader()

    @initialize(
        has_host=st.booleans(),
        tiers=st.sampled_from([{}, {"disk": DISK}, {"disk": DISK, "remote": REMOTE}]),
        reuse=st.sampled_from(["lru", "fifo", "multi_lru", "lineage"]),
        duplicates=st.sampled_from(["allow", "reject"]),
    )
    def opens(self, has_host: bool, tiers: dict[str, object], reuse: str, duplicates: str) -> None:
        self.room = CoreRoom(
            device_blocks=6,
            host_blocks=5 if has_host else 0,
            staging_blocks=8,
            transfer_blocks=3,
            reuse=reuse,
            duplicates=duplicates,
            **tiers,
        )
        self.has_volumes = bool(tiers)

    def blocks(self, number: int, count: int) -> list[BlockIdentity]:
        return self.room.sequence(count, 1_000 * number)

    def serve(self, number: int, count: int) -> list[ImmutableBlock]:
        """What an engine does: find what is there, compute the rest. All blocks, or those there was room for."""
        wanted = self.blocks(number, count)
        found = self.room.manager.onboard(wanted)
        account = found.account
        assert account.asked == count
        assert account.ready + account.waiting + sum(account.found.values()) + account.absent + account.untried == count
        assert sum(account.found.values()) == sum(account.loaded.values()) + sum(account.not_loaded.values())
        assert [block.identity for block in found.blocks] == wanted[: len(found.blocks)]
        assert all(self.room.is_right(block) for block in found.blocks)
        try:
            places = self.room.manager.allocate(count - len(found.blocks)).blocks
        except PoolExhaustedError:
            return found.blocks
        missing = wanted[len(found.blocks) :]
        self.room.write(places, missing)
        return found.blocks + self.room.manager.register_many(self.room.manager.complete(places, missing))

    def do(self, what: str, number: int, count: int) -> list[ImmutableBlock]:
        match what:
            case "serve":
                return self.serve(number, count)
            case "match":
                return self.room.manager.match(self.blocks(number, count))
            case _:
                self.room.manager.offload(count)
                return []

    @rule(what=step, keeps=st.booleans())
    def one_call(self, what: tuple[str, int, int], keeps: bool) -> None:
        self.take(self.do(*what), keeps)

    @rule(steps=st.lists(step, min_size=2, max_size=3))
    def calls_at_once(self, steps: list[tuple[str, int, int]]) -> None:
        """From several threads; what each got is released where it was got."""
        failures: list[Exception] = []

        def run(call: Callable[[], list[ImmutableBlock]]) -> None:
            try:
                for block in reversed(call()):
                    assert self.room.is_right(block)
                    block.release()
            except Exception as failure:  # noqa: BLE001 – told in the test's own thread
                failures.append(failure)

        threads = [threading.Thread(target=run, args=(lambda each=each: self.do(*each),)) for each in steps]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert failures == []

    @rule(what=step)
    def a_load_is_given_up(self, what: tuple[str, int, int]) -> None:
        """Given up whenever it happens to be: what was in doubt settles, and nothing is held."""
        future = self.room.manager.onboard_soon(self.blocks(*what[1:]))
        if not future.cancel():
            self.take(future.result().blocks, keeps=False)

    @rule(number=document, count=length)
    def a_load_runs_out_of_time(self, number: int, count: int) -> None:
        with self.room.agent.held():
            found = self.room.manager.onboard(self.blocks(number, count), budget_ms=1.0)
        assert all(self.room.is_right(block) for block in found.blocks)
        self.take(found.blocks, keeps=False)

    # What is held depends on how threads ran, which a precondition must not: Hypothesis replays a run by its choices.

    @rule(number=st.integers(0, 100))
    def a_guard_goes(self, number: int) -> None:
        if self.held:
            self.held.pop(number % len(self.held)).release()

    @rule()
    def all_guards_go_without_being_released(self) -> None:
        self.held.clear()

    @rule()
    def a_snapshot_is_published(self) -> None:
        self.room.manager.announce_snapshot()

    @rule(tier=st.sampled_from(["device", "host"]))
    def an_operator_resets(self, tier: str) -> None:
        if tier == "host" and not self.room.config.host_blocks:
            return
        self.settle()
        occupancy = getattr(self.room.manager.occupancy(), tier)
        try:
            assert self.room.manager.reset(tier) == occupancy.inactive
        except BlockStateError:
            assert occupancy.active > 0

    def take(self, blocks: list[ImmutableBlock], keeps: bool) -> None:
        if keeps and len(self.held) < 3:
            self.held += blocks
            return
        for block in reversed(blocks):
            block.release()

    def settle(self) -> None:
        """Nothing is under way any more, nor about to be."""
        transfers = self.room.manager._transfers
        while True:
            transfers.wait_for(transfers.submit(asyncio.sleep(0)))  # all that was asked for before has begun
            if not transfers._tasks and all(depth == IDLE for depth in transfers.depths().values()):
                return
            time.sleep(0.001)

    @invariant()
    def what_is_held_is_right(self) -> None:
        assert all(self.room.is_right(block) for block in self.held)

    @invariant()
    def nothing_is_lost_or_there_twice_and_readers_know_it(self) -> None:
        if not hasattr(self, "room"):
            return
        self.settle()
        held = {block.index for block in self.held}
        # A thread that has done its work may see the end of its call, and drop what it refers to, a moment later.
        until(lambda: self.room.manager.occupancy().device.active == len(held))
        occupancy = self.room.manager.occupancy()
        assert sum(occupancy.device) == 6
        assert occupancy.host.active == 0
        self.reader.read(self.room)
        pools = {Tier.G1: self.room.device_pool}
        if self.room.config.host_blocks:
            assert sum(occupancy.host) == 5
            pools[Tier.G2] = self.room.host_pool
        for tier in (Tier.G1, Tier.G2):
            keys = pools[tier].registered_keys() if tier in pools else []
            there = {key.sequence_hash & 0xFFFF_FFFF_FFFF_FFFF for key in keys}
            assert self.reader.placed[tier] ^ there == set(), tier

    @rule(number=document)
    def what_was_put_to_a_volume_is_found_again(self, number: int) -> None:
        if not self.has_volumes or self.held:
            return
        # What waits from before would take places of the host, and a block that finds none is passed over.
        self.room.manager.offload(1_000)
        self.settle()
        wanted = self.blocks(number, BLOCKS)
        blocks = self.serve(number, BLOCKS)
        self.room.manager.offload(1_000)
        self.take(blocks, keeps=False)
        assert len(blocks) == BLOCKS
        self.settle()
        self.room.manager.reset("device")
        if self.room.config.host_blocks:
            self.room.manager.reset("host")
        found = self.room.manager.onboard(wanted)
        assert [low(block.identity) for block in found.blocks] == [low(identity) for identity in wanted]
        assert all(self.room.is_right(block) for block in found.blocks)
        self.take(found.blocks, keeps=False)

    def teardown(self) -> None:
        if hasattr(self, "room"):
            self.held.clear()
            self.room.close()


ManagerMachine.TestCase.settings = settings(max_examples=12, stateful_step_count=15, deadline=None)
TestManager = ManagerMachine.TestCase
