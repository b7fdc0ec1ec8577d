"""An object volume on a real S3 server holds what a dictionary would, whatever comes in whatever order."""

from __future__ import annotations

import itertools
from contextlib import ExitStack
from dataclasses import replace

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule, run_state_machine_as_test

from storage_agent.bench_seaweed import BUCKET, SeaweedServer
from storage_agent.object_bucket import Bucket
from storage_agent.object_format import blocks_name, unpack_index
from storage_agent.port import Result
from storage_agent.volume import Volume
from storage_agent.volume_contract import (
    Told,
    VolumeCase,
    assert_exact,
    block,
    held,
    key,
    keys,
    payload,
    read,
    results,
)

CAPACITY = 8
_prefixes = itertools.count()
numbers = st.lists(st.integers(0, 9), min_size=1, max_size=5, unique=True)


class ObjectVolumeMachine(RuleBasedStateMachine):
    def __init__(self, server: SeaweedServer) -> None:
        super().__init__()
        self.prefix = f"machine/{next(_prefixes)}"
        self.case = VolumeCase(
            kind="object",
            options={"endpoint": "store", "bucket": BUCKET, "prefix": self.prefix, "object_bytes": 65536},
            endpoints={"store": server.endpoint},
        )
        self.bucket = Bucket("contract", server.endpoint, BUCKET)
        self.there: dict[int, int] = {}
        """Sizes by number."""
        self.told = Told()
        self.opened = ExitStack()
        self.volume: Volume = self.opened.enter_context(self.case.opened(self.told, capacity_blocks=CAPACITY))

    def teardown(self) -> None:
        self.opened.close()

    @rule(put=numbers, size=st.sampled_from([1, 4096, 6144]), read_back=st.booleans())
    def put(self, put: list[int], size: int, read_back: bool) -> None:
        expected = []
        for number in put:
            if number in self.there:
                expected.append(Result.PRESENT)
            elif len(self.there) == CAPACITY:
                expected.append(Result.FULL)
            else:
                self.there[number] = size
                expected.append(Result.STORED)
        blocks = [replace(block(n, size), parent_hash=key(n - 1).sequence_hash if n else 0) for n in put]
        assert results(self.volume.put(blocks, read_back=read_back)) == expected

    @rule(gone=numbers)
    def delete(self, gone: list[int]) -> None:
        expected = [Result.DELETED if self.there.pop(number, None) else Result.MISS for number in gone]
        assert results(self.volume.delete(keys(*gone))) == expected

    @rule(wanted=numbers)
    def lay_out(self, wanted: list[int]) -> None:
        report = self.volume.lay_out(keys(*sorted(wanted)))
        assert report.extents_after <= report.extents_before

    @rule()
    def compact(self) -> None:
        self.volume.compact()

    @rule()
    def reopen(self) -> None:
        self.opened.close()
        self.told = Told()
        self.volume = self.opened.enter_context(self.case.opened(self.told, capacity_blocks=CAPACITY))

    @rule(lost=st.integers(0, 9))
    def lose_an_object(self, lost: int) -> None:
        """Someone deletes one behind its back: its blocks are found corrupt once, then missing."""
        names = [listed.name for listed in self.bucket.list(f"{self.prefix}/blocks")]
        if lost >= len(names):
            return
        found = self.bucket.get(names[lost])
        assert found is not None
        index = unpack_index(found[0], int(names[lost][-16:], 16))
        self.bucket.delete([names[lost]])
        for number in {stored.header.key.sequence_hash >> 64 for stored in index.blocks} & self.there.keys():
            reads, _ = read(self.volume, number)
            if reads[0].outcome.result is Result.CORRUPT:  # else it was freed there, and put anew elsewhere
                assert f"{blocks_name(self.prefix, index.mark)} is gone" in reads[0].outcome.reason
                del self.there[number]

    @invariant()
    def holds_what_was_put(self) -> None:
        assert held(self.volume) == set(self.there)
        reads, taken = read(self.volume, *range(10))
        assert taken == {number: payload(number, size) for number, size in self.there.items()}
        assert results(reads) == [Result.HIT if number in self.there else Result.MISS for number in range(10)]
        assert self.volume.stat().degraded == ""
        assert_exact(self.volume)


def test_it_holds_what_a_dictionary_would(seaweed: SeaweedServer) -> None:
    run_state_machine_as_test(
        lambda: ObjectVolumeMachine(seaweed), settings=settings(max_examples=12, stateful_step_count=12, deadline=None)
    )
