"""Equal matches to NVIDIA Dynamo's own prefix index, `RadixTree`, on random streams.

Streams keep to what that tree supports: each worker holds whole paths and removes a block after its descendants, as an
engine that evicts leaves does. (It forgets what lies below a removed block; here that stays and is found again.)
"""

from __future__ import annotations

import json
import random

import numpy as np
import pytest

from advisor.index.array_index import ArrayIndex
from advisor.index.keys import PlaceKey
from advisor.index.layout import IndexSize
from event_plane.schema import DEPTH_UNKNOWN, RECORD_DTYPE, EventType

peer = pytest.importorskip("dynamo.llm", reason="ai-dynamo-runtime is not installed: pip install 'kvadvisor[peers]'")

WORKERS = 4
NAMESPACE = 3


class Both:
    """One stream of events into both indexes."""

    def __init__(self) -> None:
        self.tree = peer.RadixTree()
        self.index = ArrayIndex(IndexSize.for_blocks(20_000))
        self.held: list[set[int]] = [set() for _ in range(WORKERS)]
        self.events = 0

    def store(self, worker: int, path: list[int]) -> None:
        """All of a path from its root."""
        blocks = [{"block_hash": each, "tokens_hash": each} for each in path]
        self._send(worker, {"stored": {"parent_hash": None, "blocks": blocks}})
        self._apply(worker, EventType.STORE, path)
        self.held[worker].update(path)

    def remove(self, worker: int, block: int) -> None:
        self._send(worker, {"removed": {"block_hashes": [block]}})
        self._apply(worker, EventType.REMOVE, [block])
        self.held[worker].discard(block)

    def clear(self, worker: int) -> None:
        self._send(worker, "cleared")
        self._apply(worker, EventType.CLEAR, [0])
        self.held[worker].clear()

    def _send(self, worker: int, data: object) -> None:
        self.events += 1
        self.tree.apply_event(worker, json.dumps({"event_id": self.events, "data": data, "dp_rank": 0}).encode())

    def _apply(self, worker: int, kind: EventType, blocks: list[int]) -> None:
        records = np.zeros(len(blocks), RECORD_DTYPE)
        records["event_type"], records["tier"], records["depth"] = kind, 1, DEPTH_UNKNOWN
        records["sequence_hash_lo"] = blocks
        records["parent_hash_lo"][1:] = blocks[:-1]
        self.index.apply(records, producer=worker, namespace_ids=(NAMESPACE,), locations=("gpu",), now_us=0)

    def compare(self, path: list[int]) -> int:
        scores = {worker: score for (worker, _), score in self.tree.find_matches(path).scores.items()}
        by_place = self.index.match_by_place(NAMESPACE, 0, path).by_place
        assert {self.index.places[place].producer: run for place, run in by_place.items()} == scores
        assert self.index.match(NAMESPACE, 0, path) >= max(scores.values(), default=0)
        return max(scores.values(), default=0)


@pytest.mark.parametrize("seed", range(3))
def test_matches_are_equal_on_random_streams(seed: int) -> None:
    choose = random.Random(seed)
    children: dict[int, list[int]] = {0: []}
    parents: dict[int, int] = {}

    def path_to_a_leaf(length: int) -> list[int]:
        """Down the tree of prompts, which branches as it grows."""
        node, path = 0, []
        for _ in range(length):
            if not children[node] or choose.random() < 0.1:
                made = choose.getrandbits(60) + 1
                children[node].append(made)
                children[made] = []
                parents[made] = node
            node = choose.choice(children[node])
            path.append(node)
        return path

    def descendants(block: int) -> list[int]:
        found = list(children[block])
        for each in found:
            found += children[each]
        return found

    both = Both()
    longest = 0
    for _ in range(1500):
        worker = choose.randrange(WORKERS)
        action = choose.random()
        if action < 0.5 or not both.held[worker]:
            both.store(worker, path_to_a_leaf(choose.randint(1, 40)))
        elif action < 0.95:
            block = choose.choice(sorted(both.held[worker]))
            if not any(each in both.held[worker] for each in descendants(block)):
                both.remove(worker, block)
        elif action < 0.955:
            both.clear(worker)
        longest = max(longest, both.compare(path_to_a_leaf(choose.randint(1, 40))))
    assert longest >= 20
    both.index.check()
    assert PlaceKey(0, 1, "gpu") in both.index.places
