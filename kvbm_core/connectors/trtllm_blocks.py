"""TensorRT-LLM's KV cache connector over our volumes, without importing TensorRT-LLM: both its halves.

Both halves are in one process: one worker (no tensor or pipeline parallelism). The scheduler's reads blocks into host
memory before it promises their tokens, since the interface has no way back from a load that fails; the worker's copies
them to the GPU, and saves after the step. `kvbm_core.connectors.trtllm` makes the classes that are configured.
"""

from __future__ import annotations

import json
import os
import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from kvbm_core.config import SECRET_CHARACTERS_MIN, KvbmConfig
from kvbm_core.connectors.agent_place import AgentPlace, read_place
from kvbm_core.connectors.engine_blocks import WorkersPart
from kvbm_core.connectors.engine_store import EngineStore, log_fault
from kvbm_core.connectors.trtllm_plan import Save, TrtllmPlan
from kvbm_core.errors import ConfigError, EngineSupportError
from kvbm_core.sequence import TokenBlockSequence
from storage_agent.client_storage import ClientStorage

SETTINGS = "KVADVISOR_CONNECTOR"
"""Environment variable: a JSON map of `AgentPlace`'s keys and `hash_secret`."""
TAKEN = (
    f"agent_url (the agent's command URL), volume and hash_secret ({SECRET_CHARACTERS_MIN} or more random characters), "
    f"and may have tenant, model, revision, timeout_s"
)
"""Its keys, as an error tells them."""
SAVES_WAITING_MAX = 8
"""Steps whose saves wait for the volume at once; a step that would be one more waits."""


class StepMetadata(NamedTuple):
    """From the scheduler's half to the worker's. `loads`: (block of the engine, its bytes in host memory)."""

    loads: list[tuple[int, torch.Tensor]]
    saves: list[Save]


@dataclass(frozen=True, slots=True)
class _Form:
    """How the engine's blocks lie, and where they are stored; there once the worker's half knows its cache."""

    config: KvbmConfig
    store: EngineStore


class _Opened:
    """What the halves of one process share. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._form: _Form | None = None

    def open(self, form: _Form) -> None:
        with self._lock:
            before, self._form = self._form, form
        if before is not None:
            before.store.close()

    def form(self) -> _Form | None:
        with self._lock:
            return self._form


OPENED = _Opened()


class TrtllmLeader:
    """The scheduler's half. Not thread-safe, as TensorRT-LLM's scheduler is not."""

    def __init__(self, llm_args: Any) -> None:
        """Raises `EngineSupportError` for more than one worker, and `ConfigError` for settings that cannot be used."""
        _require_one_worker(llm_args)
        self._place, _ = _read_settings()
        self._plan = TrtllmPlan(_block_tokens(llm_args))
        self._staged: dict[int, list[torch.Tensor]] = {}

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int, bool]:
        """Tokens of blocks that are read and verified by now, so never an asynchronous load."""
        form = OPENED.form()
        self._staged.pop(request.request_id, None)
        if form is None or getattr(request, "multimodal_hashes", None):
            return 0, False  # before the cache is there, or where tokens alone do not say what a block is
        sequence = self._sequence(form, request)
        wanted = self._plan.wanted(request.request_id, sequence, num_computed_tokens)
        keys = [block.key for block in wanted]
        keys = keys[: form.store.present_prefix(keys)]
        buffers = [torch.empty(form.config.block_bytes, dtype=torch.uint8) for _ in keys]
        read = form.store.get(keys, [buffer.numpy().data for buffer in buffers]) if keys else []
        count = read.index(False) if False in read else len(read)
        self._staged[request.request_id] = buffers[:count]
        return self._plan.found(request.request_id, count), False

    def build_connector_meta(self, scheduler_output: Any) -> StepMetadata:
        work = self._plan.step(scheduler_output.new_requests, scheduler_output.cached_requests)
        loads = [(block, self._staged[request][number]) for request, number, block in work.loads]
        for each in scheduler_output.new_requests:
            self._staged.pop(each.request_id, None)
        return StepMetadata(loads, work.saves)

    def request_finished(self, request: Any, cache_block_ids: list[int]) -> bool:
        """False: the worker has copied what it saves, so the blocks are free."""
        self._plan.finished(request.request_id)
        self._staged.pop(request.request_id, None)
        return False

    def update_state_after_alloc(self, request: Any, block_ids: list[int]) -> None:
        """Nothing: the step's output names the blocks."""

    def shutdown(self) -> None:
        """The worker's half closes what both share."""

    def _sequence(self, form: _Form, request: Any) -> TokenBlockSequence:
        adapter = getattr(request, "lora_task_id", None)
        salt = getattr(request, "cache_salt", None) or getattr(request, "cache_salt_id", None)
        return TokenBlockSequence(
            form.config,
            self._place.tenant,
            request.get_tokens(0),
            adapter=None if adapter is None else str(adapter),
            cache_salt="" if salt is None else str(salt),
        )


