"""Orders, stores, answers, pauses and losses in any order: what is done is gone; the log folded again is the same."""

from __future__ import annotations

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from advisor.deletions import TRANSITIONS, DeletionState, Scope, Sweep
from advisor.entries import DeletionStep, OperatorEntry, OutcomeBatch, VolumeEntry
from advisor.policies.instant_moves import PRODUCER, InstantFold
from event_plane.schema import Namespace

NAMESPACES = [Namespace(tenant="acme", model="a"), Namespace(tenant="acme", model="b"), Namespace(tenant="forge")]
CHAINS = [[1, 2, 3], [1, 2, 8, 9], [1, 5]]
VOLUMES = ("fast", "slow")
SCOPES = [
    {"tenant": "acme"},
    {"tenant": "forge"},
    {"namespace_id": NAMESPACES[0].namespace_id},
    {"namespace_id": NAMESPACES[1].namespace_id, "prefix": f"{2:032x}"},
]


class Deletions(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        descriptors = [{"id": v, "speed_rank": n, "capacity_blocks": 64} for n, v in enumerate(VOLUMES)]
        self.fold = InstantFold(descriptors, {"admission": "always", "delete_moves_max": 4})
        self.now_us = 0
        self.orders = 0
        self.states: dict[str, DeletionState] = {}

    @rule(volume=st.sampled_from(VOLUMES), chain=st.sampled_from(CHAINS), namespace=st.sampled_from(NAMESPACES))
    def store(self, volume: str, chain: list[int], namespace: Namespace) -> None:
        if not self.fold.fold.volumes[volume].away:
            self.fold.store(volume, chain, namespace)
            self.fold.use(chain, namespace)

    @rule()
    def tick(self) -> None:
        self.now_us += 2_000_000
        before = set(self.fold.fold.deletions.open)
        # Planned and not yet carried out: what the tick itself ends is looked at.
        deletions = self.fold.fold.deletions
        self.fold.tick(self.now_us)
        for ended in before - set(deletions.open):
            deletion = deletions.get(ended)
            assert deletion is not None
            assert deletion.state is DeletionState.DONE
            if deletion.scope.tenant:
                assert not self.held(deletion.scope), "done, and a copy is there"
            assert all(sweep.is_clear for sweep in deletion.sweeps.values())

    def held(self, scope: Scope) -> set[int]:
        return {
            h
            for namespace in NAMESPACES
            if namespace.tenant == scope.tenant
            for h in (1, 2, 3, 5, 8, 9)
            if self.fold.held(h, namespace)
        }

    @rule(scope=st.sampled_from(SCOPES))
    def order(self, scope: dict[str, object]) -> None:
        self.orders += 1
        self.fold.log(OperatorEntry("ann", "delete", deletion=f"d{self.orders}", **scope))  # type: ignore[arg-type]

    @rule(of=st.randoms(use_true_random=False), is_late=st.booleans(), found=st.integers(0, 1))
    def answer(self, of: object, is_late: bool, found: int) -> None:
        asked = [
            (deletion.deletion_id, sweep)
            for deletion in self.fold.fold.deletions.open.values()
            for sweep in deletion.sweeps.values()
            if sweep.is_asking and sweep.answer is None
        ]
        if asked:
            deletion_id, sweep = of.choice(asked)  # type: ignore[attr-defined]
            self.say(deletion_id, sweep, is_late, found)

    def say(self, deletion_id: str, sweep: Sweep, is_late: bool = False, found: int = 0) -> None:
        producer = self.fold.fold.producers.get(PRODUCER)
        sequence = (-1 if producer is None else producer.sequence) + is_late
        keys, found = len(sweep.keys), min(found, len(sweep.keys))
        outcome = OutcomeBatch(PRODUCER, 1, sequence)
        self.fold.log(DeletionStep(deletion_id, sweep.volume, sweep.wave, keys, keys - found, 64, outcome=outcome))

    @rule(times=st.integers(1, 4))
    def go_on(self, times: int) -> None:
        for _ in range(times):
            for deletion in self.fold.fold.deletions.open.values():
                for sweep in deletion.sweeps.values():
                    if sweep.is_asking and sweep.answer is None:
                        self.say(deletion.deletion_id, sweep)
            self.tick()

    @rule(volume=st.sampled_from(("", *VOLUMES)), action=st.sampled_from(("pause", "resume")))
    def pause(self, volume: str, action: str) -> None:
        self.fold.log(OperatorEntry("ann", action, volume))

    @rule(volume=st.sampled_from(VOLUMES), away=st.booleans())
    def lose(self, volume: str, away: bool) -> None:
        self.fold.log(
            VolumeEntry(self.fold.fold.volumes[volume].descriptor, "agent", PRODUCER, away="unplugged" if away else "")
        )

    @rule(tenant=st.sampled_from(("acme", "forge")), number=st.integers(1, 5), abandons=st.booleans())
    def give_up(self, tenant: str, number: int, abandons: bool) -> None:
        if abandons:
            self.fold.log(OperatorEntry("bo", "abandon", deletion=f"d{number}"))
        else:
            self.fold.log(OperatorEntry("bo", "enable", tenant=tenant))

    @invariant()
    def states_follow_the_table_and_open_tenants_are_refused(self) -> None:
        table = self.fold.fold.deletions
        for deletion in (*table.open.values(), *table.finished):
            assert deletion.is_open == (deletion.state in TRANSITIONS) == (deletion.deletion_id in table.open)
            if deletion.is_open and deletion.scope.tenant:
                assert deletion.scope.tenant in table.refused
            assert all(set(sweep.pending) <= set(sweep.keys) for sweep in deletion.sweeps.values())

    def teardown(self) -> None:
        assert self.fold.refolded().digest() == self.fold.fold.digest()


Deletions.TestCase.settings = settings(
    max_examples=20, stateful_step_count=30, deadline=None, suppress_health_check=[HealthCheck.too_slow]
)
TestDeletions = Deletions.TestCase
