"""SGLang's pages through a real agent: host pools of its layouts, tensor-parallel ranks, chains, faults."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from event_plane.schema import DEPTH_UNKNOWN
from kvbm_core.connectors.engine_blocks import hash_of_page
from kvbm_core.connectors.sglang_pages import SETTINGS_KEY, PagesOnVolumes
from kvbm_core.errors import ConfigError, KvbmError
from tests.contract.sglang_bench import (
    HEAD_DIM,
    HEADS,
    LAYERS,
    TOKENS,
    Bench,
    Extra,
    Facts,
    Pool,
    page_keys,
    places,
    served,
)


@pytest.fixture
def bench(tmp_path: Path) -> Iterator[Bench]:
    with served(tmp_path) as found:
        yield found


@pytest.mark.parametrize(
    ("layout", "mla"),
    [
        ("layer_first", False),
        ("page_first", False),
        ("page_first_direct", False),
        ("page_head", False),
        ("layer_first", True),
        ("page_first", True),
        ("page_first_direct", True),
    ],
)
def test_pages_come_back_to_other_places_of_a_pool_in_each_layout(bench: Bench, layout: str, mla: bool) -> None:
    pool = Pool(layout, heads=1 if mla else HEADS, mla=mla)
    pool.fill(1)
    keys = page_keys(3)
    backend = bench.backend(pool, is_mla_model=mla)
    assert backend.batch_set_v1(keys, places(0, 1, 2), Extra([])) == [True] * 3
    before = [pool.page(number).clone() for number in range(3)]
    assert backend.batch_exists([*keys, page_keys(4)[3]]) == 3
    assert backend.batch_get_v1([*keys, page_keys(4)[3]], places(5, 4, 3, 0), Extra([])) == [True, True, True, False]
    for place, page in zip((5, 4, 3), before, strict=True):
        assert torch.equal(pool.page(place), page)
    assert torch.equal(pool.page(0), before[0])  # a page that is not there changes nothing
    assert backend.counts() == {"put_stored": 3, "get_hit": 3, "get_miss": 1}


def test_pages_that_sglang_copies_itself_come_back(bench: Bench) -> None:
    pool = Pool()
    pool.fill(2)
    keys = page_keys(2)
    backend = bench.backend(pool)
    assert backend.batch_set(keys, [pool.page(0), pool.page(1)])
    assert backend.set(keys[0], pool.page(0))  # again: it is there
    targets = [torch.zeros_like(pool.page(0)) for _ in range(3)]
    found = backend.batch_get([*keys, page_keys(3)[2]], targets)
    assert found[2] is None
    for number in range(2):
        assert found[number] is targets[number]
        assert torch.equal(targets[number], pool.page(number))
    alone = backend.get(keys[1])
    assert alone is not None
    assert torch.equal(alone, pool.page(1))
    assert (backend.exists(keys[1]), backend.exists(page_keys(3)[2])) == (True, False)


def test_a_page_is_there_when_every_rank_has_put_its_part_and_another_number_of_ranks_reads_it(bench: Bench) -> None:
    pools = [Pool(heads=HEADS // 2) for _ in range(2)]
    ranks = [bench.backend(pool, tp_rank=rank, tp_size=2) for rank, pool in enumerate(pools)]
    keys = page_keys(2)
    for rank, pool in enumerate(pools):
        pool.fill(rank)
        assert [backend.batch_exists(keys) for backend in ranks] == [0, 0]
        assert ranks[rank].batch_set_v1(keys, places(0, 1), Extra([])) == [True, True]
    assert [backend.batch_exists(keys) for backend in ranks] == [2, 2]
    whole = Pool()
    assert bench.backend(whole).batch_get_v1(keys, places(2, 3)) == [True, True]
    for number in range(2):
        parts = [pool.page(number).reshape(2, TOKENS, LAYERS, HEADS // 2, HEAD_DIM) for pool in pools]
        assert torch.equal(whole.page(2 + number), torch.cat(parts, dim=3).flatten())


def test_ranks_that_hold_the_same_are_written_by_one(bench: Bench) -> None:
    pools = [Pool(heads=1, mla=True) for _ in range(2)]
    for pool in pools:
        pool.fill(3)
    first, second = (bench.backend(p, is_mla_model=True, tp_rank=r, tp_size=2) for r, p in enumerate(pools))
    keys = page_keys(1)
    assert second.batch_set_v1(keys, places(0)) == [True]
    assert second.batch_exists(keys) == 0
    assert first.batch_set_v1(keys, places(0)) == [True]
    assert second.batch_get_v1(keys, places(4)) == [True]
    assert torch.equal(pools[1].page(4), pools[0].page(0))


def test_slots_tell_the_chain_and_the_half_of_the_hash_that_events_carry(bench: Bench) -> None:
    pool = Pool()
    keys = page_keys(4)
    bench.backend(pool).batch_set_v1(keys[1:3], places(0, 1), Extra([keys[0]]))
    bench.backend(pool).batch_set_v1(keys[3:], places(2), Extra())
    headers = bench.headers()
    hashes = [hash_of_page(key) for key in keys]
    assert hashes[1] & (2**64 - 1) == int(keys[1][:16], 16)
    assert [(headers[each].parent_hash, headers[each].depth) for each in hashes[1:3]] == [
        (hashes[0], 1), (hashes[1], 2),
    ]  # fmt: skip
    assert (headers[hashes[3]].parent_hash, headers[hashes[3]].depth) == (0, DEPTH_UNKNOWN)
    namespace = headers[hashes[1]].namespace
    assert (namespace.hash_scheme, namespace.model, namespace.kv_dtype, namespace.block_tokens) == (
        "sglang", "tiny", "bfloat16", TOKENS,
    )  # fmt: skip


def test_what_lies_otherwise_or_is_of_another_stage_is_not_there(bench: Bench) -> None:
    pool = Pool()
    keys = page_keys(1)
    assert bench.backend(pool).batch_set_v1(keys, places(0)) == [True]
    assert bench.backend(Pool("layer_first")).batch_exists(keys) == 0
    assert bench.backend(Pool(), pp_rank=1, pp_size=2).batch_exists(keys) == 0
    assert bench.backend(Pool(), attn_cp_rank=1, attn_cp_size=2).batch_exists(keys) == 0
    assert bench.backend(Pool()).batch_exists(keys) == 1


def test_a_damaged_page_is_not_read_and_a_stopped_agent_has_no_pages(bench: Bench, tmp_path: Path) -> None:
    pool = Pool()
    pool.fill(4)
    keys = page_keys(2)
    backend = bench.backend(pool)
    assert backend.batch_set_v1(keys, places(0, 1)) == [True, True]
    file = tmp_path / "fast.slab"
    payload = bytes(pool.page(0).view(torch.uint8).numpy())
    at = file.read_bytes().index(payload)
    with file.open("r+b") as opened:
        opened.seek(at + 7)
        opened.write(b"\xff\x01\xff")
    kept = pool.page(4).clone()
    assert backend.batch_get_v1(keys, places(4, 5)) == [False, True]
    assert torch.equal(pool.page(4), kept)
    assert backend.counts()["get_corrupt"] == 1
    assert backend.batch_exists(keys) == 0
    bench.agent.unregister_volume("fast")
    assert backend.batch_exists([keys[1]]) == 0
    assert backend.batch_set_v1(keys, places(0, 1)) == [False, False]


class LogicalHostPool:
    """SGLang's of that name: slots without memory."""

    layout = "layer_first"
    page_size = TOKENS

    def get_data_page(self, index: int, flat: bool = True) -> torch.Tensor:
        return torch.empty(0, dtype=torch.uint8)


