"""Whatever volumes are drained, one after another: they end empty, and no block is ever in no volume."""

from __future__ import annotations

from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from advisor.entries import LogEntry, OperatorEntry
from advisor.policies.instant_moves import InstantFold
from event_plane.schema import Batch, Namespace

SPACE = Namespace(tenant="acme")
BLOCKS = 24
VOLUMES: list[dict[str, Any]] = [
    {"id": name, "speed_rank": rank, "capacity_blocks": 40} for rank, name in enumerate(("fast", "middle", "slow"))
]
NAMES = st.sampled_from([volume["id"] for volume in VOLUMES])


class Kept(InstantFold):
    """Holds every block to be on a volume after every entry, once it was stored."""

    def __init__(self, policy: dict[str, Any]) -> None:
        self.stored: set[int] = set()
        super().__init__(VOLUMES, policy, blocks_max=512)

    def _apply(self, entry: LogEntry, batch: Batch | None = None) -> None:
        super()._apply(entry, batch)
        lost = {block for block in self.stored if not self.held(block, SPACE)}
        assert not lost, f"on no volume after entry {entry.position}: {lost}"

    def put(self, volume: str, block: int) -> None:
        """With its ancestors there: block n follows block n // 3."""
        path = []
        while block:
            path.append(block)
            block //= 3
        self.store(volume, path[::-1], SPACE)
        self.stored |= set(path)


@settings(max_examples=15, deadline=None)
@given(
    placed=st.lists(st.tuples(NAMES, st.integers(1, BLOCKS)), min_size=1, max_size=12),
    used=st.lists(st.integers(1, BLOCKS), max_size=6),
    drained=st.lists(NAMES, min_size=1, max_size=3),
    moves_max=st.sampled_from([1, 3, 64]),
)
def test_a_drained_volume_ends_empty_and_every_block_stays_somewhere(
    placed: list[tuple[str, int]], used: list[int], drained: list[str], moves_max: int
) -> None:
    fold = Kept({"admission": "always", "hysteresis_s": 0.0, "demote_moves_max": moves_max})
    for volume, block in placed:
        fold.put(volume, block)
    now_us = 0
    for volume in drained:
        fold.log(OperatorEntry("ann", "drain", volume))
        place = fold.fold.volumes[volume].place
        for _ in range(2 * BLOCKS):
            now_us += 1_000_000
            fold.use(used, SPACE)
            moves = fold.tick(now_us)
            assert volume not in {move.target for move in moves if move.kind != "drop"}
            if not fold.fold.index.place_figures(place).blocks:
                break
        assert fold.fold.index.place_figures(place).blocks == 0
        fold.log(OperatorEntry("ann", "undrain", volume))
    assert fold.refolded().digest() == fold.fold.digest()
    fold.fold.index.check()


@settings(max_examples=10, deadline=None)
@given(placed=st.lists(st.tuples(NAMES, st.integers(1, BLOCKS)), min_size=1, max_size=12), first=NAMES, second=NAMES)
def test_two_volumes_drained_at_once_end_in_the_third(placed: list[tuple[str, int]], first: str, second: str) -> None:
    fold = Kept({"admission": "always", "hysteresis_s": 0.0})
    for volume, block in placed:
        fold.put(volume, block)
    for volume in (first, second):
        fold.log(OperatorEntry("ann", "drain", volume))
    for second_s in range(1, 4):
        fold.tick(second_s * 1_000_000)
    for volume in (first, second):
        assert fold.fold.index.place_figures(fold.fold.volumes[volume].place).blocks == 0
