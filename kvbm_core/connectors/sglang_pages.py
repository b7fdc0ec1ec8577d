"""SGLang's HiCache pages on our volumes: what `HiCacheStorage` asks for, without importing SGLang.

The KV pool's pages are cut by heads, so that another number of ranks reads them. Pools beside it (states of Mamba
layers, sliding windows, indexers, drafts) have namespaces of their own, and are read by as many ranks as put them.
Models whose ranks hold the same (MLA) are written by one rank. `kvbm_core.connectors.sglang` makes a backend of this.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch

from event_plane.schema import Namespace
from kvbm_core.connectors.agent_place import read_place
from kvbm_core.connectors.engine_blocks import EngineBlocks, WorkersPart
from kvbm_core.connectors.engine_store import EngineStore
from kvbm_core.connectors.sglang_pool import HostPool, PoolOnVolumes, page_form, page_layout, uncut_layout
from kvbm_core.connectors.sglang_prefix import PagesFound, PoolAsked, pages_found
from kvbm_core.connectors.sglang_stats import StatsKept, StorageStats
from kvbm_core.errors import ConfigError, KvbmError
from storage_agent.client_storage import ClientStorage
from storage_agent.shards import BlockLayout

SETTINGS_KEY = "kvadvisor"
"""Of `--hicache-storage-backend-extra-config`: the map that holds our settings."""

_PLACE = f"--hicache-storage-backend-extra-config, key {SETTINGS_KEY!r}"
_KV = "kv"
_OF_EACH_RANK = frozenset({"mamba"})
"""Pools of which each rank has its own part where all have the same KV, and SGLang hands all parts to be put."""


class StorageFacts(Protocol):
    """What is used of SGLang's `HiCacheStorageConfig`."""

    tp_rank: int
    tp_size: int
    pp_rank: int
    pp_size: int
    attn_cp_rank: int
    attn_cp_size: int
    dcp_size: int
    is_mla_model: bool
    enable_storage_metrics: bool
    model_name: str | None
    extra_config: dict[str, Any] | None


class PoolTransfer(Protocol):
    """What is used of SGLang's `PoolTransfer`: pages of one pool; asked for, as many `keys` as an end needs."""

    name: Any
    host_indices: torch.Tensor | None
    keys: list[str] | None
    hit_policy: Any


