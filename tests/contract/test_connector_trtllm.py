"""TensorRT-LLM's connector halves over a real agent, driven as its executor drives them, on a cache in host memory."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from kvbm_core.connectors.trtllm_blocks import SETTINGS, TrtllmLeader, TrtllmWorker
from kvbm_core.errors import ConfigError, EngineSupportError
from storage_agent.agent import StorageAgent
from storage_agent.descriptor import VolumeDescriptor
from storage_agent.service import AgentService

TOKENS, LAYERS, PER_TOKEN, BLOCKS = 4, 2, 16, 8
BLOCK_BYTES = LAYERS * 2 * TOKENS * PER_TOKEN * 2
ARGS = SimpleNamespace(kv_cache_config=SimpleNamespace(tokens_per_block=TOKENS), model="tiny")


class Stream:
    """Host memory has no streams."""

    def synchronize(self) -> None: ...


@dataclass
class Request:
    request_id: int
    tokens: list[int]
    cache_salt: str | None = None
    lora_task_id: int | None = None
    multimodal_hashes: list[Any] | None = None

    def get_tokens(self, beam: int) -> list[int]:
        return self.tokens


@dataclass
class Step:
    request_id: int
    new_tokens: list[int]
    new_block_ids: list[int]
    computed_position: int
    num_scheduled_tokens: int


@dataclass
class Output:
    new_requests: list[Step] = field(default_factory=list)
    cached_requests: list[Step] = field(default_factory=list)


class Engine:
    """The executor's calls. A token's KV is made of the tokens up to it, so that a block tells what it was made of."""

    def __init__(self, args: Any = ARGS) -> None:
        self.leader, self.worker = TrtllmLeader(args), TrtllmWorker(args)
        self.cache = torch.zeros((BLOCKS, LAYERS, 2, TOKENS * PER_TOKEN), dtype=torch.bfloat16)
        self.worker.register_kv_caches(self.cache)

    def prefill(self, request: Request, block_ids: list[int], *, chunk: int = 0, finish: bool = True) -> int:
        """Tokens that came from the volume; the others are computed, `chunk` at a time."""
        matched, is_async = self.leader.get_num_new_matched_tokens(request, 0)
        assert not is_async
        self.leader.update_state_after_alloc(request, block_ids)
        at, tokens, is_first = matched, request.tokens, True
        while at < len(tokens):
            count = min(chunk or len(tokens), len(tokens) - at)
            told = at - matched if is_first else at  # as TensorRT-LLM tells it
            step = Step(request.request_id, tokens if is_first else [], block_ids if is_first else [], told, count)
            self.run(Output([step], []) if is_first else Output([], [step]), tokens, block_ids, at, count)
            at, is_first = at + count, False
        if finish:  # one token is generated
            step = Step(request.request_id, [7], [], len(tokens), 1)
            self.run(Output([], [step]), [*tokens, 7], block_ids, len(tokens), 1)
            assert self.leader.request_finished(request, block_ids) is False
        return matched

    def run(self, output: Output, tokens: list[int], block_ids: list[int], at: int, count: int) -> None:
        self.worker.bind_connector_meta(self.leader.build_connector_meta(output))
        self.worker.start_load_kv(Stream())
        for layer in range(LAYERS):
            self.worker.wait_for_layer_load(layer, Stream())
            for place in range(at, at + count):
                block, offset = block_ids[place // TOKENS], place % TOKENS * PER_TOKEN
                self.cache[block, layer, :, offset : offset + PER_TOKEN] = float(sum(tokens[: place + 1]) + layer)
            self.worker.save_kv_layer(layer, Stream())
        self.worker.wait_for_save(Stream())
        assert self.worker.get_finished([], []) == ([], [])

    def blocks(self, block_ids: list[int]) -> torch.Tensor:
        return self.cache[block_ids].clone()

    def close(self) -> None:
        self.leader.shutdown()
        self.worker.shutdown()


@pytest.fixture
def agent(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[StorageAgent]:
    path = str(tmp_path / "fast.slab")
    slab = VolumeDescriptor(id="fast", path=path, capacity_blocks=32, block_bytes_max=BLOCK_BYTES)
    with StorageAgent("owner", publisher=None, allowed_roots=[tmp_path]) as owner:
        owner.register_volume(slab)
        with AgentService(owner, "tcp://127.0.0.1:*") as service:
            settings = {"agent_url": service.command_url, "volume": "fast", "hash_secret": "0123456789abcdef" * 2}
            monkeypatch.setenv(SETTINGS, json.dumps(settings))
            yield owner


def stored(agent: StorageAgent) -> dict[int, int]:
    """Depth → blocks."""
    (volume,) = agent.volumes()
    depths = [header.depth for header in volume.live_headers()]
    return {depth: depths.count(depth) for depth in sorted(set(depths))}


@pytest.mark.parametrize("chunk", [0, 4, 5])
def test_a_prompt_comes_back_to_another_engine_as_it_was_computed(agent: StorageAgent, chunk: int) -> None:
    prompt = list(range(100, 114))  # three blocks and a half
    first = Engine()
    assert first.prefill(Request(1, prompt), [0, 1, 2, 3], chunk=chunk) == 0
    computed = first.blocks([0, 1, 2])
    first.close()
    assert stored(agent) == {0: 1, 1: 1, 2: 1}
    second = Engine()
    assert second.prefill(Request(1, prompt), [5, 4, 3, 2], chunk=chunk) == 12
    assert torch.equal(second.blocks([5, 4, 3]), computed)
    assert second.worker.counts() == {"get_hit": 3}  # nothing is put again
    second.close()


def test_a_shared_prefix_is_loaded_and_the_rest_is_computed_and_saved(agent: StorageAgent) -> None:
    engine = Engine()
    prefix = list(range(8))
    engine.prefill(Request(1, [*prefix, 50, 51, 52, 53, 54]), [0, 1, 2, 3])
    engine.close()
    other = Engine()
    assert other.prefill(Request(9, [*prefix, 60, 61, 62, 63, 64]), [4, 5, 6, 7]) == 8
    other.close()
    assert stored(agent) == {0: 1, 1: 1, 2: 2}


def test_the_last_token_is_always_computed(agent: StorageAgent) -> None:
    engine = Engine()
    engine.prefill(Request(1, list(range(8))), [0, 1, 2])
    engine.close()
    again = Engine()
    assert again.prefill(Request(2, list(range(8))), [3, 4, 5]) == 4
    assert again.leader.get_num_new_matched_tokens(Request(3, list(range(9))), 4) == (4, False)
    assert again.leader.get_num_new_matched_tokens(Request(4, list(range(9))), 3) == (0, False)
    again.close()


def test_salts_adapters_and_pictures_share_nothing(agent: StorageAgent) -> None:
    engine = Engine()
    prompt = list(range(9))
    engine.prefill(Request(1, prompt), [0, 1, 2])
    engine.close()
    other = Engine()
    asked = [
        Request(2, prompt, cache_salt="s"),
        Request(3, prompt, lora_task_id=5),
        Request(4, prompt, multimodal_hashes=[[1]]),
        Request(5, prompt),
    ]
    assert [other.leader.get_num_new_matched_tokens(each, 0) for each in asked] == [
        (0, False), (0, False), (0, False), (8, False),
    ]  # fmt: skip
    other.close()


def test_a_prompt_with_pictures_is_not_saved_as_its_tokens_alone(agent: StorageAgent) -> None:
    engine = Engine()
    engine.prefill(Request(1, list(range(9)), multimodal_hashes=[[1]]), [0, 1, 2])
    engine.close()
    assert stored(agent) == {}


def test_a_damaged_block_is_never_promised(agent: StorageAgent, tmp_path: Path) -> None:
    engine = Engine()
    prompt = list(range(13))
    engine.prefill(Request(1, prompt), [0, 1, 2, 3])
    payload = engine.blocks([1]).view(torch.uint8).numpy().tobytes()
    engine.close()
    file = tmp_path / "fast.slab"
    at = file.read_bytes().index(payload)
    with file.open("r+b") as opened:
        opened.seek(at + 3)
        opened.write(b"\x7f\x80\x81")
    other = Engine()
    assert other.prefill(Request(2, prompt), [4, 5, 6, 7]) == 4
    assert other.worker.counts()["get_corrupt"] == 1
    other.close()
    assert stored(agent) == {0: 1, 1: 1, 2: 1}  # put again, after it was recomputed


def test_what_cannot_be_served_is_refused_with_the_remedy(agent: StorageAgent, monkeypatch: pytest.MonkeyPatch) -> None:
    two = SimpleNamespace(tensor_parallel_size=2, kv_cache_config=ARGS.kv_cache_config)
    with pytest.raises(EngineSupportError, match=r"2 workers.*run one worker"):
        TrtllmLeader(two)
    worker = TrtllmWorker(ARGS)
    with pytest.raises(ConfigError, match=r"shape \(8, 4\): expected \[blocks"):
        worker.register_kv_caches(torch.zeros((8, 4)))
    worker.shutdown()
    monkeypatch.setenv(SETTINGS, json.dumps({"agent_url": "tcp://127.0.0.1:1", "volume": "v", "hash_root": "x"}))
    with pytest.raises(ConfigError, match="another hash_secret"):
        TrtllmWorker(ARGS)
    monkeypatch.setenv(SETTINGS, "{")
    with pytest.raises(ConfigError, match=r"KVADVISOR_CONNECTOR is no JSON map: Expecting"):
        TrtllmLeader(ARGS)
    monkeypatch.delenv(SETTINGS)
    with pytest.raises(ConfigError, match=r"KVADVISOR_CONNECTOR is not set: .* agent_url .*, volume and hash_secret"):
        TrtllmLeader(ARGS)


@pytest.mark.parametrize(
    ("given", "told"),
    [
        ({}, "hash_secret has 0 characters; it takes .*16 or more"),
        ({"hash_secret": "fifteen letters"}, "hash_secret has 15 characters"),
        ({"hash_secret": 1234567890123456}, "hash_secret is int, not text"),
        ({"hash_secrets": "0123456789abcdef"}, "unknown field `hash_secrets`; it takes .*hash_secret"),
    ],
)
def test_a_secret_that_cannot_be_used_is_told_without_its_text(
    given: dict[str, object], told: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(SETTINGS, json.dumps({"agent_url": "tcp://127.0.0.1:1", "volume": "v", **given}))
    with pytest.raises(ConfigError, match=told) as caught:
        TrtllmLeader(ARGS)
    assert not any(str(secret) in str(caught.value) for secret in given.values())
