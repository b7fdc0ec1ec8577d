"""SGLang's HiCache on our volumes: the class that its dynamic backend loads. Imports SGLang."""

from __future__ import annotations

from typing import Any

from sglang.srt.mem_cache.hicache_storage import HiCacheStorage, PoolTransferResult
from sglang.srt.observability.metrics_collector import StorageMetrics

from kvbm_core.connectors.sglang_pages import PagesOnVolumes


class KvAdvisorHiCache(PagesOnVolumes, HiCacheStorage):  # type: ignore[misc]
    """See `PagesOnVolumes`; docs/integrations/sglang.md says how it is configured."""

    def batch_exists_v2(self, keys: list[str], pool_transfers: Any = None, extra_info: Any = None) -> Any:
        found = super().batch_exists_v2(keys, pool_transfers, extra_info)
        return PoolTransferResult(found.kv_hit_pages, found.extra_pool_hit_pages, found.restorable_prefix_pages)

    def get_stats(self) -> Any:
        stats = super().get_stats()
        return StorageMetrics(**stats._asdict()) if stats is not None else None
