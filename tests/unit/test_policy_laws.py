"""Budgets, quotas, tenants, costs, back-pressure, hysteresis, retention: what the planner refuses, and its reasons."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest

from advisor.entries import Measurement
from advisor.fold import TRUSTED_BYTES
from advisor.moves import MoveKind
from advisor.policies.admission import BUILT_IN, FromTouch
from advisor.policies.instant_moves import InstantFold
from advisor.policies.policy import Candidate, Scene, Verdict
from advisor.policies.sight import mean_bytes
from event_plane.schema import Namespace

ACME, FORGE = Namespace(tenant="acme"), Namespace(tenant="forge")
FAST: dict[str, Any] = {"id": "fast", "speed_rank": 0, "capacity_blocks": 100}
SLOW: dict[str, Any] = {"id": "slow", "speed_rank": 1, "capacity_blocks": 1_000}
SECOND = 1_000_000


def shelf(fast: dict[str, Any] | None = None, slow: dict[str, Any] | None = None, **policy: Any) -> InstantFold:
    return InstantFold([FAST | (fast or {}), SLOW | (slow or {})], {"admission": "touch-2", **policy})


def heat(fold: InstantFold, blocks: range, namespace: Namespace = ACME, uses: int = 2) -> None:
    """Single blocks on the slow volume, used so often."""
    for h in blocks:
        if not fold.held(h, namespace):
            fold.store("slow", [h], namespace)
    for _ in range(uses):
        fold.use(list(blocks), namespace)


def promoted(fold: InstantFold, now_s: float) -> int:
    return sum(move.kind is MoveKind.PROMOTE for move in fold.tick(round(now_s * SECOND)))


def refusals(fold: InstantFold) -> set[str]:
    return {note.reason for note in fold.fold.refusals}


def test_moves_a_second_are_held_with_a_burst_of_sixty_four() -> None:
    fold = shelf(moves_per_s=2.0, promote_moves_max=1_000)
    heat(fold, range(1, 90))
    assert promoted(fold, 1.0) == 64
    assert "the budget of 2 moves/s is spent" in refusals(fold)
    heat(fold, range(1, 90), uses=1)
    assert promoted(fold, 6.0) == 10


def test_bytes_a_second_to_one_volume_are_held() -> None:
    budgets = [{"volume": "fast", "bytes_per_s": 4_096.0}]
    fold = shelf(budgets=budgets, promote_moves_max=1_000)
    heat(fold, range(1, 90))
    assert promoted(fold, 1.0) == 64
    assert "the budget of 4.1 kB/s to fast is spent" in refusals(fold)


def test_endurance_is_a_day_s_bytes() -> None:
    fold = shelf({"endurance_bytes_per_day": 24 * 4_096.0 * 5})
    heat(fold, range(1, 20))
    assert promoted(fold, 1.0) == 5
    assert "fast was written its 492 kB a day" in refusals(fold)


def test_moves_for_each_block_seen_start_with_two_hundred() -> None:
    fold = shelf({"capacity_blocks": 900}, moves_per_block=0.1, promote_moves_max=1_000, moves_open_max=1_000)
    heat(fold, range(1, 301))
    assert promoted(fold, 1.0) == 230
    assert "the budget of 0.1 moves for each block seen is spent" in refusals(fold)


def test_tenant_that_a_volume_is_not_for_stays_below_it() -> None:
    fold = shelf({"tenants": ["forge"]})
    heat(fold, range(1, 4), ACME)
    heat(fold, range(1, 4), FORGE)
    assert promoted(fold, 1.0) == 3
    assert "fast is not for tenant acme" in refusals(fold)


@pytest.mark.parametrize(
    ("quota", "words"), [({"blocks": 2}, "its 2 blocks"), ({"block_bytes": 8_192}, "its 8.19 kB")]
)
def test_quota_counts_what_a_tenant_holds(quota: dict[str, int], words: str) -> None:
    fold = shelf(quotas=[{"tenant": "acme", "volume": "fast", **quota}])
    fold.store("fast", [77], ACME)
    heat(fold, range(1, 5), ACME)
    heat(fold, range(1, 5), FORGE)
    assert promoted(fold, 1.0) == 5
    assert f"acme holds {words} on fast" in refusals(fold)


def test_move_that_costs_more_than_it_gains_is_refused_with_both_figures() -> None:
    rates = {"read_bytes_per_s": 2e9, "write_bytes_per_s": 1e6}
    fold = shelf(rates, {"read_bytes_per_s": 1e9}, move_cost=1.0)
    heat(fold, range(1, 3))
    assert promoted(fold, 1.0) == 0
    assert any("hits in 10 min save" in reason and "the move costs 4.1 ms" in reason for reason in refusals(fold))
    cheap = shelf(rates, {"read_bytes_per_s": 1e9}, move_cost=0.0)
    heat(cheap, range(1, 3))
    assert promoted(cheap, 1.0) == 2


def test_copy_on_a_volume_that_reads_no_faster_saves_nothing() -> None:
    fold = shelf({"read_bytes_per_s": 1e8}, {"read_bytes_per_s": 1e9})
    heat(fold, range(1, 3))
    assert promoted(fold, 1.0) == 0
    assert "fast reads no faster than slow, so a copy there saves nothing" in refusals(fold)


def test_price_of_moved_bytes_counts_where_a_second_has_a_worth() -> None:
    rates = ({"read_bytes_per_s": 2e9, "write_bytes_per_s": 2e9, "cost_per_gb_moved": 0.5}, {"read_bytes_per_s": 1e8})
    for worth, expected in ((0.0, 1), (0.001, 0), (100.0, 1)):
        fold = shelf(*rates, second_worth=worth)
        heat(fold, range(1, 2))
        assert promoted(fold, 1.0) == expected


def test_busy_volume_is_left_alone_until_it_recovers() -> None:
    fold = shelf()
    for rate in (1e9, 1e9):
        fold.log(Measurement("fast", "write", TRUSTED_BYTES, TRUSTED_BYTES / rate))
    fold.log(Measurement("fast", "read", TRUSTED_BYTES, TRUSTED_BYTES / 1e9))
    for _ in range(8):
        fold.log(Measurement("fast", "write", 1_000_000, 1_000_000 / 1e7))
    heat(fold, range(1, 3))
    assert promoted(fold, 1.0) == 0
    assert any(reason.startswith("fast is busy: it runs at ") for reason in refusals(fold))
    for _ in range(8):
        fold.log(Measurement("fast", "write", 1_000_000, 1_000_000 / 1e9))
    heat(fold, range(1, 3), uses=1)
    assert promoted(fold, 2.0) == 2


def test_block_dropped_lately_comes_back_only_where_it_is_used_more() -> None:
    fold = shelf({"capacity_blocks": 10}, hysteresis_s=600.0)
    heat(fold, range(1, 10))
    assert promoted(fold, 1.0) == 9
    dropped = {move.key.sequence_hash for move in fold.tick(2 * SECOND) if move.kind is MoveKind.DROP}
    assert dropped
    heat(fold, range(min(dropped), min(dropped) + 1), uses=1)
    assert promoted(fold, 30.0) == 0
    assert any("dropped 28 s ago, and not used 2 times as much as then" in reason for reason in refusals(fold))
    heat(fold, range(min(dropped), min(dropped) + 1), uses=2)
    assert promoted(fold, 60.0) == 1


def test_block_unused_for_a_volume_s_retention_leaves_it() -> None:
    fold = shelf({"retention_s": 60.0})
    heat(fold, range(1, 4))
    assert promoted(fold, 1.0) == 3
    fold.tick(30 * SECOND)
    heat(fold, range(1, 2), uses=1)
    left = fold.tick(80 * SECOND)
    assert {(move.kind, move.key.sequence_hash) for move in left} == {(MoveKind.DROP, 2), (MoveKind.DROP, 3)}
    assert "fast keeps unused blocks for 60 s" in left[0].reason


def test_equally_fast_volumes_fill_from_the_cheapest() -> None:
    dear, cheap = FAST | {"id": "dear", "cost_per_gb_month": 2.0}, FAST | {"id": "cheap", "cost_per_gb_month": 1.0}
    fold = InstantFold([dear, cheap, SLOW], {"admission": "touch-2"})
    heat(fold, range(1, 4))
    fold.tick(SECOND)
    assert {fold.fastest(h, ACME) for h in range(1, 4)} == {"cheap"}


def test_tenant_barred_from_the_fastest_gets_the_next() -> None:
    middle = {"id": "middle", "speed_rank": 1, "capacity_blocks": 100}
    fold = InstantFold([FAST | {"tenants": ["forge"]}, middle, SLOW | {"speed_rank": 2}], {"admission": "touch-2"})
    heat(fold, range(1, 3), ACME)
    heat(fold, range(1, 3), FORGE)
    fold.tick(SECOND)
    assert (fold.fastest(1, ACME), fold.fastest(1, FORGE)) == ("middle", "fast")


@pytest.mark.parametrize("admission", ["auto", "duel", "ranked", "touch-2", "touch-3"])
def test_scan_leaves_what_is_used(admission: str) -> None:
    """Where single uses were seen before: what learns takes the first blocks it sees for ones that come back.

    The scan passes before they would be used again; what was used every 10 s and then not for 40 s is worth little.
    """
    fold = shelf({"capacity_blocks": 24}, admission=admission)
    for at in range(1, 12):
        heat(fold, range(1, 16), uses=1)
        heat(fold, range(500 + 8 * at, 508 + 8 * at), uses=1)
        fold.tick(at * 10 * SECOND)
    hot = [h for h in range(1, 16) if fold.fastest(h, ACME) == "fast"]
    assert len(hot) == 15
    for at in range(40):
        heat(fold, range(1_000 + 8 * at, 1_008 + 8 * at), uses=1)
        fold.tick(111 * SECOND + at * SECOND // 5)
    assert all(fold.fastest(h, ACME) == "fast" for h in hot)


@dataclass(frozen=True, kw_only=True)
class Theirs(FromTouch):
    """Says what `say` says."""

    say: Callable[[], Verdict]

    def admit(self, candidate: Candidate, scene: Scene) -> Verdict:
        return self.say()


@pytest.mark.parametrize(
    ("say", "reason"),
    [
        (lambda: 1 // 0, "the policy failed: ZeroDivisionError: integer division or modulo by zero"),
        (lambda: sys.exit("usage"), "the policy failed: SystemExit: usage"),
        (lambda: None, "the policy failed: AttributeError: 'NoneType' object has no attribute 'admitted'"),
        (lambda: Verdict(True, float("nan"), "best"), "the policy failed: its value is nan"),
        (lambda: Verdict(False, 0.0, ""), "the policy gives no reason"),
        (lambda: Verdict(False, 0.0, "a\n\ud800" + "b" * 300), "a ?" + "b" * 197),
    ],
)
def test_policy_that_fails_promotes_nothing_and_ends_no_fold(
    monkeypatch: pytest.MonkeyPatch, say: Callable[[], Verdict], reason: str
) -> None:
    name = f"theirs, of {reason}"  # policies are kept by name
    monkeypatch.setitem(BUILT_IN, name, Theirs(2, "lru", say=say))
    fold = shelf(admission=name)
    heat(fold, range(1, 3))
    assert promoted(fold, 1.0) == 0
    assert refusals(fold) == {reason}


def test_a_block_s_size_is_known_while_the_fast_volume_is_empty() -> None:
    fold = shelf()
    heat(fold, range(1, 5), uses=0)
    volumes = [volume.as_planned() for volume in fold.fold.volumes.values()]
    slow = fold.fold.index.place_figures(fold.fold.volumes["slow"].place)
    assert mean_bytes(fold.fold.index, volumes) == slow.block_bytes / slow.blocks > 0
    assert mean_bytes(fold.fold.index, []) == 0
