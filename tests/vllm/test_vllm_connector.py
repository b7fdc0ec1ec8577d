"""Greedy tokens are what they are without a connector, wherever a block comes from and whatever becomes of it."""

from __future__ import annotations

import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import ExitStack
from pathlib import Path

import pytest

from storage_agent.block_header import PAGE_BYTES
from storage_agent.client import AgentClient
from storage_agent.port import BlockKey
from tests.vllm.engines import BLOCK_BYTES, Engine, agent, connected, engine, prompts_of

PROMPTS = prompts_of(seed=7, count=200)
GPU_BLOCKS = 40
"""Far fewer than the prompts have, so that blocks are evicted all the time."""
HOST_BYTES = 4_096 * BLOCK_BYTES
pytestmark = pytest.mark.timeout(1_500)


class Bench:
    """Engines, an agent, and what each prompt gives without a connector."""

    def __init__(self, folder: Path, stack: ExitStack) -> None:
        self.folder = folder
        self._stack = stack
        self.agent = stack.enter_context(agent(folder))
        with engine({"blocks": GPU_BLOCKS, "engine": {"enable_prefix_caching": False}}, folder / "bare.log") as bare:
            self.expected, cached = bare.generate(PROMPTS)
        assert not any(cached)

    def engine(self, name: str, arguments: dict[str, object] | None = None, **extra: object) -> Engine:
        """`arguments`: vLLM's own."""
        disk = {"volumes": ["fast"], "retention_s": 60.0}
        settings = {"host_bytes": HOST_BYTES, "model": "tiny", "producer": name, "agent_url": self.agent.url} | extra
        transfer = connected(disk=disk, **settings)
        return self._stack.enter_context(
            engine(
                {"blocks": GPU_BLOCKS, "transfer": transfer, "engine": arguments or {}}, self.folder / f"{name}.log"
            )
        )

    def right(self, served: Engine) -> list[int]:
        """All prompts give what they should; how many tokens of each were had without computing them."""
        tokens, cached = served.generate(PROMPTS)
        assert [n for n, found in enumerate(tokens) if found != self.expected[n]] == []
        return cached


@pytest.fixture(scope="module")
def bench(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Bench]:
    with ExitStack() as stack:
        yield Bench(tmp_path_factory.mktemp("vllm"), stack)


@pytest.fixture(scope="module")
def first(bench: Bench) -> Engine:
    """An engine that has served all prompts: its blocks are in the host, and on the volume."""
    served = bench.engine("first")
    bench.right(served)
    served.ask("settle")
    return served


@pytest.fixture(scope="module")
def second(bench: Bench) -> Engine:
    """Another one. It waits for volumes as long as a test may."""
    return bench.engine("second", core={"transfers": {"disk_to_device": {"deadline_s": 5.0}}})


def in_blocks(tokens: int) -> int:
    return (tokens - 1) // 32 * 32


def test_prompts_depend_on_what_is_in_their_blocks(bench: Bench) -> None:
    assert len({tuple(tokens) for tokens in bench.expected}) > len(PROMPTS) * 0.9


def test_blocks_come_from_the_host(bench: Bench, first: Engine) -> None:
    first.ask("reset")
    before = first.ask("cache")

    cached = bench.right(first)

    assert cached == [in_blocks(len(prompt)) for prompt in PROMPTS]
    after = first.ask("cache")
    assert after["loaded_blocks"] > before.get("loaded_blocks", 0)
    assert after.get("from_volumes_blocks", 0) == before.get("from_volumes_blocks", 0)


def test_blocks_come_from_a_volume(bench: Bench, first: Engine) -> None:
    assert first.ask("reset", connector=True)

    cached = bench.right(first)

    assert cached == [in_blocks(len(prompt)) for prompt in PROMPTS]
    assert first.ask("cache")["from_volumes_blocks"] > 0


def test_a_block_that_changed_in_the_host_is_computed_again_and_counted(bench: Bench, first: Engine) -> None:
    first.ask("settle")  # a block that is on its way to a volume would be bad there
    first.ask("reset")
    assert first.ask("corrupt_host", every=20) > 10

    bench.right(first)

    assert first.ask("cache")["wrong_blocks"] > 0


