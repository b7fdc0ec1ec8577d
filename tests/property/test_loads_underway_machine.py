"""Loads begin and end in any order: what is on its way is told to nobody, and what failed is spoilt to its end."""

from __future__ import annotations

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from event_plane.schema import Namespace
from kvbm_core.connectors.engine_blocks import EngineBlocks
from kvbm_core.connectors.loads_underway import LoadsUnderway

CHAIN = EngineBlocks(Namespace(tenant="acme", block_tokens=4)).chain(range(1, 8), [])


class Loads(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.underway = LoadsUnderway()
        self.model: dict[int, tuple[range, list[int]]] = {}
        self.tickets = 0
        self.next_block = 0

    @rule(first=st.integers(0, 6), count=st.integers(1, 7), behind=st.integers(0, 3))
    def begin(self, first: int, count: int, behind: int) -> None:
        loaded = range(first, min(first + count, len(CHAIN)))
        blocks = list(range(self.next_block, self.next_block + len(loaded) + behind))
        self.next_block += len(blocks)
        self.tickets += 1
        self.model[self.tickets] = (loaded, blocks)
        self.underway.begin(self.tickets, [CHAIN[n] for n in loaded], blocks)

    @precondition(lambda self: self.model)
    @rule(choice=st.data())
    def end(self, choice: st.DataObject) -> None:
        tickets = choice.draw(st.lists(st.sampled_from(sorted(self.model)), min_size=1, unique=True))
        ended = [self.model.pop(ticket) for ticket in tickets]
        failed = choice.draw(st.sets(st.sampled_from([b for loaded, blocks in ended for b in blocks[: len(loaded)]])))

        spoilt = self.underway.end(tickets, failed)

        assert spoilt == {
            block for _, blocks in ended for n, block in enumerate(blocks) if failed.intersection(blocks[: n + 1])
        }
        assert self.underway.end(tickets, failed) == set()

    @invariant()
    def what_is_on_its_way_is_known(self) -> None:
        coming = {n for loaded, _ in self.model.values() for n in loaded}
        assert [self.underway.is_coming([each]) for each in CHAIN] == [n in coming for n in range(len(CHAIN))]
        assert self.underway.is_coming(CHAIN) == bool(coming)


TestLoads = Loads.TestCase
TestLoads.settings = settings(max_examples=30, stateful_step_count=20)
