"""SGLang's HiCache pages on our volumes: what `HiCacheStorage` asks for, without importing SGLang.

A page is a block of one tensor-parallel rank: the ranks' pages make one block, which is there when all are. Models
whose ranks hold the same (MLA) are written by one rank. `kvbm_core.connectors.sglang` makes a HiCache backend of this.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import Any, Protocol

import torch

from event_plane.schema import Namespace
from kvbm_core.connectors.agent_place import read_place
from kvbm_core.connectors.engine_blocks import EngineBlocks, WorkersPart, hash_of_page
from kvbm_core.connectors.engine_store import EngineStore
from kvbm_core.errors import ConfigError, KvbmError
from kvbm_core.identity import BlockIdentity
from storage_agent.client_storage import ClientStorage
from storage_agent.shards import Axis, BlockLayout

SETTINGS_KEY = "kvadvisor"
"""Of `--hicache-storage-backend-extra-config`: the map that holds our settings."""

_PLACE = f"--hicache-storage-backend-extra-config, key {SETTINGS_KEY!r}"

PAGE_AXES: dict[str, tuple[str, ...]] = {
    "layer_first": ("layers", "tokens", "heads", "head_dim"),
    "page_first": ("tokens", "layers", "heads", "head_dim"),
    "page_first_direct": ("layers", "tokens", "heads", "head_dim"),
    "page_head": ("heads", "tokens", "layers", "head_dim"),
}
"""Dimensions of a page by `--hicache-mem-layout`, slowest first; K and V are an axis `outer` before them."""
_BY_PAGE_NUMBER = frozenset({"page_first_direct", "page_head"})
"""Their pages have an axis of extent 1, the page's number."""


class HostPool(Protocol):
    """What is used of SGLang's `HostKVCache`."""

    layout: str
    page_size: int

    def get_data_page(self, index: int, flat: bool = True) -> torch.Tensor: ...

    def set_from_flat_data_page(self, index: int, data_page: torch.Tensor) -> None: ...


class StorageFacts(Protocol):
    """What is used of SGLang's `HiCacheStorageConfig`."""

    tp_rank: int
    tp_size: int
    pp_rank: int
    pp_size: int
    attn_cp_rank: int
    attn_cp_size: int
    is_mla_model: bool
    model_name: str | None
    extra_config: dict[str, Any] | None


