"""Our token hashes against those of NVIDIA Dynamo's own runtime, where it is installed."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from event_plane.hashing import salt, token_hash
from kvbm_core.config import KvbmConfig
from kvbm_core.sequence import TokenBlockSequence
from tests.examples import examples

runtime = pytest.importorskip("dynamo._core", reason="ai-dynamo-runtime is not installed: it is the oracle here")


@settings(max_examples=examples(100), deadline=None)
@given(
    st.lists(st.integers(0, 2**32 - 1), max_size=80),
    st.sampled_from([4, 16]),
    st.text(max_size=12),
    st.text(max_size=12),
)
def test_token_hashes_equal_the_runtimes(tokens: list[int], block_tokens: int, adapter: str, namespace: str) -> None:
    theirs = runtime.compute_block_hash_for_seq(tokens, block_tokens, lora_name=adapter, cache_namespace=namespace)
    seed = salt(adapter=adapter, namespace=namespace)
    starts = range(0, len(tokens) - block_tokens + 1, block_tokens)
    assert [token_hash(tokens[at : at + block_tokens], seed) for at in starts] == theirs


@settings(max_examples=examples(40), deadline=None)
@given(
    st.lists(st.integers(0, 2**32 - 1), min_size=4, max_size=12),
    st.text(min_size=1, max_size=8),
    st.text(max_size=8),
    st.integers(0, 12),
)
def test_a_cut_sequence_starts_with_the_runtimes_hash(tokens: list[int], tenant: str, adapter: str, kept: int) -> None:
    config = KvbmConfig(
        layers=1, heads=1, head_dim=8, page_tokens=4, device_blocks=1, hash_secret="a secret of the tests"
    )
    sequence = TokenBlockSequence(config, tenant, tokens, adapter=adapter)
    sequence.truncate(min(kept, len(tokens)))
    sequence.extend(tokens[min(kept, len(tokens)) :])
    theirs = runtime.compute_block_hash_for_seq(tokens, 4, lora_name=adapter, cache_namespace=tenant)
    assert sequence.blocks[0].key.sequence_hash & 0xFFFF_FFFF_FFFF_FFFF == theirs[0]
    assert [token_hash(sequence.tokens_of(depth), sequence.salt) for depth in range(len(theirs))] == theirs