class TrtllmWorker:
    """The worker's half. Called by the engine's thread alone; a thread of its own puts what was saved."""

    def __init__(self, llm_args: Any) -> None:
        """Raises as `TrtllmLeader`."""
        _require_one_worker(llm_args)
        self._place, self._secret = _read_settings()
        self._block_tokens = _block_tokens(llm_args)
        self._model = self._place.model or str(getattr(llm_args, "model", ""))
        self._cache: torch.Tensor | None = None
        self._step = StepMetadata([], [])
        self._saving = ThreadPoolExecutor(1, "trtllm-save")
        self._waiting = threading.Semaphore(SAVES_WAITING_MAX)

    def bind_connector_meta(self, metadata: object) -> None:
        self._step = metadata if isinstance(metadata, StepMetadata) else StepMetadata([], [])

    def get_connector_meta(self) -> object:
        return self._step

    def register_kv_caches(self, kv_cache_tensor: torch.Tensor) -> None:
        """`[blocks, layers, K and V, elements of a layer]`. Raises `ConfigError` for a cache of another form."""
        config = _core_config(kv_cache_tensor, self._block_tokens, self._model, self._place.revision, self._secret)
        self._cache = kv_cache_tensor
        storage = ClientStorage(self._place.agent_url, timeout_s=self._place.timeout_s)
        OPENED.open(
            _Form(config, EngineStore(storage, self._place.volume, WorkersPart(0, 1, config.block_layout)))
        )

    def register_forward_pass_callable(self) -> None:
        """None: nothing needs to be told when the forward pass is queued."""

    def start_load_kv(self, stream: Any) -> None:
        if self._cache is None:
            return
        for engine_block, loaded in self._step.loads:
            target = self._cache[engine_block]
            target.copy_(loaded.view(target.dtype).view(target.shape))

    def wait_for_layer_load(self, layer_idx: int, stream: Any) -> None:
        """Nothing: every block is whole before the forward pass begins."""

    def save_kv_layer(self, layer_idx: int, stream: Any) -> None:
        """Nothing: blocks are saved whole after the forward pass."""

    def wait_for_save(self, stream: Any) -> None:
        """Copies the step's blocks to host memory; the volume has them later."""
        form, cache = OPENED.form(), self._cache
        if form is None or cache is None or not self._step.saves:
            return
        stream.synchronize()  # the forward pass has written them
        identities = [save.identity for save in self._step.saves]
        copies = [cache[save.engine_block].detach().to("cpu", copy=True).contiguous() for save in self._step.saves]
        payloads = [copy.view(-1).view(torch.uint8).numpy().data for copy in copies]
        self._waiting.acquire()

        def put() -> None:
            try:
                form.store.put(identities, payloads)
            finally:
                self._waiting.release()

        self._saving.submit(put).add_done_callback(log_fault)

    def get_finished(
        self, finished_gen_req_ids: list[int], started_loading_req_ids: list[int]
    ) -> tuple[list[int], list[int]]:
        """None: loads and saves are over when their calls return, as far as the engine's memory goes."""
        return [], []

    def counts(self) -> dict[str, int]:
        """See `EngineStore.counts`."""
        form = OPENED.form()
        return form.store.counts() if form is not None else {}

    def shutdown(self) -> None:
        """Waits until what was saved is put."""
        self._saving.shutdown(wait=True)
        form = OPENED.form()
        if form is not None:
            form.store.close()


def _require_one_worker(llm_args: Any) -> None:
    workers = getattr(llm_args, "tensor_parallel_size", 1) * getattr(llm_args, "pipeline_parallel_size", 1)
    if workers != 1:
        raise EngineSupportError(
            f"TensorRT-LLM runs with {workers} workers: this connector serves one, since a load that fails on one "
            "worker could not be undone on the others; leave the connector out, or run one worker"
        )


def _block_tokens(llm_args: Any) -> int:
    tokens: int = llm_args.kv_cache_config.tokens_per_block
    return tokens


def _read_settings() -> tuple[AgentPlace, str]:
    where = f"environment variable {SETTINGS}"
    text = os.environ.get(SETTINGS, "")
    if not text:
        raise ConfigError(f"{where} is not set: set it to a JSON map; it takes {TAKEN}")
    try:
        found = json.loads(text)
    except ValueError as error:
        raise ConfigError(f"{where} is no JSON map: {error}; it takes {TAKEN}") from error  # its text has a secret
    secret = found.pop("hash_secret", "") if isinstance(found, dict) else ""
    place = read_place(found, where, TAKEN)
    if place.hash_root:
        raise ConfigError(f"{SETTINGS}: hash_root is not used here; another hash_secret sets blocks apart")
    if not isinstance(secret, str):
        raise ConfigError(f"{where}: hash_secret is {type(secret).__name__}, not text; it takes {TAKEN}")
    if len(secret) < SECRET_CHARACTERS_MIN:
        raise ConfigError(f"{where}: hash_secret has {len(secret)} characters; it takes {TAKEN}")
    return place, secret


def _core_config(cache: torch.Tensor, block_tokens: int, model: str, revision: str, secret: str) -> KvbmConfig:
    if cache.dim() != 4 or cache.shape[3] % block_tokens:
        raise ConfigError(
            f"the KV cache has shape {tuple(cache.shape)}: expected [blocks, layers, K and V, elements], the elements "
            f"of {block_tokens} tokens; this release of TensorRT-LLM lays it otherwise"
        )
    return KvbmConfig(
        layers=cache.shape[1],
        outer=cache.shape[2],
        page_tokens=block_tokens,
        heads=1,  # how a layer's elements are ordered is TensorRT-LLM's; one worker needs no cut
        head_dim=cache.shape[3] // block_tokens,
        dtype=str(cache.dtype).removeprefix("torch."),
        device_blocks=1,  # the engine has the pool
        hash_secret=secret,
        model=model,
        revision=revision,
    )
