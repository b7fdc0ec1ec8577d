"""Streams that SGLang 0.5.23 and Dynamo 1.6.1 published themselves, read to their end."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import msgspec

from event_plane.dialects.known import open_dialect
from event_plane.recording import message_of, read_capture
from event_plane.schema import Batch, Tier
from event_plane.wire import decode, encode
from tests.foreign_streams import CONFIGURED, Key, live

SGLANG_TIERS = {"GPU": Tier.G1, "CPU_PINNED": Tier.G2}


def batches(capture: Path, name: str) -> Iterator[Batch]:
    """Decoded in the order of the producer's own numbers, which leave nothing out."""
    dialect = open_dialect(name, namespace=CONFIGURED)
    for number, frames in enumerate(read_capture(capture)):
        message = message_of(frames, "capture")
        assert message is not None
        assert dialect.origin(message).sequence == number
        batch, skipped = dialect.decode(message.payload, producer=1, epoch=1, sequence=number)
        assert skipped == {}
        yield decode(encode(batch))


def sglang_set(capture: Path) -> set[Key]:
    """What a plain set holds after the capture, read without a line of ours."""
    placed: set[tuple[str, int]] = set()
    for frames in read_capture(capture):
        _, events, _ = msgspec.msgpack.decode(frames[2])
        for event in events:
            keys = {(event["medium"], block & (2**64 - 1)) for block in event.get("block_hashes", ())}
            match event["type"]:
                case "BlockStored":
                    placed |= keys
                case "BlockRemoved":
                    placed -= keys
                case "AllBlocksCleared":
                    placed.clear()
    return {(SGLANG_TIERS[medium], medium, 0, block) for medium, block in placed}


def test_sglang_ends_with_the_same_set_in_both_tiers(shared_data: Path) -> None:
    capture = shared_data / "captures" / "sglang0523.cap"
    placed = live(batches(capture, "sglang"))
    assert placed == sglang_set(capture)
    assert {key[0] for key in placed} == {Tier.G1, Tier.G2}


def test_dynamos_relay_ends_with_the_engines_own_239_blocks(shared_data: Path) -> None:
    captures = shared_data / "captures"
    placed = live(batches(captures / "dynamo161_nats.cap", "dynamo"))
    assert len(placed) == 239
    assert {key[:3] for key in placed} == {(Tier.G1, "worker-42/dp0", 0)}
    assert {key[3] for key in placed} == set(json.loads((captures / "vllm033_int.cap.oracle.json").read_text()))
