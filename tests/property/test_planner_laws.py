"""What holds after every plan, whatever the policy, over random streams of requests."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from advisor.fold import Fold
from advisor.fold_state import export_state, restore_state
from advisor.index import ArrayIndex
from advisor.policies.admission import BUILT_IN
from advisor.policies.eviction import EVICTIONS
from advisor.policies.instant_moves import InstantFold
from event_plane.schema import EventType, Namespace, RecordFlag

BLOCKS = 60
OPEN, CLOSED = Namespace(tenant="open"), Namespace(tenant="closed")
VOLUMES: list[dict[str, Any]] = [
    {"id": "fast", "speed_rank": 0, "capacity_blocks": 8, "tenants": ["open"]},
    {"id": "middle", "speed_rank": 1, "capacity_blocks": 16, "high_watermark": 0.8, "low_watermark": 0.6},
    {"id": "slow", "speed_rank": 2, "capacity_blocks": 64, "retention_s": 400.0},
]

REQUESTS = st.lists(
    st.tuples(st.integers(1, BLOCKS), st.sampled_from([OPEN, OPEN, CLOSED]), st.sampled_from([1, 5, 40])),
    min_size=5,
    max_size=30,
)


def path_to(block: int) -> list[int]:
    """Block n follows block n // 3: root first."""
    path = []
    while block:
        path.append(block)
        block //= 3
    return path[::-1]


def serve(fold: InstantFold, block: int, namespace: Namespace) -> None:
    """A request: what is there is used, what is missing is computed and written to the slowest volume."""
    path = path_to(block)
    present = 0
    while present < len(path) and fold.held(path[present], namespace):
        present += 1
    parents = [0, *path]
    missing = [
        fold.event(EventType.STORE, "slow", h, namespace, parents[at], flags=RecordFlag.COPY)
        for at, h in enumerate(path)
        if at >= present
    ]
    if missing:
        fold.send(missing)
    fold.use(path, namespace)


def check_laws(fold: InstantFold) -> None:
    index = fold.fold.index
    volumes = {v.place: v.as_planned() for v in fold.fold.volumes.values()}
    blocks, _ = index.page(limit=1_000)
    ranks = {b.row: min(volumes[p.place].speed_rank for p in b.placements) for b in blocks}
    for block in blocks:
        held = {volumes[placed.place].volume_id for placed in block.placements}
        closed = block.key.namespace_id == CLOSED.namespace_id
        assert not (closed and "fast" in held), "a volume holds a block of a tenant that it is not for"
        if block.parent >= 0:
            assert ranks[block.parent] <= ranks[block.row], f"{block} is on a faster volume than its parent"
    for volume in volumes.values():
        if volume.volume_id != "slow":
            placed = index.place_figures(volume.place).blocks
            assert placed <= volume.slots_high, f"moves filled {volume.volume_id} past its high watermark"
    assert not fold.fold.moves.open


RELIED_ON = [
    (1, OPEN, 1), (4, OPEN, 1), (9, OPEN, 1), (18, OPEN, 1), (9, CLOSED, 1), (36, OPEN, 1), (54, CLOSED, 1),
    (27, OPEN, 1), (1, OPEN, 1),
]  # fmt: skip
"""The block that was to make way became the parent of one that came."""


@pytest.mark.parametrize("admission", sorted(BUILT_IN))
@example(requests=RELIED_ON, eviction="auto", hysteresis_s=0.0)
@settings(max_examples=6, deadline=None)
@given(requests=REQUESTS, eviction=st.sampled_from(["auto", *EVICTIONS]), hysteresis_s=st.sampled_from([0.0, 600.0]))
def test_no_plan_breaks_a_law(
    admission: str, requests: list[tuple[int, Namespace, int]], eviction: str, hysteresis_s: float
) -> None:
    policy = {"admission": admission, "eviction": eviction, "hysteresis_s": hysteresis_s, "promote_moves_max": 6}
    fold = InstantFold(VOLUMES, policy, blocks_max=512)
    now_us, halfway = 1_000_000, b""
    for number, (block, namespace, seconds) in enumerate(requests):
        now_us += seconds * 1_000_000
        if fold.tick(now_us):
            check_laws(fold)
        serve(fold, block, namespace)
        if number == len(requests) // 2:
            with tempfile.TemporaryDirectory() as folder:
                fold.fold.index.save(Path(folder) / "index", export_state(fold.fold))
                index, halfway = ArrayIndex.load(Path(folder) / "index", fold.size)
            position = fold.fold.position
    assert fold.refolded().digest() == fold.fold.digest()
    resumed = Fold(index)
    restore_state(resumed, halfway)
    for entry in fold.entries[position:]:
        resumed.apply(entry)
    assert resumed.digest() == fold.fold.digest()
    fold.fold.index.check()
