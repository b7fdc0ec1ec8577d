"""Which vLLM the connector serves, and configured how. Pure: facts in, a sentence for each that speaks against it."""

from __future__ import annotations

from dataclasses import dataclass

from kvbm_core.connectors.step_plan import LoadMode
from kvbm_core.errors import EngineSupportError

VERSIONS = ("0.32",)
"""Releases that the tests of tests/vllm run with."""
RIVALS = {
    "OffloadingConnector": "vLLM's own offloading",
    "SimpleCPUOffloadConnector": "vLLM's own offloading",
    "LMCacheConnectorV1": "LMCache",
    "LMCacheMPConnector": "LMCache",
    "MultiConnector": "MultiConnector",
}
"""Other owners of a block's life that vLLM's configuration may put in this one's place, or beside it."""
_LASTING_ROOT = "sha256"
_WORKER_APART = ("mp", "ray")
"""Executors that make a process for the worker even where there is one alone."""


@dataclass(frozen=True, slots=True, kw_only=True)
class VllmFacts:
    """What of an engine's configuration matters here. `groups`: the attention kinds of its cache groups."""

    version: str
    workers: int
    """Tensor, pipeline and context parallel together."""
    executor: str
    """`distributed_executor_backend`, as vLLM settled it."""
    groups: tuple[str, ...]
    block_tokens: int
    hash_tokens: int
    hash_algorithm: str
    has_fixed_seed: bool
    """Whether PYTHONHASHSEED names the root of the hashes."""
    has_volumes: bool
    offloading_gib: float | None
    load_failure_policy: str
    load: LoadMode
    steps_at_once: int
    """2 and more where a step is planned before the one before has ended."""


def require_support(facts: VllmFacts) -> None:
    """Raises `EngineSupportError` with everything that speaks against it."""
    found = refusals(facts)
    if found:
        raise EngineSupportError("; ".join(found))


def refusals(facts: VllmFacts) -> list[str]:
    """A sentence for each; none where the connector serves this engine."""
    found = []
    if ".".join(facts.version.split(".")[:2]) not in VERSIONS:
        found.append(f"vLLM {facts.version} was not tested with this connector: use {' or '.join(VERSIONS)}")
    if facts.workers != 1:
        found.append(
            f"{facts.workers} workers share this engine's blocks, and the connector serves one: set "
            f"tensor_parallel_size, pipeline_parallel_size and context parallel sizes to 1"
        )
    if facts.executor in _WORKER_APART:
        found.append(
            f"distributed_executor_backend is {facts.executor!r}, so the engine's worker is in another process than "
            f"its scheduler, and the connector's halves share memory: set it to 'uni'; on a CPU vLLM takes 'uni' for "
            f"'mp' unless the environment has VLLM_ENABLE_V1_MULTIPROCESSING=0"
        )
    if facts.groups != ("full_attention",) and facts.groups != ("mla_attention",):
        found.append(
            f"the model's cache groups are {', '.join(facts.groups) or 'none'}, and the connector serves one of full "
            f"attention: set disable_hybrid_kv_cache_manager, or serve it without the connector"
        )
    if facts.hash_tokens != facts.block_tokens:
        found.append(
            f"blocks of {facts.block_tokens} tokens are hashed by {facts.hash_tokens}: set block_size so that the two "
            f"are one"
        )
    if facts.offloading_gib is not None:
        found.append(rival_sentence("OffloadingConnector"))
    if facts.has_volumes and not facts.has_fixed_seed and not facts.hash_algorithm.startswith(_LASTING_ROOT):
        found.append(
            f"volumes are shared with other engines and with this one's next life, and {facts.hash_algorithm} hashes "
            f"have a root of their own in each process: set prefix_caching_hash_algo to sha256_cbor, or PYTHONHASHSEED "
            f"to one value for all"
        )
    if facts.load_failure_policy != "recompute":
        found.append(
            f"kv_load_failure_policy is {facts.load_failure_policy!r}, which fails a request for a block that can be "
            f"computed again: set it to 'recompute'"
        )
    if facts.load is LoadMode.LAYERWISE and facts.steps_at_once > 1:
        found.append(
            "load is 'layerwise', and vLLM plans a step before it hears whether the loads of the one before failed: "
            "set async_scheduling to false, or load to 'async'"
        )
    return found


def rival_sentence(connector: str) -> str:
    """Why another owner of blocks is refused beside this connector."""
    return (
        f"{RIVALS[connector]} is configured beside kvadvisor's connector, and a block's life has one owner: two would "
        f"keep, evict and announce it twice; configure one of them"
    )
