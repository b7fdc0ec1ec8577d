"""Sequences that grow and are cut, against sequences made at once, and against the blocks' own tokens."""

from __future__ import annotations

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import given, settings

from event_plane.hashing import salt, sequence_hashes, token_hash
from kvbm_core.block import MutableBlock
from kvbm_core.config import KvbmConfig
from kvbm_core.errors import BlockStateError, WrongIdentityError
from kvbm_core.pool import BlockPool
from kvbm_core.reuse import LruOrder
from kvbm_core.sequence import TokenBlockSequence
from tests.examples import examples

PAGE_TOKENS = 4
SECRET = "a secret of the tests"
CONFIG = KvbmConfig(
    layers=1, heads=1, head_dim=8, page_tokens=PAGE_TOKENS, device_blocks=4, adapter="base", hash_secret=SECRET
)
tokens = st.integers(0, 2**32 - 1)
some_tokens = st.lists(tokens, max_size=14)


@settings(max_examples=examples(60), deadline=None)
@given(some_tokens, st.lists(st.one_of(some_tokens, st.integers(0, 20)), max_size=6))
def test_a_sequence_that_grew_and_was_cut_equals_a_fresh_one(first: list[int], steps: list[list[int] | int]) -> None:
    sequence = TokenBlockSequence(CONFIG, "acme", first)
    model = list(first)
    for step in steps:
        before = list(sequence.blocks)
        if isinstance(step, int):
            kept = min(step, len(model))
            del model[kept:]
            cut = sequence.truncate(kept)
            assert sequence.blocks + cut == before
        else:
            model += step
            assert before + sequence.extend(step) == sequence.blocks
        fresh = TokenBlockSequence(CONFIG, "acme", model)
        assert sequence.blocks == fresh.blocks
        assert len(sequence) == len(model)
        assert sequence.tokens.tolist() == model


@settings(max_examples=examples(40), deadline=None)
@given(some_tokens, st.text(max_size=6), st.text(max_size=6), st.text(max_size=6))
def test_a_sequence_follows_the_reference_rules(
    ids: list[int], tenant: str, adapter: str, cache_salt: str
) -> None:
    sequence = TokenBlockSequence(CONFIG, tenant, ids, adapter=adapter, cache_salt=cache_salt)
    seed = salt(adapter, f"{tenant}\0{cache_salt}" if cache_salt else tenant)
    assert sequence.salt == seed
    hashes = sequence_hashes(ids, PAGE_TOKENS, seed, CONFIG.secret_of(tenant))
    assert [block.key.sequence_hash for block in sequence.blocks] == hashes
    assert [block.parent_hash for block in sequence.blocks] == [0, *hashes][: len(hashes)]
    assert {block.prefix_hash for block in sequence.blocks} == set(hashes[:1])
    assert [block.depth for block in sequence.blocks] == list(range(len(hashes)))
    assert {block.namespace.adapter for block in sequence.blocks} <= {adapter}
    assert {block.key.namespace_id for block in sequence.blocks} <= {
        CONFIG.namespace_of(tenant, adapter, cache_salt).namespace_id
    }
    if hashes:
        assert hashes[0] & 0xFFFF_FFFF_FFFF_FFFF == token_hash(ids[:PAGE_TOKENS], seed)


def test_adapter_salt_and_tenant_keep_blocks_apart() -> None:
    ways: list[dict[str, str]] = [{}, {"adapter": ""}, {"adapter": "other"}, {"cache_salt": "a"}, {"cache_salt": "b"}]
    firsts = [TokenBlockSequence(CONFIG, "acme", range(4), **way).blocks[0] for way in ways]
    firsts.append(TokenBlockSequence(CONFIG, "harbor", range(4)).blocks[0])
    assert len({block.key.sequence_hash & 0xFFFF_FFFF_FFFF_FFFF for block in firsts}) == len(firsts)
    assert len({block.key.namespace_id for block in firsts}) == len(firsts)
    assert TokenBlockSequence(CONFIG, "acme", range(4), adapter="base").blocks == firsts[:1]


