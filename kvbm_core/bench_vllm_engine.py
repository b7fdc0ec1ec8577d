"""One vLLM engine of `kvadvisor bench vllm`, in a process of its own: `python -m kvbm_core.bench_vllm_engine CONFIG`.

CONFIG is a JSON object. Each line of standard input is a JSON object with one command, answered by one line on standard
output that starts with `>> `. The model has random weights: what it says means nothing, what it takes does.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

os.environ |= {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # one process is the engine, so that times are its own
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_LOGGING_LEVEL": "WARNING",
    "HF_HUB_OFFLINE": "1",
    "OMP_NUM_THREADS": "1",
}

import safetensors.torch  # type: ignore[import-not-found]  # vLLM's, which is in an environment of its own
from vllm import LLM, SamplingParams
from vllm.config import KVTransferConfig

from kvbm_core.bench_vllm_model import BLOCK_TOKENS, BenchModel
from kvbm_core.bench_vllm_processes import ANSWER
from kvbm_core.connectors import host_cache


class Commands:
    def __init__(self, llm: LLM) -> None:
        self._llm = llm
        self._core = llm.llm_engine.engine_core.engine_core

    def first_token(self, prompt: list[int]) -> dict[str, Any]:
        """Seconds until the first token of one prompt, asked alone, and how many of its tokens were not computed."""
        params = SamplingParams(temperature=0.0, max_tokens=1, ignore_eos=True, detokenize=False)
        began_s = time.perf_counter()
        (output,) = self._llm.generate([{"prompt_token_ids": prompt}], params, use_tqdm=False)
        return {"seconds": time.perf_counter() - began_s, "cached": output.num_cached_tokens}

    def serve(self, prompts: list[list[int]], tokens: int) -> float:
        """Seconds that all prompts take together."""
        params = SamplingParams(temperature=0.0, max_tokens=tokens, ignore_eos=True, detokenize=False)
        began_s = time.perf_counter()
        self._llm.generate([{"prompt_token_ids": each} for each in prompts], params, use_tqdm=False)
        return time.perf_counter() - began_s

    def reset(self, connector: bool) -> bool:
        return bool(self._core.reset_prefix_cache(reset_connector=connector))

    def settle(self) -> bool:
        """Until what was offloaded is on its volumes."""
        self._host_cache().settle()
        return True

    def loaded(self) -> dict[str, int]:
        """Blocks that came to the host, by volume."""
        return dict(self._host_cache().manager.totals().requests.loaded)

    def keys(self) -> list[list[int]]:
        """Keys of all blocks that the host has."""
        return [list(key) for key in self._host_cache().manager.own_tier("host").pool.registered_keys()]

    def delay_files(self, seconds: float) -> bool:
        """From now on each file of ExampleConnector's takes so much longer to open."""
        load = _LOAD_FILE

        def late(*args: Any, **kwargs: Any) -> Any:
            time.sleep(seconds)
            return load(*args, **kwargs)

        safetensors.torch.load_file = late if seconds else load
        return True

    def _host_cache(self) -> host_cache.HostCache:
        (cache,) = host_cache.OPEN.values()
        return cache


def open_engine(config: dict[str, Any], folder: Path) -> LLM:
    """`config`: `layers`, `hidden`, `blocks` of the GPU, `length` in tokens, `transfer` of its connector if any."""
    (folder / "config.json").write_text(json.dumps(BenchModel(config["layers"], config["hidden"]).config()))
    return LLM(
        model=str(folder),
        served_model_name="bench",
        dtype="float32",
        load_format="dummy",
        skip_tokenizer_init=True,
        block_size=BLOCK_TOKENS,
        enforce_eager=True,
        max_model_len=config["length"],
        max_num_batched_tokens=config["length"],
        seed=0,
        num_gpu_blocks_override=config["blocks"],
        kv_transfer_config=KVTransferConfig(**config["transfer"]) if "transfer" in config else None,
    )


_LOAD_FILE: Callable[..., Any] = safetensors.torch.load_file


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        commands = Commands(open_engine(json.loads(sys.argv[1]), Path(folder)))
        print(ANSWER + json.dumps("ready"), flush=True)
        for line in sys.stdin:
            asked = json.loads(line)
            answer = getattr(commands, asked.pop("do"))(**asked)
            print(ANSWER + json.dumps(answer), flush=True)


if __name__ == "__main__":
    main()
