"""Our secondary tier under vLLM's own tiering manager, over a real agent: vLLM's host memory above, a slab below."""

from __future__ import annotations

import time
import uuid
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kvbm_core.errors import ConfigError
from storage_agent.agent import StorageAgent
from storage_agent.descriptor import VolumeDescriptor
from storage_agent.service import AgentService
from tests.engine_interfaces import installed, recorded

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # what importing vLLM warns of is vLLM's
    from vllm.v1.kv_offload.base import (
        LookupResult,
        OffloadingSpec,
        OffloadKey,
        ReqContext,
        ScheduleEndContext,
        make_offload_key,
    )
    from vllm.v1.kv_offload.config import (
        OffloadingCacheConfig,
        OffloadingConfig,
        OffloadingGroupConfig,
        OffloadingModelConfig,
        OffloadingParallelConfig,
    )
    from vllm.v1.kv_offload.cpu.shared_offload_region import SharedOffloadRegion
    from vllm.v1.kv_offload.tiering.factory import SecondaryTierFactory
    from vllm.v1.kv_offload.tiering.manager import CPUPrimaryTierOffloadingManager, TieringOffloadingManager

    from kvbm_core.connectors.vllm_tier import KvAdvisorTier

CHUNK_BYTES, CHUNKS, TOKENS = 8192, 4, 32
PATIENCE_S = 60.0


class Spec(OffloadingSpec):
    def get_manager(self) -> Any:
        raise NotImplementedError

    def get_worker(self, kv_caches: Any) -> Any:
        raise NotImplementedError


def spec(dtype: str = "bfloat16") -> Spec:
    return Spec(
        OffloadingConfig(
            groups=(OffloadingGroupConfig(TOKENS, ("layer.0",), 0),),
            worker_kv_bytes_per_block=CHUNK_BYTES,
            enable_kv_cache_events=False,
            extra_config={},
            engine_id="engine",
            model=OffloadingModelConfig("tiny", dtype),
            cache=OffloadingCacheConfig(TOKENS, 1),
            parallel=OffloadingParallelConfig(0, 1, 1, 1, 1, 1, 0, 1, None, False),
        )
    )


def keys(count: int, salt: str = "") -> list[OffloadKey]:
    return [make_offload_key(sha256(f"{salt}{number}".encode()).digest(), 0) for number in range(count)]


def content(key: OffloadKey) -> np.ndarray:
    return np.random.default_rng(list(key)).integers(0, 256, CHUNK_BYTES, dtype=np.uint8)


@dataclass
class Engine:
    """vLLM's tiering manager with room for four chunks in its host memory."""

    manager: TieringOffloadingManager
    tier: KvAdvisorTier
    memory: np.ndarray

    def request(self, name: str) -> ReqContext:
        found = ReqContext(name)
        self.manager.on_new_request(found)
        return found

    def step(self) -> None:
        self.manager.on_schedule_end(ScheduleEndContext((), ()))

    def offload(self, wanted: list[OffloadKey], name: str) -> None:
        """What a GPU would have written for a request, and the cascade to our tier until it is over."""
        request = self.request(name)
        for number, key in enumerate(wanted):
            request.set_offload_key_position(key, TOKENS * (number + 1))
        self.store(wanted, request)
        self.manager.on_request_finished(request)
        self.step()

    def store(self, wanted: list[OffloadKey], request: ReqContext) -> None:
        prepared = self.manager.prepare_store(wanted, request)
        assert prepared is not None
        for key, chunk in zip(prepared.keys_to_store, prepared.store_spec.block_ids, strict=True):
            self.memory[chunk] = content(key)
        self.manager.complete_store(wanted, request)
        self.tier.drain_jobs()
        self.step()

    def find(self, key: OffloadKey, request: ReqContext) -> LookupResult:
        """Step by step until it is told whether the chunk is there, and in host memory."""
        deadline_s = time.monotonic() + PATIENCE_S
        while time.monotonic() < deadline_s:
            found = self.manager.lookup(key, request)
            if found in (LookupResult.HIT, LookupResult.MISS):
                return found
            self.step()
            time.sleep(0.01)
        raise AssertionError(f"{key.hex()} was neither found nor missed in {PATIENCE_S} s")

    def load(self, key: OffloadKey, request: ReqContext) -> np.ndarray:
        (chunk,) = self.manager.prepare_load([key], request).block_ids
        found = self.memory[chunk].copy()
        self.manager.complete_load([key], request)
        return found


class Bench:
    def __init__(self, folder: Path) -> None:
        self.file = folder / "fast.slab"
        self.agent = StorageAgent("owner", publisher=None, allowed_roots=[folder])
        self.agent.register_volume(
            VolumeDescriptor(id="fast", path=str(self.file), capacity_blocks=32, block_bytes_max=CHUNK_BYTES)
        )
        self.service = AgentService(self.agent, "tcp://127.0.0.1:*")
        self.engines: list[Engine] = []

    def engine(self, **more: Any) -> Engine:
        region = SharedOffloadRegion(f"test-{uuid.uuid4().hex}", CHUNKS, 0, CHUNK_BYTES, CHUNK_BYTES)
        primary = CPUPrimaryTierOffloadingManager(CHUNKS, region)
        view = primary.get_kv_memoryview()
        config = {
            "type": "KvAdvisorTier",
            "module_path": "kvbm_core.connectors.vllm_tier",
            "agent_url": self.service.command_url,
            "volume": "fast",
        }
        tier = SecondaryTierFactory.create_secondary_tier(config, view, more.get("spec", spec()))
        assert isinstance(tier, KvAdvisorTier)
        memory = np.frombuffer(view.cast("B"), dtype=np.uint8).reshape(CHUNKS, CHUNK_BYTES)
        self.engines.append(Engine(TieringOffloadingManager(primary, [tier]), tier, memory))
        return self.engines[-1]

    def headers(self) -> list[Any]:
        (volume,) = self.agent.volumes()
        return sorted(volume.live_headers(), key=lambda header: header.depth)


