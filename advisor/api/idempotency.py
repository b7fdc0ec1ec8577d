"""Writes that can be repeated: the same Idempotency-Key gets the first answer again, and nothing is done twice."""

from __future__ import annotations

import hashlib
import re
import sqlite3
import time

import structlog
from starlette.concurrency import run_in_threadpool
from starlette.datastructures import Headers
from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from advisor.access.identity import Identity
from advisor.access.sessions import Admission
from advisor.api.bodies import again
from advisor.api.problems import problem
from advisor.api.remembered import Answer, Remembered, Verdict
from advisor.api.remembered_file import RememberedFile

HEADER = "idempotency-key"
METHODS = frozenset({"POST", "PUT", "PATCH", "DELETE"})
QUESTIONS = frozenset({"/api/v1/advice/load"})
"""They change nothing, though they are POSTs: asked again they are answered anew."""
BODY_BYTES_MAX = 1 << 20
"""Of a request with a key, and of an answer that is kept."""
REFUSED_FROM = 400
"""Answers from this status on are not kept: nothing was done, and who may do nothing takes no place from others."""

_KEY = re.compile(r'[!-~]{1,255}|"[ -~]{1,253}"', re.ASCII)
_HEADERS_KEPT = (b"content-type", b"location", b"etag")
_log = structlog.get_logger()


