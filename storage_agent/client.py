"""The agent's port from another process."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from contextlib import suppress
from math import inf
from types import TracebackType
from typing import TypeVar

from event_plane.credentials import NO_CREDENTIALS, Credentials
from storage_agent.block_wire import keys_to_wire
from storage_agent.command_nats import SCHEME as NATS_SCHEME
from storage_agent.command_nats import NatsCommandCaller
from storage_agent.command_wire import (
    CommandReply,
    CompactReply,
    CompactRequest,
    CopyRequest,
    DeleteRequest,
    MoveRequest,
    RefusedReply,
    RefuseRequest,
    RegisterRequest,
    Reply,
    Request,
    ResizeRequest,
    ScrubReply,
    ScrubRequest,
    StatReply,
    StatRequest,
    UnregisterRequest,
    VolumeReply,
    VolumeRequest,
    decode_reply,
    encode,
    outcome_from_wire,
)
from storage_agent.command_zmq import ZmqCommandCaller
from storage_agent.data_wire import DataReply, DataRequest, DoneReply
from storage_agent.descriptor import VolumeDescriptor
from storage_agent.errors import AgentUnreachable, CommandRefused, DescriptorError, StaleTerm
from storage_agent.port import AgentStat, BlockKey, CommandOutcome, CompactReport, ScrubReport, VolumeStat

ReplyT = TypeVar("ReplyT", bound=DataReply)


class AgentClient:
    """Implements `port.AgentPort` over an agent's command socket. Thread-safe: one request at a time.

    Connects when first asked, and over ZeroMQ anew after every request that was not answered in time. Commands raise
    `AgentUnreachable`, after which ask again with the same `command_id`, or `CommandRefused` with the agent's reason.
    """

    def __init__(
        self,
        command_url: str,
        timeout_s: float = 30.0,
        credentials: Credentials = NO_CREDENTIALS,
        *,
        connect_s: float = inf,
    ) -> None:
        """`credentials` are shown to a NATS server. `connect_s`: over ZeroMQ, an answer is waited for no longer than
        this while there is no connection."""
        self.command_url = command_url
        self._timeout_s = timeout_s
        self._connect_s = connect_s
        self._credentials = credentials
        self._lock = threading.Lock()
        self._caller: ZmqCommandCaller | NatsCommandCaller | None = None
        self._closed = False

    def stat(self) -> AgentStat:
        """See `AgentPort.stat`. Raises `AgentUnreachable`, or `CommandRefused` with the agent's reason."""
        reply = self._ask(StatRequest())
        if not isinstance(reply, StatReply):
            raise self._unexpected(reply)
        return reply.stat

    def copy(
        self, command_id: str, keys: Sequence[BlockKey], source: str, target: str, *, term: int = 0
    ) -> CommandOutcome:
        """See `AgentPort.copy`."""
        return self._command(CopyRequest(command_id, keys_to_wire(keys), source, target, term))

    def delete(self, command_id: str, volume: str, keys: Sequence[BlockKey], *, term: int = 0) -> CommandOutcome:
        """See `AgentPort.delete`."""
        return self._command(DeleteRequest(command_id, volume, keys_to_wire(keys), term))

    def move(
        self, command_id: str, keys: Sequence[BlockKey], source: str, target: str, *, keep: bool, term: int = 0
    ) -> CommandOutcome:
        """See `AgentPort.move`."""
        return self._command(MoveRequest(command_id, keys_to_wire(keys), source, target, keep, term))

    def scrub(self, command_id: str, volume: str, *, term: int = 0) -> ScrubReport:
        """See `AgentPort.scrub`. It may take longer than the timeout: ask again until it is answered."""
        reply = self._ask(ScrubRequest(command_id, volume, term))
        if not isinstance(reply, ScrubReply):
            raise self._unexpected(reply)
        return reply.report

    def compact(
        self, command_id: str, volume: str, keys: Sequence[BlockKey] = (), *, term: int = 0
    ) -> CompactReport:
        """See `AgentPort.compact`. As `scrub`."""
        reply = self._ask(CompactRequest(command_id, volume, term, keys_to_wire(keys)))
        if not isinstance(reply, CompactReply):
            raise self._unexpected(reply)
        return reply.report

    def refuse_tenants(self, tenants: Sequence[str], *, term: int = 0) -> None:
        """See `AgentPort.refuse_tenants`."""
        reply = self._ask(RefuseRequest(list(tenants), term))
        if not isinstance(reply, DoneReply):
            raise self._unexpected(reply)

    def register_volume(self, descriptor: VolumeDescriptor, *, term: int = 0) -> VolumeStat:
        """See `AgentPort.register_volume`. What the agent has against it is a `CommandRefused` here, or a
        `DescriptorError`."""
        return self._ask_volume(RegisterRequest(descriptor, term))

    def unregister_volume(self, volume: str, *, drain_s: float = 0.0, term: int = 0) -> None:
        """See `AgentPort.unregister_volume`; likewise. The agent waits for a minute at most."""
        reply = self._ask(UnregisterRequest(volume, drain_s, term))
        if not isinstance(reply, DoneReply):
            raise self._unexpected(reply)

    def resize_volume(self, volume: str, capacity_blocks: int, *, term: int = 0) -> VolumeStat:
        """See `AgentPort.resize_volume`; likewise."""
        return self._ask_volume(ResizeRequest(volume, capacity_blocks, term))

    def _ask_volume(self, request: VolumeRequest) -> VolumeStat:
        reply = self._ask(request)
        if not isinstance(reply, VolumeReply):
            raise self._unexpected(reply)
        return reply.stat

    def ask(self, request: DataRequest, expected: type[ReplyT]) -> ReplyT:
        """For what moves bytes itself. Raises as `stat`."""
        reply = self._ask(request)
        if not isinstance(reply, expected):
            raise self._unexpected(reply)
        return reply

    def ask_only(self, request: DataRequest) -> None:
        """As `ask`, for what it does not matter whether it is heard: the agent finds out by itself."""
        with suppress(AgentUnreachable, CommandRefused):
            self._ask(request)

    def close(self) -> None:
        """Ends the request under way with `AgentUnreachable`. Idempotent."""
        self._closed = True
        if self._caller is not None:
            self._caller.stop()
        with self._lock:
            if self._caller is not None:
                self._caller.close()
                self._caller = None

    def __enter__(self) -> AgentClient:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _command(self, request: Request) -> CommandOutcome:
        reply = self._ask(request)
        if not isinstance(reply, CommandReply):
            raise self._unexpected(reply)
        return outcome_from_wire(reply)

    def _unexpected(self, reply: Reply) -> CommandRefused:
        return CommandRefused(f"agent at {self.command_url} answered with {type(reply).__name__}")

    def _ask(self, request: Request) -> Reply:
        payload = encode(request)
        with self._lock:
            if self._closed:
                raise AgentUnreachable(f"the client of {self.command_url} is closed")
            if self._caller is None:
                self._caller = self._open_caller()
            longest = self._caller.request_bytes_max
            if len(payload) > longest:
                raise CommandRefused(f"the command has {len(payload)} bytes, at most {longest} go; ask for less")
            answer = self._caller.ask(payload, self._timeout_s)
        reply = decode_reply(answer)
        if isinstance(reply, RefusedReply):
            if reply.fault is not None:
                raise DescriptorError(reply.reason, reply.fault)
            raise (StaleTerm if reply.is_stale else CommandRefused)(reply.reason)
        return reply

    def _open_caller(self) -> ZmqCommandCaller | NatsCommandCaller:
        if self.command_url.startswith(NATS_SCHEME):
            return NatsCommandCaller(self.command_url, self._credentials)
        return ZmqCommandCaller(self.command_url, self._connect_s)
