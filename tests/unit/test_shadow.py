"""Shadows beside the live policy: what they find, what they cost, and that they are part of the folded state."""

from __future__ import annotations

import random
from typing import Any

import msgspec
import pytest

from advisor.entries import OperatorEntry, SettingsEntry
from advisor.fold import Fold
from advisor.fold_state import StateError, export_state, restore_state
from advisor.policies.instant_moves import InstantFold
from advisor.policies.registry import POLICY_VERSION
from advisor.shadow_comparison import Comparison
from advisor.shadow_index import ShadowIndex
from advisor.shadow_tally import Counts, Tally, tag_of, tags_of
from advisor.shadow_views import comparison_view
from advisor.turnstile import Turnstile
from event_plane.schema import Namespace, RecordFlag

TENANT = Namespace(tenant="acme")
BLOCK_BYTES = 4_096
FAST_BLOCKS = 50


def settings(live: dict[str, Any], *shadows: dict[str, Any], blocks_max: int = 4_096) -> SettingsEntry:
    named = [{"name": f"shadow-{i}", "policy": each, "blocks_max": blocks_max} for i, each in enumerate(shadows)]
    return SettingsEntry({"policy": live, "shadow": named}, POLICY_VERSION)


def service(
    live: dict[str, Any], *shadows: dict[str, Any], blocks_max: int = 4_096, fast_blocks: int = FAST_BLOCKS
) -> InstantFold:
    fold = InstantFold(
        [
            {"id": "fast", "speed_rank": 0, "capacity_blocks": fast_blocks, "read_bytes_per_s": 1e9},
            {"id": "slow", "speed_rank": 1, "capacity_blocks": 4_000, "read_bytes_per_s": 1e8},
        ],
        live,
    )
    fold.log(settings(live, *shadows, blocks_max=blocks_max))
    return fold


def serve(fold: InstantFold, seed: int, requests: int, first_s: int = 1) -> int:
    """Chains of three blocks, few of them often, each used twice a tick of 2 s. Returns the uses."""
    chance = random.Random(seed)
    for second in range(first_s, first_s + requests):
        number = min(int(chance.paretovariate(0.8)), 200)
        chain = [10 * number + i for i in range(1, 4)]
        if not fold.held(chain[0], TENANT):
            fold.store("slow", chain, TENANT)
        fold.use(chain, TENANT)
        fold.use(chain, TENANT)
        fold.tick(2_000_000 * second)
    return 6 * requests


def comparison(fold: Fold) -> Comparison:
    assert fold.comparison is not None
    return fold.comparison


ADMISSIONS = ["touch-2", "ranked", "auto"]


@pytest.mark.parametrize("admission", ADMISSIONS)
def test_shadow_of_the_live_policy_counts_what_the_live_policy_counts(admission: str) -> None:
    fold = service({"admission": admission}, {"admission": admission})
    uses = serve(fold, seed=3, requests=120)
    compared = comparison(fold.fold)
    assert compared.live.counts == compared.shadows[0].tally.counts
    assert compared.live.counts.uses == uses
    assert compared.live.counts.came > FAST_BLOCKS, "blocks changed places"
    assert 0 < compared.live.counts.found < uses


def test_found_uses_bytes_and_seconds_are_those_of_the_blocks_on_the_fastest_volume() -> None:
    fold = service({"admission": "touch-2"}, {"admission": "always"}, {"admission": "touch-3"})
    fold.store("slow", [1], TENANT)
    for second in (1, 2, 3, 4):
        fold.use([1], TENANT)
        fold.tick(2_000_000 * second)
    live, always, third = (
        each.counts
        for each in (comparison(fold.fold).live, *(s.tally for s in comparison(fold.fold).shadows))
    )
    # It comes with the plan after its 1st, 2nd or 3rd use, and the uses after that find it.
    assert (always.found, live.found, third.found) == (3, 2, 1)
    assert always.found_bytes == 3 * BLOCK_BYTES
    assert always.used_bytes == 4 * BLOCK_BYTES
    assert always.saved_s == pytest.approx(3 * BLOCK_BYTES * (1e-8 - 1e-9))
    assert (always.moves, always.moved_bytes, always.came, always.hit) == (1, BLOCK_BYTES, 1, 1)


