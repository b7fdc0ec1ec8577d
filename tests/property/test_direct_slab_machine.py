"""A slab under puts and gets by the host and straight from memory, mixed, with damage and crashes, against a dict."""

from __future__ import annotations

import shutil
import tempfile
from pathlib import Path

import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from event_plane.schema import Namespace
from storage_agent.agent import StorageAgent
from storage_agent.block_header import PAGE_BYTES
from storage_agent.descriptor import VolumeDescriptor
from storage_agent.direct_memory import DirectMemory, DirectSpan
from storage_agent.port import BlockKey, Buffer, PutBlock, Result
from storage_agent.slab_format import Superblock

CAPACITY = 4
BLOCK_BYTES = 2 * PAGE_BYTES
NAMESPACE = Namespace(tenant="t")
SLABS = Superblock("v", CAPACITY, BLOCK_BYTES)
numbers = st.integers(0, 5)
ways = st.dictionaries(numbers, st.booleans(), min_size=1, max_size=4)
"""Blocks, and whether each goes by a span."""
sizes = st.sampled_from([BLOCK_BYTES, PAGE_BYTES, 5000])


def key(number: int) -> BlockKey:
    return BlockKey(NAMESPACE.namespace_id, 0, number)


class DirectSlabMachine(RuleBasedStateMachine):
    @initialize()
    def start(self) -> None:
        self.folder = Path(tempfile.mkdtemp())
        self.path = self.folder / "v.slab"
        self.model: dict[int, bytes] = {}
        self.damaged: set[int] = set()
        self.version = 0
        room = torch.zeros(7 * BLOCK_BYTES, dtype=torch.uint8)
        self.memory = DirectMemory(room[-room.data_ptr() % PAGE_BYTES :])
        self.open()

    def open(self) -> None:
        self.agent = StorageAgent("a", publisher=None, allowed_roots=[self.folder], mend_interval_s=3600.0)
        self.agent.register_volume(
            VolumeDescriptor(id="v", path=str(self.path), capacity_blocks=CAPACITY, block_bytes_max=BLOCK_BYTES)
        )

    def span(self, number: int, size_bytes: int = BLOCK_BYTES) -> DirectSpan:
        return self.memory.span(number * BLOCK_BYTES, size_bytes)

    @rule(by_span=ways, size_bytes=sizes)
    def put(self, by_span: dict[int, bool], size_bytes: int) -> None:
        self.version += 1
        content = {n: (b"%d.%d " % (n, self.version) * size_bytes)[:size_bytes] for n in by_span}
        payloads: dict[int, Buffer] = {}
        for number, direct in by_span.items():
            span = self.span(number, size_bytes)
            span.fill(memoryview(content[number]))
            payloads[number] = span if direct else memoryview(content[number])
        # Spans are put before the others of their batch.
        order = sorted(by_span, key=lambda n: not (by_span[n] and size_bytes % PAGE_BYTES == 0))
        outcomes = self.agent.put("v", [PutBlock(key(n), NAMESPACE, payloads[n]) for n in order])
        for number, outcome in zip(order, outcomes, strict=True):
            if number in self.model:
                assert outcome.result is Result.PRESENT
            elif len(self.model) == CAPACITY:
                assert outcome.result is Result.FULL
            else:
                assert outcome.result is Result.STORED
                self.model[number] = content[number]

    @rule(by_span=ways)
    def get(self, by_span: dict[int, bool]) -> None:
        hosts = {number: bytearray(BLOCK_BYTES) for number in by_span}
        buffers: list[Buffer] = [self.span(n) if by_span[n] else memoryview(hosts[n]) for n in by_span]
        for number, outcome in zip(by_span, self.agent.get([key(n) for n in by_span], buffers), strict=True):
            if number in self.damaged:
                assert outcome.result is Result.CORRUPT
                self.forget(number)
                continue
            assert outcome.result is (Result.HIT if number in self.model else Result.MISS)
            if number in self.model:
                wanted = self.model[number]
                assert outcome.payload_bytes == len(wanted)
                found = self.span(number).in_host_memory() if by_span[number] else memoryview(hosts[number])
                assert bytes(found[: len(wanted)]) == wanted

    @rule(number=numbers)
    def delete(self, number: int) -> None:
        (outcome,) = self.agent.delete("", "v", [key(number)]).outcomes
        assert outcome.result is (Result.DELETED if number in self.model else Result.MISS)
        self.forget(number)

    @rule(number=numbers, place=st.integers(0, PAGE_BYTES + 4999))
    def damage(self, number: int, place: int) -> None:
        header = self.agent.volumes()[0].live_header(key(number))
        if header is None or number in self.damaged or place >= PAGE_BYTES + header.payload_bytes:
            return
        with self.path.open("r+b") as file:
            file.seek(SLABS.slot_offset(header.slot) + place)
            (byte,) = file.read(1)
            file.seek(-1, 1)
            file.write(bytes([byte ^ 0x10]))
        self.damaged.add(number)

    @rule()
    def reopen_as_after_a_crash(self) -> None:
        left = self.path.read_bytes()
        self.agent.close()
        self.path.write_bytes(left)
        self.open()
        for number in list(self.damaged):
            self.forget(number)

    def forget(self, number: int) -> None:
        self.model.pop(number, None)
        self.damaged.discard(number)

    @invariant()
    def every_slot_is_accounted_for(self) -> None:
        (stat,) = self.agent.stat().volumes
        assert (stat.blocks, stat.slots_free, stat.degraded) == (len(self.model), CAPACITY - len(self.model), "")
        assert stat.payload_bytes == sum(map(len, self.model.values()))

    def teardown(self) -> None:
        if hasattr(self, "agent"):
            self.agent.close()
            shutil.rmtree(self.folder)


TestDirectSlab = DirectSlabMachine.TestCase
TestDirectSlab.settings = settings(max_examples=5, stateful_step_count=12, deadline=None)
