"""Our token hashes against those of NVIDIA Dynamo's own runtime, where it is installed."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from event_plane.hashing import salt, token_hash

runtime = pytest.importorskip("dynamo._core", reason="ai-dynamo-runtime is not installed: it is the oracle here")


@settings(max_examples=100, deadline=None)
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