class Idempotency:
    """ASGI middleware, within the door: only those whom it let in are remembered.

    A key is begun on the disk before anything is done, so that after a crash in between a repeat is told that the end
    is unknown, and is not done a second time.
    """

    def __init__(self, app: ASGIApp, file: RememberedFile | None) -> None:
        """`file` None: what is remembered ends with this process."""
        self._app = app
        self._file = file
        self._remembered = Remembered(() if file is None else file.load())

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        key = Headers(scope=scope).get(HEADER) if _is_write(scope) else None
        who: Identity | None = scope.get("state", {}).get("identity")
        if key is None or who is None:
            await self._app(scope, receive, send)
            return
        if not _KEY.fullmatch(key):
            answer = _refused(422, f"Idempotency-Key was {key[:80]!r}: give 1 to 255 visible ASCII characters")
            await answer(scope, receive, send)
            return
        body = await _whole(receive)
        if body is None:
            detail = f"the body is longer than {BODY_BYTES_MAX} bytes: send it without Idempotency-Key"
            await _refused(413, detail)(scope, receive, send)
            return
        slot = _digest(*_owner(scope, who), key)
        fingerprint = _digest(scope["method"], scope["path"], scope["query_string"].decode("latin-1"), body)
        begun = self._remembered.begin(slot, fingerprint, time.time_ns() // 1_000)
        if begun.verdict is Verdict.FRESH:
            await self._carry_out(slot, begun.dropped, scope, again(body, receive), send)
        elif begun.answer is not None and begun.verdict is Verdict.REPEATED:
            await _send_again(begun.answer, send)
        else:
            await _turned_down(begun.verdict)(scope, receive, send)

    async def _carry_out(
        self, slot: bytes, dropped: list[bytes], scope: Scope, receive: Receive, send: Send
    ) -> None:
        try:
            await self._put(slot, dropped)
        except sqlite3.Error as error:
            self._remembered.fail(slot)
            detail = f"the key cannot be remembered ({error}), so nothing was done: free space on the service's disk"
            await _refused(503, detail)(scope, receive, send)
            return
        kept = _Keeping(send)
        try:
            await self._app(scope, receive, kept)
        except Exception:
            # Answered with 500 further out: what was begun has raised, and may be asked for again.
            await self._forget(slot)
            raise
        except BaseException:
            self._remembered.lose(slot)
            raise
        await self._remember(slot, kept)
        await kept.flush()

    async def _remember(self, slot: bytes, kept: _Keeping) -> None:
        answer = kept.answer()
        if answer is None:
            self._remembered.lose(slot)
            return
        if answer.status >= REFUSED_FROM:
            await self._forget(slot)
            return
        dropped = self._remembered.answer(slot, answer)
        try:
            await self._put(slot, dropped)
        except sqlite3.Error as error:
            _log.warning("an answer is remembered until this process ends only", slot=slot.hex()[:12], error=str(error))

    async def _forget(self, slot: bytes) -> None:
        self._remembered.fail(slot)
        if self._file is None:
            return
        try:
            await run_in_threadpool(self._file.remove, [slot])
        except sqlite3.Error as error:
            _log.warning("a key stays begun in the file", slot=slot.hex()[:12], error=str(error))

    async def _put(self, slot: bytes, dropped: list[bytes]) -> None:
        entry = self._remembered.get(slot)
        if self._file is not None and entry is not None:
            await run_in_threadpool(self._file.put, entry, dropped)


class _Keeping:
    """Holds an answer back until it is remembered; one that is longer than `BODY_BYTES_MAX` is let through."""

    def __init__(self, send: Send) -> None:
        self._send = send
        self._held: list[Message] = []
        self._held_bytes = 0
        self._through = False

    async def __call__(self, message: Message) -> None:
        if self._through:
            await self._send(message)
            return
        self._held.append(message)
        self._held_bytes += len(message.get("body", b""))
        if self._held_bytes > BODY_BYTES_MAX:
            self._through = True
            await self.flush()

    def answer(self) -> Answer | None:
        """What was held; None where it was too long, or never came."""
        if self._through or not self._held or self._held[-1].get("more_body", False):
            return None
        start = self._held[0]
        headers = tuple((n.decode(), v.decode("latin-1")) for n, v in start["headers"] if n.lower() in _HEADERS_KEPT)
        return Answer(start["status"], headers, b"".join(message.get("body", b"") for message in self._held[1:]))

    async def flush(self) -> None:
        held, self._held = self._held, []
        for message in held:
            await self._send(message)


def _is_write(scope: Scope) -> bool:
    return (
        scope["type"] == "http"
        and scope["method"] in METHODS
        and scope["path"].startswith("/api/v1/")
        and scope["path"] not in QUESTIONS
    )


def _owner(scope: Scope, who: Identity) -> tuple[str, ...]:
    """Whose key it is: names are given twice, tokens are not. Whoever comes without one of ours is known by name."""
    admission: Admission | None = scope["state"].get("admission")
    return who.tenant, who.name, who.scope.word, "" if admission is None else admission.token_id


async def _whole(receive: Receive) -> bytes | None:
    """A request's body; None where it is longer than `BODY_BYTES_MAX`, or the client went in the middle of it."""
    body = bytearray()
    more = True
    while more:
        message = await receive()
        body += message.get("body", b"")
        more = message.get("more_body", False)
        if message["type"] != "http.request" or len(body) > BODY_BYTES_MAX:
            return None
    return bytes(body)


def _digest(*parts: str | bytes) -> bytes:
    digest = hashlib.sha256()
    for part in parts:
        whole = part if isinstance(part, bytes) else part.encode()
        digest.update(len(whole).to_bytes(8, "big") + whole)
    return digest.digest()


async def _send_again(answer: Answer, send: Send) -> None:
    length = [] if answer.status == 204 else [(b"content-length", str(len(answer.body)).encode())]
    headers = [(name.encode(), value.encode("latin-1")) for name, value in answer.headers]
    headers += [*length, (b"idempotency-replayed", b"true")]
    await send({"type": "http.response.start", "status": answer.status, "headers": headers})
    await send({"type": "http.response.body", "body": answer.body})


def _refused(status: int, detail: str) -> JSONResponse:
    return problem(status, "idempotency", "The Idempotency-Key cannot be used", detail)


def _turned_down(verdict: Verdict) -> JSONResponse:
    if verdict is Verdict.DIFFERENT:
        return _refused(422, "Idempotency-Key was sent before with another request: make a key for each request")
    if verdict is Verdict.UNKNOWN:
        return _refused(
            409,
            "the request with this Idempotency-Key was begun, and its answer was not kept: see in GET /api/v1/audit "
            "whether it was done, and send what is missing with another key",
        )
    if verdict is Verdict.FULL:
        answer = _refused(503, "too many requests with an Idempotency-Key are under way: send it again soon")
    else:
        answer = _refused(409, "the request with this Idempotency-Key is still under way: send it again soon")
    answer.headers["Retry-After"] = "1"
    return answer
