"""SGLang's own cache controllers, factory, hashes and host pools over a real agent, where SGLang is installed.

They run on the CPU. What is not SGLang's here: memory of the pools, whose making asks for a GPU's pool, and the ranks
of the process, which its launcher would tell.
"""

from __future__ import annotations

import threading
import warnings
from collections.abc import Iterator
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed

from event_plane.schema import DEPTH_UNKNOWN
from kvbm_core.connectors.sglang_pages import SETTINGS_KEY
from kvbm_core.connectors.sglang_pool import PAGE_AXES
from tests.contract.sglang_bench import HEAD_DIM, HEADS, LAYERS, PAGES, TOKENS, Bench, Pool, places, served

PATIENCE_S = 60.0

pytestmark = pytest.mark.skipif(
    find_spec("sglang") is None, reason="sglang is not installed here: pools of its shapes stand for it"
)


class SGLang:
    """Its modules. One process, no ranks."""

    def __init__(self, folder: Path) -> None:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # what importing SGLang warns of is SGLang's
            self.controllers = import_module("sglang.srt.managers.cache_controller")
            self.hybrid = import_module("sglang.srt.mem_cache.hybrid_cache.hybrid_cache_controller")
            self.storage = import_module("sglang.srt.mem_cache.hicache_storage")
            self.group = import_module("sglang.srt.mem_cache.pool_host.group")
            self.mha = import_module("sglang.srt.mem_cache.pool_host.mha")
            self.mamba = import_module("sglang.srt.mem_cache.pool_host.mamba")
            self.page_hashes = import_module("sglang.srt.mem_cache.utils").get_hash_str
            self.handle = import_module("sglang.srt.mem_cache.base_prefix_cache").CacheRequestHandle
            self.parallel = import_module("sglang.srt.runtime_context").get_parallel()
        self.device = SimpleNamespace(
            device="cpu", layer_num=LAYERS, register_layer_transfer_counter=lambda counter: None
        )
        torch.distributed.init_process_group("gloo", init_method=f"file://{folder}/group", rank=0, world_size=1)

    def kv_pool(self, layout: str, seed: int) -> Any:
        ours = Pool(layout)
        ours.fill(seed)
        sizes = {"layer_num": LAYERS, "head_num": HEADS, "head_dim": HEAD_DIM, "dtype": torch.bfloat16}
        return self._pool(self.mha.MHATokenToKVPoolHost, PAGES * TOKENS, **vars(ours), **sizes)

    def mamba_pool(self, seed: int) -> Any:
        made = torch.Generator().manual_seed(seed)
        temporal = torch.randn((PAGES, 2, 1, 4, 4), generator=made)
        conv = torch.randn((PAGES, 2, 1, 3, 4), generator=made).to(torch.bfloat16)
        state_bytes = 2 * 16 * 4 + 2 * 12 * 2
        buffers = {"temporal_buffer": temporal, "conv_buffer": [conv], "slot_state_buffers": []}
        sizes = {"layout": "page_first", "page_size": 1, "size_per_token": state_bytes, "slot_state_device_tensors": ()}
        return self._pool(self.mamba.MambaPoolHost, PAGES, kv_buffer=temporal, **buffers, **sizes)

    def controller(self, kind: Any, host: Any, url: str, *, interface_v1: int) -> Any:
        extra = {
            "backend_name": "kvadvisor",
            "module_path": "kvbm_core.connectors.sglang",
            "class_name": "KvAdvisorHiCache",
            "interface_v1": interface_v1,
            SETTINGS_KEY: {"agent_url": url, "volume": "fast"},
        }
        return kind(
            SimpleNamespace(get_kvcache=lambda: self.device),
            host,
            TOKENS,
            torch.distributed.group.WORLD,
            threading.Event(),
            storage_backend="dynamic",
            prefetch_threshold=TOKENS,
            model_name="tiny",
            storage_backend_extra_config=extra,
            enable_storage_metrics=True,
        )

    def hybrid_controller(self, seed: int, url: str) -> tuple[Any, Any, Any]:
        kv, mamba = self.kv_pool("page_first", seed), self.mamba_pool(seed)
        names, entry = self.storage.PoolName, self.group.PoolEntry
        entries = [
            entry(names.KV, kv, self.device, lambda layer: layer, is_primary_index_anchor=True),
            entry(names.MAMBA, mamba, self.device, lambda layer: layer),
        ]
        host = self.group.HostPoolGroup(entries)
        return self.controller(self.hybrid.HybridCacheController, host, url, interface_v1=1), kv, mamba

    def state(self, slot: int, key: str) -> Any:
        policy = self.storage.PoolHitPolicy.TRAILING_PAGES
        names = self.storage.PoolName
        return self.storage.PoolTransfer(names.MAMBA, torch.tensor([slot]), keys=[key], hit_policy=policy)

    @staticmethod
    def _pool(kind: Any, size: int, **fields: Any) -> Any:
        pool = object.__new__(kind)
        memory = {"size": size, "logical_size": size, "lock": threading.RLock(), "can_use_write_back_jit": False}
        vars(pool).update({"device": "cpu", "pin_memory": False, **memory, **fields})
        pool.clear()
        return pool


