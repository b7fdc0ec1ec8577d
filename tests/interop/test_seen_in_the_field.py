"""What real engines were seen to do (reference: foreign streams), each survived from socket to folded state.

A publisher with vLLM's frames and the advisor's own intake, log and fold stand at the ends. What a dialect alone has to
survive is tested with the dialects.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import ExitStack, closing
from dataclasses import dataclass
from typing import Final

import pytest

from advisor.index import Key
from advisor.index.views import BlockRow
from advisor.intake import SourceFacts
from event_plane.schema import producer_id
from tests.fault_ends import PROBE_INTERVAL_S, Advisor, Engine, attach, described, removed, stored
from tests.faults import PASSES, ByteProxy, ZmqProxy
from tests.ports import free_ports

RANK_0: Final = producer_id("vllm/kv-events/dp0")
RANK_1: Final = producer_id("vllm/kv-events/dp1")
FIRST: Final = 1
"""The block that attaching stored."""


@dataclass
class Scene:
    engine: Engine
    lanes: ZmqProxy
    wire: ByteProxy
    """What is published goes through it."""
    advisor: Advisor

    def until(self, *blocks: int) -> None:
        """Wait until everything published is folded; the blocks that are live then are these."""

        def caught_up() -> bool:
            state = self.advisor.fold.producers.get(RANK_0)
            return state is not None and state.sequence == self.engine.last

        self.advisor.wait_for(caught_up, lambda: described(self.advisor.fold, blocks))
        with self.advisor.lock:
            assert self.advisor.blocks() == sorted(blocks)
            self.advisor.fold.index.check()

    def block(self, block: int, group: int = 0) -> BlockRow:
        with self.advisor.lock:
            (namespace_id,) = self.advisor.fold.namespaces
            found = self.advisor.fold.index.get(Key(namespace_id, group, block))
        assert found is not None
        return found


@pytest.fixture
def scene(request: pytest.FixtureRequest) -> Iterator[Scene]:
    """An engine that has stored one block, and an advisor that heard of it. Its parameter: seconds between probes."""
    probe_interval_s = getattr(request, "param", PROBE_INTERVAL_S)
    with ExitStack() as stack:
        events, requests = free_ports(2)
        engine = stack.enter_context(closing(Engine((events, requests), 0, 1024)))
        lanes = stack.enter_context(closing(ZmqProxy((events, requests))))
        wire = stack.enter_context(closing(ByteProxy(lanes.events_port)))
        urls = (f"zmq+tcp://127.0.0.1:{port}" for port in (wire.port, lanes.requests_port))
        advisor = stack.enter_context(
            closing(Advisor(*urls, SourceFacts("vllm", dialect="vllm"), probe_interval_s, wait_s=2.0))
        )
        attach(lanes, lambda: engine.publish(stored([FIRST])))
        opened = Scene(engine, lanes, wire, advisor)
        opened.until(FIRST)
        yield opened
    advisor.check_log()


def test_store_citing_a_parent_never_reported_is_placed_and_matches_nothing(scene: Scene) -> None:
    scene.engine.publish(stored([50], parent=49), stored([60]))
    scene.until(FIRST, 50, 60)
    with scene.advisor.lock:
        (namespace_id,) = scene.advisor.fold.namespaces
        assert scene.advisor.fold.index.match(namespace_id, 0, [49, 50]) == 0


def test_token_ids_that_do_not_fit_the_hashes_are_no_reason_to_refuse_a_block(scene: Scene) -> None:
    scene.engine.publish(stored([50, 51], token_ids=[1, 2, 3]), stored([60], token_ids=[]))
    scene.until(FIRST, 50, 51, 60)
    assert not scene.advisor.intake.refused


def test_offload_placeholder_without_size_or_tokens_is_a_placement_like_any_other(scene: Scene) -> None:
    scene.engine.publish(stored([FIRST], block_size=0, token_ids=[], medium="CPU"))
    scene.until(FIRST)
    assert len(scene.block(FIRST).placements) == 2
    scene.engine.publish(removed([FIRST]))
    scene.until(FIRST)
    scene.engine.publish(removed([FIRST], medium="CPU"))
    scene.until()


def test_hash_removed_twice_is_gone_once_and_can_come_back(scene: Scene) -> None:
    scene.engine.publish(removed([FIRST]))
    scene.engine.publish(removed([FIRST]))
    scene.engine.publish(stored([FIRST]))
    scene.until(FIRST)
    scene.engine.publish(removed([FIRST]))
    scene.until()


def test_children_that_arrive_before_their_parents_are_attached_when_these_come(scene: Scene) -> None:
    scene.engine.publish(stored([12], parent=11))
    scene.engine.publish(stored([11], parent=10))
    scene.engine.publish(stored([10]))
    scene.until(FIRST, 10, 11, 12)
    assert scene.block(12).parent == scene.block(11).row
    assert scene.block(11).parent == scene.block(10).row
    with scene.advisor.lock:
        (namespace_id,) = scene.advisor.fold.namespaces
        assert scene.advisor.fold.index.match(namespace_id, 0, [10, 11, 12]) == 3


def test_late_copy_does_not_bring_a_removed_block_back(scene: Scene) -> None:
    scene.lanes.disturb(live=[(0, 1_000)])
    scene.engine.publish(stored([50, 51]))
    scene.engine.publish(removed([51]))
    scene.until(FIRST, 50)
    before = scene.advisor.intake.duplicates[RANK_0]
    scene.lanes.calm()
    scene.advisor.wait_for(lambda: scene.advisor.intake.duplicates[RANK_0] >= before + 2, lambda: "no late copy came")
    scene.until(FIRST, 50)


def test_replayed_batches_that_overlap_live_ones_count_once(scene: Scene) -> None:
    scene.lanes.disturb(live=[(), PASSES, PASSES, PASSES])
    before = scene.advisor.intake.duplicates[RANK_0]
    for block in (50, 51, 52, 53):
        scene.engine.publish(stored([block]))
    scene.until(FIRST, 50, 51, 52, 53)
    # The resend for 50 brings all that follows too.
    scene.advisor.wait_for(lambda: scene.advisor.intake.duplicates[RANK_0] > before, lambda: "no double came")
    assert {placed.references for block in (51, 52, 53) for placed in scene.block(block).placements} == {1}
    scene.engine.publish(removed([50, 51, 52, 53]))
    scene.until(FIRST)


def test_replay_with_holes_and_an_end_marker_is_asked_for_again(scene: Scene) -> None:
    scene.engine.holed_resends = 1
    scene.lanes.disturb(live=[(), (), (), (), PASSES])
    for block in (50, 51, 52, 53, 54):
        scene.engine.publish(stored([block]))
    scene.until(FIRST, 50, 51, 52, 53, 54)
    assert scene.engine.holed_resends == 0
    assert not scene.advisor.fold.producers[RANK_0].partial
    assert not scene.advisor.intake.lost


def test_tail_that_an_idle_engine_lost_is_found_by_asking(scene: Scene) -> None:
    scene.lanes.disturb(live=[()])
    scene.engine.publish({"type": "AllBlocksCleared"})
    scene.engine.publish(stored([50]))
    scene.until(50)


@pytest.mark.parametrize("scene", [3_600.0], indirect=True, ids=["without probes"])
def test_two_ranks_on_one_port_are_two_producers(scene: Scene) -> None:
    """Both number from 0; a Clear of one leaves the other's blocks, and nothing seems to be missing."""
    scene.engine.publish(stored([50]), rank=1, sequence=0)
    scene.engine.publish(stored([51]), rank=1, sequence=1)
    scene.advisor.wait_for(lambda: scene.advisor.blocks() == [FIRST, 50, 51], lambda: "rank 1 was not heard")
    scene.engine.publish({"type": "AllBlocksCleared"}, rank=1, sequence=2)
    scene.advisor.wait_for(lambda: scene.advisor.blocks() == [FIRST], lambda: "the Clear was not heard")
    states = scene.advisor.fold.producers
    assert (states[RANK_0].epochs_closed, states[RANK_1].epochs_closed, states[RANK_1].sequence) == (0, 0, 2)
    assert scene.advisor.intake.resends[RANK_1] == 0


