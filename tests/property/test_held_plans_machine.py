"""Whatever is ticked, approved, rejected, tried again and drained: one plan waits at most, and a move is opened once.

Of a plan that is applied nothing is left out.
"""

from __future__ import annotations

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from advisor.entries import OperatorEntry
from advisor.entries import Tick as TickEntry
from advisor.fold import Fold
from advisor.fold_state import export_state, restore_state
from advisor.plan_desk import PlanState
from advisor.policies.instant_moves import InstantFold
from event_plane.schema import EventType, Namespace

SPACE = Namespace(tenant="acme")
VOLUMES = [
    {"id": "fast", "speed_rank": 0, "capacity_blocks": 5, "high_watermark": 0.8, "low_watermark": 0.4},
    {"id": "slow", "speed_rank": 1, "capacity_blocks": 10},
]
POLICY = {"admission": "always", "hysteresis_s": 0, "approve": True, "approve_within_s": 100}

chains = st.tuples(st.integers(0, 5), st.integers(1, 3)).map(lambda c: [10 * c[0] + i for i in range(1, c[1] + 1)])
names = st.sampled_from([str(volume["id"]) for volume in VOLUMES])


class HeldPlansMachine(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.service = InstantFold(VOLUMES, POLICY, blocks_max=256)
        self.now_us = 0
        self.seen: list[str] = []
        """Plans that waited once."""
        self.opened: set[str] = set()

    def _log_operator(self, action: str, plan_or_move: str = "") -> None:
        """Whatever is opened by it was not open before."""
        before = set(self.service.fold.moves.open)
        self.service.log(OperatorEntry("ann", action, move=plan_or_move))
        fresh = set(self.service.fold.moves.open) - before
        assert not fresh & self.opened
        self.opened |= fresh

    @rule(volume=names, chain=chains)
    def put(self, volume: str, chain: list[int]) -> None:
        self.service.store(volume, chain, SPACE)

    @rule(chain=chains)
    def use(self, chain: list[int]) -> None:
        self.service.use(chain, SPACE)

    @rule(volume=names, chain=chains)
    def remove(self, volume: str, chain: list[int]) -> None:
        held = [h for h in reversed(chain) if volume in self.service.held(h, SPACE)]
        if held:
            self.service.send([self.service.event(EventType.REMOVE, volume, h, SPACE) for h in held])

    @rule(seconds=st.sampled_from([1, 40, 100]))
    def tick(self, seconds: int) -> None:
        self.now_us += seconds * 1_000_000
        before, opened = self.service.fold.plans.waiting, set(self.service.fold.moves.open)
        self.service.log(TickEntry(self.now_us))
        after = self.service.fold.plans.waiting
        assert set(self.service.fold.moves.open) == opened, "a tick opens nothing"
        if after is not None and after is not before:
            assert before is None or before.state is PlanState.LAPSED
            self.seen.append(after.plan_id)

    @precondition(lambda self: self.seen)
    @rule(action=st.sampled_from(["approve", "reject"]), data=st.data())
    def decide(self, action: str, data: st.DataObject) -> None:
        plan_id = data.draw(st.sampled_from(self.seen[-3:]))
        held = self.service.fold.plans.waiting
        planned = [move.move_id for move in held.moves] if held is not None else []
        self._log_operator(action, plan_id)
        if held is not None and held.state is PlanState.APPROVED:
            assert (held.plan_id, held.opened_total + held.refused) == (plan_id, len(planned))
            assert set(held.opened) <= set(planned) & set(self.service.fold.moves.open)

    @rule()
    def apply(self) -> None:
        self._log_operator("apply")
        applied = [p for p in self.service.fold.plans.ended if p.decided_at == len(self.service.entries)]
        assert [plan.refusals for plan in applied if plan.state is PlanState.APPROVED] in ([], [[]])

    @rule(action=st.sampled_from(["cancel", "retry"]), data=st.data())
    def turn_back(self, action: str, data: st.DataObject) -> None:
        known = [*self.service.fold.moves.open, *(move.move_id for move in self.service.fold.moves.finished)]
        if known:
            self._log_operator(action, data.draw(st.sampled_from(known)))

    @rule(volume=st.sampled_from(["", "fast"]), action=st.sampled_from(["pause", "resume", "resume"]))
    def pause(self, volume: str, action: str) -> None:
        self.service.log(OperatorEntry("bo", action, volume))

    @rule(volume=names, action=st.sampled_from(["drain", "undrain"]))
    def drain(self, volume: str, action: str) -> None:
        self.service.log(OperatorEntry("bo", action, volume))

    @rule()
    def carry_out(self) -> None:
        self.service.carry_out_open()

    @rule()
    def restart(self) -> None:
        before = self.service.fold
        self.service.fold = Fold(before.index)
        restore_state(self.service.fold, export_state(before))
        assert self.service.fold.digest() == before.digest()

    @invariant()
    def laws_hold(self) -> None:
        fold = self.service.fold
        held = fold.plans.waiting
        assert held is None or (held.state is PlanState.WAITING and held.moves)
        assert all(plan.state is not PlanState.WAITING and not plan.moves for plan in fold.plans.ended)

    def teardown(self) -> None:
        assert self.service.refolded().digest() == self.service.fold.digest()


TestHeldPlans = HeldPlansMachine.TestCase
TestHeldPlans.settings = settings(max_examples=20, stateful_step_count=25, deadline=None)
