"""Recordings on disk: raw captures of a publisher's frames, and traces of requests; plain or gzip.

A capture is, for each message, `u32le frame count`, then for each frame `u32le length` and its bytes. A trace, of
Mooncake's or RAGPulse's form, is one JSON object a line. Everything is read as a stream, one message or line at a time.
`event_plane.parquet` has the recordings of decoded batches.
"""

from __future__ import annotations

import gzip
import itertools
import math
import struct
import zlib
from collections.abc import Generator, Iterator, Sequence
from contextlib import closing, contextmanager
from pathlib import Path
from types import TracebackType
from typing import Annotated, BinaryIO, Final, Literal, Self, cast

import msgspec

from event_plane.dialects.known import Detector
from event_plane.errors import RecordingError
from event_plane.part_file import PartFile
from event_plane.transport import Message
from event_plane.wire import BATCH_BYTES_MAX, is_batch

Format = Literal["capture", "trace", "parquet"]

FRAMES_MAX: Final = 16
FRAME_BYTES_MAX: Final = BATCH_BYTES_MAX
_WRITTEN_AT_ONCE_BYTES: Final = 1 << 20
LINE_BYTES_MAX: Final = 16 * 1024 * 1024
TIMESTAMP_MS_MAX: Final = 10**14
TRACE_BLOCK_TOKENS: Final = 512
_SIGNAL_CHARACTERS_MAX: Final = 256
_PRIORITY_MAX: Final = 1_000_000
_TOKENS_MAX: Final = 1 << 32
_RAG_ID_BITS: Final = 48
_RAG_GROUPS_MAX: Final = 1 << 15
_PARQUET_MAGIC: Final = b"PAR1"
_GZIP_MAGIC: Final = b"\x1f\x8b"
_SNIFFED_MESSAGES: Final = 64
_U32 = struct.Struct("<I")
_SEQUENCE = struct.Struct(">Q")
_ACCEPTED: Final = "give a capture (.cap), a recording (.parquet) or a trace of requests (.jsonl, .jsonl.gz)"


class TraceRequest(msgspec.Struct, frozen=True):
    """One request of a trace. Times in ms since its start, lengths in tokens; `block_ids` root first, one per block."""

    timestamp_ms: float
    input_tokens: int
    output_tokens: int
    block_ids: list[int]
    block_tokens: int = TRACE_BLOCK_TOKENS
    """Tokens of each block but the last."""
    session_id: str = ""
    """Empty: not told, as in Mooncake's own traces."""
    tenant: str = ""
    priority: int = 0


class _TraceLine(msgspec.Struct, frozen=True):
    timestamp: Annotated[float, msgspec.Meta(ge=0, le=TIMESTAMP_MS_MAX)]
    input_length: int
    output_length: int
    hash_ids: list[Annotated[int, msgspec.Meta(ge=0, le=(1 << 63) - 1)]]
    session_id: Annotated[str, msgspec.Meta(max_length=_SIGNAL_CHARACTERS_MAX)] = ""
    tenant: Annotated[str, msgspec.Meta(max_length=_SIGNAL_CHARACTERS_MAX)] = ""
    priority: Annotated[int, msgspec.Meta(ge=-_PRIORITY_MAX, le=_PRIORITY_MAX)] = 0


class _RagPulseLine(msgspec.Struct, frozen=True):
    timestamp: str
    input_length: int
    output_length: int
    hash_ids: dict[str, list[Annotated[int, msgspec.Meta(ge=0, lt=1 << _RAG_ID_BITS)]]]


_Lines = msgspec.json.Decoder[_TraceLine] | msgspec.json.Decoder[_RagPulseLine]
_MOONCAKE_LINES: Final = msgspec.json.Decoder(_TraceLine)
_RAGPULSE_LINES: Final = msgspec.json.Decoder(_RagPulseLine)


def detect_format(path: Path) -> Format:
    """What `path` holds, told from its first bytes. Raises `RecordingError` where it is neither."""
    with _opened(path) as stream:
        head = stream.read(8)
    if not head:
        raise RecordingError(f"{path} is empty: {_ACCEPTED}")
    if head.lstrip()[:1] == b"{":
        return "trace"
    if head[:4] == _PARQUET_MAGIC:
        return "parquet"
    if len(head) == 8:
        frame_count, first_length = struct.unpack("<II", head)
        if 1 <= frame_count <= FRAMES_MAX and first_length <= FRAME_BYTES_MAX:
            return "capture"
    raise RecordingError(f"{path} starts with {head!r}, like no capture, recording or trace: {_ACCEPTED}")


