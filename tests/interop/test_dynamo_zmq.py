"""Dynamo's four frames on a real ZeroMQ socket: topic, publisher, sequence, header and envelope."""

from __future__ import annotations

import time
from contextlib import closing
from pathlib import Path

import zmq

from event_plane.connect import open_subscriber
from event_plane.dialects.known import Detector, open_dialect
from event_plane.transport import Message
from tests.foreign_streams import CONFIGURED, envelope, hashes, router_event, router_stored

PATIENCE_S = 60.0
PUBLISHER = 0xAB


def test_four_frames_are_read_from_the_tail(tmp_path: Path) -> None:
    place = f"ipc://{tmp_path}/events"
    payload = envelope(router_event(router_stored([11, 12])), sequence=3, publisher=PUBLISHER)
    frames = (
        b"namespace.n.component.c.kv-events",
        PUBLISHER.to_bytes(8, "big"),
        (3).to_bytes(8, "big"),
        b"\x01" + len(payload).to_bytes(4, "big") + payload,
    )
    with (
        zmq.Context() as context,
        context.socket(zmq.PUB) as engine,
        closing(open_subscriber("engine", f"zmq+{place}", topic=b"namespace.n", foreign=True)) as subscriber,
    ):
        engine.setsockopt(zmq.LINGER, 0)
        engine.bind(place)
        deadline = time.monotonic() + PATIENCE_S
        while not (messages := [got for got in subscriber.receive(8) if isinstance(got, Message)]):
            assert time.monotonic() < deadline
            engine.send_multipart(frames)
            time.sleep(0.05)
    name = Detector().detect(messages[0])
    assert name == "dynamo"
    dialect = open_dialect(name, namespace=CONFIGURED)
    origin = dialect.origin(messages[0])
    assert (origin.part, origin.sequence) == (f"{PUBLISHER:016x}", 3)
    batch, skipped = dialect.decode(messages[0].payload, producer=1, epoch=1, sequence=3)
    assert (hashes(batch), skipped) == ([11, 12], {})
