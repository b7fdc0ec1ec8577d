"""One host pool of SGLang's HiCache: how its pages lie, and to and from volumes with them.

A page is what one tensor-parallel rank holds of a block: the ranks' pages make one block, which is there when all are.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import gcd, prod
from typing import Protocol

import torch

from kvbm_core.connectors.engine_blocks import EngineBlocks, hash_of_page
from kvbm_core.connectors.engine_store import EngineStore
from kvbm_core.errors import ConfigError, KvbmError
from kvbm_core.identity import BlockIdentity
from storage_agent.port import BlockKey
from storage_agent.shards import Axis, BlockLayout

PAGE_AXES: dict[str, tuple[str, ...]] = {
    "layer_first": ("layers", "tokens", "heads", "head_dim"),
    "page_first": ("tokens", "layers", "heads", "head_dim"),
    "page_first_direct": ("layers", "tokens", "heads", "head_dim"),
    "page_head": ("heads", "tokens", "layers", "head_dim"),
}
"""Dimensions of a page by `--hicache-mem-layout`, slowest first; K and V are an axis `outer` before them."""
_BY_PAGE_NUMBER = frozenset({"page_first_direct", "page_head"})
"""Their pages have an axis of extent 1, the page's number."""
_RUN_BYTES_MAX = 1 << 20


class HostPool(Protocol):
    """What is used of SGLang's `HostKVCache`."""

    layout: str
    page_size: int

    def get_data_page(self, index: int, flat: bool = True) -> torch.Tensor: ...

    def set_from_flat_data_page(self, index: int, data_page: torch.Tensor) -> None: ...


class PoolOnVolumes:
    """Thread-safe, as its store is."""

    def __init__(self, pool: HostPool, store: EngineStore, blocks: EngineBlocks, *, writes: bool) -> None:
        """`writes`: whether this rank puts pages; where it does not, another puts the same ones."""
        self._pool = pool
        self._store = store
        self._blocks = blocks
        self._writes = writes
        first, again = pool.get_data_page(0, flat=False), pool.get_data_page(0, flat=False)
        self._elements, self._dtype = first.numel(), first.dtype
        self._lies_together = first.is_contiguous() and first.data_ptr() == again.data_ptr()
        """A page is a view of the pool's own memory, which a block can be read straight into."""

    def present(self, keys: Sequence[str]) -> list[bool]:
        """Pages that every rank has put. No use of a block."""
        return self._store.present(self._keys(keys))

    def present_prefix(self, keys: Sequence[str]) -> int:
        """How many of `keys` are there, from the first on."""
        return self._store.present_prefix(self._keys(keys))

    def load(self, keys: Sequence[str], host_indices: torch.Tensor | None) -> list[bool]:
        """Read pages to their places in the pool: straight there where a page lies together, else by a copy."""
        places = self._places(keys, host_indices)
        if self._lies_together:
            return self.read(keys, [self._pool.get_data_page(place, flat=False) for place in places])
        pages = [self.empty_page() for _ in places]
        found = self.read(keys, pages)
        for place, page, is_there in zip(places, pages, found, strict=True):
            if is_there:
                self._pool.set_from_flat_data_page(place, page)
        return found

    def save(
        self, keys: Sequence[str], host_indices: torch.Tensor | None, before: Sequence[str] | None
    ) -> list[bool]:
        """Put pages from their places in the pool. `before`: the keys ahead of them in their sequence, None: unknown.

        Whether each is there now, or will be when another rank has put it.
        """
        places = self._places(keys, host_indices)
        ahead = None if before is None else [hash_of_page(key) for key in before]
        chain = self._blocks.chain([hash_of_page(key) for key in keys], ahead)
        return self._put(chain, [self._pool.get_data_page(place, flat=False) for place in places])

    def read(self, keys: Sequence[str], pages: Sequence[torch.Tensor]) -> list[bool]:
        """Fill each page, or leave it as it is. Pages are contiguous and in host memory."""
        return self._store.get(self._keys(keys), [_bytes_of(page) for page in pages])

    def write(self, keys: Sequence[str], pages: Sequence[torch.Tensor]) -> list[bool]:
        """Put pages of which nobody says what sequence they are of; otherwise as `save`."""
        return self._put([self._blocks.alone(hash_of_page(key)) for key in keys], pages)

    def empty_page(self) -> torch.Tensor:
        """Flat."""
        return torch.empty(self._elements, dtype=self._dtype)

    def _keys(self, keys: Sequence[str]) -> list[BlockKey]:
        return [self._blocks.key(hash_of_page(key)) for key in keys]

    def _put(self, blocks: Sequence[BlockIdentity], pages: Sequence[torch.Tensor]) -> list[bool]:
        if not self._writes:
            return [True] * len(blocks)
        return self._store.put(blocks, [_bytes_of(page.contiguous()) for page in pages])

    def _places(self, keys: Sequence[str], host_indices: torch.Tensor | None) -> list[int]:
        given = 0 if host_indices is None else host_indices.numel()
        if host_indices is None or given != len(keys) * self._pool.page_size:
            raise KvbmError(
                f"{len(keys)} pages of {self._pool.page_size} tokens have {given} places: give one for each token"
            )
        return [int(place) for place in host_indices[:: self._pool.page_size].tolist()]


def page_layout(pool: HostPool, workers: int) -> BlockLayout:
    """Layout of a whole block, all `workers`' pages. Raises `ConfigError` for a pool that lies in no known way."""
    axes = PAGE_AXES.get(pool.layout)
    if axes is None:
        raise ConfigError(
            f"host pools of layout {pool.layout!r} are not stored: set --hicache-mem-layout to one of "
            f"{', '.join(PAGE_AXES)}"
        )
    page = pool.get_data_page(0, flat=False)
    if not page.numel():
        raise ConfigError(
            f"the model's KV pool, a {type(pool).__name__}, has no pages of its own, as DeepSeek V4's: it is not "
            "stored, take another HiCache backend"
        )
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
        _dtype_of(page),
    )


def uncut_layout(pool: HostPool, workers: int) -> BlockLayout:
    """Of pages that nobody knows how to cut: all `workers`' pages, one after another, for as many to read."""
    page = pool.get_data_page(0, flat=False)
    page_bytes = page.numel() * page.element_size()
    run_bytes = gcd(page_bytes, _RUN_BYTES_MAX)
    axes = (Axis("ranks", workers), Axis("runs", page_bytes // run_bytes), Axis("bytes", run_bytes))
    return BlockLayout(axes, 1, "ranks", _dtype_of(page))


def page_form(pool: HostPool) -> str:
    """How an uncut page lies, in words that differ where two pages of as many bytes lie differently."""
    return f"{pool.layout}/{'x'.join(str(extent) for extent in pool.get_data_page(0, flat=False).shape)}"


def _dtype_of(page: torch.Tensor) -> str:
    return str(page.dtype).removeprefix("torch.")


def _bytes_of(tensor: torch.Tensor) -> memoryview:
    """Of a contiguous tensor in host memory, without a copy."""
    return tensor.view(-1).view(torch.uint8).numpy().data
