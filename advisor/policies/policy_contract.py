"""The contract of policies as a pytest plugin: name it in `pytest_plugins`, derive a class from `PolicyContract`.

    pytest_plugins = ["advisor.policies.policy_contract"]   # in conftest.py

    class TestMine(PolicyContract):
        admission = "mine"

Every admission of ours passes it; `examples/custom_policy` shows it on one of another package.
"""

from __future__ import annotations

import math
import random
from functools import cache

import pytest

from advisor.fold import Fold
from advisor.fold_state import export_state, restore_state
from advisor.index import BlockRow, Key
from advisor.moves import MoveKind
from advisor.policies.instant_moves import InstantFold
from advisor.policies.policy import REASON_CHARACTERS_MAX, Candidate, Policy, Scene
from advisor.policies.registry import checked, policy_named
from event_plane.schema import EventType, Namespace, RecordFlag

OPEN, CLOSED = Namespace(tenant="open"), Namespace(tenant="closed")
REQUESTS = 120


def candidates() -> list[tuple[Candidate, Scene]]:
    """A spread of what a planner may ask about, extremes among them."""
    asked = []
    for touches in (1, 2, 3, 40, 2**32 - 1):
        for score, gap_s in ((-1e9, 0.0), (1.0, 0.001), (2_000_000.0, 86_400.0)):
            for is_full, is_tight in ((False, False), (True, False), (True, True)):
                block = BlockRow(5, Key(1, 0, 77), -1, 0, 16, touches, 1_000_000, 2_000_000, ())
                saved_s = None if is_tight else 0.01
                candidate = Candidate(
                    block, "open", "slow", "fast", 4_096, saved_s, score, math.exp(-gap_s), gap_s, touches % 3
                )
                asked.append((candidate, Scene(1_800.0, 100, 10, is_full, is_tight)))
    return asked


@cache
def exercised(admission: str, fast_blocks: int) -> InstantFold:
    fold = InstantFold(
        [
            {"id": "fast", "speed_rank": 0, "capacity_blocks": fast_blocks, "tenants": ["open"]},
            {"id": "middle", "speed_rank": 1, "capacity_blocks": 3 * fast_blocks},
            {"id": "slow", "speed_rank": 2, "capacity_blocks": 400},
        ],
        {"admission": admission, "moves_per_s": 1.0, "promote_moves_max": 8},
    )
    for at in range(REQUESTS):
        serve(fold, at)
    return fold


class PolicyContract:
    """Set `admission` to the name under which the policy is installed."""

    admission: str

    @pytest.fixture
    def policy(self) -> Policy:
        return policy_named(self.admission)

    @pytest.fixture(params=[4, 12])
    def fold(self, request: pytest.FixtureRequest) -> InstantFold:
        """After requests to three volumes, the fastest of so many blocks. Tests read it."""
        return exercised(self.admission, request.param)

    def test_says_what_it_is(self, policy: Policy) -> None:
        assert checked(policy, self.admission, "the contract") is policy

    def test_same_question_same_verdict(self, policy: Policy) -> None:
        for candidate, scene in candidates():
            assert policy.admit(candidate, scene) == policy.admit(candidate, scene)

    def test_values_can_be_compared(self, policy: Policy) -> None:
        for candidate, scene in candidates():
            assert math.isfinite(policy.admit(candidate, scene).value)

    def test_every_verdict_has_a_reason_of_one_short_line(self, policy: Policy) -> None:
        for candidate, scene in candidates():
            reason = policy.admit(candidate, scene).reason
            assert 0 < len(reason) <= REASON_CHARACTERS_MAX
            assert reason == " ".join(reason.split())

    def test_something_is_promoted(self, fold: InstantFold) -> None:
        promoted = [move for move in fold.done if move.kind is MoveKind.PROMOTE]
        assert promoted, f"{REQUESTS} requests for the same few chains, and no block was worth a faster volume"

    def test_no_block_is_faster_than_its_parent(self, fold: InstantFold) -> None:
        volumes = {v.place: v.as_planned() for v in fold.fold.volumes.values()}
        blocks, _ = fold.fold.index.page(limit=10_000)
        ranks = {block.row: min(volumes[p.place].speed_rank for p in block.placements) for block in blocks}
        for block in blocks:
            assert block.parent < 0 or ranks[block.parent] <= ranks[block.row]

    def test_no_block_is_where_its_tenant_may_not_be(self, fold: InstantFold) -> None:
        for move in fold.done:
            assert not (move.target == "fast" and move.key.namespace_id == CLOSED.namespace_id)

    def test_log_folded_again_gives_the_same_plans(self, fold: InstantFold) -> None:
        assert fold.refolded().digest() == fold.fold.digest()

    def test_checkpoint_and_the_rest_of_the_log_give_the_same_plans(
        self, fold: InstantFold, tmp_path_factory: pytest.TempPathFactory
    ) -> None:
        path = tmp_path_factory.mktemp("checkpoint") / "index"
        half = len(fold.entries) // 2
        before = fold.refolded(half)
        before.index.save(path)
        resumed = Fold(type(before.index).load(path, fold.size)[0])
        restore_state(resumed, export_state(before))
        for entry in fold.entries[half:]:
            resumed.apply(entry)
        assert resumed.digest() == fold.fold.digest()


def serve(fold: InstantFold, at: int) -> None:
    """The request number `at`: a chat that goes on, or a block that nobody asks for again."""
    chance = random.Random(at)
    fold.tick(at * 5_000_000)
    namespace = CLOSED if at % 5 == 0 else OPEN
    chat = chance.randrange(1, 5)
    chain = [1_000 + at] if at % 7 == 0 else [10 * chat + turn for turn in range(1 + min(8, at // 12))]
    missing = [
        fold.event(EventType.STORE, "slow", h, namespace, parent, flags=RecordFlag.COPY)
        for h, parent in zip(chain, [0, *chain], strict=False)
        if not fold.held(h, namespace)
    ]
    if missing:
        fold.send(missing)
    fold.use(chain, namespace)