def read_capture(path: Path) -> Generator[list[bytes], None, None]:
    """The frames of each message, in order. Raises `RecordingError` naming the byte where it is cut or damaged."""
    with _opened(path) as stream:
        offset = 0
        while frame_count := _read_u32(path, stream, offset, offset, at_end_ok=True):
            if frame_count > FRAMES_MAX:
                raise _damaged(path, offset, offset, f"says {frame_count} frames, more than {FRAMES_MAX}")
            at = offset + _U32.size
            frames = []
            for _ in range(frame_count):
                length = _read_u32(path, stream, at, offset)
                if length > FRAME_BYTES_MAX:
                    raise _damaged(path, at, offset, f"says a frame of {length} bytes, more than {FRAME_BYTES_MAX}")
                frame = stream.read(length)
                if len(frame) < length:
                    raise _damaged(path, at, offset, f"says a frame of {length} bytes, {len(frame)} follow")
                frames.append(frame)
                at += _U32.size + length
            yield frames
            offset = at


def message_of(frames: Sequence[bytes], source: str) -> Message | None:
    """A capture's message as the subscription `source` would have received it; None where it is no message.

    Frames of ZeroMQ are read from the tail (`[…, topic, sequence u64 big-endian, payload]`), as its subscriber does;
    those of NATS are `[subject, payload]`.
    """
    match frames:
        case [*_, topic, sequence, payload] if len(sequence) == _SEQUENCE.size:
            return Message(source, topic, _SEQUENCE.unpack(sequence)[0], payload)
        case [subject, payload]:
            return Message(source, subject, 0, payload)
    return None


def frames_of(message: Message, *, numbered: bool) -> list[bytes]:
    """What `message_of` reads. `numbered`: as ZeroMQ's, whose transport numbers messages; else as NATS's."""
    if numbered:
        return [message.topic, _SEQUENCE.pack(message.transport_sequence), message.payload]
    return [message.topic, message.payload]


class CaptureRecorder:
    """Writes one capture. Not thread-safe. `path` appears, replacing what had its name, when `close` returns.

    Until then it is `part_of(path)`, a capture as well, whole up to the last `flush`.
    """

    def __init__(self, path: Path) -> None:
        """Raises `RecordingError` where the file cannot be made."""
        self.path = path
        self.messages = 0
        self._part = PartFile(path, buffering=0)
        self._waiting = bytearray()
        self._waiting_messages = 0
        self._end = 0
        self._closed = False

    def write(self, frames: Sequence[bytes]) -> None:
        """Take one message. Raises `RecordingError` for a full disk: the file is closed then, and keeps what was
        flushed."""
        self._waiting += _U32.pack(len(frames))
        for frame in frames:
            self._waiting += _U32.pack(len(frame)) + frame
        self._waiting_messages += 1
        if len(self._waiting) >= _WRITTEN_AT_ONCE_BYTES:
            self.flush()

    def flush(self) -> None:
        """Hand what waits to the operating system. Raises as `write` does."""
        try:
            with memoryview(self._waiting) as waiting:
                written = 0
                while written < len(waiting):
                    written += self._part.file.write(waiting[written:])
        except OSError as error:
            raise self._cut(error) from error
        self._end += len(self._waiting)
        self.messages += self._waiting_messages
        self._waiting = bytearray()
        self._waiting_messages = 0

    def close(self) -> None:
        """Flush; the file has its name and is durable when it returns. Idempotent. Raises as `write` does."""
        if not self._closed:
            self.flush()
            self._closed = True
            self._part.finish(self._end)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, fault: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _cut(self, error: OSError) -> RecordingError:
        self._closed = True
        if not self.messages:
            self._part.discard()
            return self._part.unwritable(error)
        self._part.finish(self._end)
        return RecordingError(
            f"{self.path} holds the first {self.messages:,} messages and no more ({error.strerror}): free space, or"
            " record to another disk"
        )


def capture_dialect(path: Path) -> str:
    """Whose messages a capture holds: `kvadvisor` or a name of `dialects.known.DIALECTS`, told from the first ones.

    Raises `RecordingError` for messages of a form that no known engine sends.
    """
    detector = Detector()
    with closing(read_capture(path)) as messages:
        for frames in itertools.islice(messages, _SNIFFED_MESSAGES):
            message = message_of(frames, path.name)
            if message is None:
                raise RecordingError(f"{path} holds messages of {len(frames)} frames that no known engine sends")
            dialect = "kvadvisor" if is_batch(message.payload) else detector.detect(message)
            if dialect is not None:
                return dialect
    return "vllm"