@pytest.fixture
def bench(tmp_path: Path) -> Iterator[Bench]:
    found = Bench(tmp_path)
    yield found
    for engine in found.engines:
        engine.memory = np.empty(0)  # vLLM closes its memory only where nobody looks at it
        engine.manager.shutdown()
    found.service.close()
    found.agent.close()


def test_chunks_that_host_memory_let_go_of_come_back_from_the_volume(bench: Bench) -> None:
    engine = bench.engine()
    first, second = keys(4), keys(4, "other")
    engine.offload(first, "1")
    engine.offload(second, "2")  # takes the room of the first four
    assert engine.tier.counts() == {"put_stored": 8}
    request = engine.request("3")
    for key in first:
        assert engine.find(key, request) is LookupResult.HIT
        assert (engine.load(key, request) == content(key)).all()
    assert engine.find(keys(1, "never")[0], request) is LookupResult.MISS
    assert engine.tier.counts()["get_hit"] == 4


def test_another_engine_of_the_same_model_reads_them_and_one_of_another_dtype_does_not(bench: Bench) -> None:
    wanted = keys(2)
    bench.engine().offload(wanted, "1")
    other, eight_bit = bench.engine(), bench.engine(spec=spec("fp8"))
    request = other.request("2")
    assert [other.find(key, request) for key in wanted] == [LookupResult.HIT] * 2
    assert (other.load(wanted[1], request) == content(wanted[1])).all()
    strange = eight_bit.request("3")
    assert [eight_bit.find(key, strange) for key in wanted] == [LookupResult.MISS] * 2


def test_slots_tell_the_chain_and_vllms_hash(bench: Bench) -> None:
    wanted = keys(3)
    bench.engine().offload(wanted, "1")
    hashes = [int.from_bytes(key[16:32], "big") for key in wanted]
    assert [(h.key.sequence_hash, h.parent_hash, h.depth) for h in bench.headers()] == [
        (hashes[0], 0, 0),
        (hashes[1], hashes[0], 1),
        (hashes[2], hashes[1], 2),
    ]
    longer = bench.engine()
    request = longer.request("2")
    wanted = keys(4)
    for number, key in enumerate(wanted):
        request.set_offload_key_position(key, TOKENS * (number + 1))
    assert [longer.find(key, request) for key in wanted] == [LookupResult.HIT] * 3 + [LookupResult.MISS]
    longer.store(wanted[3:], request)
    assert (bench.headers()[3].parent_hash, bench.headers()[3].depth) == (hashes[2], 3)
    namespace = bench.headers()[0].namespace
    assert (namespace.hash_scheme, namespace.model, namespace.block_tokens) == ("vllm", "tiny", TOKENS)


def test_a_damaged_chunk_becomes_a_miss_and_the_others_are_kept(bench: Bench) -> None:
    wanted = keys(2)
    bench.engine().offload(wanted, "1")
    at = bench.file.read_bytes().index(content(wanted[0]).tobytes())
    with bench.file.open("r+b") as opened:
        opened.seek(at + 5)
        opened.write(b"\x00\xff\x00\xff")
    other = bench.engine()
    request = other.request("2")
    for key in wanted:
        other.manager.lookup(key, request)  # both are asked for in one step, and loaded in one job
    assert other.find(wanted[1], request) is LookupResult.HIT
    assert (other.load(wanted[1], request) == content(wanted[1])).all()
    assert other.find(wanted[0], request) is LookupResult.MISS
    assert other.tier.counts()["get_corrupt"] == 1


def test_without_its_agent_everything_is_a_miss_and_nothing_is_held(bench: Bench) -> None:
    engine = bench.engine()
    engine.offload(keys(2), "1")
    bench.agent.unregister_volume("fast")
    engine.offload(keys(4, "other"), "2")
    assert engine.tier.counts()["put_failed"] == 4
    assert engine.find(keys(1)[0], engine.request("3")) is LookupResult.MISS
    engine.offload(keys(4, "more"), "4")  # host memory has room: no job holds a chunk


def test_a_key_that_is_none_of_ours_is_refused(bench: Bench) -> None:
    view = memoryview(bytearray(CHUNK_BYTES)).cast("B", (1, CHUNK_BYTES))
    config = {"type": "KvAdvisorTier", "module_path": "kvbm_core.connectors.vllm_tier", "agent_url": "tcp://127.0.0.1:1"}
    with pytest.raises(ConfigError, match=r"secondary tier 'KvAdvisorTier'.*volume"):
        SecondaryTierFactory.create_secondary_tier(config, view, spec())
    with pytest.raises(ConfigError, match="root_dir"):
        SecondaryTierFactory.create_secondary_tier(config | {"volume": "v", "root_dir": "/x"}, view, spec())


def test_the_installed_vllm_has_the_interface_that_was_recorded() -> None:
    assert installed("vllm") == recorded()["vllm"].classes