@pytest.fixture(scope="module")
def sglang(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SGLang]:
    found = SGLang(tmp_path_factory.mktemp("ranks"))
    ranks = {"tp_rank": 0, "tp_size": 1, "pp_rank": 0, "pp_size": 1, "attn_dcp_rank": 0, "attn_dcp_size": 1}
    with found.parallel.override(**ranks):
        yield found
    torch.distributed.destroy_process_group()


@pytest.fixture
def bench(tmp_path: Path) -> Iterator[Bench]:
    with served(tmp_path) as found:
        yield found


def prefetched(controller: Any, operation: Any, at: torch.Tensor) -> list[Any]:
    """What SGLang's scheduler does with a hit: it gives it room, and waits for the pages."""
    hit = controller.prefetch_hit_queue.get(timeout=PATIENCE_S)
    assert hit is operation
    hit.host_indices = at[: hit.storage_hit_count]
    controller.prefetch_buffer.put(hit)
    acks = [controller.ack_prefetch_queue.get(timeout=PATIENCE_S)]
    while not acks[-1].completed_req:
        acks.append(controller.ack_prefetch_queue.get(timeout=PATIENCE_S))
    return acks


@pytest.mark.parametrize("layout", sorted(PAGE_AXES))
@pytest.mark.parametrize("interface_v1", [0, 1])
def test_its_threads_back_pages_up_and_another_engine_prefetches_them(
    sglang: SGLang, bench: Bench, layout: str, interface_v1: int
) -> None:
    tokens = list(range(3 * TOKENS))
    keys = sglang.page_hashes(tokens, None, page_size=TOKENS)
    pools = [sglang.kv_pool(layout, seed) for seed in (1, 2)]
    first, second = (
        sglang.controller(sglang.controllers.HiCacheController, pool, bench.url, interface_v1=interface_v1)
        for pool in pools
    )
    first.write_storage(places(0, 1, 2), tokens, hash_value=keys, prefix_keys=[])
    assert first.ack_backup_queue.get(timeout=PATIENCE_S).completed_tokens == 3 * TOKENS
    operation = second.prefetch("request", [*tokens, 1, 2, 3, 4], None, [])
    acks = prefetched(second, operation, places(3, 4, 5))
    assert [ack.completed_tokens for ack in acks] == [3 * TOKENS, None]
    for page in range(3):
        assert torch.equal(pools[1].get_data_page((3 + page) * TOKENS), pools[0].get_data_page(page * TOKENS))
    assert first.storage_backend.get_stats().backup_pgs == [3]
    assert second.storage_backend.get_stats().prefetch_pgs == [3]
    depths = sorted(header.depth for header in bench.headers().values())
    assert depths == ([0, 1, 2] if interface_v1 else [DEPTH_UNKNOWN] * 3)
    for controller in (first, second):
        controller.detach_storage_backend()


def test_a_hybrid_model_is_restored_where_its_states_are(sglang: SGLang, bench: Bench) -> None:
    tokens = list(range(3 * TOKENS))
    keys = sglang.page_hashes(tokens, None, page_size=TOKENS)
    first, kv, mamba = sglang.hybrid_controller(1, bench.url)
    second, other_kv, other_mamba = sglang.hybrid_controller(2, bench.url)
    first.write_storage(
        places(0, 1, 2), tokens, hash_value=keys, prefix_keys=[], extra_pools=[sglang.state(0, keys[1])]
    )
    assert first.ack_backup_queue.get(timeout=PATIENCE_S).completed_tokens == 3 * TOKENS
    request = sglang.handle("request", 0)
    operation = second.prefetch(request, [*tokens, 1, 2, 3, 4], None, [], extra_pools=[sglang.state(4, "any")])
    acks = prefetched(second, operation, places(3, 4, 5))
    assert operation.query_pool_hit_pages == {"kv": 3, "mamba": 2}
    assert [ack.completed_tokens for ack in acks] == [2 * TOKENS, None, None]
    assert acks[1].pool_hits["mamba"] == 1
    for page in range(2):
        assert torch.equal(other_kv.get_data_page((3 + page) * TOKENS), kv.get_data_page(page * TOKENS))
    assert torch.equal(other_mamba.get_data_page(4), mamba.get_data_page(0))
    for controller in (first, second):
        controller.detach_storage_backend()