def read_trace(path: Path) -> Iterator[TraceRequest]:
    """The requests of a Mooncake or RAGPulse trace, in the order of its lines; empty lines are stepped over.

    Raises `RecordingError` naming the line that cannot be read, or saying that the file is of another format where its
    first line is JSON and no request.
    """
    lines: _Lines = _MOONCAKE_LINES
    with _opened(path) as stream:
        for number in itertools.count(1):
            line = stream.readline(LINE_BYTES_MAX + 1)
            if not line:
                return
            if len(line) > LINE_BYTES_MAX:
                raise RecordingError(f"{path}, line {number} is longer than {LINE_BYTES_MAX} bytes: it is no trace")
            if number == 1 and _is_ragpulse(line):
                lines = _RAGPULSE_LINES
            if line.strip():
                yield _request(path, number, line, lines)


def _is_ragpulse(line: bytes) -> bool:
    try:
        _RAGPULSE_LINES.decode(line)
    except (msgspec.MsgspecError, ValueError):
        return False
    return True


def _request(path: Path, number: int, line: bytes, lines: _Lines) -> TraceRequest:
    try:
        read = lines.decode(line)
        for name, value in (("input_length", read.input_length), ("output_length", read.output_length)):
            if not 0 <= value <= _TOKENS_MAX:
                raise RecordingError(f"{path}, line {number} has {name} {value}: mend or remove that line")
        return _ragpulse_request(read) if isinstance(read, _RagPulseLine) else _mooncake_request(read)
    except msgspec.ValidationError as error:
        if number == 1:
            raise RecordingError(
                f"{path} holds JSON of another format than Mooncake's ({error}): give lines with timestamp,"
                " input_length, output_length and hash_ids"
            ) from error
        raise RecordingError(f"{path}, line {number} is no request ({error}): mend or remove that line") from error
    except (msgspec.MsgspecError, ValueError) as error:
        raise RecordingError(f"{path}, line {number} is no request ({error}): mend or remove that line") from error


def _mooncake_request(line: _TraceLine) -> TraceRequest:
    return TraceRequest(
        line.timestamp,
        line.input_length,
        line.output_length,
        line.hash_ids,
        session_id=line.session_id,
        tenant=line.tenant,
        priority=line.priority,
    )


def _ragpulse_request(line: _RagPulseLine) -> TraceRequest:
    """Its ids count within a group (`sys_prompt`, `passages_ids` …), groups follow one another, seconds are text.

    Raises `ValueError` for a time that is none, or too many groups.
    """
    seconds = float(line.timestamp)
    if not 0 <= seconds * 1000 <= TIMESTAMP_MS_MAX:
        raise ValueError(f"timestamp {line.timestamp} is out of range")
    if len(line.hash_ids) > _RAG_GROUPS_MAX:
        raise ValueError(f"{len(line.hash_ids)} groups of ids are more than {_RAG_GROUPS_MAX}")
    ids = [group << _RAG_ID_BITS | each for group, named in enumerate(line.hash_ids.values()) for each in named]
    tokens = math.floor(line.input_length / max(len(ids), 1) + 0.5)
    return TraceRequest(
        seconds * 1000, line.input_length, line.output_length, ids, min(TRACE_BLOCK_TOKENS, max(1, tokens))
    )


def _read_u32(path: Path, stream: BinaryIO, at: int, message_at: int, *, at_end_ok: bool = False) -> int:
    """The number at byte `at`; 0 at the end of the file where that is allowed."""
    raw = stream.read(_U32.size)
    if not raw and at_end_ok:
        return 0
    if len(raw) < _U32.size:
        raise _damaged(path, at, message_at, "ends in the middle of a message")
    number: int = _U32.unpack(raw)[0]
    if number == 0 and at_end_ok:
        raise _damaged(path, at, message_at, "says a message without frames")
    return number


def _damaged(path: Path, at: int, message_at: int, what: str) -> RecordingError:
    return RecordingError(
        f"{path} {what} at byte {at}: it was cut or damaged; record it again, or keep the whole messages before with"
        f" `head -c {message_at}`"
    )


@contextmanager
def _opened(path: Path) -> Iterator[BinaryIO]:
    """`path` unpacked; whatever goes wrong while it is open becomes a `RecordingError`."""
    try:
        with path.open("rb") as plain:
            packed = plain.read(2) == _GZIP_MAGIC
            plain.seek(0)
            if not packed:
                yield plain
                return
            with gzip.open(plain) as unpacked:
                yield cast(BinaryIO, unpacked)
    except (EOFError, zlib.error, gzip.BadGzipFile) as error:
        raise RecordingError(f"{path} is a damaged gzip file ({error}): fetch or record it again") from error
    except OSError as error:
        raise RecordingError(f"{path} cannot be read ({error.strerror or error}): check the path") from error
