"""What the planner learns: requests told apart, shadows of a sample, slots that change hands, checkpoints, budgets."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

import msgspec
import numpy as np
import pytest

from advisor.fold import Fold
from advisor.fold_state import export_state, restore_state
from advisor.policies import heat_book, shadows
from advisor.policies.budgets import Purse
from advisor.policies.heat_book import HeatBook
from advisor.policies.instant_moves import InstantFold
from advisor.policies.learning import Learning
from advisor.policies.limits import Limits, VolumeBudget
from advisor.policies.plan import Volume
from advisor.policies.rules.noting import NOTE_DTYPE, NOTES_OF_3, tell_requests
from advisor.policies.shadows import NO_LIMIT, ShadowTiers
from advisor.shadow_tally import tag_of
from advisor.tiers import noted
from advisor.tiers.duelling import BY_WORTH, FIRST, RANKED
from advisor.tiers.fast_tier import HEAPED, TOKENS, USED, FastTier
from event_plane.schema import Namespace

ACME = Namespace(tenant="acme")
ALL_ARMS = 0b111111


def shelf(fast_blocks: int = 12, **policy: Any) -> InstantFold:
    return InstantFold(
        [
            {"id": "fast", "speed_rank": 0, "capacity_blocks": fast_blocks},
            {"id": "slow", "speed_rank": 1, "capacity_blocks": 2_000},
        ],
        {"admission": "auto", "hysteresis_s": 0.0, **policy},
    )


def serve(fold: InstantFold, requests: int, seed: int = 1) -> None:
    """Chats that go on, one in three requests for something of its own; a tick every 3 s."""
    chance = random.Random(seed)
    lengths = dict.fromkeys(range(1, 9), 1)
    for at in range(requests):
        chat = chance.randrange(1, 9)
        lengths[chat] = min(40, lengths[chat] + chance.randint(0, 2))
        first, length = (100 * chat, lengths[chat]) if at % 3 else (10_000 + 3 * at, 2)
        chain = list(range(first, first + length))
        if not fold.held(chain[-1], ACME):
            fold.store("slow", chain, ACME)
        fold.use(chain, ACME)
        fold.tick((at + 1) * 3_000_000)


def told(fold: InstantFold) -> list[list[int]]:
    """Requests as the planner would tell them now, by hash."""
    index, book = fold.fold.index, HeatBook()
    rows = index.touched()
    slots, _ = book.note(index, rows)
    uses = int(book.notes["left"][slots].sum())
    ids, ends, tokens, block_tokens = (np.empty(uses, np.int64) for _ in range(4))
    args = (index.tables.blocks, book.notes, rows, slots, ids, ends, np.empty(uses), tokens, block_tokens)
    count = int(tell_requests(*args))
    hashes = [index.block(int(row)).key.sequence_hash for row in book.notes["row"][ids]]
    assert not book.notes["left"].any()
    return [hashes[first:end] for first, end in zip([0, *ends[:count]], ends[:count], strict=False)]


def test_requests_are_told_apart_by_the_paths_of_what_was_used() -> None:
    fold = shelf()
    fold.store("slow", [1, 2, 3], ACME)
    fold.store("slow", [1, 2, 4, 5], ACME)
    fold.store("slow", [9], ACME)
    requests = [[1, 2, 3], [1, 2, 4, 5], [9], [1, 2, 3], [1, 2]]
    for request in requests:
        fold.use(request, ACME)
    assert sorted(told(fold)) == sorted(requests)


def test_single_blocks_used_again_are_told_in_the_order_of_their_first_use() -> None:
    fold = shelf()
    for h in (7, 8):
        fold.store("slow", [h], ACME)
    for h in (7, 8, 7, 8):
        fold.use([h], ACME)
    assert told(fold) == [[7], [8], [7], [8]]


@pytest.mark.parametrize(("room", "sample"), [(1, 1), (6_144, 1), (6_145, 2), (50_000, 16)])
def test_shadow_of_a_large_volume_is_a_sample(room: int, sample: int) -> None:
    made = ShadowTiers(HeatBook().notes, room)
    assert (made.sample, made.tiers.first.capacity) == (sample, room // sample)
    assert made.tiers.first.levels[TOKENS] == 200.0 / sample


def tiers_of(fold: InstantFold) -> Iterator[tuple[ShadowTiers, FastTier]]:
    made = fold.fold.policies.learning._shadows
    assert made is not None
    return ((made, tier) for tier in made.tiers)


def test_shadows_of_a_sample_keep_paths_and_their_size(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shadows, "SHADOW_BLOCKS_MAX", 8)
    fold = shelf(fast_blocks=30)
    serve(fold, 120)
    held = 0
    for made, tier in tiers_of(fold):
        present = np.flatnonzero(tier.present)
        assert (made.sample, tier.counts[USED]) == (4, len(present))
        assert len(present) <= tier.capacity == 6
        parents = made.parents[present]
        assert tier.present[parents[parents >= 0]].all()
        held += len(present)
    assert held > 20


def test_slots_that_change_hands_leave_shadows_sound(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(heat_book, "SLOTS", 64)
    fold = shelf()
    serve(fold, 90)
    book = fold.fold.policies.book.notes
    for _, tier in tiers_of(fold):
        heap = tier.heap[: tier.counts[HEAPED]]
        assert tier.counts[USED] == tier.present.sum() <= tier.capacity
        assert tier.present[heap].all()
        assert (tier.places >= 0).sum() == len(heap)
        assert book["tag"][tier.present].all()
    held = 0
    for made, tier in tiers_of(fold):
        present = np.flatnonzero(tier.present)
        above = made.parents[present]
        assert (tier.children == np.bincount(above[above >= 0], minlength=64)).all()
        for slot, parent in zip(present[above >= 0], above[above >= 0], strict=True):
            held += 1
            assert int(book["tag"][parent]) in ancestors(fold, int(book["row"][slot]))
    assert held > 20
    half = fold.refolded(len(fold.entries) // 2)
    assert fold.refolded().digest() == fold.fold.digest()
    assert _resumed(half, fold).digest() == fold.fold.digest()


def ancestors(fold: InstantFold, row: int) -> list[int]:
    """Tags, from the parent up."""
    tags = []
    while (row := fold.fold.index.block(row).parent) >= 0:
        tags.append(tag_of(fold.fold.index.block(row).key))
    return tags


def test_slot_that_changed_hands_is_no_parent_and_no_walk_through_it_is_endless(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(heat_book, "SLOTS", 64)
    fold, book = shelf(), HeatBook()
    fold.store("slow", list(range(1, 1_001)), ACME)
    rows = np.array([block.row for h in range(1, 1_001) if (block := fold.block(h, ACME)) is not None], np.int32)
    book.note(fold.fold.index, rows)
    notes, parents = book.notes, np.full(64, -1, np.int64)
    old = notes["parent"] >= 0
    old[old] = notes["tag"][notes["parent"][old]] != notes["parent_tag"][old]
    assert old.any(), "blocks took their ancestors' slots"
    for sample in (1, 2, 16):
        noted.parents_in_sample(notes, sample, parents)
        for slot in np.flatnonzero(parents >= 0):
            assert int(notes["tag"][parents[slot]]) in ancestors(fold, int(notes["row"][slot]))


def test_blocks_noted_as_each_other_s_parents_have_no_ancestor_in_a_sample() -> None:
    notes, parents = np.zeros(24, NOTE_DTYPE), np.full(24, -1, np.int64)
    notes["tag"] = range(1, 25)
    tags = notes["tag"] * np.uint64(noted.SAMPLE_MIX) >> np.uint64(noted.SAMPLE_SHIFT)
    first, second = np.flatnonzero(tags % np.uint64(4))[:2]
    below = np.flatnonzero(tags % np.uint64(4) == 0)[0]
    notes["parent"] = -1
    for slot, parent in ((first, second), (second, first), (below, first)):
        notes["parent"][slot], notes["parent_tag"][slot] = parent, notes["tag"][parent]
    noted.parents_in_sample(notes, 4, parents)
    assert (parents == -1).all()


def _resumed(before: Fold, fold: InstantFold) -> Fold:
    """Half of the log by one fold, the rest by one that was filled from its state."""
    resumed = Fold(before.index)
    restore_state(resumed, export_state(before))
    for entry in fold.entries[len(fold.entries) // 2 :]:
        resumed.apply(entry)
    return resumed


@pytest.mark.parametrize("admission", ["hazard", "duel", "auto"])
def test_what_was_learned_goes_on_from_a_checkpoint(admission: str) -> None:
    fold = shelf(admission=admission, moves_per_block=0.3)
    serve(fold, 110)
    assert fold.fold.policies.learning.due_us > 0
    assert _resumed(fold.refolded(len(fold.entries) // 2), fold).digest() == fold.fold.digest()


def test_state_of_version_3_is_read_and_its_blocks_are_classed() -> None:
    fold = shelf()
    serve(fold, 40)
    saved: dict[str, Any] = msgspec.msgpack.decode(export_state(fold.fold))
    notes = np.frombuffer(saved["policies"]["notes"], fold.fold.policies.book.notes.dtype)
    old = np.zeros(len(notes), NOTES_OF_3)
    for name in NOTES_OF_3.names or ():
        old[name] = notes[name]
    saved["version"] = 3
    saved["policies"] |= {"notes": old.tobytes(), "counts": saved["policies"]["counts"][:24]}
    del saved["policies"]["learning"]
    restored = Fold(fold.fold.index)
    restore_state(restored, msgspec.msgpack.encode(saved))
    book = restored.policies.book.notes
    assert (book["counted"] == book["touches"]).all()
    restored.tick(1_000_000_000, 9_999)
    used = book["touches"] > 1
    assert used.any()
    assert book["group"][used].min() >= 3, "blocks used twice are of the classes of those"


def test_arms_that_are_not_allowed_any_more_give_up_the_lead() -> None:
    learning = Learning(HeatBook())
    learning.prepare(ALL_ARMS, RANKED, 10)
    assert learning.leader == RANKED
    learning.prepare(1 << BY_WORTH, BY_WORTH, 10)
    assert learning.leader == BY_WORTH
    learning.prepare(0b1110, FIRST, 10)
    assert learning.leader == FIRST
    learning.prepare(0, FIRST, 10)
    assert (learning.arms, learning.due_us) == (0, 0)


def test_shadows_earn_their_share_of_what_the_budgets_let_through() -> None:
    made = ShadowTiers(HeatBook().notes, 50_000)
    made.earn(160.0, 3_200.0)
    assert made.tiers.ranked.levels[TOKENS] == 200 / 16 + 10
    made.earn(1e6, 3_200.0)
    assert made.tiers.ranked.levels[TOKENS] == 200.0
    made.earn(np.inf, np.inf)
    assert made.tiers.ranked.levels[TOKENS] == NO_LIMIT
    made.earn(0.0, np.inf)
    assert made.tiers.ranked.levels[TOKENS] == 200 / 16


def test_allowance_is_the_tightest_of_the_budgets() -> None:
    fast = Volume("fast", "agent", 0, 3, 0, 100, 0.9, 0.8)

    def allowed(**limits: Any) -> tuple[float, float]:
        return Purse(Limits(**limits), 0, {}, 3_000_000).allowance(fast, 1_000.0, 50, 1_000_000)

    assert allowed() == (np.inf, np.inf)
    assert allowed(moves_per_block=0.1) == (5.0, np.inf)
    assert allowed(moves_per_s=10.0, moves_per_block=0.1) == (5.0, 100.0)
    assert allowed(moves_per_s=2.0) == (4.0, 64.0)
    assert allowed(budgets=(VolumeBudget(volume="fast", bytes_per_s=1_000.0),), moves_per_s=50.0) == (2.0, 64.0)
