"""A directory volume on a real folder against a dict: puts, gets, deletes, compaction, closes and crashes."""

from __future__ import annotations

import shutil
import tempfile
from pathlib import Path

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from event_plane.schema import Namespace
from storage_agent.block_header import BlockHeader
from storage_agent.descriptor import VolumeDescriptor
from storage_agent.directory_volume import DirectoryOptions, DirectoryStore
from storage_agent.port import BlockKey, PutBlock, Result
from storage_agent.slot_volume import SlotVolume

CAPACITY = 90
BLOCK_BYTES = 40_000
NAMESPACE = Namespace(tenant="t")
SEGMENT_BYTES = 1 << 20
"""The smallest: about 25 of these blocks."""
numbers = st.integers(0, 60)
batches = st.lists(numbers, min_size=1, max_size=20, unique=True)


def key(number: int) -> BlockKey:
    return BlockKey(NAMESPACE.namespace_id, 0, number)


class DirectoryVolumeMachine(RuleBasedStateMachine):
    @initialize()
    def start(self) -> None:
        self.root = Path(tempfile.mkdtemp())
        self.folder = self.root / "v0"
        self.lives = 0
        self.model: dict[int, bytes] = {}
        self.version = 0
        self.open()

    def open(self) -> None:
        descriptor = VolumeDescriptor(
            id="v", kind="directory", path=str(self.folder), capacity_blocks=CAPACITY, block_bytes_max=BLOCK_BYTES
        )
        store = DirectoryStore(descriptor, self.folder, DirectoryOptions(segment_bytes=SEGMENT_BYTES), deadline_s=30.0)
        self.volume = SlotVolume(descriptor, store, on_stored=lambda h: None, on_freed=lambda h: None)

    @rule(batch=batches)
    def put(self, batch: list[int]) -> None:
        blocks = []
        for number in batch:
            self.version += 1
            content = (b"%d-%d " % (number, self.version)).ljust(BLOCK_BYTES - number, b".")
            blocks.append(PutBlock(key(number), NAMESPACE, memoryview(content), max(0, number - 1), number))
        for number, block, outcome in zip(batch, blocks, self.volume.put(blocks), strict=True):
            assert outcome.result is (Result.PRESENT if number in self.model else Result.STORED)
            self.model.setdefault(number, bytes(block.payload))

    @rule(batch=batches)
    def get(self, batch: list[int]) -> None:
        taken: dict[int, bytes] = {}

        def accept(index: int, header: BlockHeader, payload: memoryview) -> str:
            taken[batch[index]] = bytes(payload)
            return ""

        self.volume.read([key(number) for number in batch], accept)
        assert taken == {number: self.model[number] for number in batch if number in self.model}

    @rule(batch=batches)
    def delete(self, batch: list[int]) -> None:
        for number, outcome in zip(batch, self.volume.delete([key(number) for number in batch]), strict=True):
            assert outcome.result is (Result.DELETED if number in self.model else Result.MISS)
            self.model.pop(number, None)

    @rule(batch=batches)
    def lay_out(self, batch: list[int]) -> None:
        report = self.volume.lay_out([key(number) for number in sorted(batch)])
        assert report.extents_after <= report.extents_before

    @rule()
    def compact(self) -> None:
        assert self.volume.compact() >= 0

    @rule()
    def reopen_after_a_close(self) -> None:
        self.volume.close()
        assert not list(self.folder.glob("*.writing"))
        self.open()

    @rule()
    def reopen_as_after_a_crash(self) -> None:
        self.lives += 1
        left = self.root / f"v{self.lives}"
        shutil.copytree(self.folder, left)
        self.volume.close()
        self.folder = left
        self.open()

    @invariant()
    def what_is_live_is_what_was_put(self) -> None:
        assert {header.depth for header in self.volume.live_headers()} == self.model.keys()
        stat = self.volume.stat()
        assert (stat.blocks, stat.slots_free) == (len(self.model), CAPACITY - len(self.model))
        assert stat.payload_bytes == sum(map(len, self.model.values()))

    def teardown(self) -> None:
        if hasattr(self, "volume"):
            assert self.volume.scrub().corrupt == 0
            self.volume.close()
            shutil.rmtree(self.root)


TestDirectoryVolume = DirectoryVolumeMachine.TestCase
TestDirectoryVolume.settings = settings(max_examples=8, stateful_step_count=18, deadline=None)
