"""A connector's two halves over real memory and a real agent, with tensors in the place of an engine's caches."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from event_plane.memory_transport import MemoryPublisher
from event_plane.schema import Namespace, producer_id
from kvbm_core.config import KvbmConfig, TierVolumes
from kvbm_core.connectors import host_loads
from kvbm_core.connectors.engine_blocks import EngineBlocks
from kvbm_core.connectors.host_cache import HostCache
from kvbm_core.connectors.host_loads import EndedLoad
from kvbm_core.connectors.schedule import Schedule, Scheduled
from kvbm_core.connectors.step_plan import LoadMode, StepPlan
from kvbm_core.errors import BlockStateError, LayoutError
from kvbm_core.manager import KvBlockManager
from storage_agent.agent import StorageAgent
from storage_agent.descriptor import VolumeDescriptor

LAYERS, HEADS, TOKENS, WIDTH = 2, 2, 4, 6
CONFIG = KvbmConfig(
    layers=LAYERS,
    outer=1,
    heads=HEADS,
    head_dim=WIDTH,
    page_tokens=TOKENS,
    device_blocks=6,
    device_memory="host",
    device_order="HND",
    disk=TierVolumes(volumes=("nvme",), retention_s=60.0),
    hash_secret="known to all who read this",
)
BLOCKS = EngineBlocks(Namespace(tenant="acme", model="m", kv_dtype="float16", block_tokens=TOKENS))


class Engine:
    """Blocks of a GPU in the place of one; a block's bytes are its hash, so that every copy can be checked."""

    def __init__(self, manager: KvBlockManager, mode: LoadMode) -> None:
        self.layers = [torch.zeros(16, HEADS, TOKENS, WIDTH, dtype=torch.float16) for _ in range(LAYERS)]
        self.cache = HostCache(manager, self.layers, mode)
        self.schedule = Schedule(self.cache)
        self.failed: set[int] = set()
        self.spoilt: set[int] = set()

    def ask(self, request: str, hashes: list[int], had: int = 0) -> int | None:
        self.schedule.chain(request, len(hashes), lambda count: BLOCKS.chain(hashes[count:], hashes[:count]))
        return self.schedule.matched(request, len(hashes) * TOKENS + 1, had, TOKENS)

    def ask_patiently(self, request: str, hashes: list[int], had: int = 0) -> int:
        found = None
        while found is None:
            found = self.ask(request, hashes, had)
        return found

    def compute(self, hashes: list[int], blocks: list[int]) -> None:
        for number, block in zip(hashes, blocks, strict=True):
            for layer, cache in enumerate(self.layers):
                cache[block] = number * 10 + layer

    def holds(self, hashes: list[int], blocks: list[int]) -> bool:
        return all(
            bool((cache[block] == number * 10 + layer).all())
            for number, block in zip(hashes, blocks, strict=True)
            for layer, cache in enumerate(self.layers)
        )

    def run(self, plan: StepPlan, computed: tuple[list[int], list[int]] = ([], [])) -> None:
        """One step as an engine makes it, after its loads have ended where it waits for them outside of steps."""
        self.cache.begin_load(plan.loads)
        ended: list[EndedLoad] = []
        while self.cache.mode is LoadMode.ASYNC and len(ended) < len(plan.loads):
            ended += self.cache.finish_load(0.01)
        for layer in range(LAYERS):
            self.cache.wait_layer(layer)
            self.compute(*computed)
            self.cache.save_layer(layer, plan.saves)
        ended += self.cache.finish_load()
        self.failed = {block for each in ended for block in each.failed}
        self.cache.finish_save(plan.saves, bool(self.failed) and self.cache.mode is LoadMode.LAYERWISE)
        self.spoilt = self.schedule.ended([each.load.ticket for each in ended], self.failed)
        self.cache.settle()

    def serve(self, request: str, hashes: list[int], blocks: list[int]) -> int:
        """All of a request in one step; how many of its blocks were loaded."""
        found = self.ask_patiently(request, hashes)
        self.schedule.allocated(request, blocks, found)
        plan = self.schedule.step([Scheduled(request, len(hashes), blocks)])
        self.run(plan, (hashes[found:], blocks[found:]))
        self.schedule.finished(request)
        return found


@pytest.fixture(params=LoadMode)
def mode(request: pytest.FixtureRequest) -> LoadMode:
    chosen: LoadMode = request.param
    return chosen


