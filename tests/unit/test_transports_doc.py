"""docs/transports.md names every option of a publisher, with the default that the code has."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from event_plane.batching import ADAPTIVE_EVENTS, MESSAGES_PER_S_MAX, SNAPSHOT_CHUNK_RECORDS_MAX
from event_plane.publishing import PublisherOptions
from event_plane.schema import RECORD_COUNT_MAX
from event_plane.zmq_live import DROPPING_BYTES_MAX
from event_plane.zmq_transport import ACK_TAG, SNAPSHOT_TAG

DOC = (Path(__file__).resolve().parents[2] / "docs" / "transports.md").read_text(encoding="utf-8")
NAMED = set(re.findall(r"`([a-z_]+)`", "\n".join(line.split("|")[1] for line in DOC.splitlines() if line[:3] == "| `")))


@pytest.mark.parametrize("option", sorted(PublisherOptions.__annotations__))
def test_every_option_of_a_publisher_is_in_the_table(option: str) -> None:
    assert option in NAMED


def test_limits_and_tags_are_those_of_the_code() -> None:
    for said in (
        f"{SNAPSHOT_CHUNK_RECORDS_MAX:,} a chunk",
        f"`messages_per_s_max` | {MESSAGES_PER_S_MAX} |",
        f"{RECORD_COUNT_MAX:,} records",
        f"holds {ADAPTIVE_EVENTS} events",
        f"{ADAPTIVE_EVENTS} · N = {ADAPTIVE_EVENTS * MESSAGES_PER_S_MAX:,}",
        f"{DROPPING_BYTES_MAX >> 20} MiB",
        f"`{ACK_TAG.decode()}`",
        f"`{SNAPSHOT_TAG.decode()}`",
    ):
        assert said in DOC
