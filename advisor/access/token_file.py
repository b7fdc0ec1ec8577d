"""The file of tokens in the service's directory: `tokens.json`, its owner's alone, replaced whole."""

from __future__ import annotations

import contextlib
import fcntl
import os
import stat
import time
from collections.abc import Iterator
from pathlib import Path

import msgspec

from advisor.access.errors import TokensError
from advisor.access.identity import Scope
from advisor.access.tokens import Token, TokenBook, make_token
from event_plane.errors import RecordingError
from event_plane.part_file import PartFile

FILE = "tokens.json"
LOCK = "tokens.lock"
TOKENS_MAX = 1_024
_BYTES_MAX = 4 << 20
_OTHERS = stat.S_IRWXG | stat.S_IRWXO


class _Kept(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    version: int
    tokens: list[Token]


_Signature = tuple[int, int, int, int, int]


class TokenFile:
    """Reads and writes `tokens.json` in `directory`. Every method raises `TokensError`."""

    def __init__(self, directory: Path) -> None:
        self.path = directory / FILE
        self._read: tuple[_Signature | None, TokenBook | TokensError] | None = None

    def create(
        self, name: str, scope: Scope, tenant: str = "", *, valid_s: float = 0.0, now_us: int | None = None
    ) -> tuple[Token, str]:
        """A token that is good from now on, for `valid_s` seconds (0: for ever), and the text to be shown once."""
        made_us = time.time_ns() // 1000 if now_us is None else now_us
        try:
            expires_us = made_us + round(valid_s * 1e6) if valid_s else 0
            token, text = make_token(name, scope, tenant, now_us=made_us, expires_us=expires_us)
        except ValueError as error:
            raise TokensError(str(error)) from error
        with self._locked():
            tokens = list(self._load())
            if len(tokens) >= TOKENS_MAX:
                raise TokensError(f"{self.path} holds {len(tokens)} tokens, which is the most: revoke some first")
            self._write([*tokens, token])
        return token, text

    def revoke(self, token_id: str) -> Token:
        """Answers with what it was."""
        with self._locked():
            tokens = list(self._load())
            for token in tokens:
                if token.id == token_id:
                    self._write([each for each in tokens if each is not token])
                    return token
        raise TokensError(f"{self.path} holds no token {token_id!r}: kvadvisor token list names those there are")

    def book(self) -> TokenBook:
        """The tokens there are now: the file is read again when it is another one than before."""
        signature = self._signature()
        if self._read is None or self._read[0] != signature:
            try:
                self._read = (signature, self._load())
            except TokensError as error:
                self._read = (signature, error)
        if isinstance(self._read[1], TokensError):
            raise self._read[1]
        return self._read[1]

    def _signature(self) -> _Signature | None:
        try:
            found = os.lstat(self.path)
        except (FileNotFoundError, NotADirectoryError):
            return None
        except OSError as error:
            raise self._unreadable(error) from error
        return found.st_mtime_ns, found.st_ctime_ns, found.st_size, found.st_ino, found.st_mode

    def _load(self) -> TokenBook:
        try:
            descriptor = os.open(self.path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
        except (FileNotFoundError, NotADirectoryError):
            return TokenBook([])
        except OSError as error:
            raise self._unreadable(error) from error
        with open(descriptor, "rb") as file:
            self._require_own(os.fstat(descriptor))
            content = file.read(_BYTES_MAX + 1)
        try:
            kept = msgspec.json.decode(content, type=_Kept) if len(content) <= _BYTES_MAX else None
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            raise TokensError(f"{self.path} is damaged ({error}): nobody comes in by a token; {_REMEDY}") from error
        if kept is None or kept.version != 1 or len(kept.tokens) > TOKENS_MAX:
            raise TokensError(f"{self.path} is not what this version writes: nobody comes in by a token; {_REMEDY}")
        return TokenBook(kept.tokens)

    def _require_own(self, found: os.stat_result) -> None:
        if not stat.S_ISREG(found.st_mode):
            raise TokensError(f"{self.path} is no regular file: nobody comes in by a token; {_REMEDY}")
        if found.st_uid not in (os.geteuid(), 0):
            raise TokensError(f"{self.path} belongs to user {found.st_uid}: chown it to {os.geteuid()}, who runs this")
        if found.st_mode & _OTHERS:
            raise TokensError(f"{self.path} has mode {stat.S_IMODE(found.st_mode):03o}, open to others: chmod 600 it")

    def _unreadable(self, error: OSError) -> TokensError:
        if isinstance(error, PermissionError):
            return TokensError(f"{self.path} cannot be read ({error.strerror}): make tokens as who serves, or root")
        return TokensError(f"{self.path} cannot be read ({error.strerror}): nobody comes in by a token; {_REMEDY}")

    def _write(self, tokens: list[Token]) -> None:
        content = msgspec.json.format(msgspec.json.encode(_Kept(1, tokens)), indent=1) + b"\n"
        try:
            part = PartFile(self.path)
        except RecordingError as error:
            raise TokensError(str(error)) from error
        try:
            os.fchmod(part.file.fileno(), stat.S_IRUSR | stat.S_IWUSR)
            part.file.write(content)
            part.finish(len(content))
        except (RecordingError, OSError) as error:
            part.discard()
            raise TokensError(str(error)) from error

    @contextlib.contextmanager
    def _locked(self) -> Iterator[None]:
        """One writer at a time. The lock file stays: removing it would let two lock two files of one name."""
        lock = self.path.with_name(LOCK)
        try:
            self.path.parent.mkdir(0o700, parents=True, exist_ok=True)
            descriptor = os.open(lock, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX)
                yield
            finally:
                os.close(descriptor)
        except OSError as error:
            raise TokensError(f"{lock} cannot be locked ({error.strerror}): make its folder writable") from error


_REMEDY = "mend it, or delete it and make tokens anew with kvadvisor token create"