@pytest.fixture
def engine(tmp_path: Path, mode: LoadMode) -> Iterator[Engine]:
    agent = StorageAgent("agent", publisher=None, allowed_roots=[tmp_path])
    agent.register_volume(
        VolumeDescriptor(id="nvme", path=str(tmp_path / "nvme.slab"), capacity_blocks=32, block_bytes_max=4_096)
    )
    publisher = MemoryPublisher("memory://connector", producer=producer_id("engine"))
    with KvBlockManager(CONFIG, publisher, agent) as manager:
        engine = Engine(manager, mode)
        yield engine
        engine.cache.close()
    publisher.close()
    agent.close()


def test_blocks_of_one_request_are_loaded_by_the_next(engine: Engine) -> None:
    assert engine.serve("a", [1, 2, 3], [0, 1, 2]) == 0

    assert engine.serve("b", [1, 2, 3, 4], [8, 9, 10, 11]) == 3

    assert engine.holds([1, 2, 3, 4], [8, 9, 10, 11])
    counts = engine.cache.counts()
    assert (counts["saved_blocks"], counts["loaded_blocks"], counts["present_blocks"]) == (4, 3, 3)


def test_blocks_that_left_the_host_come_from_the_volume(engine: Engine) -> None:
    engine.serve("a", [1, 2, 3], [0, 1, 2])
    engine.schedule.reset()

    assert engine.serve("b", [1, 2, 3], [8, 9, 10]) == 3

    assert engine.holds([1, 2, 3], [8, 9, 10])
    assert engine.cache.counts()["from_volumes_blocks"] == 3


def test_what_came_from_a_volume_is_summed_as_it_comes(engine: Engine, mode: LoadMode) -> None:
    engine.serve("a", [1, 2, 3], [0, 1, 2])
    engine.schedule.reset()
    found = engine.cache.manager.onboard(BLOCKS.chain([1, 2, 3], []))
    engine.cache.manager.device.payload(found.blocks[1].index)[5] ^= 1  # before anybody asked for it
    found.release()

    loaded = engine.serve("b", [1, 2, 3], [8, 9, 10])

    assert (loaded, engine.failed) == ((3, {9}) if mode is LoadMode.ASYNC else (1, set()))
    assert engine.cache.counts()["wrong_blocks"] == 1


def test_what_is_on_no_volume_pushes_nothing_out_of_the_host(engine: Engine) -> None:
    engine.serve("a", [1, 2, 3, 4, 5, 6], [0, 1, 2, 3, 4, 5])

    assert engine.ask_patiently("b", [7, 8, 9]) == 0

    assert engine.ask_patiently("c", [1, 2, 3, 4, 5, 6]) == 6
    assert engine.cache.counts().get("from_volumes_blocks", 0) == 0