@pytest.mark.parametrize("kept", [-1, 11])
def test_more_tokens_than_there_are_cannot_be_kept(kept: int) -> None:
    sequence = TokenBlockSequence(CONFIG, "acme", range(10))
    with pytest.raises(ValueError, match=f"{kept} tokens cannot be kept of 10: give a number from 0 to 10"):
        sequence.truncate(kept)
    assert len(sequence.blocks) == 2


def test_a_token_that_is_no_u32_changes_nothing() -> None:
    sequence = TokenBlockSequence(CONFIG, "acme", range(3))
    with pytest.raises(ValueError, match="token 4294967296 is no u32"):
        sequence.extend([3, 1 << 32])
    assert sequence.extend([3]) == TokenBlockSequence(CONFIG, "acme", range(4)).blocks


def test_a_blocks_tokens_are_given_by_its_depth() -> None:
    sequence = TokenBlockSequence(CONFIG, "acme", range(10))
    assert [sequence.tokens_of(depth).tolist() for depth in range(3)] == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9]]
    with pytest.raises(IndexError, match="no block at depth 3: the sequence has 2 full ones"):
        sequence.tokens_of(3)


def block_of_a_pool() -> MutableBlock:
    pool = BlockPool(
        name="device:0",
        blocks=1,
        page_tokens=PAGE_TOKENS,
        reuse=LruOrder(),
        duplicates="reject",
        on_store=lambda identity, copied: None,
        on_remove=lambda identity: None,
    )
    return pool.allocate(1).blocks[0]


@settings(max_examples=examples(40), deadline=None)
@given(st.lists(tokens, min_size=8, max_size=8), st.integers(0, 1), st.integers(0, 3), st.booleans())
def test_a_block_with_tokens_commits_under_their_identity_alone(
    ids: list[int], depth: int, place: int, one_by_one: bool
) -> None:
    sequence = TokenBlockSequence(CONFIG, "acme", ids)
    block = block_of_a_pool()
    block.init_sequence(sequence.salt)
    if one_by_one:
        for token in sequence.tokens_of(depth):
            block.add_token(int(token))
    else:
        block.add_tokens(sequence.tokens_of(depth))
    wrong = list(ids)
    wrong[depth * PAGE_TOKENS + place] ^= 1
    with pytest.raises(WrongIdentityError, match="block 0 holds tokens whose hash after"):
        block.commit(TokenBlockSequence(CONFIG, "acme", wrong).blocks[depth])
    assert block.filled_tokens == PAGE_TOKENS
    assert block.commit(sequence.blocks[depth]).identity == sequence.blocks[depth]


def test_a_block_says_what_its_tokens_need() -> None:
    block = block_of_a_pool()
    with pytest.raises(BlockStateError, match="a Reset block cannot take fill"):
        block.add_token(1)
    with pytest.raises(ValueError, match="salt -1 is no u64"):
        block.init_sequence(-1)
    block.init_sequence()
    with pytest.raises(BlockStateError, match="block 0 was started without a salt: give init_sequence one"):
        block.add_token(1)
    block.reset()
    block.init_sequence(7)
    with pytest.raises(BlockStateError, match="block 0 keeps its tokens: give them with add_tokens"):
        block.fill(1)
    with pytest.raises(ValueError, match="token -1 is no u32"):
        block.add_token(-1)
    with pytest.raises(BlockStateError, match="block 0 has room for 4 tokens, not 5"):
        block.add_tokens(np.arange(5))
    with pytest.raises(BlockStateError, match="block 0 has room for 4 tokens, not 0"):
        block.add_tokens([])
    assert block.filled_tokens == 0
    block.add_tokens(np.arange(4))
    other_size = KvbmConfig(layers=1, heads=1, head_dim=8, page_tokens=8, device_blocks=4, hash_secret=SECRET)
    with pytest.raises(WrongIdentityError, match="is of 8 tokens, the pool's blocks of 4"):
        block.commit(TokenBlockSequence(other_size, "acme", range(8)).blocks[0])
