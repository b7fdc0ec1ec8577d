"""SGLang's pools beside the KV one through a real agent, its metrics, and what is said when pages are not stored."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from structlog.testing import capture_logs

from kvbm_core.connectors.engine_blocks import hash_of_page
from kvbm_core.connectors.sglang_pages import PagesOnVolumes
from kvbm_core.connectors.sglang_stats import GB
from kvbm_core.errors import ConfigError, KvbmError
from tests.contract.sglang_bench import BLOCK_BYTES, PAGES, TOKENS, Bench, Extra, Pool, page_keys, places, served


class MambaPool:
    """As SGLang's `MambaPoolHost`: a page is one state, put together from two tensors each time it is asked for."""

    layout = "page_first"
    page_size = 1

    def __init__(self) -> None:
        self.temporal = torch.zeros((PAGES, 2, 8), dtype=torch.float32)
        self.conv = torch.zeros((PAGES, 2, 8), dtype=torch.bfloat16)

    def get_data_page(self, index: int, flat: bool = True) -> torch.Tensor:
        return torch.cat([self._bytes(self.temporal, index), self._bytes(self.conv, index)])

    def set_from_flat_data_page(self, index: int, data_page: torch.Tensor) -> None:
        self._bytes(self.temporal, index).copy_(data_page[:64])
        self._bytes(self.conv, index).copy_(data_page[64:])

    def fill(self, seed: int) -> None:
        made = torch.Generator().manual_seed(seed)
        for tensor in (self.temporal, self.conv):
            tensor.copy_(torch.randn(tensor.shape, generator=made))

    def page(self, number: int) -> torch.Tensor:
        return self.get_data_page(number)

    def _bytes(self, tensor: torch.Tensor, index: int) -> torch.Tensor:
        return tensor[index].view(-1).view(torch.uint8)


@dataclass
class Transfer:
    """As SGLang's `PoolTransfer`."""

    name: str
    keys: list[str] | None = None
    host_indices: torch.Tensor | None = None
    hit_policy: Any = "all_pages"


@pytest.fixture
def bench(tmp_path: Path) -> Iterator[Bench]:
    with served(tmp_path) as found:
        yield found


def hybrid(bench: Bench, kv: Pool, mamba: MambaPool, **facts: Any) -> PagesOnVolumes:
    backend = bench.backend(kv, **facts)
    backend.register_mem_host_pool_v2(kv, "kv")
    backend.register_mem_host_pool_v2(mamba, "mamba")
    backend.on_host_pools_registered()
    return backend


def states(*slots: int) -> torch.Tensor:
    return torch.tensor(slots)


def test_states_of_mamba_layers_come_back_and_a_prefix_ends_where_one_is(bench: Bench) -> None:
    kv, mamba = Pool(), MambaPool()
    kv.fill(1)
    mamba.fill(2)
    backend = hybrid(bench, kv, mamba)
    keys = page_keys(4)
    before = [mamba.page(number).clone() for number in range(2)]
    assert backend.batch_set_v1(keys, places(0, 1, 2, 3), Extra([])) == [True] * 4
    saved = [Transfer("mamba", [keys[0], keys[2]], states(0, 1))]
    assert backend.batch_set_v2(saved, Extra([])) == {"mamba": [True, True]}
    asked = [Transfer("mamba", [keys[3]], hit_policy="trailing_pages")]
    found = backend.batch_exists_v2([*keys, page_keys(5)[4]], asked, Extra([]))
    assert (found.kv_hit_pages, found.restorable_prefix_pages) == (3, [1, 3])
    assert found.extra_pool_hit_pages == {"kv": 4, "mamba": 3}
    loaded = backend.batch_get_v2([Transfer("mamba", [keys[2], keys[3]], states(5, 4))], Extra([]))
    assert loaded == {"mamba": [True, False]}
    assert torch.equal(mamba.page(5), before[1])
    assert not mamba.page(4).equal(before[0])


def test_each_rank_has_its_states_where_all_have_the_same_kv(bench: Bench) -> None:
    kv, states_of = Pool(heads=1, mla=True), [MambaPool(), MambaPool()]
    kv.fill(1)
    ranks = [
        hybrid(bench, kv, pool, is_mla_model=True, tp_rank=rank, tp_size=2) for rank, pool in enumerate(states_of)
    ]
    keys = page_keys(1)
    asked = [Transfer("mamba", keys, hit_policy="trailing_pages")]
    assert ranks[0].batch_set_v1(keys, places(0)) == [True]
    for rank, pool in enumerate(states_of):
        pool.fill(rank)
        assert ranks[1].batch_exists_v2(keys, asked).kv_hit_pages == 0
        assert ranks[rank].batch_set_v2([Transfer("mamba", keys, states(0))]) == {"mamba": [True]}
    for rank, pool in enumerate(states_of):
        assert ranks[rank].batch_exists_v2(keys, asked).kv_hit_pages == 1
        assert ranks[rank].batch_get_v2([Transfer("mamba", keys, states(3))]) == {"mamba": [True]}
        assert torch.equal(pool.page(3), pool.page(0))
    assert not torch.equal(states_of[0].page(3), states_of[1].page(3))
    alone = hybrid(bench, Pool(heads=1, mla=True), MambaPool(), is_mla_model=True)
    assert alone.batch_exists_v2(keys, asked).extra_pool_hit_pages == {"kv": 1}  # nobody knows how states are cut


