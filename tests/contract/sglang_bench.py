"""Host pools of SGLang's shapes, and HiCache backends of ours over a real agent, for the tests of the backend."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass, field
from hashlib import sha256
from pathlib import Path
from typing import Any

import torch

from kvbm_core.connectors.sglang_pages import SETTINGS_KEY, PagesOnVolumes
from storage_agent.agent import StorageAgent
from storage_agent.block_header import BlockHeader
from storage_agent.descriptor import VolumeDescriptor
from storage_agent.service import AgentService

LAYERS, TOKENS, HEADS, HEAD_DIM, PAGES = 3, 4, 4, 8, 6
BLOCK_BYTES = 2 * LAYERS * TOKENS * HEADS * HEAD_DIM * 2


class Pool:
    """A host pool with the shapes of SGLang's `MHATokenToKVPoolHost` and, without V, `MLATokenToKVPoolHost`."""

    def __init__(self, layout: str = "page_first", *, heads: int = HEADS, mla: bool = False) -> None:
        self.layout = layout
        self.page_size = TOKENS
        outer = () if mla else (2,)
        size = PAGES * TOKENS
        shapes = {
            "layer_first": (LAYERS, size, heads, HEAD_DIM),
            "page_first": (size, LAYERS, heads, HEAD_DIM),
            "page_first_direct": (PAGES, LAYERS, TOKENS, heads, HEAD_DIM),
            "page_head": (PAGES, heads, TOKENS, LAYERS, HEAD_DIM),
        }
        self.kv_buffer = torch.zeros((*outer, *shapes[layout]), dtype=torch.bfloat16)
        self._outer = len(outer)

    def get_data_page(self, index: int, flat: bool = True) -> torch.Tensor:
        page = self._page(index)
        return page.flatten() if flat else page

    def set_from_flat_data_page(self, index: int, data_page: torch.Tensor) -> None:
        page = self._page(index)
        page.copy_(data_page.reshape(page.shape))

    def _page(self, index: int) -> torch.Tensor:
        at = self._outer + (1 if self.layout == "layer_first" else 0)
        if self.layout in ("layer_first", "page_first"):
            return self.kv_buffer.narrow(at, index, TOKENS)
        return self.kv_buffer.narrow(at, index // TOKENS, 1)

    def fill(self, seed: int) -> None:
        self.kv_buffer.copy_(torch.randn(self.kv_buffer.shape, generator=torch.Generator().manual_seed(seed)))

    def page(self, number: int) -> torch.Tensor:
        return self.get_data_page(number * TOKENS)


@dataclass
class Facts:
    extra_config: dict[str, Any] | None = None
    tp_rank: int = 0
    tp_size: int = 1
    pp_rank: int = 0
    pp_size: int = 1
    attn_cp_rank: int = 0
    attn_cp_size: int = 1
    dcp_size: int = 1
    enable_storage_metrics: bool = False
    is_mla_model: bool = False
    model_name: str | None = "tiny"


@dataclass
class Extra:
    prefix_keys: list[str] | None = None
    extra_info: dict[str, Any] | None = field(default=None)


@dataclass
class Bench:
    agent: StorageAgent
    url: str
    closing: ExitStack

    def backend(self, pool: Pool, **facts: Any) -> PagesOnVolumes:
        extra = {"backend_name": "kvadvisor", SETTINGS_KEY: {"agent_url": self.url, "volume": "fast"}}
        backend = PagesOnVolumes(Facts(extra, **facts), {})
        backend.register_mem_pool_host(pool)
        return self.closing.enter_context(closing(backend))

    def headers(self) -> dict[int, BlockHeader]:
        (volume,) = self.agent.volumes()
        return {header.key.sequence_hash: header for header in volume.live_headers()}


@contextmanager
def served(folder: Path) -> Iterator[Bench]:
    slab = VolumeDescriptor(
        id="fast", path=str(folder / "fast.slab"), capacity_blocks=16, block_bytes_max=BLOCK_BYTES
    )
    with StorageAgent("owner", publisher=None, allowed_roots=[folder]) as agent, ExitStack() as stack:
        agent.register_volume(slab)
        service = stack.enter_context(AgentService(agent, "tcp://127.0.0.1:*"))
        yield Bench(agent, service.command_url, stack)


def page_keys(count: int, salt: str = "") -> list[str]:
    return [sha256(f"{salt}{number}".encode()).hexdigest() for number in range(count)]


def places(*pages: int) -> torch.Tensor:
    return torch.cat([torch.arange(page * TOKENS, (page + 1) * TOKENS) for page in pages])