def test_block_that_names_itself_as_parent_is_placed_and_removed_like_any_other(scene: Scene) -> None:
    scene.engine.publish(stored([50], parent=50), stored([51], parent=50))
    scene.until(FIRST, 50, 51)
    scene.engine.publish(removed([50]), removed([51]))
    scene.until(FIRST)


def test_group_and_medium_are_part_of_what_is_stored_and_removed(scene: Scene) -> None:
    scene.engine.publish(stored([50], group_idx=0), stored([50], group_idx=1), stored([50], group_idx=1, medium="CPU"))
    scene.engine.publish(removed([50], group_idx=1))
    scene.until(FIRST, 50, 50)
    assert len(scene.block(50).placements) == len(scene.block(50, group=1).placements) == 1
    scene.engine.publish(removed([50], group_idx=0))
    scene.until(FIRST, 50)
    scene.engine.publish(removed([50], group_idx=1, medium="CPU"))
    scene.until(FIRST)


def test_copies_are_counted_and_a_chain_announced_again_is_none(scene: Scene) -> None:
    scene.engine.publish(stored([10, 11]))
    scene.engine.publish(stored([11], parent=10))
    scene.engine.publish(stored([10]))
    scene.engine.publish(removed([11]), removed([10]))
    scene.until(FIRST, 11)
    scene.engine.publish(removed([11]))
    scene.until(FIRST)


def test_engine_that_restarts_and_overtakes_the_cursor_while_we_were_away_is_a_new_life(scene: Scene) -> None:
    """Its numbers go on where the former life's ended: only the bytes under a known number tell."""
    known = scene.engine.last
    scene.engine.stop()
    scene.wire.cut()
    scene.wire.stall()
    scene.lanes.disturb(live=[()])
    scene.engine.start()
    for block in range(100, 101 + known):
        scene.engine.publish(stored([block]))
    time.sleep(0.1)  # the proxy loses them
    scene.lanes.calm()
    scene.wire.flow()
    scene.engine.publish(stored([200]))
    scene.until(*range(100, 101 + known), 200)
    assert scene.advisor.fold.producers[RANK_0].epochs_closed == 1