def test_a_window_of_pages_is_of_another_namespace_and_tells_its_chain(bench: Bench) -> None:
    kv, window = Pool(), Pool("page_first_direct", heads=2)
    kv.fill(1)
    window.fill(2)
    backend = bench.backend(kv)
    backend.register_mem_host_pool_v2(window, "swa")
    keys = page_keys(3)
    hashes = [hash_of_page(key) for key in keys]
    assert backend.batch_set_v1(keys, places(0, 1, 2), Extra([])) == [True] * 3
    assert backend.batch_set_v2([Transfer("swa", keys[1:], places(0, 1))], Extra(keys[:1])) == {"swa": [True, True]}
    (volume,) = bench.agent.volumes()
    headers = {(header.namespace.hash_root, header.key.sequence_hash): header for header in volume.live_headers()}
    assert len(headers) == 5
    root = "/swa/page_first_direct/2x1x3x4x2x8"
    assert [(headers[root, each].parent_hash, headers[root, each].depth) for each in hashes[1:]] == [
        (hashes[0], 1), (hashes[1], 2),
    ]  # fmt: skip
    assert headers[root, hashes[1]].namespace.block_tokens == TOKENS
    window.kv_buffer[:, 4:].zero_()
    assert backend.batch_get_v2([Transfer("swa", keys[1:], places(5, 4))]) == {"swa": [True, True]}
    assert torch.equal(window.page(5), window.page(0))
    other = bench.backend(Pool())
    other.register_mem_host_pool_v2(Pool("layer_first", heads=2), "swa")
    assert other.batch_exists_v2(keys, [Transfer("swa", keys[2:], None, "trailing_pages")]).kv_hit_pages == 0


def test_what_sglang_could_not_restore_is_refused(bench: Bench) -> None:
    backend = bench.backend(Pool(heads=1, mla=True), is_mla_model=True, tp_size=2)
    draft = Pool()
    draft.head_num = 2  # type: ignore[attr-defined]
    with pytest.raises(ConfigError, match=r"'draft' has each of 2 ranks' own heads.*take a draft model of MLA"):
        backend.register_mem_host_pool_v2(draft, "draft")
    with pytest.raises(KvbmError, match="no host pool 'swa' is registered"):
        backend.batch_exists_v2(page_keys(1), [Transfer("swa")])
    backend.register_mem_host_pool_v2(MambaPool(), "mamba")
    with pytest.raises(KvbmError, match="'block_groups', which is none of all_pages, trailing_pages"):
        backend.batch_exists_v2(page_keys(1), [Transfer("mamba", hit_policy="block_groups")])
    with pytest.raises(KvbmError, match="1 pages of 1 tokens have 0 places"):
        backend.batch_get_v2([Transfer("mamba", page_keys(1))])


def test_pages_of_another_format_are_not_read_whatever_the_model_is_called(bench: Bench) -> None:
    packed = Pool()
    packed.storage_format_tag = "packed"  # type: ignore[attr-defined]
    keys = page_keys(1)
    assert bench.backend(packed).batch_set_v1(keys, places(0)) == [True]
    assert bench.backend(packed).batch_exists(keys) == 1
    assert bench.backend(Pool()).batch_exists(keys) == 0


def test_metrics_tell_pages_and_speed_once_and_only_of_what_moved(bench: Bench) -> None:
    pool = Pool()
    keys = page_keys(3)
    backend = bench.backend(pool, enable_storage_metrics=True)
    backend.batch_set_v1(keys[:2], places(0, 1))
    backend.batch_set_v1(keys, places(0, 1, 2))
    backend.batch_get_v1(keys, places(3, 4, 5))
    backend.batch_get_v1(page_keys(1, "never"), places(3))
    stats = backend.get_stats()
    assert stats is not None
    assert (stats.backup_pgs, stats.prefetch_pgs) == ([2, 1], [3])
    assert all(0 < speed * GB < 2**40 for speed in (*stats.backup_bandwidth, *stats.prefetch_bandwidth))
    assert len(stats.backup_bandwidth) == 2
    assert backend.get_stats() == ([], [], [], [])
    assert bench.backend(pool).get_stats() is None


def test_a_full_volume_is_said_once_though_reads_go_on_and_again_when_there_is_room(bench: Bench) -> None:
    pool = Pool()
    backend = bench.backend(pool)
    assert all(backend.batch_set_v1(page_keys(6, f"{turn}"), places(*range(6)))[0] for turn in range(2))
    with capture_logs() as said:
        for turn in range(3):  # 16 slots: the third turn is one too many
            backend.batch_set_v1(page_keys(6, f"more {turn}"), places(*range(6)))
            assert backend.batch_get_v1(page_keys(1, "0"), places(0)) == [True]
    warned = [entry for entry in said if entry["event"] == "engine blocks are recomputed"]
    assert [(entry["what"], entry["reason"]) for entry in warned] == [("put", "all slots are taken; free some first")]


def test_a_page_larger_than_the_volumes_blocks_is_said(bench: Bench) -> None:
    backend = bench.backend(Pool(heads=8))
    with capture_logs() as said:
        assert backend.batch_set_v1(page_keys(1), places(0)) == [False]
    assert str(2 * BLOCK_BYTES) in said[0]["reason"]
    assert str(BLOCK_BYTES) in said[0]["reason"]
