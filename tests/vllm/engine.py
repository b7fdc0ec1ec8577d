"""A real vLLM in a process of its own, told what to do by lines on standard input: `python engine.py CONFIG_JSON`.

The model is a tiny Llama with random weights, the same in every process; prompts are token ids. The weights are large
enough for a wrong block to change what is generated, which vLLM's own dummy weights are not, and numbers have 32 bits,
so that a prompt computed in parts rounds to the same tokens. Each line is a JSON
object with one command, answered by one line on standard output that starts with `>> `.
"""

from __future__ import annotations

import json
import os
import random
import sys
import tempfile
from pathlib import Path
from typing import Any

os.environ |= {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # so that one process is the engine, to be killed and looked into
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_LOGGING_LEVEL": "WARNING",
    "HF_HUB_OFFLINE": "1",
    "OMP_NUM_THREADS": "1",
} | ({} if "VLLM_CPU_KVCACHE_SPACE" in os.environ else {"VLLM_CPU_KVCACHE_SPACE": "1"})

import torch
import vllm
from safetensors.torch import save_file
from vllm import LLM, SamplingParams
from vllm.config import KVEventsConfig, KVTransferConfig

MODEL: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_act": "silu",
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "vocab_size": 1024,
    "max_position_embeddings": 4096,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "tie_word_embeddings": False,
    "torch_dtype": "float32",
    "bos_token_id": 1,
    "eos_token_id": 2,
}
BLOCK_TOKENS = 32


def open_engine(config: dict[str, Any], folder: Path) -> LLM:
    (folder / "config.json").write_text(json.dumps(MODEL))
    save_file(weights(), folder / "model.safetensors")
    events = KVEventsConfig(enable_kv_cache_events=True, **config["events"]) if "events" in config else None
    transfer = KVTransferConfig(**config["transfer"]) if "transfer" in config else None
    vllm.__version__ = config.get("says_it_is", vllm.__version__)
    return LLM(
        model=str(folder),
        served_model_name="tiny-llama",
        dtype="float32",
        skip_tokenizer_init=True,
        block_size=BLOCK_TOKENS,
        enforce_eager=True,
        max_model_len=config.get("length", 1024),
        seed=0,
        num_gpu_blocks_override=config.get("blocks", 64),
        kv_events_config=events,
        kv_transfer_config=transfer,
        **config.get("engine", {}),
    )


def weights() -> dict[str, torch.Tensor]:
    """Of normal distribution, so wide that no layer's part in the result is small."""
    random = torch.Generator().manual_seed(1)
    hidden, middle, words = MODEL["hidden_size"], MODEL["intermediate_size"], MODEL["vocab_size"]
    narrow = MODEL["num_key_value_heads"] * MODEL["head_dim"]
    shapes = {"model.embed_tokens": (words, hidden), "model.norm": (hidden,), "lm_head": (words, hidden)}
    for layer in range(MODEL["num_hidden_layers"]):
        shapes |= {
            f"model.layers.{layer}.{name}": shape
            for name, shape in {
                "input_layernorm": (hidden,),
                "post_attention_layernorm": (hidden,),
                "self_attn.q_proj": (hidden, hidden),
                "self_attn.k_proj": (narrow, hidden),
                "self_attn.v_proj": (narrow, hidden),
                "self_attn.o_proj": (hidden, hidden),
                "mlp.gate_proj": (middle, hidden),
                "mlp.up_proj": (middle, hidden),
                "mlp.down_proj": (hidden, middle),
            }.items()
        }
    return {
        f"{name}.weight": torch.ones(shape)
        if len(shape) == 1
        else torch.randn(shape, generator=random) * (2.0 / shape[1] ** 0.5)
        for name, shape in shapes.items()
    }


class Commands:
    def __init__(self, llm: LLM) -> None:
        self._llm = llm
        self._core = llm.llm_engine.engine_core.engine_core
        self._pool = self._core.scheduler.kv_cache_manager.block_pool

    def generate(self, prompts: list[list[int]], tokens: int) -> dict[str, Any]:
        """Greedy tokens of each prompt, and of how many of its tokens the engine had the blocks."""
        params = SamplingParams(temperature=0.0, max_tokens=tokens, ignore_eos=True, detokenize=False)
        outputs = self._llm.generate([{"prompt_token_ids": each} for each in prompts], params, use_tqdm=False)
        return {
            "tokens": [list(output.outputs[0].token_ids) for output in outputs],
            "cached": [output.num_cached_tokens for output in outputs],
        }

    def cached(self) -> list[str]:
        """Hashes of the blocks that the engine's own cache holds, the low 64 bits in hexadecimal."""
        held = self._pool.cached_block_hash_to_block._cache
        return sorted({bytes(key)[:32][-8:].hex() for key in held})

    def reset(self, connector: bool = False) -> bool:
        return bool(self._core.reset_prefix_cache(reset_connector=connector))

    def cache(self) -> dict[str, Any]:
        """What the connector of this process counts."""
        return self._host_cache().counts()

    def settle(self) -> bool:
        """Until what was offloaded is on its volumes."""
        self._host_cache().settle()
        return True

    def keys(self) -> list[list[int]]:
        """Keys of all blocks that the host has, or that were last seen on a volume."""
        manager = self._host_cache().manager
        return [list(key) for digit in range(16) for key in manager.find_keys(f"{digit:x}")]

    def corrupt_host(self, every: int) -> int:
        """Flip a byte of every so-manieth block in host memory; how many."""
        tier = self._host_cache().manager.own_tier("host")
        places = [tier.pool.find(key).slot for key in tier.pool.registered_keys()[::every]]
        for place in places:
            tier.storage.payload(place)[7] ^= 0xFF
        return len(places)

    def preemptions(self) -> int:
        """Of an engine that keeps statistics."""
        (counter,) = (each for each in self._llm.get_metrics() if each.name == "vllm:num_preemptions")
        return int(counter.value)

    def give_up(self, prompts: list[list[int]], steps: int) -> bool:
        """Begin with these prompts, and abort all after so many steps."""
        engine = self._llm.llm_engine
        names = [f"given up {number}" for number in range(len(prompts))]
        for name, prompt in zip(names, prompts, strict=True):
            engine.add_request(name, {"prompt_token_ids": prompt}, SamplingParams(max_tokens=8, detokenize=False))
        for _ in range(steps):
            engine.step()
        engine.abort_request(names)
        while self._core.scheduler.has_requests():
            self._core.step_fn()
        return True

    def fail_loads(self, seed: int, share: float) -> bool:
        """From now on so large a share of the blocks of every load changes in the host after they were promised."""
        cache = self._host_cache()
        storage = cache.manager.own_tier("host").storage
        chosen = random.Random(seed)
        begin = type(cache).begin_load

        def begin_load(loads: Any) -> None:
            for load in loads:
                for place in load.host_blocks:
                    if chosen.random() < share:
                        storage.payload(place)[7] ^= 0xFF
            begin(cache, loads)

        cache.begin_load = begin_load
        return True

    def _host_cache(self) -> Any:
        from kvbm_core.connectors import host_cache

        return next(iter(host_cache.OPEN.values()))


def main() -> None:
    config = json.loads(sys.argv[1])
    with tempfile.TemporaryDirectory() as folder:
        commands = Commands(open_engine(config, Path(folder)))
        print(">> " + json.dumps("ready"), flush=True)
        for line in sys.stdin:
            asked = json.loads(line)
            answer = getattr(commands, asked.pop("do"))(**asked)
            print(">> " + json.dumps(answer), flush=True)


if __name__ == "__main__":
    main()