@pytest.mark.parametrize("volume", ["shared", "far", "ram"])
def test_blocks_come_from_other_kinds_of_volumes_and_while_they_are_moved_there_and_back(
    bench: Bench, first: Engine, volume: str
) -> None:
    first.ask("settle")
    keys = [BlockKey(*key) for key in first.ask("keys")]
    whole = [in_blocks(len(prompt)) for prompt in PROMPTS]
    with ThreadPoolExecutor(1) as mover:
        empty(first)
        moving = mover.submit(move, bench, keys, "fast", volume)

        assert bench.right(first) == whole

        moving.result()
        first.ask("settle")
        empty(first)
        before = first.ask("cache")["from_volumes_blocks"]

        assert bench.right(first) == whole

        assert first.ask("cache")["from_volumes_blocks"] > before
        with AgentClient(bench.agent.url, 60.0) as asking:
            blocks = {each.descriptor.id: each.blocks for each in asking.stat().volumes}
        assert blocks[volume] == len(keys)
        # The ends of chains, which no prompt is loaded to the end of, are put to the fast volume again.
        assert blocks["fast"] < len(keys) / 4
        empty(first)
        moving = mover.submit(move, bench, keys, volume, "fast")

        assert bench.right(first) == whole

        moving.result()


def move(bench: Bench, keys: list[BlockKey], source: str, target: str) -> None:
    """As an advisor does: a few blocks at a time."""
    with AgentClient(bench.agent.url, 60.0) as moving:
        for start in range(0, len(keys), 16):
            moved = moving.move(f"{source}-{target}-{start}", keys[start : start + 16], source, target, keep=False)
            assert all(each.result.ok for each in moved.outcomes)


def test_another_engine_finds_them_and_what_rots_on_the_volume_is_computed(
    bench: Bench, first: Engine, second: Engine
) -> None:
    first.ask("settle")

    cached = bench.right(second)

    assert sum(cached) > 0.95 * sum(in_blocks(len(prompt)) for prompt in PROMPTS)
    assert second.ask("cache")["from_volumes_blocks"] > 0
    damage(bench.folder / "fast.slab")
    empty(second)

    bench.right(second)

    assert second.ask("cache")["volume_corrupt_blocks"] > 0


@pytest.mark.parametrize(
    "arguments", [{"hf_overrides": {"rope_theta": 20_000.0}}, {"revision": "v2"}], ids=["configuration", "revision"]
)
def test_an_engine_of_another_configuration_or_revision_finds_none_of_its_blocks(
    bench: Bench, first: Engine, arguments: dict[str, object]
) -> None:
    first.ask("settle")
    other = bench.engine("other", arguments)

    other.generate(PROMPTS[:20])

    assert other.ask("cache")["asked_blocks"] > 0
    assert other.ask("cache").get("from_volumes_blocks", 0) == 0
    other.stop()


def test_an_agent_that_stands_still_or_is_killed_costs_blocks_and_no_tokens(bench: Bench, second: Engine) -> None:
    second.ask("settle")
    empty(second)
    before = not_given(second)
    bench.agent.freeze()

    bench.right(second)  # it ends although nobody answers

    bench.agent.thaw()
    assert not_given(second) > before
    before = not_given(second)
    while not_given(second) == before:  # unless the agent was killed before anything was asked of it
        second.ask("settle")
        empty(second)
        bench.agent.freeze()
        with ThreadPoolExecutor(1) as serving:
            served = serving.submit(bench.right, second)
            wait([served], 1.0)
            bench.agent.kill()
            bench.agent.start()
            served.result()
    second.ask("settle")
    empty(second)
    came = second.ask("cache")["from_volumes_blocks"]

    bench.right(second)

    assert second.ask("cache")["from_volumes_blocks"] > came


def test_an_engine_that_starts_after_a_kill_finds_them(bench: Bench, first: Engine, second: Engine) -> None:
    second.kill()
    first.kill()
    third = bench.engine("third")

    cached = bench.right(third)

    assert sum(cached) > 0.95 * sum(in_blocks(len(prompt)) for prompt in PROMPTS)
    assert third.ask("cache")["from_volumes_blocks"] > 0
    assert third.stop() == 0


def not_given(served: Engine) -> int:
    """Blocks that were on a volume, and not had in time or at all."""
    counts = served.ask("cache")
    return sum(counts.get(f"volume_{reason}_blocks", 0) for reason in ("deadline", "failed"))


def empty(served: Engine) -> None:
    """GPU and host, once nothing is on its way any more."""
    while not served.ask("reset", connector=True):
        time.sleep(0.1)


def damage(slab: Path) -> None:
    """Flip a byte in every tenth of the slots' payloads, as a medium does that rots."""
    slot_bytes = PAGE_BYTES + BLOCK_BYTES
    size = slab.stat().st_size
    with slab.open("r+b") as medium:
        for place in range(4 * PAGE_BYTES, size - slot_bytes, 10 * slot_bytes):
            medium.seek(place + PAGE_BYTES + 100)
            byte = medium.read(1)
            medium.seek(-1, 1)
            medium.write(bytes([byte[0] ^ 0xFF]))