def test_blocks_that_another_request_fetched_and_gave_up_are_fetched_again(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine.serve("a", [1, 2], [0, 1])
    engine.schedule.reset()
    holding, fetching, all_asked = StorageAgent.holding, threading.Event(), threading.Event()

    def holding_late(*asked: Any) -> list[str]:
        fetching.set()
        assert all_asked.wait(60)
        return holding(*asked)

    monkeypatch.setattr(StorageAgent, "holding", holding_late)
    assert engine.ask("b", [9, 1, 2]) is None  # block 9 is nowhere, and those behind it are then of no use to b
    assert fetching.wait(60)
    assert engine.ask("c", [1, 2]) is None
    engine.cache.manager.onboard_soon([]).result()  # behind c, which waits for b by now
    all_asked.set()

    assert (engine.ask_patiently("b", [9, 1, 2]), engine.ask_patiently("c", [1, 2])) == (0, 2)


def test_what_the_engine_has_by_itself_is_not_loaded(engine: Engine) -> None:
    engine.serve("a", [1, 2, 3], [0, 1, 2])

    assert engine.ask_patiently("b", [1, 2, 3], had=1) == 2
    engine.schedule.allocated("b", [0, 5, 6], 2)
    engine.run(engine.schedule.step([Scheduled("b", 3, [0, 5, 6])]))

    assert engine.holds([1, 2, 3], [0, 5, 6])


def test_the_last_token_is_left_to_be_computed(engine: Engine) -> None:
    engine.serve("a", [1, 2], [0, 1])

    engine.schedule.chain("b", 2, lambda count: BLOCKS.chain([1, 2][count:], [1, 2][:count]))
    found = None
    while found is None:
        found = engine.schedule.matched("b", 2 * TOKENS, 0, TOKENS)
    assert found == 1


@pytest.mark.parametrize("mode", [LoadMode.LAYERWISE], indirect=True)
def test_a_block_of_the_host_that_changed_is_not_promised_where_a_step_would_wait_for_it(engine: Engine) -> None:
    engine.serve("a", [1, 2, 3], [0, 1, 2])
    engine.cache.manager.device.payload(1)[5] ^= 1

    assert engine.serve("b", [1, 2, 3], [8, 9, 10]) == 1

    assert engine.failed == set()
    assert engine.cache.counts()["wrong_blocks"] == 1
    assert engine.serve("c", [1, 2, 3], [11, 12, 13]) == 3
    assert engine.holds([1, 2, 3], [11, 12, 13])


def test_a_block_of_the_host_that_changed_is_reported(engine: Engine) -> None:
    engine.serve("a", [1, 2, 3], [0, 1, 2])

    assert engine.ask_patiently("b", [1, 2, 3]) == 3
    engine.cache.manager.device.payload(1)[5] ^= 1
    engine.schedule.allocated("b", [8, 9, 10], 3)
    engine.run(engine.schedule.step([Scheduled("b", 3, [8, 9, 10])]))

    assert engine.failed == {9}
    assert engine.spoilt == {9, 10}  # what was computed behind it may be wrong too
    assert engine.holds([1, 3], [8, 10])
    counts = engine.cache.counts()
    assert (counts["wrong_blocks"], counts["load_failed_blocks"], counts["loaded_blocks"]) == (1, 1, 2)
    engine.schedule.reset()  # so that the good copy on the volume is found
    assert engine.serve("c", [1, 2, 3], [11, 12, 13]) == 3
    assert engine.holds([1, 2, 3], [11, 12, 13])


def test_a_block_that_changed_after_it_came_from_a_volume_is_reported(engine: Engine) -> None:
    engine.serve("a", [1], [0])
    engine.schedule.reset()
    assert engine.ask_patiently("b", [1]) == 1
    (place,) = (block.index for block in engine.cache.manager.match(BLOCKS.chain([1], [])))
    engine.cache.manager.device.payload(place)[5] ^= 1
    engine.schedule.allocated("b", [8], 1)
    engine.run(engine.schedule.step([Scheduled("b", 1, [8])]))

    assert engine.failed == {8}


def test_a_copy_that_the_device_refuses_is_reported_and_the_host_keeps_the_block(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine.serve("a", [1, 2], [0, 1])

    def refused(*asked: object) -> None:
        raise RuntimeError("an illegal memory access was encountered")

    with monkeypatch.context() as patched:
        patched.setattr(host_loads, "copy_tensors", refused)
        assert engine.serve("b", [1, 2], [8, 9]) == 2

    assert engine.failed == {8, 9}
    assert engine.cache.counts().get("wrong_blocks", 0) == 0
    assert engine.serve("c", [1, 2], [10, 11]) == 2
    assert engine.holds([1, 2], [10, 11])


def test_nobody_gets_a_block_that_is_on_its_way_to_another_request(engine: Engine) -> None:
    engine.serve("a", [1, 2, 3], [0, 1, 2])
    assert engine.ask_patiently("b", [1, 2]) == 2
    engine.schedule.allocated("b", [8, 9], 2)
    plan = engine.schedule.step([Scheduled("b", 2, [8, 9])])

    assert engine.ask("c", [1, 2, 3], had=2) is None
    assert engine.ask("d", [1, 2], had=2) is None
    assert engine.ask("e", [1, 2, 3]) is None
    assert engine.ask("f", [4, 5]) in (0, None)

    engine.run(plan)
    assert engine.ask_patiently("c", [1, 2, 3], had=2) == 1
    assert engine.ask("d", [1, 2], had=2) == 0
    assert engine.ask_patiently("e", [1, 2, 3]) == 3


def test_blocks_that_another_lookup_brought_in_are_loaded_before_it_is_asked_again(engine: Engine) -> None:
    engine.serve("a", [1, 2, 3], [0, 1, 2])
    engine.schedule.reset()
    engine.schedule.step([Scheduled("other", 0, [])])  # an engine at work waits for no lookup
    engine.ask("b", [1, 2, 3])
    while engine.cache.manager.occupancy().device.active < 3:
        time.sleep(0.001)

    assert engine.serve("c", [1, 2, 3], [8, 9, 10]) == 3

    assert engine.failed == set()
    assert engine.holds([1, 2, 3], [8, 9, 10])
    engine.schedule.finished("b")


@pytest.mark.parametrize("mode", [LoadMode.LAYERWISE], indirect=True)
def test_nothing_is_saved_of_a_step_that_computed_on_what_did_not_come(engine: Engine) -> None:
    engine.serve("a", [1], [0])
    for request in ("b", "other"):
        engine.ask_patiently(request, [1, 2] if request == "b" else [7])
    engine.cache.manager.device.payload(0)[5] ^= 1
    engine.schedule.allocated("b", [8, 9], 1)
    both = [Scheduled("b", 2, [8, 9]), Scheduled("other", 1, [5])]

    engine.run(engine.schedule.step(both), ([2, 7], [9, 5]))

    assert (engine.failed, engine.spoilt) == ({8}, {8, 9})
    assert engine.cache.manager.match(BLOCKS.chain([2, 7], [])) == []
    engine.run(engine.schedule.step(both), ([1, 2, 7], [8, 9, 5]))
    for request in ("b", "other"):
        engine.schedule.finished(request)
    assert engine.serve("c", [1, 2], [10, 11]) == 2
    assert engine.serve("d", [7], [12]) == 1
    assert engine.holds([1, 2, 7], [10, 11, 12])


def test_a_full_host_keeps_the_beginning_of_a_chain(engine: Engine) -> None:
    held = engine.cache.manager.allocate(3).blocks

    engine.serve("a", [1, 2, 3, 4], [0, 1, 2, 3])

    assert engine.cache.counts()["not_saved_host_full_blocks"] == 2
    for place in held:
        place.release()
    assert engine.serve("b", [1, 2, 3, 4], [8, 9, 10, 11]) == 2


def test_a_request_that_ends_while_it_waits_lets_go_of_its_blocks(engine: Engine) -> None:
    engine.serve("a", [1, 2, 3], [0, 1, 2])
    assert engine.ask_patiently("b", [1, 2, 3]) == 3
    with pytest.raises(BlockStateError):
        engine.cache.reset()

    engine.schedule.finished("b")

    engine.cache.reset()


def test_a_request_that_ends_lets_go_of_what_came_from_a_volume(engine: Engine) -> None:
    engine.serve("a", [1, 2, 3], [0, 1, 2])
    engine.schedule.reset()
    assert engine.ask_patiently("b", [1, 2, 3]) == 3

    engine.schedule.finished("b")

    assert engine.cache.manager.occupancy().device == (0, 3, 3)
    assert engine.serve("c", [1, 2, 3], [8, 9, 10]) == 3
    assert engine.holds([1, 2, 3], [8, 9, 10])


def test_a_request_that_ends_while_blocks_are_on_their_way_leaves_none_in_use(engine: Engine) -> None:
    engine.serve("a", [1, 2, 3], [0, 1, 2])
    engine.schedule.reset()
    engine.ask("b", [1, 2, 3])

    engine.schedule.finished("b")

    assert engine.serve("c", [1, 2, 3], [8, 9, 10]) == 3
    assert engine.cache.manager.occupancy().device.active == 0


def test_more_that_the_engine_found_itself_shortens_the_load(engine: Engine) -> None:
    engine.serve("a", [1, 2, 3], [0, 1, 2])
    assert engine.ask_patiently("b", [1, 2, 3]) == 3

    assert engine.ask_patiently("b", [1, 2, 3], had=2) == 1
    engine.schedule.allocated("b", [0, 1, 7], 1)
    engine.run(engine.schedule.step([Scheduled("b", 3, [0, 1, 7])]))

    assert engine.holds([3], [7])


def test_tensors_of_another_shape_are_refused(engine: Engine) -> None:
    with pytest.raises(LayoutError, match="splits blocks"):
        HostCache(engine.cache.manager, [torch.zeros(16, HEADS, TOKENS // 2, WIDTH)] * LAYERS)


