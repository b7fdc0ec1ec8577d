"""vLLM's own offloading on our volumes: a secondary tier that its tier factory loads. Imports vLLM.

    "secondary_tiers": [{"type": "KvAdvisorTier", "module_path": "kvbm_core.connectors.vllm_tier",
                         "agent_url": "tcp://127.0.0.1:5600", "volume": "fast"}]

vLLM's host memory is the tier above: it says which chunks are stored and wanted, and owns them there. A chunk is one
block of ours, all workers' bytes together, under the hash that vLLM gives it. What may be shared between runs is vLLM's
own rule, that of its file tier: its digest is part of the namespace.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterable
from concurrent.futures import Future, ThreadPoolExecutor, wait
from queue import Empty, SimpleQueue
from typing import TYPE_CHECKING, Any

from vllm.v1.kv_offload.base import (
    Locality,
    LookupResult,
    Medium,
    RequestOffloadingContext,
    get_offload_block_hash,
    get_offload_group_idx,
)
from vllm.v1.kv_offload.file_mapper import FileMapper
from vllm.v1.kv_offload.tiering.async_lookup import AsyncLookupManager
from vllm.v1.kv_offload.tiering.base import JobResult, SecondaryTierManager

from event_plane.schema import Namespace
from kvbm_core.connectors.agent_place import AgentPlace, read_place
from kvbm_core.connectors.engine_blocks import EngineBlocks, WorkersPart, hash_of_digest
from kvbm_core.connectors.engine_store import EngineStore, log_fault
from kvbm_core.identity import BlockIdentity
from storage_agent.client_storage import ClientStorage
from storage_agent.port import BlockKey

if TYPE_CHECKING:
    from vllm.v1.kv_offload.base import OffloadingSpec, OffloadKey, ReqContext, ScheduleEndContext
    from vllm.v1.kv_offload.tiering.backpressure import BackpressureDetector
    from vllm.v1.kv_offload.tiering.base import TransferJob


class KvAdvisorTier(SecondaryTierManager):  # type: ignore[misc]
    """What the scheduler calls returns at once: lookups, loads and stores each have a thread.

    An agent that does not answer makes every lookup a miss and every load a failed one, which vLLM recomputes.
    """

    medium = Medium.STORAGE

    def __init__(
        self,
        offloading_spec: OffloadingSpec,
        primary_kv_view: memoryview,
        tier_type: str,
        locality: str | None = None,
        backpressure_detector: BackpressureDetector | None = None,
        **place: Any,
    ) -> None:
        """`place`: the keys of `AgentPlace`. Raises `ConfigError` that names a wrong one."""
        super().__init__(offloading_spec, primary_kv_view, tier_type, backpressure_detector)
        found = read_place(place, f"secondary tier {tier_type!r}")
        self.locality = Locality(locality) if locality is not None else None
        self._chunks = primary_kv_view.cast("B")
        self._groups = _groups(offloading_spec, found)
        self._store = EngineStore(
            ClientStorage(found.agent_url, timeout_s=found.timeout_s), found.volume, WorkersPart()
        )
        self._lookups = _Lookups(tier_type, self._store, self._key)
        # A load that a request waits for is never behind stores.
        self._loading = ThreadPoolExecutor(1, f"{tier_type}-load")
        self._storing = ThreadPoolExecutor(1, f"{tier_type}-store")
        self._under_way: dict[int, Future[None]] = {}
        self._wanted: dict[int, list[OffloadKey]] = {}
        self._finished: SimpleQueue[JobResult] = SimpleQueue()

    def lookup(self, key: OffloadKey, req_context: ReqContext) -> LookupResult:
        self._note(key, req_context)
        found = self._lookups.lookup(key, req_context)
        if found is None:
            return LookupResult.RETRY
        return LookupResult.HIT if found else LookupResult.MISS

    def submit_store(self, job_metadata: TransferJob) -> None:
        keys = list(job_metadata.keys)
        blocks = [self._identity(key, job_metadata.req_context) for key in keys]
        payloads = self._places(job_metadata)

        def store() -> tuple[OffloadKey, ...]:
            stored = self._store.put(blocks, payloads)
            return tuple(key for key, is_there in zip(keys, stored, strict=True) if is_there)

        self._submit(self._storing, job_metadata, store)

    def submit_load(self, job_metadata: TransferJob) -> None:
        keys = list(job_metadata.keys)
        wanted = [self._key(key) for key in keys]
        buffers = self._places(job_metadata)

        def load() -> tuple[OffloadKey, ...]:
            loaded = self._store.get(wanted, buffers)
            return tuple(key for key, is_there in zip(keys, loaded, strict=True) if is_there)

        self._wanted[job_metadata.job_id] = keys
        self._submit(self._loading, job_metadata, load)

    def get_finished_jobs(self) -> Iterable[JobResult]:
        """A load that failed makes its chunks misses, so that the scheduler does not ask for them again."""
        results: list[JobResult] = []
        while True:
            try:
                result = self._finished.get_nowait()
            except Empty:
                return results
            self._under_way.pop(result.job_id, None)
            keys = self._wanted.pop(result.job_id, None)
            if keys is not None and not result.success:
                loaded = set(result.successful_keys or ())
                self._lookups.mark_miss([key for key in keys if key not in loaded])
            results.append(result)

    def touch(self, keys: Collection[OffloadKey], req_context: ReqContext) -> None:
        """Chunks that the GPU or host memory had: what is stored later comes behind them. No use of the volume's."""
        for key in keys:
            self._note(key, req_context)

    def on_new_request(self, req_context: ReqContext) -> RequestOffloadingContext:
        return RequestOffloadingContext()

    def on_request_finished(self, req_context: ReqContext) -> None:
        self._lookups.cleanup(req_context.req_id)

    def on_schedule_end(self, context: ScheduleEndContext) -> None:
        self._lookups.flush()

    def drain_jobs(self) -> None:
        wait(list(self._under_way.values()))

    def shutdown(self) -> None:
        """Waits for what moves bytes right now; what has not begun is given up."""
        self._lookups.shutdown()
        for executor in (self._loading, self._storing):
            executor.shutdown(wait=True, cancel_futures=True)
        self._chunks.release()
        self._store.close()

    def counts(self) -> dict[str, int]:
        """See `EngineStore.counts`."""
        return self._store.counts()

    def _submit(
        self, executor: ThreadPoolExecutor, job: TransferJob, move: Callable[[], tuple[OffloadKey, ...]]
    ) -> None:
        asked = len(job.keys)
        job_id = job.job_id

        def run() -> None:
            started_s = time.monotonic()
            moved: tuple[OffloadKey, ...] = ()
            try:
                moved = move()
            finally:  # whatever went wrong, vLLM lets go of the chunks that it keeps for the job
                self._finished.put(
                    JobResult(
                        job_id=job_id,
                        success=len(moved) == asked,
                        successful_keys=moved or None,
                        transfer_time=time.monotonic() - started_s,
                        transfer_bytes=len(moved) * self.block_size_bytes,
                    )
                )

        self._under_way[job_id] = executor.submit(run)
        self._under_way[job_id].add_done_callback(log_fault)

    def _places(self, job: TransferJob) -> list[memoryview]:
        size = self.block_size_bytes
        return [self._chunks[int(chunk) * size : (int(chunk) + 1) * size] for chunk in job.chunk_ids]

    def _key(self, key: OffloadKey) -> BlockKey:
        group: int = get_offload_group_idx(key)
        return self._groups[group].key(hash_of_digest(get_offload_block_hash(key)))

    def _identity(self, key: OffloadKey, request: ReqContext) -> BlockIdentity:
        """With its place in the chain, where vLLM named the chunks that it follows."""
        group: int = get_offload_group_idx(key)
        blocks, sequence_hash = self._groups[group], hash_of_digest(get_offload_block_hash(key))
        end_tokens = self._note(key, request)
        if end_tokens is None:
            return blocks.alone(sequence_hash)
        chunk_tokens = blocks.namespace.block_tokens
        chain = _chain_of(request)
        parent = chain.get((group, end_tokens - chunk_tokens), 0)
        prefix = chain.get((group, chunk_tokens), 0)
        if end_tokens % chunk_tokens or not prefix or (end_tokens > chunk_tokens and not parent):
            return blocks.alone(sequence_hash)
        return blocks.placed(sequence_hash, parent, prefix, end_tokens // chunk_tokens - 1)

    def _note(self, key: OffloadKey, request: ReqContext) -> int | None:
        """Where the chunk ends in its request, in tokens, as vLLM says and we remember."""
        end_tokens: int | None = request.get_offload_key_position(key)
        if end_tokens is not None:
            place = get_offload_group_idx(key), end_tokens
            _chain_of(request)[place] = hash_of_digest(get_offload_block_hash(key))
        return end_tokens


class _Chain(dict[tuple[int, int], int]):
    """One request's chunks as they were named: (group, end in tokens) → sequence hash."""


def _chain_of(request: ReqContext) -> _Chain:
    chain: _Chain | None = request.get_state(_Chain)
    if chain is None:
        chain = _Chain()
        request.set_state(chain)
    return chain


class _Lookups(AsyncLookupManager):  # type: ignore[misc]
    """vLLM's queue of lookups: one step's are asked together, in a thread of its own."""

    def __init__(self, tier_type: str, store: EngineStore, key_of: Callable[[OffloadKey], BlockKey]) -> None:
        self._store = store
        self._key_of = key_of
        super().__init__(tier_type)

    def batch_lookup(self, keys: list[OffloadKey], req_context: ReqContext) -> Iterable[bool]:
        return self._store.present([self._key_of(key) for key in keys])


def _groups(spec: OffloadingSpec, place: AgentPlace) -> list[EngineBlocks]:
    """One namespace a cache group: their chunks differ in tokens."""
    run = FileMapper.from_offloading_spec(
        root_dir="", offloading_spec=spec, blocks_per_file=spec.blocks_per_chunk, parallel_agnostic=True
    )
    digest = f"{run.base_path.rpartition('_')[2]}.{run.rank}"
    return [
        EngineBlocks(
            Namespace(
                tenant=place.tenant,
                model=place.model or spec.config.model.name,
                revision=place.revision,
                kv_dtype=spec.config.model.dtype,
                block_tokens=tokens * spec.blocks_per_chunk,
                hash_scheme="vllm",
                hash_root="/".join(part for part in (place.hash_root, digest, spec.config.kv_cache_layout) if part),
            ),
            number,
        )
        for number, tokens in enumerate(spec.tokens_per_block)
    ]
