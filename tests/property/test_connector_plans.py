"""Engines' block names, and TensorRT-LLM's steps in any order of chunks, for either way that releases count."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
from hypothesis import given
from hypothesis import strategies as st

from event_plane.schema import DEPTH_UNKNOWN, Namespace
from kvbm_core.config import KvbmConfig
from kvbm_core.connectors.engine_blocks import EngineBlocks, WorkersPart, hash_of_digest, hash_of_page
from kvbm_core.connectors.trtllm_plan import TrtllmPlan
from kvbm_core.errors import ConfigError
from kvbm_core.sequence import TokenBlockSequence
from storage_agent.shards import Axis, BlockLayout

TOKENS = 4
CONFIG = KvbmConfig(
    layers=1, heads=1, head_dim=1, page_tokens=TOKENS, device_blocks=1, hash_secret="0123456789abcdef"
)
BLOCKS = EngineBlocks(Namespace(model="tiny", block_tokens=TOKENS, hash_scheme="sglang"), 2)


@dataclass
class Step:
    request_id: int
    new_tokens: list[int]
    new_block_ids: list[int]
    computed_position: int
    num_scheduled_tokens: int


@given(
    length=st.integers(1, 40),
    had_blocks=st.integers(0, 3),
    found_limit=st.integers(0, 10),
    chunks=st.lists(st.integers(1, 12), min_size=1, max_size=6),
    generated=st.integers(0, 6),
    counts_loaded=st.booleans(),
)
def test_each_block_is_loaded_or_saved_once_and_never_saved_before_it_is_computed(
    length: int, had_blocks: int, found_limit: int, chunks: list[int], generated: int, counts_loaded: bool
) -> None:
    tokens = list(range(length))
    had = min(had_blocks, (length - 1) // TOKENS)
    block_ids = list(range(100, 100 + (length + generated) // TOKENS + 1))
    plan = TrtllmPlan(TOKENS)
    wanted = plan.wanted(1, TokenBlockSequence(CONFIG, "acme", tokens), had * TOKENS)
    assert [block.depth for block in wanted] == list(range(had, (length - 1) // TOKENS))
    count = min(found_limit, len(wanted))
    loaded_tokens = plan.found(1, count)
    assert loaded_tokens == count * TOKENS
    at, saved, loads, is_first, number = had * TOKENS + loaded_tokens, [], [], True, 0
    while at < length + generated:
        step_tokens = min(chunks[number % len(chunks)], length - at) if at < length else 1
        number += 1
        told = at - (loaded_tokens if is_first and not counts_loaded else 0)
        new = tokens if is_first else [at] if at >= length else []
        step = Step(1, new, block_ids if is_first else [], told, step_tokens)
        work = plan.step([step], []) if is_first else plan.step([], [step])
        at, is_first = at + step_tokens, False
        loads += work.loads
        for save in work.saves:
            assert (save.identity.depth + 1) * TOKENS <= at
            assert save.engine_block == block_ids[save.identity.depth]
            saved.append(save.identity)
    assert loads == [(1, n, block_ids[had + n]) for n in range(count)]
    depths = [identity.depth for identity in saved]
    assert depths == list(range(had + count, had + count + len(saved)))
    if counts_loaded or number > 1:
        assert had + count + len(saved) == at // TOKENS
    expected = TokenBlockSequence(CONFIG, "acme", list(range(at))).blocks
    assert saved == expected[had + count : had + count + len(saved)]
    plan.finished(1)
    assert plan.step([], [Step(1, [0], [], at, 1)]).saves == []


@given(st.binary(min_size=32, max_size=32))
def test_a_page_key_keeps_the_half_that_events_carry_in_the_low_half(digest: bytes) -> None:
    found = hash_of_page(digest.hex())
    assert found & (2**64 - 1) == int.from_bytes(digest[:8], "big")
    assert found >> 64 == int.from_bytes(digest[8:16], "big")
    assert hash_of_digest(digest) == int.from_bytes(digest[16:], "big")


@given(st.lists(st.integers(1, 2**128 - 1), max_size=6), st.lists(st.integers(1, 2**128 - 1), max_size=6))
def test_a_chain_cut_anywhere_is_the_same_chain(before: list[int], after: list[int]) -> None:
    whole = BLOCKS.chain([*before, *after], [])
    assert BLOCKS.chain(after, before) == whole[len(before) :]
    assert [block.depth for block in whole] == list(range(len(whole)))
    assert [block.parent_hash for block in whole] == [0, *before, *after][: len(whole)]
    assert {block.prefix_hash for block in whole} <= {whole[0].key.sequence_hash if whole else 0}
    assert {block.key.group for block in whole} <= {2}
    unknown = BLOCKS.chain(after, None)
    assert [block.parent_hash for block in unknown] == [0, *after][: len(after)]
    assert {block.depth for block in unknown} <= {DEPTH_UNKNOWN}


def test_names_and_parts_that_make_no_sense_are_refused() -> None:
    with pytest.raises(ValueError, match="too short: 32 hexadecimal digits"):
        hash_of_page("00ff")
    with pytest.raises(ValueError, match="has 3 bytes, at least 16"):
        hash_of_digest(b"abc")
    layout = BlockLayout((Axis("tokens", 4), Axis("heads", 6)), 2, "heads")
    with pytest.raises(ConfigError, match="6 heads cannot be split evenly among 4"):
        WorkersPart(0, 4, layout)
    with pytest.raises(ConfigError, match="no worker 2 of 2"):
        WorkersPart(2, 2, layout)
    with pytest.raises(ConfigError, match="split among 2 workers need a layout"):
        WorkersPart(0, 2)
    assert WorkersPart(1, 3, layout).part_bytes == 16
