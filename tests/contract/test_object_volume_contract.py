"""The object store, held to the contract of every volume, on a real S3 server."""

from __future__ import annotations

import itertools

import pytest

from storage_agent.bench_seaweed import BUCKET, SeaweedServer
from storage_agent.block_header import BlockHeader
from storage_agent.descriptor import OptionValue
from storage_agent.object_bucket import Bucket
from storage_agent.volume import Volume
from storage_agent.volume_contract import VolumeCase, VolumeContract, payload

_prefixes = itertools.count()


class TestObject(VolumeContract):
    @pytest.fixture
    def case(self, seaweed: SeaweedServer) -> VolumeCase:
        prefix = f"contract/{next(_prefixes)}"
        bucket = Bucket("contract", seaweed.endpoint, BUCKET)

        def damage(volume: Volume, header: BlockHeader) -> None:
            """Where the block's payload is, by its bytes."""
            for listed in list(bucket.list(f"{prefix}/blocks")):
                found = bucket.get(listed.name)
                assert found is not None
                place = found[0].find(payload(header.key.sequence_hash >> 64))
                if place > 0:
                    content = bytearray(found[0])
                    content[place + 77] ^= 0x10
                    bucket.put(listed.name, bytes(content))

        options: dict[str, OptionValue] = {"endpoint": "store", "bucket": BUCKET, "prefix": prefix}
        return VolumeCase(kind="object", options=options, endpoints={"store": seaweed.endpoint}, damage=damage)