def test_what_cannot_be_configured_is_refused_with_the_remedy() -> None:
    with pytest.raises(ConfigError, match=r"key 'kvadvisor': .*agent_url.*it takes agent_url"):
        PagesOnVolumes(Facts({SETTINGS_KEY: {"volume": "fast"}}))
    with pytest.raises(ConfigError, match="agent_url is '', volume 'fast'; name both"):
        PagesOnVolumes(Facts({SETTINGS_KEY: {"agent_url": "", "volume": "fast"}}))
    with pytest.raises(ConfigError, match=r"timeout_s is 0\.0; wait some seconds"):
        PagesOnVolumes(Facts({SETTINGS_KEY: {"agent_url": "tcp://127.0.0.1:1", "volume": "fast", "timeout_s": 0}}))
    backend = PagesOnVolumes(Facts({SETTINGS_KEY: {"agent_url": "tcp://127.0.0.1:1", "volume": "fast"}}))
    with pytest.raises(KvbmError, match="call register_mem_pool_host first"):
        backend.register_mem_host_pool_v2(Pool(), "mamba")
    with pytest.raises(ConfigError, match="spread over 2 ranks by decode context parallelism"):
        PagesOnVolumes(Facts({SETTINGS_KEY: {"agent_url": "tcp://127.0.0.1:1", "volume": "fast"}}, dcp_size=2))
    with pytest.raises(ConfigError, match="a LogicalHostPool, has no pages of its own"):
        backend.register_mem_pool_host(LogicalHostPool())  # type: ignore[arg-type]
    odd = Pool()
    odd.layout = "page_unified"
    with pytest.raises(ConfigError, match="'page_unified' are not stored: set --hicache-mem-layout"):
        backend.register_mem_pool_host(odd)
    with pytest.raises(KvbmError, match="call register_mem_pool_host first"):
        backend.exists(page_keys(1)[0])
    with pytest.raises(KvbmError, match="delete a model's or a tenant's blocks at the advisor"):
        backend.clear()
    backend.register_mem_pool_host(Pool())
    with pytest.raises(ValueError, match="'nonsense' is no hexadecimal digest"):
        backend.exists("nonsense")
    with pytest.raises(KvbmError, match="2 pages of 4 tokens have 4 places"):
        backend.batch_get_v1(page_keys(2), places(0))
    backend.close()
