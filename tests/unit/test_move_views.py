"""The list of moves: filtered, in pages that join to the whole, refusals on the first."""

from __future__ import annotations

import pytest

from advisor.entries import OperatorEntry, SettingsEntry, Tick
from advisor.move_views import moves_view
from advisor.policies.instant_moves import InstantFold
from advisor.views import MoveView
from event_plane.schema import Namespace

S = 1_000_000
POLICY = {"admission": "always", "hysteresis_s": 0.0}
TENANTS = [Namespace(tenant="acme"), Namespace(tenant="other")]
VOLUMES = [
    {"id": "fast", "capacity_blocks": 16, "high_watermark": 0.75},
    {"id": "slow", "capacity_blocks": 64, "speed_rank": 1},
]


@pytest.fixture(scope="module")
def instant() -> InstantFold:
    """Of each tenant four moves: one kept, one aborted, one open, one of a dry run."""
    instant = InstantFold(VOLUMES, POLICY)
    for second in range(1, 5):
        for tenant in TENANTS:
            instant.store("slow", [second], tenant)
            instant.use([second], tenant)
        if second == 4:
            instant.log(SettingsEntry({"policy": {**POLICY, "dry_run": True}}, "version"))
        instant.log(Tick(second * S))
        if second == 1:
            instant.carry_out_open()
        elif second == 2:
            instant.log(OperatorEntry("ann", "cancel"))
        elif second == 3:
            for move in list(instant.fold.moves.open.values()):
                instant.fold._step(move.move_id, next(iter(move.triggers - {"abort"})))
    return instant


def pages(instant: InstantFold, limit: int) -> list[MoveView]:
    found, after = [], None
    while True:
        page = moves_view(instant.fold, limit, after=after)
        found += page.moves
        assert len(page.moves) <= limit
        if page.next_cursor is None:
            return found
        after = page.next_cursor


@pytest.mark.parametrize("limit", [1, 3, 8, 9])
def test_pages_join_to_the_whole_newest_first(instant: InstantFold, limit: int) -> None:
    whole = moves_view(instant.fold, 1_000)
    assert whole.next_cursor is None
    assert len(whole.moves) == 8
    assert pages(instant, limit) == whole.moves
    assert [move.changed_us for move in whole.moves] == sorted((m.changed_us for m in whole.moves), reverse=True)
    assert whole.first(3).next_cursor == moves_view(instant.fold, 3).next_cursor


def test_filters_are_joined(instant: InstantFold) -> None:
    def states(**filters: str) -> list[str]:
        return sorted(move.state for move in moves_view(instant.fold, 1_000, **filters).moves)

    assert states(tenant="acme") == ["aborted", "copying", "dry", "kept"]
    assert states(state="open") == ["copying", "copying"]
    assert states(state="dry", tenant="other") == ["dry"]
    assert states(state="aborted", kind="promote", volume="slow") == ["aborted", "aborted"]
    assert states(volume="tape") == states(kind="drop") == []


@pytest.mark.parametrize("cursor", ["", "7", "7.x.9-0", "1.2.", "١.2.9-0"])
def test_a_cursor_that_is_none_is_refused(instant: InstantFold, cursor: str) -> None:
    with pytest.raises(ValueError, match="is none of ours: use next_cursor of the page before"):
        moves_view(instant.fold, 5, after=cursor)
