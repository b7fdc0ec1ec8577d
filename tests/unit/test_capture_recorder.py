"""Captures are whole up to their last whole message, whatever ends the recorder; credentials come from a file."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from event_plane.credentials import NO_CREDENTIALS, Credentials
from event_plane.credentials_file import load_credentials
from event_plane.errors import RecordingError, TransportError
from event_plane.part_file import part_of
from event_plane.recording import CaptureRecorder, frames_of, message_of, read_capture
from event_plane.transport import Message
from tests.disks import file_size_limit

FRAMES = [b"topic", bytes(8), b"payload" * 100]


def test_capture_has_its_name_when_it_is_closed_and_is_readable_before(tmp_path: Path) -> None:
    path = tmp_path / "stream.cap"
    recorder = CaptureRecorder(path)
    recorder.write(FRAMES)
    recorder.flush()
    recorder.write(FRAMES)
    assert not path.exists()
    assert list(read_capture(part_of(path))) == [FRAMES]
    recorder.close()
    recorder.close()
    assert list(read_capture(path)) == [FRAMES, FRAMES]
    assert not part_of(path).exists()


def test_folder_that_is_absent_is_named(tmp_path: Path) -> None:
    with pytest.raises(RecordingError, match=r"nowhere/a\.cap cannot be written \(No such file or directory\)"):
        CaptureRecorder(tmp_path / "nowhere" / "a.cap")


@pytest.fixture
def _small_files() -> Iterator[None]:
    with file_size_limit(100_000):
        yield


@pytest.mark.usefixtures("_small_files")
def test_full_disk_keeps_the_messages_that_were_written(tmp_path: Path) -> None:
    path = tmp_path / "full.cap"
    recorder = CaptureRecorder(path)

    def write_much() -> None:
        for _ in range(1_000):
            recorder.write(FRAMES)
            recorder.flush()

    with pytest.raises(RecordingError, match=r"full\.cap holds the first [\d,]+ messages and no more .*free") as full:
        write_much()
    recorder.close()
    kept = list(read_capture(path))
    assert f"the first {len(kept)} messages" in str(full.value)
    assert len(kept) == 100_000 // (4 + 3 * 4 + 5 + 8 + 700)
    assert kept[-1] == FRAMES


@pytest.mark.usefixtures("_small_files")
def test_disk_without_room_for_one_message_leaves_nothing(tmp_path: Path) -> None:
    recorder = CaptureRecorder(tmp_path / "full.cap")
    recorder.write([b"topic", bytes(8), bytes(200_000)])
    with pytest.raises(RecordingError, match="cannot be written"):
        recorder.close()
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("numbered", [True, False])
def test_message_survives_its_frames(numbered: bool) -> None:
    message = Message("engine", b"subject", 7 if numbered else 0, b"payload")
    assert message_of(frames_of(message, numbered=numbered), "engine") == message


def test_frames_are_read_from_the_tail() -> None:
    assert message_of([b"ns", b"publisher", (9).to_bytes(8, "big"), b"p"], "s") == Message("s", b"publisher", 9, b"p")
    assert message_of([b"one"], "s") is None
    assert message_of([b"topic", b"short", b"payload"], "s") is None


def test_credentials_name_files_beside_their_own(tmp_path: Path) -> None:
    path = tmp_path / "credentials.toml"
    path.write_text('user = "reader"\npassword_file = "secret"\n')
    assert load_credentials(path) == Credentials(user="reader", password_file=tmp_path / "secret")
    assert load_credentials(None) is NO_CREDENTIALS


@pytest.mark.parametrize(
    ("content", "said"),
    [("user = ", "is no TOML"), ('password = "x"', "says password = 'x': the keys are"), ("user = 5", "says user = 5")],
)
def test_credentials_that_cannot_be_used_are_named(tmp_path: Path, content: str, said: str) -> None:
    path = tmp_path / "credentials.toml"
    path.write_text(content)
    with pytest.raises(TransportError, match=re.escape(said)):
        load_credentials(path)
