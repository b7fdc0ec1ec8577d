"""vLLM's KV connector: blocks go to host memory and to a storage agent's volumes, and come back on a prefix hit.

How to configure it is in docs/integrations/vllm.md. vLLM makes two of it in one process: one beside its scheduler,
which plans (`schedule.Schedule`), one beside its model, which moves bytes (`host_cache.HostCache`). A block keeps the
hash that vLLM gives it.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NoReturn

import msgspec
import torch
import vllm
from vllm.distributed.kv_transfer import get_kv_transfer_group
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorMetadata,
    KVConnectorRole,
    KVConnectorWorkerMetadata,
)
from vllm.distributed.kv_transfer.kv_connector.v1.metrics import KVConnectorStats
from vllm.v1.core import kv_cache_utils
from vllm.v1.kv_cache_interface import get_kv_cache_spec_kind

from event_plane.connect import open_publisher
from event_plane.memory_transport import MemoryPublisher
from event_plane.publishing import BatchPublisher
from event_plane.schema import Namespace, producer_id
from kvbm_core.config import BLOCKS_MAX, KvbmConfig
from kvbm_core.connectors import host_cache
from kvbm_core.connectors.engine_blocks import EngineBlocks, digest_of_config, hash_of_digest
from kvbm_core.connectors.host_cache import HostCache
from kvbm_core.connectors.host_loads import EndedLoad
from kvbm_core.connectors.schedule import PATIENCE_S, Schedule, Scheduled
from kvbm_core.connectors.step_plan import LoadMode, StepPlan
from kvbm_core.connectors.vllm_events import HandedBack
from kvbm_core.connectors.vllm_settings import VllmSettings, read_settings
from kvbm_core.connectors.vllm_support import RIVALS, VllmFacts, require_support, rival_sentence
from kvbm_core.core_desk import CoreDesk
from kvbm_core.errors import BlockStateError, ConfigError, EngineSupportError
from kvbm_core.identity import BlockIdentity
from kvbm_core.manager import KvBlockManager
from kvbm_core.storage import TORCH_DTYPES
from storage_agent.client_storage import ClientStorage

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.distributed.kv_events import KVCacheEvent
    from vllm.v1.core.kv_cache_manager import KVCacheBlocks, KVCacheManager
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.kv_cache_interface import KVCacheConfig
    from vllm.v1.outputs import KVConnectorOutput
    from vllm.v1.request import Request

SECRET_OF_NO_USE = "vLLM's own hashes name blocks"
"""The core asks for one, to key hashes of its own; under this connector it makes none."""


def __getattr__(name: str) -> NoReturn:
    """vLLM's offloading settings put another connector's name in the place of ours, and look for it here."""
    if name in RIVALS:
        raise EngineSupportError(rival_sentence(name))
    raise AttributeError(f"module {__name__} has no {name}")


@dataclass
class StepMetadata(KVConnectorMetadata):  # type: ignore[misc]  # vLLM is not in the environment that mypy runs in
    """What the scheduler's half tells the worker's."""

    plan: StepPlan


@dataclass
class EndedLoads(KVConnectorWorkerMetadata):  # type: ignore[misc]
    """What the worker's half tells the scheduler's."""

    tickets: tuple[int, ...]

    def aggregate(self, other: KVConnectorWorkerMetadata) -> KVConnectorWorkerMetadata:
        assert isinstance(other, EndedLoads)
        return EndedLoads(self.tickets + other.tickets)


@dataclass
class Counts(KVConnectorStats):  # type: ignore[misc]
    """Blocks since the last time, by `HostCache.counts`' names."""

    def reset(self) -> None:
        self.data: dict[str, int] = {}

    def aggregate(self, other: KVConnectorStats) -> KVConnectorStats:
        for name, blocks in other.data.items():
            self.data[name] = self.data.get(name, 0) + blocks
        return self

    def reduce(self) -> dict[str, int | float]:
        return dict(self.data)

    def is_empty(self) -> bool:
        return not any(self.data.values())