class PagesOnVolumes:
    """Thread-safe once a host pool is registered: SGLang prefetches and backs up in threads of their own."""

    def __init__(self, storage_config: StorageFacts, kwargs: dict[str, Any] | None = None) -> None:
        """Asks nothing of the agent yet. Raises `ConfigError`: settings that are not there, or a rank out of range."""
        extra = storage_config.extra_config or {}
        self._place = read_place(extra.get(SETTINGS_KEY), _PLACE)
        self._facts = storage_config
        self._writes = not storage_config.is_mla_model or storage_config.tp_rank == 0
        self._pool: HostPool | None = None
        self._store: EngineStore | None = None
        self._blocks: EngineBlocks | None = None

    # Host pools

    def register_mem_pool_host(self, mem_pool_host: HostPool) -> None:
        """The pool tells how pages lie. Raises `ConfigError` for one whose pages cannot be cut by heads."""
        layout = page_layout(mem_pool_host, 1 if self._facts.is_mla_model else self._facts.tp_size)
        part = (
            WorkersPart(0, 1, layout)
            if self._facts.is_mla_model
            else WorkersPart(self._facts.tp_rank, self._facts.tp_size, layout)
        )
        self.close()
        place = self._place
        self._blocks = EngineBlocks(
            Namespace(
                tenant=place.tenant,
                model=place.model or self._facts.model_name or "",
                revision=place.revision,
                kv_dtype=layout.dtype,
                block_tokens=mem_pool_host.page_size,
                hash_scheme="sglang",
                hash_root=place.hash_root + _piece(self._facts),
            )
        )
        self._pool = mem_pool_host
        self._store = EngineStore(
            ClientStorage(place.agent_url, timeout_s=place.timeout_s), place.volume, part
        )

    def register_mem_host_pool_v2(self, host_pool: HostPool, host_pool_name: str) -> None:
        """Raises `ConfigError` for pools beside the KV one (Mamba, sliding windows, drafts): they are not stored."""
        if str(host_pool_name) != "kv":
            raise ConfigError(
                f"the model has a host pool {str(host_pool_name)!r} beside its KV cache, which is not stored: "
                "take another HiCache backend for this model"
            )

    def on_host_pools_registered(self) -> None:
        """Nothing is left to do then."""

    # Are they there?

    def exists(self, key: str) -> bool:
        return self.batch_exists([key]) == 1

    def batch_exists(self, keys: list[str], extra_info: Any = None) -> int:
        """Pages that every rank has put, from the first of `keys` on. No use of a block."""
        store, blocks = self._opened()
        return store.present_prefix([blocks.key(hash_of_page(key)) for key in keys])

    # Pages in the pool

    def batch_get_v1(self, keys: list[str], host_indices: torch.Tensor, extra_info: Any = None) -> list[bool]:
        """Read pages to their places in the pool: straight there where a page lies together, else by a copy."""
        pool = self._registered_pool()
        places = _page_places(host_indices, pool.page_size, len(keys))
        views = [pool.get_data_page(place, flat=False) for place in places]
        targets = [view if view.is_contiguous() else torch.empty_like(view.flatten()) for view in views]
        found = self._get(keys, targets)
        for place, view, target, is_there in zip(places, views, targets, found, strict=True):
            if is_there and target is not view:
                pool.set_from_flat_data_page(place, target)
        return found

    def batch_set_v1(self, keys: list[str], host_indices: torch.Tensor, extra_info: Any = None) -> list[bool]:
        """Put pages from their places in the pool. With the keys before them, our tree knows their parents."""
        pool = self._registered_pool()
        places = _page_places(host_indices, pool.page_size, len(keys))
        _, blocks = self._opened()
        before = getattr(extra_info, "prefix_keys", None)
        chain = blocks.chain(
            [hash_of_page(key) for key in keys], None if before is None else [hash_of_page(key) for key in before]
        )
        return self._put(chain, [pool.get_data_page(place, flat=False) for place in places])

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
        pool = self._registered_pool()
        wanted = target_locations if target_locations is not None else [None] * len(keys)
        targets = [
            target if target is not None else torch.empty_like(pool.get_data_page(0, flat=False).flatten())
            for target in wanted
        ]
        found = self._get(keys, targets)
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
        _, blocks = self._opened()
        pages = [value for value in values or () if value is not None]
        if len(pages) != len(keys):
            raise KvbmError(f"{len(keys)} keys, {len(pages)} pages: give one tensor a key")
        return all(self._put([blocks.alone(hash_of_page(key)) for key in keys], pages))

    # The rest

    def clear(self) -> bool:
        """Refused: the volume is others' too."""
        raise KvbmError(
            f"volume {self._place.volume!r} may hold other engines' blocks and is not cleared from here: "
            "delete a model's or a tenant's blocks at the advisor"
        )

    def get_stats(self) -> None:
        """None: the agent and the advisor measure."""

    def counts(self) -> dict[str, int]:
        """See `EngineStore.counts`."""
        return self._store.counts() if self._store is not None else {}

    def close(self) -> None:
        """Idempotent."""
        if self._store is not None:
            self._store.close()

    def _get(self, keys: Sequence[str], targets: Sequence[torch.Tensor]) -> list[bool]:
        store, blocks = self._opened()
        return store.get([blocks.key(hash_of_page(key)) for key in keys], [_bytes_of(target) for target in targets])

    def _put(self, chain: Sequence[BlockIdentity], pages: Sequence[torch.Tensor]) -> list[bool]:
        store, _ = self._opened()
        if not self._writes:
            return [True] * len(chain)
        return store.put(chain, [_bytes_of(page.contiguous()) for page in pages])

    def _opened(self) -> tuple[EngineStore, EngineBlocks]:
        if self._store is None or self._blocks is None:
            raise KvbmError("no host pool is registered: call register_mem_pool_host first")
        return self._store, self._blocks

    def _registered_pool(self) -> HostPool:
        self._opened()
        assert self._pool is not None
        return self._pool


def page_layout(pool: HostPool, workers: int) -> BlockLayout:
    """Layout of a whole block, all `workers`' pages. Raises `ConfigError` for a pool that lies in no known way."""
    axes = PAGE_AXES.get(pool.layout)
    if axes is None:
        raise ConfigError(
            f"host pools of layout {pool.layout!r} are not stored: set --hicache-mem-layout to one of "
            f"{', '.join(PAGE_AXES)}"
        )
    page = pool.get_data_page(0, flat=False)
    extents = list(page.shape)
    if len(extents) > len(axes) and extents[0] == 2:
        axes = ("outer", *axes)
    if pool.layout in _BY_PAGE_NUMBER and len(extents) == len(axes) + 1:
        del extents[1 if axes[0] == "outer" else 0]
    if len(extents) != len(axes) or prod(extents) != page.numel():
        raise ConfigError(f"a page of shape {tuple(page.shape)} is not of layout {pool.layout!r}, axes {axes}")
    whole = [extent * workers if axis == "heads" else extent for axis, extent in zip(axes, extents, strict=True)]
    return BlockLayout(
        tuple(Axis(axis, extent) for axis, extent in zip(axes, whole, strict=True)),
        page.element_size(),
        "heads",
        str(page.dtype).removeprefix("torch."),
    )


def _piece(facts: StorageFacts) -> str:
    """What a pipeline stage or a context-parallel rank holds of a block is a block of its own."""
    stage = f"/stage{facts.pp_rank}of{facts.pp_size}" if facts.pp_size > 1 else ""
    context = f"/context{facts.attn_cp_rank}of{facts.attn_cp_size}" if facts.attn_cp_size > 1 else ""
    return stage + context


def _page_places(host_indices: torch.Tensor, page_size: int, pages: int) -> list[int]:
    if host_indices.numel() != pages * page_size:
        raise KvbmError(
            f"{pages} pages of {page_size} tokens have {host_indices.numel()} places: give one for each token"
        )
    return [int(place) for place in host_indices[::page_size].tolist()]


def _bytes_of(tensor: torch.Tensor) -> memoryview:
    """Of a contiguous tensor in host memory, without a copy."""
    return tensor.view(-1).view(torch.uint8).numpy().data
