"""Arguments of the wrong type from callers in the agent's process: named at once, and no slot or reader is lost."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from event_plane.schema import Namespace
from storage_agent.agent import StorageAgent
from storage_agent.descriptor import VolumeDescriptor
from storage_agent.errors import VolumeError
from storage_agent.port import BlockKey, PutBlock, Result
from storage_agent.shards import Shard

NAMESPACE = Namespace(tenant="t")
CAPACITY = 8
GOOD = b"y" * 100


def key(number: int) -> BlockKey:
    return BlockKey(NAMESPACE.namespace_id, 0, number)


def block(number: int) -> PutBlock:
    return PutBlock(key(number), NAMESPACE, memoryview(GOOD))


def slab(folder: Path, **facts: Any) -> VolumeDescriptor:
    wanted = {"id": "slab", "path": str(folder / "slab"), "capacity_blocks": CAPACITY, "block_bytes_max": 4096}
    return VolumeDescriptor(**{**wanted, **facts})


@pytest.fixture
def agent(tmp_path: Path) -> Iterator[StorageAgent]:
    with StorageAgent("slips", publisher=None, allowed_roots=[tmp_path]) as agent:
        agent.register_volume(slab(tmp_path))
        yield agent


@pytest.mark.parametrize(
    ("field", "value", "wanted"),
    [
        ("payload", b"bytes", "give memoryview"),
        ("payload", bytearray(4), "give memoryview"),
        ("key", (1, 0, 2), "give BlockKey"),
        ("namespace", "tenant", "give Namespace"),
        ("span", (1, 0, 2), "ShardSpan"),
        ("layout", "layout", "BlockLayout"),
    ],
)
def test_a_block_of_wrong_parts_is_refused_when_it_is_made(field: str, value: object, wanted: str) -> None:
    parts: dict[str, Any] = {"key": key(1), "namespace": NAMESPACE, "payload": memoryview(GOOD), field: value}
    with pytest.raises(TypeError, match=rf"PutBlock\.{field} is of type {type(value).__name__}; .*{wanted}"):
        PutBlock(**parts)


def test_a_batch_that_cannot_be_begun_leaves_no_slot_reserved(agent: StorageAgent) -> None:
    view = memoryview(GOOD)
    released = PutBlock(key(2), NAMESPACE, view)
    view.release()
    with pytest.raises(ValueError, match="released memoryview"):
        agent.put("slab", [block(1), released])
    (stat,) = agent.stat().volumes
    assert (stat.blocks, stat.slots_free) == (0, CAPACITY)
    assert [outcome.result for outcome in agent.put("slab", [block(1)])] == [Result.STORED]


@pytest.mark.parametrize("facts", [{"depth": "deep"}, {"parent_hash": "root"}, {"block_tokens": 1.5}])
def test_a_fact_that_is_no_number_fails_its_block_alone(agent: StorageAgent, facts: dict[str, Any]) -> None:
    odd = PutBlock(key(2), NAMESPACE, memoryview(GOOD), **facts)
    assert [outcome.result for outcome in agent.put("slab", [block(1), odd])] == [Result.STORED, Result.FAILED]
    (stat,) = agent.stat().volumes
    assert (stat.blocks, stat.slots_free) == (1, CAPACITY - 1)


def test_what_is_no_key_is_a_miss_and_holds_nothing(agent: StorageAgent) -> None:
    agent.put("slab", [block(1)])
    buffers = [memoryview(bytearray(100)) for _ in range(4)]
    odd: list[Any] = [key(1), None, (1, 2), BlockKey(1, 0, "hash")]  # type: ignore[arg-type]
    results = [outcome.result for outcome in agent.get(odd, buffers)]
    assert results == [Result.HIT, Result.MISS, Result.MISS, Result.MISS]
    # It would wait for ever for a reader that was forgotten.
    assert [outcome.result for outcome in agent.delete("", "slab", odd).outcomes] == [Result.DELETED, *results[1:]]


def test_what_is_no_buffer_fails_its_block_alone(agent: StorageAgent) -> None:
    agent.put("slab", [block(1), block(2)])
    buffer = memoryview(bytearray(100))
    odd: Any = bytearray(100)
    outcomes = agent.get([key(1), key(2)], [odd, buffer])
    assert [outcome.result for outcome in outcomes] == [Result.FAILED, Result.HIT]
    assert "bytearray; give a memoryview" in outcomes[0].reason
    assert buffer == GOOD


def test_a_get_that_cannot_be_planned_lets_go_of_its_blocks(agent: StorageAgent) -> None:
    agent.put("slab", [block(1)])
    odd: Any = (0, 2)
    with pytest.raises(TypeError, match="give Shard"):
        agent.get([key(1)], [memoryview(bytearray(100))], odd)
    outcomes = agent.get([key(1)], [memoryview(bytearray(100))], Shard(0, 2))
    assert outcomes[0].result is Result.FAILED
    assert [outcome.result for outcome in agent.delete("", "slab", [key(1)]).outcomes] == [Result.DELETED]


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("id", 5),
        ("capacity_blocks", "10"),
        ("capacity_blocks", 10.5),
        ("block_bytes_max", True),
        ("path", 7),
        ("tier", "3"),
        ("high_watermark", "1"),
        ("when_full", "evict"),
        ("options", None),
        ("options", {1: 2}),
    ],
)
def test_a_descriptor_of_wrong_types_is_refused_with_its_field(
    agent: StorageAgent, tmp_path: Path, field: str, value: object
) -> None:
    with pytest.raises(VolumeError, match=r"correct|rename"):
        agent.register_volume(slab(tmp_path, **{"id": "other", "path": str(tmp_path / "other"), field: value}))
    assert agent.register_volume(slab(tmp_path, id="other", path=str(tmp_path / "other"))).blocks == 0
