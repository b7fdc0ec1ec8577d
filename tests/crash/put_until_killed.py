"""Puts, moves and deletes blocks on two volumes for ever, printing each answer that it got: `put N` and `del N`."""

from __future__ import annotations

import itertools
import sys
from pathlib import Path

from event_plane.schema import Namespace
from storage_agent.agent import StorageAgent
from storage_agent.descriptor import VolumeDescriptor
from storage_agent.port import BlockKey, PutBlock, Result

NAMESPACE = Namespace(tenant="crash")
BLOCK_BYTES = 30_000
CAPACITY = 64


def key(number: int) -> BlockKey:
    return BlockKey(NAMESPACE.namespace_id, 0, number)


def payload(number: int) -> bytes:
    return b"%010d" % number * (BLOCK_BYTES // 10)


def open_agent(folder: Path) -> StorageAgent:
    agent = StorageAgent("crash", publisher=None, allowed_roots=[folder])
    for rank, name in enumerate(("fast", "slow")):
        agent.register_volume(
            VolumeDescriptor(
                id=name,
                path=str(folder / f"{name}.slab"),
                capacity_blocks=CAPACITY,
                block_bytes_max=BLOCK_BYTES,
                speed_rank=rank,
            )
        )
    return agent


def say(verb: str, number: int) -> None:
    sys.stdout.write(f"{verb} {number}\n")
    sys.stdout.flush()


def main(folder: Path, first: int) -> None:
    agent = open_agent(folder)
    for start in itertools.count(first, 8):
        numbers = range(start, start + 8)
        for number, stored in zip(
            numbers,
            agent.put("slow", [PutBlock(key(n), NAMESPACE, memoryview(payload(n))) for n in numbers]),
            strict=True,
        ):
            assert stored.result is Result.STORED, stored
            say("put", number)
        moved = agent.move("", [key(n) for n in numbers[::2]], "slow", "fast", keep=start % 16 == 0)
        assert all(outcome.result is Result.COPIED for outcome in moved.outcomes), moved
        for number in range(start - 32, start - 24):
            for volume in ("fast", "slow"):
                say("deleting", number)
                agent.delete(f"{number}-{volume}", volume, [key(number)])


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]))
