"""A picture that is taken while blocks come, go and come again in rows that were another's."""

from __future__ import annotations

import threading

import numpy as np

from advisor.index import ArrayIndex, IndexSize
from advisor.index.jit import INTERPRETED
from advisor.prefixes.picture import Picture
from event_plane.schema import RECORD_DTYPE, Records

NAMESPACES = (5, 9)
CHAIN = 8
CHAINS = 10 if INTERPRETED else 200


def chains(first: int, count: int, kind: int, namespace: int) -> Records:
    """`count` chains of `CHAIN` blocks, each of which hangs on the first block of the first."""
    records = np.zeros(count * CHAIN, RECORD_DTYPE)
    numbers = np.arange(first, first + len(records), dtype=np.uint64)
    parents = numbers - 1
    parents[::CHAIN] = first
    parents[0] = 0
    records["event_type"], records["tier"], records["namespace"] = kind, 3, namespace
    records["sequence_hash_lo"], records["parent_hash_lo"], records["block_size"] = numbers, parents, 100
    return records if kind == 1 else records[::-1]


def test_pictures_while_rows_pass_from_one_namespace_to_the_other_are_sound_and_near() -> None:
    index = ArrayIndex(IndexSize.for_blocks(20_000))
    ended = threading.Event()

    def fold() -> None:
        # The same rows again and again, in turn of either namespace.
        turn = 0
        while not ended.is_set():
            namespace = turn % 2
            for kind in (1, 2):
                index.apply(
                    chains(1_000_000 * namespace + 10, CHAINS, kind, namespace), producer=1, namespace_ids=NAMESPACES,
                    locations=("a",), now_us=turn,
                )  # fmt: skip
            turn += 1

    kept = chains(5_000_000, 2 * CHAINS, 1, 0)
    index.apply(kept, producer=1, namespace_ids=NAMESPACES, locations=("a",), now_us=1)
    writer = threading.Thread(target=fold)
    writer.start()
    try:
        for _ in range(5 if INTERPRETED else 12):
            picture = Picture.take(index, slice_rows=97)
            waiting, seen = picture.groups().tolist(), 0
            while waiting:
                node = waiting.pop()
                seen += 1
                children = picture.children_of(node).tolist()
                assert all(picture.realm[child] == picture.realm[node] for child in children)
                waiting += children
            assert seen == len(picture.nodes.first)
            both = [picture.sum_of(picture.groups(), picture.allowed([each])).blocks for each in NAMESPACES]
            # What stays is counted exactly; of what comes and goes no more than there are rows.
            assert len(kept) <= both[0] <= len(kept) + CHAINS * CHAIN
            assert both[1] <= CHAINS * CHAIN
            assert max(picture.figures(node).blocks for node in picture.groups().tolist()) >= len(kept)
    finally:
        ended.set()
        writer.join()
    index.check()
