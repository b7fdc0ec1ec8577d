"""What our ZeroMQ ends say to foreign ends: vLLM's frames, its resend protocol in both forms, and who may connect."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing
from pathlib import Path

import msgspec
import pytest
import zmq

from event_plane.errors import TransportError
from event_plane.schema import EventRecord, EventType, Namespace
from event_plane.transport import Message, ResendEnd
from event_plane.wire import decode
from event_plane.zmq_transport import ZmqPublisher, ZmqSubscriber
from tests.ports import free_ports

PATIENCE_S = 60.0
OpenSocket = Callable[[int], zmq.Socket[bytes]]
END = b"\xff" * 8
PAYLOAD = msgspec.msgpack.encode([1.0, [["AllBlocksCleared"]], 0])


def stores(*blocks: int) -> list[EventRecord]:
    return [EventRecord(EventType.STORE, 1, block, Namespace(model="m"), "gpu:0") for block in blocks]


def number(sequence: int) -> bytes:
    return sequence.to_bytes(8, "big")


@pytest.fixture
def opened() -> Iterator[ExitStack]:
    with ExitStack() as stack:
        yield stack


@pytest.fixture
def open_socket(opened: ExitStack) -> OpenSocket:
    """Opens plain ZeroMQ sockets, as a foreign end would."""
    context = opened.enter_context(zmq.Context())

    def open_socket(kind: int) -> zmq.Socket[bytes]:
        opened_socket = opened.enter_context(context.socket(kind))
        opened_socket.setsockopt(zmq.LINGER, 0)
        opened_socket.setsockopt(zmq.RCVTIMEO, int(PATIENCE_S * 1000))
        return opened_socket

    return open_socket


@pytest.fixture
def publisher(opened: ExitStack) -> ZmqPublisher:
    any_port = "zmq+tcp://127.0.0.1:0"
    return opened.enter_context(
        closing(ZmqPublisher(any_port, any_port, producer=1, epoch=2, flush_events=1, topic=b"kv@host", heartbeat_s=0))
    )


def receive_until(subscriber: ZmqSubscriber, done: Callable[[list[Message | ResendEnd]], bool]) -> list[Message]:
    received: list[Message | ResendEnd] = []
    deadline = time.monotonic() + PATIENCE_S
    while not done(received):
        assert time.monotonic() < deadline
        received += subscriber.receive(16)
        time.sleep(0.002)
    return [each for each in received if isinstance(each, Message)]


def test_batch_travels_as_topic_sequence_payload(publisher: ZmqPublisher, open_socket: OpenSocket) -> None:
    sub = open_socket(zmq.SUB)
    sub.connect(publisher.url.endpoint)
    sub.setsockopt(zmq.SUBSCRIBE, b"kv@")
    deadline = time.monotonic() + PATIENCE_S
    while not sub.poll(10):
        assert time.monotonic() < deadline
        publisher.publish(stores(5), flush=True)
    topic, sequence, payload = sub.recv_multipart()
    assert topic == b"kv@host"
    assert int.from_bytes(sequence, "big") == decode(payload).sequence


def test_dealer_gets_every_buffered_batch_and_the_end_marker(
    publisher: ZmqPublisher, open_socket: OpenSocket
) -> None:
    publisher.publish(stores(1, 2, 3), flush=True)
    dealer = open_socket(zmq.DEALER)
    dealer.connect(publisher.resend_url.endpoint)
    dealer.send_multipart([b"", number(1)])
    replies = [dealer.recv_multipart() for _ in range(3)]
    assert [reply[:3] for reply in replies] == [
        [b"", b"kv@host", number(1)], [b"", b"kv@host", number(2)], [b"", b"kv@host", END],
    ]  # fmt: skip
    assert [decode(reply[3]).sequence for reply in replies[:2]] == [1, 2]
    assert replies[2][3] == b""


def test_slow_asker_gets_a_whole_resend(publisher: ZmqPublisher, open_socket: OpenSocket) -> None:
    large = {"note": "x" * 20_000}
    for block in range(800):
        event = stores(block)[0]
        event.extra = large
        publisher.publish([event])
    publisher.flush()
    dealer = open_socket(zmq.DEALER)
    dealer.setsockopt(zmq.RCVHWM, 1)
    dealer.setsockopt(zmq.RCVBUF, 4096)
    dealer.connect(publisher.resend_url.endpoint)
    dealer.send_multipart([b"", number(0)])
    deadline = time.monotonic() + PATIENCE_S
    while publisher.stat().resends == 0:
        assert time.monotonic() < deadline
        time.sleep(0.005)
    # Publishing goes on while the asker does not read.
    publisher.publish(stores(900), flush=True)
    sequences = [dealer.recv_multipart()[2] for _ in range(802)]
    assert sequences == [number(sequence) for sequence in range(801)] + [END]


def test_asker_that_vanishes_does_not_stop_the_publisher(
    publisher: ZmqPublisher, open_socket: OpenSocket
) -> None:
    publisher.publish(stores(*range(1, 200)), flush=True)
    for _ in range(5):
        dealer = open_socket(zmq.DEALER)
        dealer.connect(publisher.resend_url.endpoint)
        dealer.send_multipart([b"", number(0)])
        dealer.recv_multipart()
        dealer.close(linger=0)
    publisher.publish(stores(1000), flush=True)
    assert publisher.last_sequence == 199


def test_request_that_cannot_be_read_is_counted_and_ignored(
    publisher: ZmqPublisher, open_socket: OpenSocket
) -> None:
    publisher.publish(stores(1), flush=True)
    dealer = open_socket(zmq.DEALER)
    dealer.connect(publisher.resend_url.endpoint)
    for frames in ([b"x"], [b"", b"short"], [b"", b"ACK1", b"x"], [b"", number(0), b"", b""]):
        dealer.send_multipart(frames)
    dealer.send_multipart([b"", number(0)])
    assert [dealer.recv_multipart()[2] for _ in range(2)] == [number(0), END]
    assert publisher.stat().requests_refused == 4


@pytest.mark.parametrize("with_topic", [False, True], ids=["before vLLM 0.25", "since vLLM 0.25"])
def test_resend_of_a_foreign_engine_is_read_in_both_forms(
    with_topic: bool, opened: ExitStack, open_socket: OpenSocket
) -> None:
    events, resends = free_ports(2)
    pub, router = open_socket(zmq.PUB), open_socket(zmq.ROUTER)
    pub.bind(f"tcp://127.0.0.1:{events}")
    router.bind(f"tcp://127.0.0.1:{resends}")
    asked: list[list[bytes]] = []

    def serve() -> None:
        identity, *request = router.recv_multipart()
        asked.append(request)
        topic = [b"kv@engine"] if with_topic else []
        for sequence in (3, 4):
            router.send_multipart([identity, b"", *topic, number(sequence), PAYLOAD])
        router.send_multipart([identity, b"", *topic, END, b""])

    serving = threading.Thread(target=serve)
    serving.start()
    subscriber = opened.enter_context(
        closing(ZmqSubscriber("vllm", f"zmq+tcp://127.0.0.1:{events}", f"zmq+tcp://127.0.0.1:{resends}"))
    )
    deadline = time.monotonic() + PATIENCE_S
    live: list[Message | ResendEnd] = []
    while not live:
        assert time.monotonic() < deadline
        pub.send_multipart([b"kv@engine", number(5), PAYLOAD])
        time.sleep(0.01)
        live = subscriber.receive(1)
    assert live == [Message("vllm", b"kv@engine", 5, PAYLOAD)]
    assert subscriber.foreign is True

    subscriber.acknowledge(1, 2, 5)
    assert subscriber.ask_resend(3, token=9)
    received = receive_until(subscriber, lambda got: ResendEnd("vllm", 9) in got)
    resent = [each for each in received if each.transport_sequence != 5]
    assert resent == [Message("vllm", b"kv@engine", sequence, PAYLOAD) for sequence in (3, 4)]
    serving.join(PATIENCE_S)
    assert asked == [[b"", number(3)]]
    # An engine's ROUTER takes asks alone; an acknowledgement would end its publisher thread.
    assert not router.poll(50)


def test_message_that_is_no_batch_is_counted_and_dropped(opened: ExitStack, open_socket: OpenSocket) -> None:
    (events,) = free_ports(1)
    pub = open_socket(zmq.PUB)
    pub.bind(f"tcp://127.0.0.1:{events}")
    subscriber = opened.enter_context(closing(ZmqSubscriber("vllm", f"zmq+tcp://127.0.0.1:{events}", topic=b"kv@")))
    deadline = time.monotonic() + PATIENCE_S
    received: list[Message | ResendEnd] = []
    while not received or subscriber.malformed < 2:  # the subscription may come to stand in the middle of a round
        assert time.monotonic() < deadline
        pub.send_multipart([b"kv@engine", b"short", PAYLOAD])
        pub.send_multipart([b"kv@engine"])
        pub.send_multipart([b"other", number(1), PAYLOAD])
        pub.send_multipart([b"kv@engine", number(2), PAYLOAD])
        time.sleep(0.01)
        received += subscriber.receive(8)
    assert {each.transport_sequence for each in received if isinstance(each, Message)} == {2}


def test_subscriber_finds_a_publisher_that_came_back_on_the_same_port(opened: ExitStack) -> None:
    events, resends = free_ports(2)
    place = (f"zmq+tcp://127.0.0.1:{events}", f"zmq+tcp://127.0.0.1:{resends}")
    subscriber = opened.enter_context(closing(ZmqSubscriber("core", *place)))
    for life in (1, 2):
        with closing(ZmqPublisher(*place, producer=1, epoch=life, flush_events=1)) as publisher:
            deadline = time.monotonic() + PATIENCE_S
            epochs: set[int] = set()
            while life not in epochs:
                assert time.monotonic() < deadline
                publisher.publish(stores(life), flush=True)
                time.sleep(0.01)
                epochs = {decode(each.payload).epoch for each in subscriber.receive(64) if isinstance(each, Message)}
    assert subscriber.foreign is False


@pytest.mark.parametrize("host", ["0.0.0.0", "192.0.2.1", "[::]", "example.org"])
def test_publishing_beyond_this_machine_is_refused(host: str) -> None:
    with pytest.raises(TransportError, match="reachable from other machines"):
        ZmqPublisher(f"zmq+tcp://{host}:5557", producer=1)


@pytest.mark.parametrize("taken", [0, 1], ids=["events", "resends"])
def test_port_in_use_is_named_with_a_remedy(taken: int, open_socket: OpenSocket) -> None:
    ports = free_ports(2)
    open_socket(zmq.PUB).bind(f"tcp://127.0.0.1:{ports[taken]}")
    with pytest.raises(TransportError, match=rf"port {ports[taken]} is in use; stop .* or choose another port"):
        ZmqPublisher(*(f"zmq+tcp://127.0.0.1:{port}" for port in ports), producer=1)


def test_socket_file_that_cannot_be_made_is_one_clear_error(tmp_path: Path) -> None:
    with pytest.raises(TransportError, match=r"cannot publish on .*absent"):
        ZmqPublisher(f"zmq+ipc://{tmp_path}/absent/events", producer=1)


def test_socket_file_that_cannot_be_named_is_one_clear_error_of_a_subscriber(tmp_path: Path) -> None:
    with pytest.raises(TransportError, match=r"cannot subscribe to .*; check the URL"):
        ZmqSubscriber("core", f"zmq+ipc://{tmp_path}/{'x' * 200}")


def test_socket_file_of_a_dead_publisher_is_taken_over(tmp_path: Path) -> None:
    for _ in range(2):
        ZmqPublisher(f"zmq+ipc://{tmp_path}/events", producer=1).close()
