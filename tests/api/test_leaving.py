"""Who is still there when a stream's watcher leaves, or the server stops: answered plainly, and no traceback."""

from __future__ import annotations

import asyncio
import logging
import socket
import time
from collections.abc import Callable
from urllib.parse import urlsplit

import pytest
from sample_parts import sample_parts
from sample_reader import SampleReader
from sample_recordings import SampleRecordings
from served import Served
from starlette.types import Message

from advisor.api.app import create_app

PATIENCE_S = 60.0


def eventually(holds: Callable[[], bool]) -> None:
    until_s = time.monotonic() + PATIENCE_S
    while not holds():
        assert time.monotonic() < until_s
        time.sleep(0.01)


def faults(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.levelno >= logging.ERROR]


def begin(served: Served, head: str, body: bytes) -> socket.socket:
    host, _, port = urlsplit(served.url).netloc.partition(":")
    connection = socket.create_connection((host, int(port)), timeout=PATIENCE_S)
    connection.sendall(f"{head}\r\nHost: localhost\r\nContent-Length: 1000\r\n".encode() + body)
    return connection


def answered(connection: socket.socket) -> bytes:
    read = b""
    while piece := connection.recv(65_536):
        read += piece
    return read


UPLOAD = "PUT /api/v1/recordings/trace HTTP/1.1"
OCTETS = b"Content-Type: application/octet-stream\r\n\r\n"


@pytest.mark.parametrize("is_whole", [False, True])
def test_a_file_that_is_being_sent_or_read_when_the_server_stops_is_answered_503(
    caplog: pytest.LogCaptureFixture, is_whole: bool
) -> None:
    recordings = SampleRecordings()
    recordings.reads_s = PATIENCE_S
    served = Served(SampleReader(), recordings=recordings)
    with begin(served, UPLOAD, OCTETS + b"{".ljust(1000 if is_whole else 10)) as connection:
        eventually(lambda: len(recordings.uploads) == 1)
        served.stop()
        answer = answered(connection)
    assert answer.startswith(b"HTTP/1.1 503 ")
    assert b"urn:kvadvisor:problem:stopping" in answer
    assert b"nothing of it is kept; send it again" in answer
    assert recordings.uploads[0].discarded >= 1
    assert "trace" not in {view.name for view in recordings.views}
    assert faults(caplog) == []


def test_an_order_whose_body_stalls_when_the_server_stops_is_answered_503(caplog: pytest.LogCaptureFixture) -> None:
    served = Served(SampleReader())
    head = "POST /api/v1/pause HTTP/1.1"
    with begin(served, head, b"Content-Type: application/json\r\n\r\n{") as connection:
        eventually(lambda: served.awaited() == 1)
        served.stop()
        assert answered(connection).startswith(b"HTTP/1.1 503 ")
    assert faults(caplog) == []


@pytest.mark.parametrize("path", ["/api/v1/stream", "/live"])
def test_a_watcher_that_leaves_while_events_wait_leaves_no_fault(path: str) -> None:
    async def watch() -> list[Message]:
        app = create_app(sample_parts(reader=SampleReader()))
        app.state.feed._interval_s = 0.01
        sent: list[Message] = []
        left = asyncio.Event()

        async def receive() -> Message:
            await left.wait()
            return {"type": "http.disconnect"}

        async def send(message: Message) -> None:
            sent.append(message)
            if message["type"] == "http.response.body":
                # Meanwhile the next events wait for this one, as a watcher that reads no more has them do.
                await asyncio.sleep(0.3)
                left.set()
                await asyncio.Event().wait()

        scope = {
            "type": "http", "asgi": {"version": "3.0"}, "http_version": "1.1", "method": "GET", "scheme": "http",
            "path": path, "raw_path": path.encode(), "query_string": b"", "root_path": "",
            "headers": [(b"host", b"127.0.0.1")], "client": ("127.0.0.1", 1), "server": ("127.0.0.1", 80),
        }  # fmt: skip
        await app(scope, receive, send)
        return sent

    assert [message.get("status", 0) for message in asyncio.run(watch())] == [200, 0]
