"""Attempts to have a file kept by who may not send it any more, or is not there any more."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from urllib.parse import urlsplit

import pytest
from sample_door import SampleDoor
from sample_reader import SampleReader
from sample_recordings import FIGURES, SampleRecordings
from served import serving

from advisor.access.identity import Scope
from advisor.api import door as front_door
from advisor.errors import ActionRefused
from advisor.recording_upload import Upload
from advisor.recording_views import RecordingFiguresView

PATIENCE_S = 60.0
TRACE = b'{"timestamp": 0}'


class Sender:
    """One who sends a file of 1,000 bytes over a socket of its own, with a token that can be revoked."""

    def __init__(self, door: SampleDoor, url: str) -> None:
        self._door = door
        self._token = door.token(Scope.OPERATE)
        host, _, port = urlsplit(url).netloc.partition(":")
        self.socket = socket.create_connection((host, int(port)), timeout=PATIENCE_S)
        self.socket.sendall(
            b"PUT /api/v1/recordings/trace HTTP/1.1\r\nHost: localhost\r\nContent-Length: 1000\r\n"
            b"Content-Type: application/octet-stream\r\nAuthorization: Bearer " + self._token.encode() + b"\r\n\r\n"
        )

    def revoke(self) -> None:
        self._door.tokens.revoke(self._token[4:16])

    def answered(self) -> bytes:
        """All of it, to the end of the connection."""
        read = b""
        while piece := self.socket.recv(65_536):
            read += piece
        return read


@pytest.fixture
def recordings() -> SampleRecordings:
    return SampleRecordings()


@pytest.fixture
def sender(recordings: SampleRecordings, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Sender]:
    monkeypatch.setattr(front_door, "RECHECK_S", 0.05)
    door = SampleDoor(tmp_path)
    with serving(SampleReader(), doorkeeper=door.doorkeeper, recordings=recordings) as served:
        sender = Sender(door, served.url)
        with sender.socket:
            eventually(lambda: len(recordings.uploads) == 1)
            yield sender


def eventually(holds: Callable[[], bool]) -> None:
    until_s = time.monotonic() + PATIENCE_S
    while not holds():
        assert time.monotonic() < until_s
        time.sleep(0.01)


def test_no_more_of_a_file_is_read_once_its_token_is_revoked(sender: Sender, recordings: SampleRecordings) -> None:
    sender.socket.sendall(TRACE)
    sender.revoke()
    answer = sender.answered()
    assert answer.startswith(b"HTTP/1.1 401 ")
    assert b"nothing of it is kept" in answer
    assert recordings.uploads[0].discarded == 1
    assert "trace" not in {view.name for view in recordings.views}


def test_a_file_that_is_whole_is_not_kept_once_its_token_is_revoked(
    sender: Sender, recordings: SampleRecordings
) -> None:
    recordings.reads_s = PATIENCE_S
    sender.socket.sendall(TRACE.ljust(1_000))
    sender.revoke()
    assert sender.answered().startswith(b"HTTP/1.1 401 ")
    assert "trace" not in {view.name for view in recordings.views}


@pytest.mark.parametrize("sent", [TRACE, TRACE.ljust(1_000)])
def test_a_file_whose_sender_gives_up_is_thrown_away(
    sender: Sender, recordings: SampleRecordings, sent: bytes
) -> None:
    recordings.reads_s = PATIENCE_S
    sender.socket.sendall(sent)
    sender.socket.close()
    eventually(lambda: recordings.uploads[0].discarded > 0)
    assert "trace" not in {view.name for view in recordings.views}


def test_what_is_given_up_when_all_of_it_was_read_is_not_given_its_name(tmp_path: Path) -> None:
    def count(_: Path, is_unwanted: Callable[[], bool]) -> RecordingFiguresView:
        threading.Thread(target=upload.discard).start()
        eventually(is_unwanted)
        return FIGURES

    def keep(_: Upload, __: RecordingFiguresView) -> None:
        raise AssertionError("it was given up")

    upload = Upload(tmp_path / "trace", 1_000, lambda: None, count, keep, lambda _: None)  # type: ignore[arg-type]
    upload.write(TRACE)
    with pytest.raises(ActionRefused, match="not taken in any more"):
        upload.finish()
    assert list(tmp_path.iterdir()) == []
