"""What the planner remembers: saved with the fold, read from older states, bounded, and named in the log."""

from __future__ import annotations

import copy
from typing import Any

import msgspec
import numpy as np
import pytest

from advisor.fold import Fold
from advisor.fold_state import StateError, export_state, restore_state
from advisor.index import ArrayIndex
from advisor.policies import heat_book
from advisor.policies.heat_book import HeatBook
from advisor.policies.instant_moves import InstantFold
from advisor.policies.learning import Learning
from advisor.policies.registry import POLICY_VERSION
from advisor.policies.rules.eviction import LRU_LEAF
from advisor.policies.rules.noting import NOTES
from advisor.tiers.duelling import RANKED
from event_plane.schema import Namespace

ACME = Namespace(tenant="acme")


def used_fold() -> InstantFold:
    fold = InstantFold(
        [
            {"id": "fast", "speed_rank": 0, "capacity_blocks": 8},
            {"id": "slow", "speed_rank": 1, "capacity_blocks": 100},
        ],
        {"moves_per_s": 1.0},
    )
    for at in range(1, 30):
        chain = [10 * (at % 5) + 1, 10 * (at % 5) + 2]
        if not fold.held(chain[0], ACME):
            fold.store("slow", chain, ACME)
        fold.use(chain, ACME)
        fold.tick(at * 3_000_000)
    return fold


def test_state_without_policies_is_read_as_one_that_remembers_nothing() -> None:
    fold = used_fold().fold
    saved: dict[str, Any] = msgspec.msgpack.decode(export_state(fold))
    del saved["policies"]
    saved["version"] = 2
    saved["limits"] = {"eviction": "lfu", "promote_touches": 2, "promote_moves_max": 9}
    restored = Fold(ArrayIndex(fold.index.size))
    restore_state(restored, msgspec.msgpack.encode(saved))
    limits = restored.limits
    assert (limits.eviction, limits.admission, limits.promote_moves_max) == ("lfu", "auto", 9)
    assert restored.policies.book.turn == 0


@pytest.mark.parametrize("part", ["used", "notes", "counts", "waiting"])
def test_bytes_that_are_no_notes_are_refused(part: str) -> None:
    fold = used_fold().fold
    saved: dict[str, Any] = msgspec.msgpack.decode(export_state(fold))
    saved["policies"][part] = saved["policies"][part] + b"\xff"
    with pytest.raises(StateError, match="what the policies remember cannot be read"):
        restore_state(Fold(ArrayIndex(fold.index.size)), msgspec.msgpack.encode(saved))


def test_digest_tells_of_what_the_planner_remembers() -> None:
    fold = used_fold()
    before = fold.fold.digest()
    fold.fold.policies.book.next_turn()
    assert fold.fold.digest() != before


def test_log_names_the_version_of_the_policies() -> None:
    assert used_fold().fold.policy_version == POLICY_VERSION


def test_book_keeps_the_hottest_of_a_full_set(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(heat_book, "SLOTS", 8)
    fold = InstantFold([{"id": "slow", "capacity_blocks": 1_000}], {}, blocks_max=256)
    book = HeatBook()
    learning = Learning(book)
    learning.prepare(arms=0b111111, start=RANKED, room=4)
    assert len(book.notes) == 8
    fold.store("slow", [1], ACME)
    for _ in range(5):
        fold.use([1], ACME)
    for h in range(100, 200):
        fold.store("slow", [h], ACME)
        fold.use([h], ACME)
        rows = fold.fold.index.touched_since_drain()
        slots, given = book.note(fold.fold.index, rows)
        learning.lose(given)
        learning.hear(fold.fold.index, rows, slots, LRU_LEAF, 0.0)
    block = fold.block(1, ACME)
    assert block is not None
    slot = book.slot(fold.fold.index, block.row)
    assert slot >= 0
    assert book.notes[slot].touches == 5
    assert book.counts[NOTES] == 8


def test_a_copy_is_the_same_and_shares_nothing() -> None:
    fold = used_fold().fold
    fold.policies.wait(np.arange(3))
    copied, before = copy.deepcopy(fold.policies), fold.policies.described(fold.index)
    assert copied.described(fold.index) == before
    assert copied.learning.saved() == fold.policies.learning.saved()
    copied.waiting.clear()
    copied.buckets.clear()
    copied.book.notes[:] = 0
    assert fold.policies.described(fold.index) == before
