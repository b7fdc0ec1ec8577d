"""TensorRT-LLM's KV cache connector on our volumes: the classes that `KvCacheConnectorConfig` names. Imports it."""

from __future__ import annotations

from typing import Any

from tensorrt_llm._torch.pyexecutor.kv_cache_connector import KvCacheConnectorScheduler, KvCacheConnectorWorker

from kvbm_core.connectors.trtllm_blocks import TrtllmLeader, TrtllmWorker


class KvAdvisorScheduler(TrtllmLeader, KvCacheConnectorScheduler):  # type: ignore[misc]
    """See `TrtllmLeader`."""

    def __init__(self, llm_args: Any) -> None:
        KvCacheConnectorScheduler.__init__(self, llm_args)
        TrtllmLeader.__init__(self, llm_args)


class KvAdvisorWorker(TrtllmWorker, KvCacheConnectorWorker):  # type: ignore[misc]
    """See `TrtllmWorker`."""

    def __init__(self, llm_args: Any) -> None:
        KvCacheConnectorWorker.__init__(self, llm_args)
        TrtllmWorker.__init__(self, llm_args)
