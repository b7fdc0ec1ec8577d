"""Whatever happens to volumes and blocks, a shadow keeps the planner's laws, and a restart changes nothing."""

from __future__ import annotations

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from advisor.entries import OperatorEntry, SettingsEntry
from advisor.fold import Fold
from advisor.fold_state import export_state, restore_state
from advisor.policies.instant_moves import InstantFold
from event_plane.schema import EventType, Namespace

TENANTS = [Namespace(tenant="a"), Namespace(tenant="b")]
VOLUMES = [
    {"id": "fast", "speed_rank": 0, "capacity_blocks": 5, "high_watermark": 0.8, "low_watermark": 0.6},
    {"id": "middle", "speed_rank": 1, "capacity_blocks": 8},
    {"id": "slow", "speed_rank": 2, "capacity_blocks": 40},
]
BLOCKS_MAX = 40
SHADOWS = [
    {"name": name, "policy": {"admission": name, "eviction": eviction, "hysteresis_s": 0}, "blocks_max": BLOCKS_MAX}
    for name, eviction in (("always", "lru"), ("touch-2", "lfu"), ("auto", "value"))
]

chains = st.tuples(st.integers(0, 11), st.integers(1, 4)).map(lambda c: [10 * c[0] + i for i in range(1, c[1] + 1)])
tenants = st.sampled_from(TENANTS)
names = st.sampled_from([str(volume["id"]) for volume in VOLUMES])


class ShadowMachine(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.service = InstantFold(VOLUMES, {}, blocks_max=512)
        self.service.log(SettingsEntry({"policy": {"admission": "touch-2"}, "shadow": SHADOWS}, "tiering"))
        self.now_us = 0

    @rule(volume=names, chain=chains, tenant=tenants)
    def put(self, volume: str, chain: list[int], tenant: Namespace) -> None:
        self.service.store(volume, chain, tenant)

    @rule(chain=chains, tenant=tenants)
    def use(self, chain: list[int], tenant: Namespace) -> None:
        self.service.use(chain, tenant)

    @rule(volume=names, chain=chains, tenant=tenants)
    def remove(self, volume: str, chain: list[int], tenant: Namespace) -> None:
        held = [h for h in reversed(chain) if volume in self.service.held(h, tenant)]
        if held:
            self.service.send([self.service.event(EventType.REMOVE, volume, h, tenant) for h in held])

    @rule(seconds=st.sampled_from([1, 31, 700]))
    def tick(self, seconds: int) -> None:
        self.now_us += seconds * 1_000_000
        self.service.tick(self.now_us)

    @rule(volume=st.sampled_from(["", "fast", "middle"]), action=st.sampled_from(["pause", "resume"]))
    def pause(self, volume: str, action: str) -> None:
        self.service.log(OperatorEntry("operator", action, volume))

    @rule()
    def restart(self) -> None:
        before = self.service.fold
        self.service.fold = Fold(before.index)
        restore_state(self.service.fold, export_state(before))
        assert self.service.fold.digest() == before.digest()

    @invariant()
    def laws_hold(self) -> None:
        compared = self.service.fold.comparison
        assert compared is not None
        for shadow in compared.shadows:
            counts = shadow.tally.counts
            assert (counts.uses, counts.used_bytes) == (compared.live.counts.uses, compared.live.counts.used_bytes)
            assert 0 <= counts.found <= counts.uses
            assert counts.hit <= counts.came
            assert counts.bounced <= counts.came
            assert len(shadow.index) <= BLOCKS_MAX
            for volume in shadow.volumes[:-1]:
                assert shadow.index.place_figures(volume.place).blocks <= volume.capacity_blocks

    def teardown(self) -> None:
        compared = self.service.fold.comparison
        assert compared is not None
        for shadow in compared.shadows:
            shadow.index.check()
        assert self.service.refolded().digest() == self.service.fold.digest()


TestShadowMachine = ShadowMachine.TestCase
TestShadowMachine.settings = settings(max_examples=8, stateful_step_count=40, deadline=None)