def test_shadow_moves_nothing() -> None:
    alone = service({"admission": "touch-3"})
    watched = service({"admission": "touch-3"}, {"admission": "always"}, {"admission": "auto"})
    for fold in (alone, watched):
        serve(fold, seed=5, requests=60)
    told = [[(m.kind, m.key, m.source, m.target, m.reason) for m in fold.done] for fold in (alone, watched)]
    assert told[0] == told[1]
    assert told[0]
    assert comparison(watched.fold).shadows[0].tally.counts.moves > len(told[0])


def test_block_put_on_the_fast_volume_takes_room_in_a_shadow_and_a_moved_one_does_not() -> None:
    fold = service({"admission": "always"}, {"admission": "touch-3"})
    fold.store("fast", [1, 2, 3], TENANT)
    fold.store("slow", [11, 12], TENANT)
    fold.use([11, 12], TENANT)
    fold.tick(2_000_000)
    assert fold.held(11, TENANT) == ["fast", "slow"], "the live policy brought it"
    shadow = comparison(fold.fold).shadows[0]
    assert shadow.index.place_figures(shadow.volumes[0].place).blocks == 3
    assert shadow.index.place_figures(shadow.volumes[1].place).blocks == 2


def test_shadow_that_begins_late_takes_blocks_with_their_ancestors_and_history() -> None:
    fold = service({"admission": "touch-3"})
    fold.store("slow", [1, 2, 3, 4], TENANT)
    for second in (1, 2):
        fold.use([4], TENANT)
        fold.tick(2_000_000 * second)
    fold.log(settings({"admission": "touch-3"}, {"admission": "touch-3"}))
    fold.use([1, 2, 3, 4], TENANT)
    fold.tick(6_000_000)
    shadow = comparison(fold.fold).shadows[0]
    blocks = sorted(shadow.index.page(-1, 10)[0], key=lambda block: block.depth)
    assert [block.key.sequence_hash for block in blocks] == [1, 2, 3, 4]
    assert [block.touches for block in blocks] == [1, 1, 1, 3]
    shadow.index.check()


def test_changed_settings_begin_anew_and_say_so_and_a_restart_does_not() -> None:
    live = {"admission": "touch-2"}
    fold = service(live, {"admission": "always"})
    serve(fold, seed=1, requests=5)
    before = comparison(fold.fold)
    assert before.note == ""
    fold.log(settings(live, {"admission": "always"}))
    assert fold.fold.comparison is before
    fold.log(settings(live, {"admission": "touch-3"}))
    after = comparison(fold.fold)
    assert after.note.startswith("begun anew")
    assert (after.began_us, after.live.counts) == (0, Counts())
    fold.log(SettingsEntry({"policy": live}, POLICY_VERSION))
    assert fold.fold.comparison is None


@pytest.mark.parametrize("cut", [7, 33])
def test_comparison_goes_on_after_a_restart_from_a_checkpoint_as_if_there_was_none(cut: int) -> None:
    def begun() -> InstantFold:
        fold = service({"admission": "auto"}, {"admission": "touch-2"}, {"eviction": "lfu", "admission": "touch-3"})
        serve(fold, seed=cut, requests=cut)
        return fold

    whole, cut_short = begun(), begun()
    cut_short.fold = restored(cut_short.fold)
    for fold in (whole, cut_short):
        serve(fold, seed=9, requests=40, first_s=100)
    assert whole.fold.digest() == cut_short.fold.digest()
    assert comparison(whole.fold).live.counts == comparison(cut_short.fold).live.counts
    assert whole.refolded().digest() == whole.fold.digest()


def restored(fold: Fold) -> Fold:
    """As a start of the service reads it, the index aside, which is taken over."""
    again = Fold(fold.index)
    restore_state(again, export_state(fold))
    return again


def test_damaged_comparison_is_refused_by_name() -> None:
    fold = service({"admission": "auto"}, {"admission": "always"})
    serve(fold, seed=1, requests=3)
    state = msgspec.msgpack.decode(export_state(fold.fold))
    state["comparison"][5][0][0][2] += b"x"
    with pytest.raises(StateError, match="what the policies remember cannot be read"):
        restore_state(Fold(fold.fold.index), msgspec.msgpack.encode(state))


def test_shadow_without_room_forgets_what_only_the_slow_volume_has_used_longest_ago() -> None:
    fold = service({"admission": "touch-3"}, {"admission": "touch-3"}, blocks_max=64, fast_blocks=8)
    for number in range(1, 200):
        fold.store("slow", [number], TENANT)
    for second in range(1, 6):
        fold.use([7], TENANT)
        fold.use(range(100 + 10 * second, 110 + 10 * second), TENANT)
        fold.tick(2_000_000 * second)
    shadow = comparison(fold.fold).shadows[0]
    assert len(shadow.index) <= 64
    assert shadow.tally.counts.found == 2, "block 7 came with its 3rd use and was found since"
    shadow.index.check()


