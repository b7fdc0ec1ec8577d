"""A process of four tensor-parallel workers. Commands and answers are lines of JSON."""

from __future__ import annotations

import json
import sys
import threading

from kvbm_core.block import CompleteBlock
from kvbm_core.remote import RemoteMutableBlock
from tests.remote_ranks import Rank, identity, keys

PLACES = [
    ("universal", "fully_contiguous"),
    ("NHD", "layer_separate_outer_first"),
    ("HND", "layer_separate_block_first"),
    ("NHD", "fully_contiguous"),
]
"""Order and layout of each worker's pool."""


def offer(rank: Rank, numbers: list[int]) -> str:
    return rank.registration.block_set(rank.computed(numbers)).export().hex()


def read(rank: Rank, sets: list[str], numbers: list[int]) -> list[str]:
    for each in sets:
        rank.memory.import_(bytes.fromhex(each))
    found = rank.memory.get_remote_blocks_immutable(keys(numbers))
    targets = rank.pool.allocate(len(found)).blocks
    said = []
    for number, outcome in zip(numbers, rank.memory.read(found, targets), strict=True):
        if isinstance(outcome, CompleteBlock):
            said.append("right" if rank.holds(outcome.index, number) else "wrong")
        else:
            said.append(f"{type(outcome).__name__}: {outcome}")
    return said


def write(ranks: list[Rank], sets: list[str], numbers: list[int]) -> list[list[str]]:
    """All workers at once, each its heads into every pool that waits for them."""
    said: list[list[str]] = [[] for _ in ranks]

    def write_one(at: int, rank: Rank) -> None:
        for each in sets:
            rank.memory.import_(bytes.fromhex(each))
        remote = rank.memory.get_remote_blocks_mutable(keys(numbers))
        said[at] = [str(error) for error in rank.memory.write(remote, rank.computed(numbers))]

    threads = [threading.Thread(target=write_one, args=each) for each in enumerate(ranks)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return said


def take(rank: Rank, sets: list[str], numbers: list[int]) -> int:
    """How many guards of blocks to be written there are; they are held until the process ends."""
    for each in sets:
        rank.memory.import_(bytes.fromhex(each))
    _held.extend(rank.memory.get_remote_blocks_mutable(keys(numbers)))
    return len(_held)


def grant(rank: Rank, numbers: list[int]) -> str:
    blocks = rank.pool.allocate(len(numbers)).blocks
    identities = [identity(number) for number in numbers]
    return rank.registration.mutable_block_set(blocks, identities, deadline_s=60.0).export().hex()


_held: list[RemoteMutableBlock] = []


def main() -> None:
    ranks = [Rank(number, 4, order=order, layout=layout, blocks=16) for number, (order, layout) in enumerate(PLACES)]
    print(json.dumps("ready"), flush=True)
    for line in sys.stdin:
        match json.loads(line):
            case ["offer", rank, blocks]:
                answer: object = offer(ranks[rank], blocks)
            case ["read", rank, sets, blocks]:
                answer = read(ranks[rank], sets, blocks)
            case ["write", sets, blocks]:
                answer = write(ranks, sets, blocks)
            case ["take", rank, sets, blocks]:
                answer = take(ranks[rank], sets, blocks)
            case ["grant", rank, blocks]:
                answer = grant(ranks[rank], blocks)
            case _:
                return
        print(json.dumps(answer), flush=True)


if __name__ == "__main__":
    main()
