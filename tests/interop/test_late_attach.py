"""An engine as of vLLM 0.10, whose resends carry no topic, met when it has long been running."""

from __future__ import annotations

import json
import struct
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import zmq

from advisor.replay import live_blocks, replay_recording
from advisor.service import AdvisorService
from advisor.settings import AdvisorSettings, SourceSettings
from event_plane.recording import read_capture
from tests.ports import free_ports

SEQUENCE = struct.Struct(">q")
END = SEQUENCE.pack(-1)


class OldEngine:
    """Publishes a recorded stream; its ROUTER answers with `["", sequence, payload]`, everything sent so far."""

    def __init__(self, messages: list[list[bytes]], ports: list[int]) -> None:
        self.resends_ended = 0
        self._messages = messages
        self._sent = 0
        self._context = zmq.Context()
        self._pub = self._context.socket(zmq.XPUB)
        self._router = self._context.socket(zmq.ROUTER)
        for socket, port in zip((self._pub, self._router), ports, strict=True):
            socket.setsockopt(zmq.LINGER, 0)
            socket.bind(f"tcp://127.0.0.1:{port}")
        self._pub.setsockopt(zmq.XPUB_VERBOSE, 1)
        self._stopping = threading.Event()
        self._serving = threading.Thread(target=self._serve)
        self._serving.start()

    def publish(self, count: int) -> None:
        for topic, sequence, payload in self._messages[self._sent : self._sent + count]:
            self._pub.send_multipart((topic, sequence, payload))
            self._sent += 1

    @property
    def sent(self) -> list[list[bytes]]:
        return self._messages[: self._sent]

    def wait_for_subscriber(self) -> None:
        joined = False
        while not joined:
            assert self._pub.poll(60_000)
            joined = self._pub.recv().startswith(b"\x01")

    def restart(self, sent: int) -> None:
        """A life of its own, numbered from 0, whose first batches went out while nobody listened."""
        later = self._messages[self._sent :]
        self._messages = [[topic, SEQUENCE.pack(n), payload] for n, (topic, _, payload) in enumerate(later)]
        self._sent = sent

    def close(self) -> None:
        self._stopping.set()
        self._serving.join()
        self._context.destroy()

    def _serve(self) -> None:
        while not self._stopping.is_set():
            if not self._router.poll(20):
                continue
            peer, empty, start = self._router.recv_multipart()
            for _, sequence, payload in self.sent:
                if sequence >= start:
                    self._router.send_multipart((peer, empty, sequence, payload))
            self._router.send_multipart((peer, empty, END, b""))
            self.resends_ended += 1


@pytest.fixture
def ports() -> list[int]:
    return free_ports(2)


@pytest.fixture
def engine(shared_data: Path, ports: list[int]) -> Iterator[OldEngine]:
    started = OldEngine(list(read_capture(shared_data / "captures" / "vllm033_int.cap")), ports)
    yield started
    started.close()


def write_capture(path: Path, messages: list[list[bytes]]) -> Path:
    def framed(message: list[bytes]) -> bytes:
        return struct.pack("<I", len(message)) + b"".join(struct.pack("<I", len(each)) + each for each in message)

    path.write_bytes(b"".join(framed(message) for message in messages))
    return path


def eventually(holds: Callable[[], bool], what: str) -> None:
    deadline = time.monotonic() + 60
    while not holds():
        assert time.monotonic() < deadline, what
        time.sleep(0.02)


@pytest.mark.parametrize("topic", ["", "kv@"], ids=["no topic configured", "a prefix configured"])
def test_resends_without_a_topic_are_the_live_producers(
    tmp_path: Path, shared_data: Path, engine: OldEngine, ports: list[int], topic: str
) -> None:
    oracle = set(json.loads((shared_data / "captures" / "vllm033_int.cap.oracle.json").read_text()))
    events, resends = (f"zmq+tcp://127.0.0.1:{port}" for port in ports)
    source = SourceSettings(name="vllm", url=events, resend_url=resends, dialect="vllm", topic=topic)
    engine.publish(700)
    with AdvisorService(AdvisorSettings(directory=tmp_path / "state", sources=(source,))) as service:
        eventually(lambda: engine.resends_ended >= 1, "the first resend, before any live message")
        engine.wait_for_subscriber()
        engine.publish(100)
        eventually(lambda: len(service.fold.producers) > 0, "a producer")
        (state,) = service.fold.producers.values()
        eventually(lambda: state.sequence == 799, "the last batch")
        assert state.name == "vllm/kv@127.0.0.1@llama/dp0"
        assert (state.gaps, state.partial) == (0, False)
        live = {block.key.sequence_hash for block in service.fold.index.page(limit=1_000)[0]}
        assert len(live) == 239
        assert live == oracle
        assert list(service.fold.producers.values()) == [state]


def test_silent_restart_while_away_is_seen_though_resends_have_no_topic(
    tmp_path: Path, engine: OldEngine, ports: list[int]
) -> None:
    events, resends = (f"zmq+tcp://127.0.0.1:{port}" for port in ports)
    source = SourceSettings(name="vllm", url=events, resend_url=resends, dialect="vllm")
    settings = AdvisorSettings(directory=tmp_path / "state", sources=(source,))
    with AdvisorService(settings) as service:
        engine.wait_for_subscriber()
        engine.publish(10)
        eventually(lambda: [each.sequence for each in service.fold.producers.values()] == [9], "the first life")
    # Its next life is at the very sequence that would have come next.
    engine.restart(10)
    with AdvisorService(settings) as service:
        eventually(lambda: engine.resends_ended >= 2, "the resend, before any live message")
        engine.wait_for_subscriber()
        engine.publish(1)
        (state,) = service.fold.producers.values()
        eventually(lambda: state.epochs_closed >= 1 and state.sequence == 10, "the second life")
        second_life = write_capture(tmp_path / "second.cap", engine.sent)
        eventually(lambda: live_blocks(service.fold) == live_blocks(replay_recording(second_life).fold), "its blocks")