def test_volume_that_goes_is_forgotten_and_one_that_comes_is_planned_for() -> None:
    fold = service({"admission": "touch-2"}, {"admission": "always"})
    serve(fold, seed=2, requests=10)
    fold.fold.volumes.pop("fast")
    fold.tick(100_000_000)
    shadow = comparison(fold.fold).shadows[0]
    assert [volume.volume_id for volume in shadow.volumes] == ["slow"]
    fast = next(place for place, key in enumerate(shadow.index.places) if key.location == "fast")
    assert (shadow.index.is_volume(fast), shadow.index.place_figures(fast).blocks) == (False, 0)


@pytest.mark.parametrize("what", [{"tenant": "acme"}, {"namespace_id": TENANT.namespace_id, "prefix": f"{2:x}"}])
def test_what_a_person_had_deleted_is_gone_from_shadows_and_no_policy_counts_it(what: dict[str, Any]) -> None:
    fold = service({"admission": "touch-3"}, {"admission": "always"})
    fold.store("slow", [1, 2, 3], TENANT)
    fold.use([1, 2, 3], TENANT)
    fold.tick(2_000_000)
    compared = comparison(fold.fold)
    index, before = compared.shadows[0].index, compared.shadows[0].tally.counts.moves
    assert (len(index), before) == (3, 3)
    fold.log(OperatorEntry("operator", "delete", deletion="d-1", **what))
    fold.tick(4_000_000)
    fold.tick(6_000_000)
    left = [] if "tenant" in what else [1]
    assert [h for h in (1, 2, 3) if fold.held(h, TENANT)] == left
    assert [block.key.sequence_hash for block in index.page(-1, 10)[0]] == left
    assert (compared.live.counts.moves, compared.shadows[0].tally.counts.moves) == (0, before)


def test_view_has_shares_and_the_last_hour() -> None:
    fold = service({"admission": "touch-2"}, {"admission": "always"})
    serve(fold, seed=4, requests=30)
    fold.tick(3_600_000_000 + 120_000_000)
    view = comparison_view(fold.fold)
    live = view.policies[0]
    assert (view.fastest, live.name, live.eviction) == ("fast", "live", "lfuda-leaf")
    assert live.since_start.found_share == pytest.approx(live.since_start.found / 180)
    assert live.last_hour.uses == 0, "all uses were longer ago"
    assert len(view.times_us) == len(live.found_each)
    assert view.policies[1].memory_bytes > 0


def test_tally_knows_precision_and_ping_pong() -> None:
    tally = Tally()
    tally.came(1, 0)
    tally.came(2, 0)
    tally.left(2, 10_000_000)
    tally.came(2, 20_000_000)
    tally.left(2, 30_000_000)
    tally.came(2, 631_000_000)
    assert (tally.counts.came, tally.counts.bounced, tally.counts.hit) == (4, 1, 0)
    saved = Tally(tally.saved())
    assert saved.saved() == tally.saved()


def test_tag_of_a_key_is_that_of_its_row_in_any_index() -> None:
    for size in (8, 64):
        fold = InstantFold([{"id": "slow", "capacity_blocks": 8}], {}, blocks_max=size)
        high = (0xDEAD << 100) + 5
        fold.store("slow", [high], TENANT)
        block = fold.block(high, TENANT)
        assert block is not None
        assert tags_of(fold.fold.index, [block.row]).tolist() == [tag_of(block.key)]


def test_shadow_index_is_saved_and_restored_row_by_row() -> None:
    fold = service({"admission": "touch-2"}, {"admission": "touch-2"})
    serve(fold, seed=8, requests=50)
    index = comparison(fold.fold).shadows[0].index
    again = ShadowIndex.restored(index.saved(), index.blocks_max, Turnstile())
    assert again.saved() == index.saved()
    again.check()


def test_engine_stores_are_no_puts() -> None:
    fold = service({"admission": "touch-2"}, {"admission": "touch-2"})
    store = fold.event(1, "slow", 5, TENANT, flags=RecordFlag.COPY)  # type: ignore[arg-type]
    store.location, store.tier = "gpu", 1
    fold.send([store])
    assert len(comparison(fold.fold).shadows[0].index) == 0