class KvAdvisorConnector(KVConnectorBase_V1):  # type: ignore[misc]
    """Both halves. Refuses with `EngineSupportError` or `ConfigError`, in a sentence, what it does not serve."""

    def __init__(self, vllm_config: VllmConfig, role: KVConnectorRole, kv_cache_config: KVCacheConfig) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        self._settings = read_settings(self._kv_transfer_config.kv_connector_extra_config)
        require_support(_facts(vllm_config, kv_cache_config, self._settings))
        self._block_tokens: int = vllm_config.cache_config.block_size
        self._engine_id: str = self._kv_transfer_config.engine_id
        self._worker: _Worker | None = None
        self._leader: _Leader | None = None
        self._engine_blocks: KVCacheManager | None = None

    @classmethod
    def requires_piecewise_for_cudagraph(cls, extra_config: dict[str, Any]) -> bool:
        """Layers are loaded and saved one by one, which a whole captured graph would step over."""
        return True

    @classmethod
    def build_kv_connector_stats(cls, data: dict[str, Any] | None = None) -> KVConnectorStats | None:
        return Counts(data=data or {})

    # The worker's half

    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor]) -> None:
        if get_kv_transfer_group() is not self:
            raise EngineSupportError(rival_sentence("MultiConnector"))
        self._worker = _Worker(self._vllm_config, self._settings, self._engine_id, kv_caches)

    def bind_connector_metadata(self, connector_metadata: KVConnectorMetadata) -> None:
        """Loads that no step waits for begin here, beside the model's work: `start_load_kv` comes after it."""
        super().bind_connector_metadata(connector_metadata)
        if self._settings.load is LoadMode.ASYNC:
            self._working.begin(self._plan)

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        if self._settings.load is LoadMode.LAYERWISE:
            self._working.begin(self._plan)

    def wait_for_layer_load(self, layer_name: str) -> None:
        self._working.wait_layer(layer_name)

    def save_kv_layer(self, layer_name: str, kv_layer: torch.Tensor, attn_metadata: Any, **kwargs: Any) -> None:
        self._working.save_layer(layer_name, self._plan)

    def wait_for_save(self) -> None:
        self._working.finish(self._plan)

    def get_finished(self, finished_req_ids: set[str]) -> tuple[set[str] | None, set[str] | None]:
        ended = self._working.collect(self._plan)
        return None, {each.load.request for each in ended} if self._settings.load is LoadMode.ASYNC else None

    def get_block_ids_with_load_errors(self) -> set[int]:
        return {block for each in self._working.ended for block in each.failed}

    def build_connector_worker_meta(self) -> KVConnectorWorkerMetadata | None:
        """The last that vLLM asks for in a step: what has ended is told."""
        tickets = tuple(each.load.ticket for each in self._working.take_ended())
        return EndedLoads(tickets) if tickets else None

    def get_kv_connector_stats(self) -> KVConnectorStats | None:
        return None if self._worker is None else Counts(data=self._worker.take_counts())

    # The scheduler's half

    def bind_kv_cache_manager(self, kv_cache_manager: KVCacheManager) -> None:
        super().bind_kv_cache_manager(kv_cache_manager)
        self._engine_blocks = kv_cache_manager

    def get_num_new_matched_tokens(self, request: Request, num_computed_tokens: int) -> tuple[int | None, bool]:
        blocks = self._leading.matched(request, num_computed_tokens)
        if blocks is None:
            return None, False
        return blocks * self._block_tokens, blocks > 0 and self._settings.load is LoadMode.ASYNC

    def update_state_after_alloc(self, request: Request, blocks: KVCacheBlocks, num_external_tokens: int) -> None:
        self._leading.allocated(request, blocks.get_block_ids()[0], num_external_tokens)

    def build_connector_meta(self, scheduler_output: SchedulerOutput) -> KVConnectorMetadata:
        return StepMetadata(self._leading.step(scheduler_output))

    def update_connector_output(self, connector_output: KVConnectorOutput) -> None:
        told = connector_output.kv_connector_worker_meta
        if not isinstance(told, EndedLoads):
            return
        spoilt = self._leading.schedule.ended(told.tickets, connector_output.invalid_block_ids)
        if spoilt:
            assert self._engine_blocks is not None, "vLLM binds its cache manager before the first step"
            self._engine_blocks.evict_blocks(spoilt)

    def request_finished(self, request: Request, block_ids: list[int]) -> tuple[bool, dict[str, Any] | None]:
        """What the step saves is copied within it, so the blocks may go at once."""
        if self._leader is not None:
            self._leader.finished(request)
        return False, None

    def take_events(self) -> Iterable[KVCacheEvent]:
        handed = None if self._leader is None else self._leader.handed
        return () if handed is None else handed.take()

    def reset_cache(self) -> bool | None:
        try:
            self._leading.schedule.reset()
        except BlockStateError:
            return False
        return True

    def shutdown(self) -> None:
        if self._leader is not None:
            self._leader.schedule.close()
        if self._worker is not None:
            self._worker.close()
        self._leader = self._worker = None

    @property
    def _plan(self) -> StepPlan:
        metadata = self._get_connector_metadata()
        assert isinstance(metadata, StepMetadata)
        return metadata.plan

    @property
    def _working(self) -> _Worker:
        if self._worker is None:
            raise ConfigError("vLLM has not told of its caches: the connector works beside a model runner alone")
        return self._worker

    @property
    def _leading(self) -> _Leader:
        """Made when it is first needed: the worker's half is there by then."""
        if self._leader is None:
            cache = host_cache.OPEN.get(self._engine_id)
            if cache is None:
                raise EngineSupportError(
                    "the engine's worker is in another process than its scheduler, and the connector's halves share "
                    "memory: set distributed_executor_backend to 'uni'"
                )
            self._leader = _Leader(cache, self._vllm_config, self._settings)
        return self._leader