class PagesOnVolumes:
    """Thread-safe once its host pools are registered: SGLang prefetches and backs up in threads of their own."""

    def __init__(self, storage_config: StorageFacts, kwargs: dict[str, Any] | None = None) -> None:
        """Asks nothing of the agent yet. Raises `ConfigError`: settings that are not there, or ranks not served."""
        extra = storage_config.extra_config or {}
        self._place = read_place(extra.get(SETTINGS_KEY), _PLACE)
        if storage_config.dcp_size > 1:
            raise ConfigError(
                f"pages are spread over {storage_config.dcp_size} ranks by decode context parallelism, which is not "
                "stored: set --dcp-size to 1, or take another HiCache backend"
            )
        self._facts = storage_config
        self._stats = StatsKept() if storage_config.enable_storage_metrics else None
        self._store: EngineStore | None = None
        self._pools: dict[str, PoolOnVolumes] = {}
        self._page_tokens = 0

    # Host pools

    def register_mem_pool_host(self, mem_pool_host: HostPool) -> None:
        """The pool tells how pages lie. Raises `ConfigError` for one whose pages cannot be cut by heads."""
        part = self._part(self._facts.is_mla_model, mem_pool_host, page_layout)
        self.close()
        place = self._place
        storage = ClientStorage(place.agent_url, timeout_s=place.timeout_s)
        moved = self._stats.moved if self._stats is not None else None
        self._store = EngineStore(storage, place.volume, part, moved=moved)
        self._page_tokens = mem_pool_host.page_size
        self._pools = {_KV: self._on_volumes(mem_pool_host, self._store, "", self._facts.is_mla_model)}

    def register_mem_host_pool_v2(self, host_pool: HostPool, host_pool_name: Any) -> None:
        """A pool beside the KV one. Raises `ConfigError` for one that SGLang does not hand to us whole."""
        name = str(host_pool_name)
        if name == _KV:
            return
        facts = self._facts
        if facts.is_mla_model and facts.tp_size > 1 and name.startswith("draft") and hasattr(host_pool, "head_num"):
            raise ConfigError(
                f"host pool {name!r} has each of {facts.tp_size} ranks' own heads, of which SGLang backs up the first "
                "rank's alone: take a draft model of MLA, one rank, or another HiCache backend"
            )
        alike = facts.is_mla_model and name not in _OF_EACH_RANK
        store = self._opened().beside(self._part(alike, host_pool, uncut_layout))
        self._pools[name] = self._on_volumes(host_pool, store, f"/{name}/{page_form(host_pool)}", alike)

    def on_host_pools_registered(self) -> None:
        """Nothing is left to do then."""

    # Are they there?

    def exists(self, key: str) -> bool:
        return self.batch_exists([key]) == 1

    def batch_exists(self, keys: list[str], extra_info: Any = None) -> int:
        """Pages that every rank has put, from the first of `keys` on. No use of a block."""
        return self._pool(_KV).present_prefix(keys)

    def batch_exists_v2(
        self, keys: list[str], pool_transfers: list[PoolTransfer] | None = None, extra_info: Any = None
    ) -> PagesFound:
        """Prefixes of `keys` of which each pool has what it needs."""
        kv_pages = self.batch_exists(keys)
        asked = [
            PoolAsked(
                str(transfer.name),
                str(getattr(transfer.hit_policy, "value", transfer.hit_policy)),
                len(transfer.keys or ()),
                self._pool(transfer.name).present(keys[:kv_pages]),
            )
            for transfer in pool_transfers or ()
        ]
        return pages_found(kv_pages, asked)

    # Pages in the pools

    def batch_get_v1(self, keys: list[str], host_indices: torch.Tensor, extra_info: Any = None) -> list[bool]:
        """Read pages to their places in the KV pool."""
        return self._pool(_KV).load(keys, host_indices)

    def batch_set_v1(self, keys: list[str], host_indices: torch.Tensor, extra_info: Any = None) -> list[bool]:
        """Put pages from their places in the KV pool. With the keys before them, our tree knows their parents."""
        return self._pool(_KV).save(keys, host_indices, _before(extra_info))

    def batch_get_v2(self, transfers: list[PoolTransfer], extra_info: Any = None) -> dict[str, list[bool]]:
        """Read pages to their places in each pool; by pool, which are there."""
        return {each.name: self._pool(each.name).load(each.keys or [], each.host_indices) for each in transfers}

    def batch_set_v2(self, transfers: list[PoolTransfer], extra_info: Any = None) -> dict[str, list[bool]]:
        """Put pages from their places in each pool; by pool, which are there."""
        before = _before(extra_info)
        return {
            each.name: self._pool(each.name).save(each.keys or [], each.host_indices, before) for each in transfers
        }

    # Pages that SGLang copies

    def get(
        self, key: str, target_location: torch.Tensor | None = None, target_sizes: Any = None
    ) -> torch.Tensor | None:
        """`target_location` filled, or None."""
        return self.batch_get([key], [target_location])[0]

    def batch_get(
        self,
        keys: list[str],
        target_locations: Sequence[torch.Tensor | None] | None = None,
        target_sizes: Any = None,
    ) -> list[torch.Tensor | None]:
        """Each target filled, or None. Targets are contiguous; without one a tensor is made."""
        pool = self._pool(_KV)
        wanted = target_locations if target_locations is not None else [None] * len(keys)
        targets = [target if target is not None else pool.empty_page() for target in wanted]
        found = pool.read(keys, targets)
        return [target if is_there else None for target, is_there in zip(targets, found, strict=True)]

    def set(
        self,
        key: str,
        value: torch.Tensor | None = None,
        target_location: Any = None,
        target_sizes: Any = None,
    ) -> bool:
        return self.batch_set([key], [value])

    def batch_set(
        self,
        keys: list[str],
        values: Sequence[torch.Tensor | None] | None = None,
        target_locations: Any = None,
        target_sizes: Any = None,
    ) -> bool:
        """Whether all are there now. Nobody says which sequence they are of."""
        pages = [value for value in values or () if value is not None]
        if len(pages) != len(keys):
            raise KvbmError(f"{len(keys)} keys, {len(pages)} pages: give one tensor a key")
        return all(self._pool(_KV).write(keys, pages))

    # The rest

    def clear(self) -> bool:
        """Refused: the volume is others' too."""
        raise KvbmError(
            f"volume {self._place.volume!r} may hold other engines' blocks and is not cleared from here: "
            "delete a model's or a tenant's blocks at the advisor"
        )

    def get_stats(self) -> StorageStats | None:
        """Since the last call; None where SGLang keeps no metrics of its storage."""
        return self._stats.take() if self._stats is not None else None

    def counts(self) -> dict[str, int]:
        """See `EngineStore.counts`."""
        return self._store.counts() if self._store is not None else {}

    def close(self) -> None:
        """Idempotent."""
        if self._store is not None:
            self._store.close()

    def _part(self, alike: bool, pool: HostPool, layout_of: Callable[[HostPool, int], BlockLayout]) -> WorkersPart:
        """`alike`: the ranks' pages are the same."""
        if alike:
            return WorkersPart(0, 1, layout_of(pool, 1))
        return WorkersPart(self._facts.tp_rank, self._facts.tp_size, layout_of(pool, self._facts.tp_size))

    def _on_volumes(self, pool: HostPool, store: EngineStore, form: str, alike: bool) -> PoolOnVolumes:
        place = self._place
        layout = store.part.layout
        tag = getattr(pool, "storage_format_tag", None)
        namespace = Namespace(
            tenant=place.tenant,
            model=place.model or self._facts.model_name or "",
            revision=place.revision,
            kv_dtype=layout.dtype if layout is not None else "",
            block_tokens=self._page_tokens,
            hash_scheme="sglang",
            hash_root=place.hash_root + _piece(self._facts) + (f"/{tag}" if tag else "") + form,
        )
        return PoolOnVolumes(pool, store, EngineBlocks(namespace), writes=not alike or self._facts.tp_rank == 0)

    def _opened(self) -> EngineStore:
        if self._store is None:
            raise KvbmError("no host pool is registered: call register_mem_pool_host first")
        return self._store

    def _pool(self, name: Any) -> PoolOnVolumes:
        self._opened()
        pool = self._pools.get(str(name))
        if pool is None:
            raise KvbmError(f"no host pool {str(name)!r} is registered: call register_mem_host_pool_v2 first")
        return pool


def _before(extra_info: Any) -> list[str] | None:
    before: list[str] | None = getattr(extra_info, "prefix_keys", None)
    return before


def _piece(facts: StorageFacts) -> str:
    """What a pipeline stage or a context-parallel rank holds of a block is a block of its own."""
    stage = f"/stage{facts.pp_rank}of{facts.pp_size}" if facts.pp_size > 1 else ""
    context = f"/context{facts.attn_cp_rank}of{facts.attn_cp_size}" if facts.attn_cp_size > 1 else ""
    return stage + context
