"""SGLang's HiCache on our volumes: the class that its dynamic backend loads. Imports SGLang."""

from __future__ import annotations

from sglang.srt.mem_cache.hicache_storage import HiCacheStorage

from kvbm_core.connectors.sglang_pages import PagesOnVolumes


class KvAdvisorHiCache(PagesOnVolumes, HiCacheStorage):  # type: ignore[misc]
    """See `PagesOnVolumes`; docs/integrations/sglang.md says how it is configured."""