class _Worker:
    """One engine's worker: makes the host's memory for its layers, and copies as the plans say."""

    def __init__(
        self,
        vllm_config: VllmConfig,
        settings: VllmSettings,
        engine_id: str,
        kv_caches: dict[str, torch.Tensor],
    ) -> None:
        self._engine_id = engine_id
        self._numbers = {name: number for number, name in enumerate(kv_caches)}
        self.ended: list[EndedLoad] = []
        """Loads that are over, and of which the scheduler was not told yet."""
        self._told: dict[str, int] = {}
        self._told_s = 0.0
        layers = [_as_known(layer) for layer in kv_caches.values()]
        form = _cache_form(vllm_config, next(iter(kv_caches)))
        self._cache = host_cache.OPEN[engine_id] = _open_cache(vllm_config, settings, engine_id, layers, form)

    def begin(self, plan: StepPlan) -> None:
        self._cache.begin_load(plan.loads)

    def wait_layer(self, name: str) -> None:
        self._cache.wait_layer(self._numbers[name])

    def save_layer(self, name: str, plan: StepPlan) -> None:
        self._cache.save_layer(self._numbers[name], plan.saves)

    def finish(self, plan: StepPlan) -> None:
        failed = any(each.failed for each in self.collect(plan))
        self._cache.finish_save(plan.saves, is_spoilt=failed and self._cache.mode is LoadMode.LAYERWISE)

    def collect(self, plan: StepPlan) -> list[EndedLoad]:
        """Loads that are over and were not told of; a step without work waits a little for one."""
        self.ended += self._cache.finish_load(PATIENCE_S if plan.is_idle and not self.ended else 0.0)
        return self.ended

    def take_ended(self) -> list[EndedLoad]:
        ended, self.ended = self.ended, []
        return ended

    def take_counts(self) -> dict[str, int]:
        """Once a second, since a step may take no longer than the counting."""
        if time.monotonic() - self._told_s < _COUNTS_S:
            return {}
        self._told_s = time.monotonic()
        counts = self._cache.counts()
        fresh = {name: blocks - self._told.get(name, 0) for name, blocks in counts.items()}
        self._told = counts
        return {name: blocks for name, blocks in fresh.items() if blocks}

    def close(self) -> None:
        host_cache.OPEN.pop(self._engine_id, None)
        self._cache.close()


