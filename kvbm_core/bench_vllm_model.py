"""The model and the prompts of `kvadvisor bench vllm`. Pure."""

from __future__ import annotations

from dataclasses import dataclass
from random import Random
from typing import Any

BLOCK_TOKENS = 32
"""vLLM refuses 16 on a CPU."""
_HEAD_DIM = 64
_NUMBER_BYTES = 4
_WORDS = 1_024
_FIRST_WORD = 3
"""Words below are marks."""


@dataclass(frozen=True, slots=True)
class BenchModel:
    """A Llama with random weights; two heads to each pair of keys and values, of 32-bit numbers."""

    layers: int
    hidden: int

    @property
    def _heads(self) -> int:
        return self.hidden // _HEAD_DIM

    @property
    def block_bytes(self) -> int:
        """Of one block: layers, keys and values, heads, width, bytes of a number, tokens."""
        return self.layers * 2 * (self._heads // 2) * _HEAD_DIM * _NUMBER_BYTES * BLOCK_TOKENS

    def config(self) -> dict[str, Any]:
        """Its `config.json`."""
        return {
            "architectures": ["LlamaForCausalLM"],
            "model_type": "llama",
            "hidden_act": "silu",
            "hidden_size": self.hidden,
            "intermediate_size": self.hidden * 11 // 4,
            "num_hidden_layers": self.layers,
            "num_attention_heads": self._heads,
            "num_key_value_heads": self._heads // 2,
            "head_dim": _HEAD_DIM,
            "vocab_size": _WORDS,
            "max_position_embeddings": 8_192,
            "rms_norm_eps": 1e-5,
            "rope_theta": 10_000.0,
            "tie_word_embeddings": False,
            "torch_dtype": "float32",
            "bos_token_id": 1,
            "eos_token_id": 2,
        }


def random_prompt(chosen: Random, tokens: int) -> list[int]:
    """One that shares its beginning with none."""
    return [chosen.randrange(_FIRST_WORD, _WORDS) for _ in range(tokens)]


def loadable_tokens(prompt: list[int]) -> int:
    """How many tokens of a prompt need not be computed: whole blocks, without the last token."""
    return (len(prompt) - 1) // BLOCK_TOKENS * BLOCK_TOKENS
