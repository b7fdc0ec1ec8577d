"""An agent's life in a few steps: puts, deletes, moves, growing, shrinking, compaction, closing, opening again.

As a program it is killed at one of its changes: `python -m tests.crash.agent_script FOLDER KIND NUMBER half`. It says
on standard output what it is about to do and what it was answered.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from event_plane.schema import Namespace
from storage_agent.agent import StorageAgent
from storage_agent.descriptor import OptionValue, VolumeDescriptor
from storage_agent.direct_memory import DirectMemory, DirectSpan
from storage_agent.port import BlockKey, PutBlock, Result
from tests.disk_shim import Change, DiskShim

NAMESPACE = Namespace(tenant="crash")
BLOCK_BYTES = 6000
KINDS = ("slab", "slab-classes", "directory")
"""`slab-classes` is a slab that keeps its slots, of two sizes, and is not resized. On `slab` some are put directly."""
DIRECT = range(30, 40)
"""Blocks of one page, which a slab takes from where they lie."""
CAPACITIES = {"first": 12, "second": 8}
KILLED = 86

Say = Callable[[str], None]


def key(number: int) -> BlockKey:
    return BlockKey(NAMESPACE.namespace_id, 0, number << 64 | 7)


def payload(number: int) -> bytes:
    size = 4096 if number in DIRECT else BLOCK_BYTES - 500 * (number % 3)
    return (b"%06d" % number * (size // 6 + 1))[:size]


def open_agent(folder: Path, kind: str, capacities: dict[str, int] = CAPACITIES) -> StorageAgent:
    agent = StorageAgent("crash", publisher=None, allowed_roots=[folder], mend_interval_s=3600.0)
    small = {"block_bytes": BLOCK_BYTES - 500, "blocks": 4}
    large = {"block_bytes": 2 * BLOCK_BYTES, "blocks": capacities["first"] - 4}
    options: dict[str, dict[str, OptionValue]] = {
        "directory": {"segment_bytes": 1 << 20},
        "slab-classes": {"classes": [small, large]},
    }
    agent.register_volumes(
        [
            VolumeDescriptor(
                id=name,
                kind="slab" if name == "second" or kind == "slab-classes" else kind,
                path=str(folder / name),
                options=options.get(kind, {}) if name == "first" else {},
                capacity_blocks=capacities[name],
                block_bytes_max=2 * BLOCK_BYTES if name == "first" and kind == "slab-classes" else BLOCK_BYTES,
                speed_rank=rank,
            )
            for rank, name in enumerate(("first", "second"))
        ]
    )
    return agent


def live(folder: Path, kind: str, say: Say) -> None:
    """One life, and the beginning of another."""

    def put(*numbers: int) -> None:
        say(f"putting {_list(numbers)}")
        blocks = [PutBlock(key(n), NAMESPACE, payload_to_put(n), max(0, n - 1), n) for n in numbers]
        outcomes = agent.put("first", blocks)
        assert {outcome.result for outcome in outcomes} == {Result.STORED}, outcomes
        say(f"put {_list(numbers)}")

    def delete(*numbers: int, volume: str = "first") -> None:
        say(f"deleting {_list(numbers)}")
        outcomes = agent.delete("", volume, [key(n) for n in numbers]).outcomes
        assert {outcome.result for outcome in outcomes} == {Result.DELETED}, outcomes
        say(f"deleted {_list(numbers)}")

    def resize(capacity: int) -> None:
        if kind == "slab-classes":
            return
        agent.resize_volume("first", capacity)
        say(f"resized {capacity}")

    agent = open_agent(folder, kind)
    say("open")
    put(0, 1, 2, 3, 4)
    put(5)
    direct = [30, 31, 32] if kind == "slab" else []
    if direct:
        put(*direct)
    delete(1, 2, *direct[:1])
    outcomes = agent.move("", [key(n) for n in (0, 3, *direct[1:2])], "first", "second", keep=False).outcomes
    assert {outcome.result for outcome in outcomes} == {Result.COPIED}, outcomes
    agent.move("", [key(5)], "first", "second", keep=True)
    resize(16)
    put(10, 11, 12, 13, 14, 15)
    delete(10, 11, 12, *(13 for _ in direct[2:]))
    delete(3, volume="second")
    agent.compact("", "first")
    resize(7)
    put(20)
    agent.close()
    say("closed")
    capacity = CAPACITIES["first"] if kind == "slab-classes" else 7
    agent = open_agent(folder, kind, {**CAPACITIES, "first": capacity})
    delete(20)
    put(21)
    agent.close()
    say("closed")


def payload_to_put(number: int) -> memoryview | DirectSpan:
    """At a page boundary in memory that a slab writes from, where it is for that."""
    if number not in DIRECT:
        return memoryview(payload(number))
    import torch  # here, for it takes seconds, which most of those that are killed do not need

    room = torch.zeros(2 * len(payload(number)), dtype=torch.uint8)
    span = DirectMemory(room).span(-room.data_ptr() % 4096, len(payload(number)))
    span.fill(memoryview(payload(number)))
    return span


def _list(numbers: Sequence[int]) -> str:
    return ",".join(map(str, numbers))


def main(folder: Path, kind: str, at: int, only_half: bool) -> None:
    seen = 0

    def before(change: Change, half: Callable[[], None]) -> None:
        nonlocal seen
        if seen == at:
            if only_half:
                half()
            os._exit(KILLED)
        seen += 1

    with DiskShim(folder, before).watching():
        live(folder, kind, lambda words: print(words, flush=True))


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2], int(sys.argv[3]), sys.argv[4] == "half")
