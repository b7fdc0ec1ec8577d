"""What the running service tells of one tenant: its own blocks and deletions, counted right, and nothing of others'."""

from __future__ import annotations

from pathlib import Path

import pytest

from advisor.block_desk import ServiceBlocks
from advisor.deletion_desk import ServiceDeletions
from advisor.entries import OperatorEntry
from advisor.errors import NothingSuch
from advisor.index import Key
from advisor.log_desk import LogDesk
from advisor.moves import Move, MoveKind
from advisor.policies.instant_moves import InstantFold
from advisor.service import AdvisorService
from advisor.settings import AdvisorSettings
from advisor.usage_desk import ServiceUsage, count_by_place
from event_plane.schema import Namespace

ACME = [Namespace(tenant="acme", model="a"), Namespace(tenant="acme", model="b")]
FORGE = Namespace(tenant="forge")


def shelf() -> InstantFold:
    descriptors = [{"id": v, "speed_rank": n, "capacity_blocks": 100} for n, v in enumerate(("fast", "slow"))]
    fold = InstantFold(descriptors, {})
    fold.store("slow", [1, 2, 3], ACME[0], size=1_000)
    fold.store("fast", [1], ACME[0], size=1_000)
    fold.store("slow", [7], ACME[1], size=500)
    fold.store("slow", [1, 2, 3, 4, 5], FORGE, size=10)
    return fold


def serving(directory: Path, fold: InstantFold) -> AdvisorService:
    service = AdvisorService(AdvisorSettings(directory=directory))
    service.fold = fold.fold
    return service


def test_usage_counts_own_blocks_by_place_and_tier(tmp_path: Path) -> None:
    usage = ServiceUsage(serving(tmp_path, shelf()))
    acme = usage.usage("acme")
    assert (acme.namespaces, acme.blocks, acme.block_bytes) == (2, 4, 4_500)
    assert [(place.place, place.blocks, place.block_bytes) for place in acme.places] == [
        ("slow", 4, 3_500), ("fast", 1, 1_000)
    ]
    assert sum(tier.blocks for tier in acme.tiers) == 5
    assert sum(tier.block_bytes for tier in acme.tiers) == 4_500
    assert usage.usage("forge").blocks == 5
    nobody = usage.usage("nobody")
    assert (nobody.namespaces, nobody.blocks, nobody.block_bytes, nobody.tiers, nobody.places) == (0, 0, 0, [], [])


def test_count_in_slices_is_the_count(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("advisor.usage_desk.ROWS_AT_ONCE", 3)
    index = shelf().fold.index
    blocks, sizes = count_by_place(index, {each.namespace_id for each in ACME})
    assert (blocks.sum(), sizes.sum()) == (5, 4_500)
    assert blocks.tolist() == [
        sum(placed.place == place for block in index.page(limit=100, namespace_ids=[e.namespace_id for e in ACME])[0]
            for placed in block.placements)
        for place in range(len(index.places))
    ]


def test_block_shows_its_tenant_no_position_of_the_log(tmp_path: Path) -> None:
    fold = shelf()
    key = Key(ACME[0].namespace_id, 0, 2)
    fold.fold.moves.add([Move("4711-0", MoveKind.PROMOTE, key, "slow", "fast", 1_000, "hot", 5, 5)])
    service = serving(tmp_path, fold)
    blocks = ServiceBlocks(service, LogDesk(service))
    assert [each.open_move for each in blocks.named(2, tenant="acme")] == [""]
    assert [each.open_move for each in blocks.named(2, namespace_id=ACME[0].namespace_id)] == ["4711-0"]


def test_deletions_of_others_are_as_none(tmp_path: Path) -> None:
    fold = shelf()
    fold.log(OperatorEntry("ann", "delete", deletion="d-1", tenant="forge"))
    fold.log(OperatorEntry("ann", "delete", deletion="d-2", namespace_id=ACME[1].namespace_id))
    fold.log(OperatorEntry("ann", "delete", deletion="d-3", namespace_id=FORGE.namespace_id, prefix=f"{2:032x}"))
    deletions = ServiceDeletions(serving(tmp_path, fold))
    acme = deletions.page(tenant="acme")
    assert ([each.id for each in acme.deletions], acme.refused) == (["d-2"], [])
    forge = deletions.page(tenant="forge")
    assert {each.id for each in forge.deletions} == {"d-1", "d-3"}
    assert [each.tenant for each in forge.refused] == ["forge"]
    assert deletions.get("d-2", "acme").id == "d-2"
    for after in ("d-1", "d-9"):
        with pytest.raises(ValueError, match=f"no deletion '{after}' is kept: begin at the first page"):
            deletions.page(after, tenant="acme")
        with pytest.raises(NothingSuch, match=f"there is no deletion '{after}'"):
            deletions.get(after, "acme")
