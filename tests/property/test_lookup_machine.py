"""A lookup and a request's offers, walked by Hypothesis: no step but the table's, and each block offered once."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from event_plane.schema import Namespace
from kvbm_core.connectors.engine_blocks import EngineBlocks
from kvbm_core.connectors.lookup import TRANSITIONS, LookupState, LookupTrigger, diagram, next_state
from kvbm_core.connectors.step_plan import RequestBlocks, loadable_blocks
from kvbm_core.errors import LookupStateError

BLOCKS = EngineBlocks(Namespace(tenant="acme", block_tokens=4))


@given(st.lists(st.sampled_from(LookupTrigger), max_size=8))
def test_a_lookup_walks_its_table_and_blocks_are_taken_once(triggers: list[LookupTrigger]) -> None:
    state, taken = LookupState.LOOKING, 0
    for trigger in triggers:
        if trigger not in TRANSITIONS[state]:
            with pytest.raises(LookupStateError, match=f"{state} cannot {trigger}"):
                next_state(state, trigger)
            continue
        state = next_state(state, trigger)
        taken += state is LookupState.TAKEN
    assert taken <= 1
    assert not (taken and state is LookupState.DROPPED)


def test_the_documented_diagram_is_the_table() -> None:
    page = Path(__file__).resolve().parents[2] / "docs" / "integrations" / "vllm.md"
    assert diagram() in page.read_text(), "regenerate it from kvbm_core.connectors.lookup.diagram()"


@given(st.lists(st.tuples(st.integers(0, 12), st.integers(0, 12)), max_size=12), st.integers(0, 12))
def test_every_full_block_is_offered_once_and_in_order(steps: list[tuple[int, int]], known: int) -> None:
    hashes = list(range(1, known + 1))
    request = RequestBlocks(chain=BLOCKS.chain(hashes, []))
    offered: list[tuple[int, int]] = []
    for full, allocated in steps:
        save = request.offer(full, list(range(100, 100 + allocated)))
        if save is not None:
            offered += [
                (identity.key.sequence_hash, block)
                for identity, block in zip(save.identities, save.engine_blocks, strict=True)
            ]
    reached = max((min(full, allocated, known) for full, allocated in steps), default=0)
    assert offered == [(number + 1, 100 + number) for number in range(reached)]


@given(st.integers(0, 1_000), st.integers(1, 64))
def test_a_load_leaves_the_last_token_to_be_computed(tokens: int, block_tokens: int) -> None:
    blocks = loadable_blocks(tokens, block_tokens)

    assert blocks * block_tokens <= max(0, tokens - 1)
    assert (blocks + 1) * block_tokens > max(0, tokens - 1)
