"""Recordings: routes of the REST API, and their bodies."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from pathlib import Path as FilePath
from typing import Annotated, Any, TypeVar

from fastapi import APIRouter, Depends, HTTPException, Path, Query, Request, Response
from pydantic import ConfigDict, Field
from starlette.requests import ClientDisconnect
from starlette.responses import FileResponse

from advisor.access.identity import Scope
from advisor.api.access import identity_of, needs
from advisor.api.actions import NoOrder, Operator, Order, done
from advisor.api.problems import documented
from advisor.api.queries import ListQuery
from advisor.api.routes import first_rows
from advisor.recording_shelf import NoRoom, TooLarge
from advisor.recording_views import (
    NAME_PATTERN,
    AdvisorRecordings,
    AdvisorUpload,
    RecordingDetailView,
    RecordingView,
)
from event_plane.errors import RecordingError
from event_plane.recording import detect_format

Answer = TypeVar("Answer")

Name = Annotated[str, Field(pattern=NAME_PATTERN, description="Of a recording: the name of its file.")]
NameInPath = Annotated[str, Path(pattern=NAME_PATTERN, description="Of a recording: the name of its file.")]

WRITTEN_AT_ONCE_BYTES = 1 << 20
UPLOAD_SILENCE_S = 30.0
"""Of one who sends a file, after which it is given up."""

_BYTES = "application/octet-stream"
_SENT_FILE: dict[str, Any] = {
    "requestBody": {"required": True, "content": {_BYTES: {"schema": {"type": "string", "format": "binary"}}}}
}


class RecordOrder(Order):
    """Without `seconds` and `events` it goes on until it is stopped."""

    model_config = ConfigDict(json_schema_extra={"examples": [{"name": "evening", "seconds": 600}]})

    name: Name
    seconds: float | None = Field(None, gt=0, le=604_800, description="It ends by itself after so many seconds.")
    events: int | None = Field(None, ge=1, le=1 << 40, description="It ends with the batch that has so many events.")


def recording_routes(recordings: AdvisorRecordings) -> APIRouter:
    """`/api/v1/recordings`."""
    routes = APIRouter(prefix="/api/v1", tags=["recordings"], dependencies=[Depends(needs(Scope.READ))])

    @routes.get("/recordings", summary="Recordings, newest first", responses=documented(422))
    def index(query: Annotated[ListQuery, Query()], response: Response) -> list[RecordingView]:
        return first_rows(recordings.list(), query.limit, response)

    @routes.post("/recordings", summary="Record the log from here on", responses=documented(409, 422, 507))
    def start(order: RecordOrder, who: Operator) -> RecordingView:
        return kept(lambda: recordings.start(who.name, order.name, seconds=order.seconds, events=order.events))

    @routes.post(
        "/recordings/{name}/stop",
        summary="End a recording; answers when its file is whole",
        responses=documented(404, 409, 422),
    )
    def stop(name: NameInPath, _: NoOrder, who: Operator) -> RecordingView:
        return done(lambda: recordings.stop(who.name, name))

    @routes.get("/recordings/{name}", summary="What is in a recording", responses=documented(404, 422))
    def one(name: NameInPath) -> RecordingDetailView:
        """Figures as `kvadvisor inspect` counts them, in a process of its own: null until it has."""
        return done(lambda: recordings.get(name))

    @routes.get(
        "/recordings/{name}/file",
        summary="The file of a recording",
        response_class=FileResponse,
        responses={
            200: {"content": {_BYTES: {"schema": {"type": "string", "format": "binary"}}}},
            **documented(404, 409, 422),
        },
    )
    def file(name: NameInPath) -> FileResponse:
        path = done(lambda: recordings.file(name))
        return FileResponse(path, media_type=_BYTES, filename=_file_name(name, path))

    @routes.put(
        "/recordings/{name}",
        summary="Take in a recording, a capture or a trace of requests",
        responses=documented(400, 408, 409, 413, 422, 507),
        openapi_extra=_SENT_FILE,
    )
    async def upload(name: NameInPath, who: Operator, request: Request) -> RecordingView:
        """The body is the file as it is, Content-Type application/octet-stream. Answers when all of it has been read
        as such; of one that cannot be, nothing is left."""
        _require_size(request, name, recordings.upload_bytes_max)
        taken = await asyncio.to_thread(kept, lambda: recordings.upload(who.name, name))
        try:
            async for piece in _pieces(request):
                await asyncio.to_thread(kept, lambda piece=piece: taken.write(piece))
            return await _finished(request, taken)
        finally:
            taken.discard()

    @routes.delete("/recordings/{name}", summary="Delete a recording", responses=documented(404, 409, 422))
    def delete(name: NameInPath, who: Operator) -> RecordingView:
        """Answers with what was deleted."""
        return done(lambda: recordings.delete(who.name, name))

    return routes


def _file_name(name: str, path: FilePath) -> str:
    """What a recording is saved as: in Parquet, under a name that says so."""
    try:
        is_parquet = detect_format(path) == "parquet"
    except RecordingError:
        is_parquet = False
    return f"{name}.parquet" if is_parquet and not name.endswith(".parquet") else name


def kept(act: Callable[[], Answer]) -> Answer:
    """As `advisor.api.actions.done`, of what takes room on the disk or reads what was sent."""

    def tried() -> Answer:
        try:
            return act()
        except NoRoom as error:
            raise HTTPException(507, str(error)) from error
        except TooLarge as error:
            raise HTTPException(413, str(error)) from error
        except RecordingError as error:
            raise HTTPException(422, str(error)) from error

    return done(tried)


def _require_size(request: Request, name: str, bytes_max: int) -> None:
    """Before the first byte, of one who says how many there are."""
    said = request.headers.get("content-length", "")
    if said.isdigit() and int(said) > bytes_max:
        raise HTTPException(
            413, f"{name} has {int(said):,} bytes and at most {bytes_max:,} are taken in: raise api.upload_bytes_max"
        )


async def _finished(request: Request, taken: AdvisorUpload) -> RecordingView:
    """What `finish` answers. Where its sender goes before the file has its name, it is thrown away: see `_gone`."""
    finishing = asyncio.create_task(asyncio.to_thread(kept, taken.finish))
    leaving = asyncio.create_task(_left(request))
    try:
        await asyncio.wait({finishing, leaving}, return_when=asyncio.FIRST_COMPLETED)
        if not finishing.done():
            await asyncio.to_thread(taken.discard)
            await asyncio.wait({finishing})
            if finishing.exception() is not None:
                raise _gone(request) from finishing.exception()
        return await finishing
    finally:
        finishing.cancel()
        leaving.cancel()


async def _left(request: Request) -> None:
    """Returns when who sent it is not there any more, or not known any more."""
    while (await request.receive())["type"] != "http.disconnect":
        pass


def _gone(request: Request) -> HTTPException:
    """Of a sender that went away, 400; of one whose token is no more good (`advisor.api.door`), 401."""
    if identity_of(request) is None:
        detail = "the token was revoked or has expired before the file was taken in: nothing of it is kept"
        return HTTPException(401, detail, {"Connection": "close"})
    return HTTPException(400, "the connection ended before the file was taken in: send it again")


async def _pieces(request: Request) -> AsyncIterator[bytes]:
    """The body, in pieces worth a write. Raises 408 where its sender says nothing for long, else as `_gone`."""
    waiting = bytearray()
    stream = request.stream()
    while True:
        try:
            async with asyncio.timeout(UPLOAD_SILENCE_S):
                read = await anext(stream, None)
        except TimeoutError as error:
            raise HTTPException(408, f"nothing came for {UPLOAD_SILENCE_S:.0f} s: send the file again") from error
        except ClientDisconnect as error:
            raise _gone(request) from error
        waiting += read or b""
        if len(waiting) >= WRITTEN_AT_ONCE_BYTES or (read is None and waiting):
            yield bytes(waiting)
            waiting.clear()
        if read is None:
            return
