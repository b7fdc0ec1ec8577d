"""Puts and deletes blocks in an object store for ever, printing each answer that it got: `put N` and `deleted N`."""

from __future__ import annotations

import itertools
import sys
from pathlib import Path

from storage_agent.endpoints import Endpoint
from storage_agent.port import Result
from storage_agent.volume_contract import VolumeCase, block, keys

OBJECT_BYTES = 65536


def case(url: str, access_key_file: Path, secret_key_file: Path, prefix: str) -> VolumeCase:
    endpoint = Endpoint(url=url, access_key_file=access_key_file, secret_key_file=secret_key_file)
    return VolumeCase(
        kind="object",
        options={"endpoint": "store", "bucket": "blocks", "prefix": prefix, "object_bytes": OBJECT_BYTES},
        endpoints={"store": endpoint},
    )


def say(verb: str, number: int) -> None:
    sys.stdout.write(f"{verb} {number}\n")
    sys.stdout.flush()


def main(url: str, access_key_file: Path, secret_key_file: Path, prefix: str) -> None:
    with case(url, access_key_file, secret_key_file, prefix).opened(capacity_blocks=200) as volume:
        for start in itertools.count(0, 10):
            numbers = range(start, start + 10)
            for number, stored in zip(numbers, volume.put([block(n) for n in numbers]), strict=True):
                assert stored.result is Result.STORED, stored
                say("put", number)
            gone = range(start + 1, start + 10, 3)
            for number in gone:
                say("deleting", number)
            assert {outcome.result for outcome in volume.delete(keys(*gone))} == {Result.DELETED}
            for number in gone:
                say("deleted", number)
            if start >= 50:
                volume.delete(keys(*range(start - 50, start - 40)))
            volume.compact()


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]), Path(sys.argv[3]), sys.argv[4])
