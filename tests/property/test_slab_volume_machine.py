"""A slab on a real file against a dict: puts, gets, deletes, damage and reopening, in order and out of order."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Sequence
from pathlib import Path

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from event_plane.schema import Namespace
from storage_agent.block_header import PAGE_BYTES, BlockHeader
from storage_agent.descriptor import VolumeDescriptor
from storage_agent.port import BlockKey, PutBlock, Result
from storage_agent.slab_format import Superblock
from storage_agent.slab_volume import SlabInspection, SlabStore
from storage_agent.slot_volume import SlotVolume

CAPACITY = 5
BLOCK_BYTES = 64
NAMESPACE = Namespace(tenant="t")
SLABS = Superblock("v", CAPACITY, BLOCK_BYTES)
numbers = st.integers(0, 7)
batches = st.lists(numbers, min_size=1, max_size=4, unique=True)


def key(number: int) -> BlockKey:
    return BlockKey(NAMESPACE.namespace_id, 0, number)


class SlabVolumeMachine(RuleBasedStateMachine):
    @initialize()
    def start(self) -> None:
        self.folder = Path(tempfile.mkdtemp())
        self.path = self.folder / "v.slab"
        self.model: dict[int, bytes] = {}
        self.damaged: dict[int, int] = {}
        """Blocks with a flipped bit, and the byte of the slot it is in."""
        self.announced: set[int] = set()
        self.version = 0
        self.open()

    def open(self) -> None:
        def stored(headers: Sequence[BlockHeader]) -> None:
            self.announced |= {header.key.sequence_hash for header in headers}

        def freed(headers: Sequence[BlockHeader]) -> None:
            self.announced -= {header.key.sequence_hash for header in headers}

        self.descriptor = VolumeDescriptor(
            id="v", path=str(self.path), capacity_blocks=CAPACITY, block_bytes_max=BLOCK_BYTES
        )
        store = SlabStore(self.descriptor, self.path, deadline_s=30.0)
        self.volume = SlotVolume(self.descriptor, store, on_stored=stored, on_freed=freed)
        self.announced = {header.key.sequence_hash for header in self.volume.live_headers()}

    @rule(batch=batches)
    def put(self, batch: list[int]) -> None:
        blocks = []
        for number in batch:
            self.version += 1
            content = memoryview(b"%d-%d" % (number, self.version))
            blocks.append(PutBlock(key(number), NAMESPACE, content, max(0, number - 1)))
        for number, block, outcome in zip(batch, blocks, self.volume.put(blocks), strict=True):
            if number in self.model:
                assert outcome.result is Result.PRESENT
            elif len(self.model) == CAPACITY:
                assert outcome.result is Result.FULL
            else:
                assert outcome.result is Result.STORED
                self.model[number] = bytes(block.payload)

    @rule(batch=batches)
    def get(self, batch: list[int]) -> None:
        taken: dict[int, bytes] = {}

        def accept(index: int, header: BlockHeader, payload: memoryview) -> str:
            taken[batch[index]] = bytes(payload)
            return ""

        read = self.volume.read([key(number) for number in batch], accept)
        for number, answer in zip(batch, read, strict=True):
            if number in self.damaged:
                assert answer.outcome.result is Result.CORRUPT
                self.forget(number)
            else:
                assert answer.outcome.result is (Result.HIT if number in self.model else Result.MISS)
        assert taken == {number: self.model[number] for number in batch if number in self.model}

    @rule(batch=batches)
    def delete(self, batch: list[int]) -> None:
        for number, outcome in zip(batch, self.volume.delete([key(number) for number in batch]), strict=True):
            assert outcome.result is (Result.DELETED if number in self.model else Result.MISS)
            self.forget(number)

    @rule(batch=batches)
    def lay_out(self, batch: list[int]) -> None:
        self.get(list(self.damaged))
        report = self.volume.lay_out([key(number) for number in sorted(batch)])
        assert report.extents_after <= report.extents_before
        assert report.moved_blocks <= len(set(batch) & self.model.keys())

    @rule(number=numbers, place=st.integers(0, PAGE_BYTES + 2))
    def damage(self, number: int, place: int) -> None:
        header = self.volume.live_header(key(number))
        if header is None or number in self.damaged:
            return
        with self.path.open("r+b") as file:
            file.seek(SLABS.slot_offset(header.slot) + place)
            (byte,) = file.read(1)
            file.seek(-1, 1)
            file.write(bytes([byte ^ 0x10]))
        self.damaged[number] = place

    @rule()
    def reopen_after_a_close(self) -> None:
        self.volume.close()
        self.open()  # by the saved table: what is bad is found by the get

    @rule()
    def reopen_as_after_a_crash(self) -> None:
        left = self.path.read_bytes()
        self.volume.close()
        self.path.write_bytes(left)
        self.open()
        for number in list(self.damaged):
            self.forget(number)

    def forget(self, number: int) -> None:
        self.model.pop(number, None)
        self.damaged.pop(number, None)

    @invariant()
    def table_file_and_announcements_agree(self) -> None:
        live = {header.key.sequence_hash: header.slot for header in self.volume.live_headers()}
        assert live.keys() == self.model.keys() == self.announced
        stat = self.volume.stat()
        assert (stat.blocks, stat.slots_free) == (len(self.model), CAPACITY - len(self.model))
        sound = {slot for number, slot in live.items() if number not in self.damaged}
        slab = SlabInspection(self.descriptor, self.path)
        states = [report.state for report in slab.reports()]
        slab.close()
        assert states == [
            "live" if slot in sound else "torn" if slot in live.values() else "free" for slot in range(CAPACITY)
        ]

    def teardown(self) -> None:
        if hasattr(self, "volume"):
            self.volume.close()
            shutil.rmtree(self.folder)


TestSlabVolume = SlabVolumeMachine.TestCase
TestSlabVolume.settings = settings(max_examples=12, stateful_step_count=20, deadline=None)