class _Leader:
    """One engine's scheduler: its requests' hashes as our chains, its steps as plans."""

    def __init__(self, cache: HostCache, vllm_config: VllmConfig, settings: VllmSettings) -> None:
        self.schedule = Schedule(cache)
        self._block_tokens: int = vllm_config.cache_config.block_size
        config = cache.manager.config
        algorithm = vllm_config.cache_config.prefix_caching_hash_algo
        self._blocks = EngineBlocks(
            Namespace(
                tenant=settings.tenant,
                model=config.model,
                revision=config.revision,
                adapter="",  # it is in vLLM's hash
                kv_dtype=config.dtype,
                block_tokens=self._block_tokens,
                hash_root=f"vllm {algorithm} {kv_cache_utils.NONE_HASH[-8:].hex()}",
            )
        )
        self._requests: dict[str, Request] = {}
        events = vllm_config.kv_events_config
        self.handed: HandedBack | None = None
        if events is not None and events.enable_kv_cache_events and not settings.event_url:
            self.handed = HandedBack(self._block_tokens)
            cache.manager.hooks.add(self.handed.on_step)

    def matched(self, request: Request, had_tokens: int) -> int | None:
        self._requests[request.request_id] = request
        self._extend(request)
        had = had_tokens // self._block_tokens
        return self.schedule.matched(request.request_id, request.num_tokens, had, self._block_tokens)

    def allocated(self, request: Request, block_ids: Sequence[int], tokens: int) -> None:
        self.schedule.allocated(request.request_id, block_ids, tokens // self._block_tokens)

    def step(self, output: SchedulerOutput) -> StepPlan:
        state = output.kv_connector_block_state
        computed = {each.req_id: each.num_computed_tokens for each in output.scheduled_new_reqs}
        cached = output.scheduled_cached_reqs
        computed.update(zip(cached.req_ids, cached.num_computed_tokens, strict=True))
        scheduled = []
        for request_id, tokens in output.num_scheduled_tokens.items():
            request = self._requests.get(request_id)
            block_ids = state.get_block_ids(request_id) if state is not None else None
            if request is None or block_ids is None:
                continue
            self._extend(request)
            full = (computed[request_id] + tokens) // self._block_tokens
            scheduled.append(Scheduled(request_id, full, list(block_ids[0])))
        return self.schedule.step(scheduled)

    def finished(self, request: Request) -> None:
        self.schedule.finished(request.request_id)
        self._requests.pop(request.request_id, None)
        if self.handed is not None:
            self.handed.finished(request)

    def _extend(self, request: Request) -> None:
        hashes = request.block_hashes

        def after(count: int) -> list[BlockIdentity]:
            known = [hash_of_digest(digest) for digest in hashes]
            if self.handed is not None:
                self.handed.name(request, count)
            return self._blocks.chain(known[count:], known[:count])

        self.schedule.chain(request.request_id, len(hashes), after)


def _facts(vllm_config: VllmConfig, kv_cache_config: KVCacheConfig, settings: VllmSettings) -> VllmFacts:
    cache, parallel = vllm_config.cache_config, vllm_config.parallel_config
    return VllmFacts(
        version=vllm.__version__,
        workers=parallel.world_size,
        executor=str(parallel.distributed_executor_backend),
        groups=tuple(get_kv_cache_spec_kind(group.kv_cache_spec).value for group in kv_cache_config.kv_cache_groups),
        block_tokens=cache.block_size,
        hash_tokens=kv_cache_config.hash_block_size or cache.block_size,
        hash_algorithm=cache.prefix_caching_hash_algo,
        has_fixed_seed="PYTHONHASHSEED" in os.environ,
        has_volumes=bool(settings.agent_url),
        offloading_gib=cache.kv_offloading_size,
        load_failure_policy=vllm_config.kv_transfer_config.kv_load_failure_policy,
        load=settings.load,
        steps_at_once=vllm_config.max_concurrent_batches,
    )


def _open_cache(
    vllm_config: VllmConfig, settings: VllmSettings, engine_id: str, layers: Sequence[torch.Tensor], form: str
) -> HostCache:
    """Host memory for blocks like those of `layers`, and the volumes. Raises what the settings cannot be served by."""
    model = vllm_config.model_config
    _, heads, tokens, head_dim = layers[0].shape
    block_bytes = len(layers) * layers[0][0].nbytes
    if not block_bytes <= settings.host_bytes <= BLOCKS_MAX * block_bytes:
        raise ConfigError(
            f"host_bytes = {settings.host_bytes} holds {settings.host_bytes // block_bytes} blocks of {block_bytes} "
            f"bytes: set it so that 1 to {BLOCKS_MAX} fit"
        )
    config = _core_config(
        settings,
        {
            "layers": len(layers),
            "outer": 1,  # keys and values of a token lie in one row
            "heads": heads,
            "head_dim": head_dim,
            "page_tokens": tokens,
            "dtype": _DTYPE_NAMES[layers[0].dtype],
            "device_bytes": settings.host_bytes,
            "device_memory": "host",
            "device_layout": "fully_contiguous",
            "device_order": "HND",
            "disk": settings.disk,
            "remote": settings.remote,
            "model": settings.model or model.model,
            "revision": " ".join(part for part in (settings.revision or model.revision or "", form) if part),
            "hash_secret": SECRET_OF_NO_USE,
        },
    )
    with ExitStack() as opened:
        producer = producer_id(settings.producer)
        if settings.event_url:
            publisher: BatchPublisher = open_publisher(settings.event_url, producer=producer)
        else:
            publisher = MemoryPublisher(f"memory://{engine_id}", producer=producer)  # nobody listens
        opened.callback(publisher.close)
        storage = None
        if settings.agent_url:
            storage = opened.enter_context(ClientStorage(settings.agent_url))
        manager = opened.enter_context(KvBlockManager(config, publisher, storage))
        if settings.desk_url:
            opened.enter_context(CoreDesk(manager, settings.desk_url))
        cache = HostCache(manager, layers, settings.load)
        return cache.owning(opened.pop_all())


def _core_config(settings: VllmSettings, engine: dict[str, Any]) -> KvbmConfig:
    """What the engine says of its blocks, and what the settings add. Raises `ConfigError`."""
    twice = sorted(set(settings.core) & set(engine))
    if twice:
        raise ConfigError(f"core.{twice[0]} is the engine's to say: leave it out of the connector's configuration")
    try:
        return msgspec.convert(msgspec.to_builtins(engine) | settings.core, KvbmConfig)
    except msgspec.ValidationError as error:
        raise ConfigError(f"core cannot be used: {error}") from error


def _cache_form(vllm_config: VllmConfig, layer_name: str) -> str:
    """What decides a block's bytes beside its tokens, its shape and the weights: the attention backend, on a CPU its
    instructions, and the model's configuration, overrides in it.

    Part of the namespace, so that no engine reads what another kind wrote.
    """
    layer = vllm_config.compilation_config.static_forward_context[layer_name]
    model = f"config-{digest_of_config(vllm_config.model_config.hf_config.to_dict())}"
    parts = (layer.get_attn_backend().get_name(), getattr(layer, "isa", ""), model)
    return " ".join(part for part in parts if part)


def _as_known(layer: torch.Tensor) -> torch.Tensor:
    """vLLM keeps 8-bit floats as bytes; bits are moved, not numbers."""
    return layer.view(torch.int8) if layer.dtype is torch.uint8 else layer


_COUNTS_S = 1.0
_DTYPE_NAMES = {dtype: name for name, dtype in TORCH_DTYPES.items()}
