"""The agent's port from another process."""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Sequence
from types import TracebackType

import zmq

from storage_agent.command_wire import (
    REQUEST_BYTES_MAX,
    CommandReply,
    CopyRequest,
    DeleteRequest,
    RefusedReply,
    Reply,
    Request,
    StatReply,
    StatRequest,
    decode_reply,
    encode,
    keys_to_wire,
    outcome_from_wire,
)
from storage_agent.errors import AgentUnreachable, CommandRefused
from storage_agent.port import AgentStat, BlockKey, CommandOutcome

_CLOSED_LOOK_MS = 100
"""How often a waiting request looks whether the client was closed meanwhile."""


class AgentClient:
    """Implements `port.AgentPort` over an agent's command socket. Thread-safe: one request at a time.

    Connects when first asked, and anew after every request that was not answered in time.
    """

    def __init__(self, command_url: str, timeout_s: float = 30.0) -> None:
        self.command_url = command_url
        self._timeout_s = timeout_s
        self._lock = threading.Lock()
        self._context = zmq.Context()
        self._socket: zmq.Socket[bytes] | None = None
        self._numbers = itertools.count()
        self._closed = False

    def stat(self) -> AgentStat:
        """See `AgentPort.stat`. Raises `AgentUnreachable`, or `CommandRefused` with the agent's reason."""
        reply = self._ask(StatRequest())
        if not isinstance(reply, StatReply):
            raise CommandRefused(f"agent at {self.command_url} answered a stat with {type(reply).__name__}")
        return reply.stat

    def copy(self, command_id: str, keys: Sequence[BlockKey], source: str, target: str) -> CommandOutcome:
        """See `AgentPort.copy`. Raises as `stat`; after `AgentUnreachable` ask again with the same `command_id`."""
        return self._command(CopyRequest(command_id, keys_to_wire(keys), source, target))

    def delete(self, command_id: str, volume: str, keys: Sequence[BlockKey]) -> CommandOutcome:
        """See `AgentPort.delete`. Raises as `copy`."""
        return self._command(DeleteRequest(command_id, volume, keys_to_wire(keys)))

    def close(self) -> None:
        """Ends the request under way with `AgentUnreachable`. Idempotent."""
        self._closed = True
        with self._lock:
            self._disconnect()
            self._context.term()

    def __enter__(self) -> AgentClient:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _command(self, request: Request) -> CommandOutcome:
        reply = self._ask(request)
        if not isinstance(reply, CommandReply):
            raise CommandRefused(f"agent at {self.command_url} answered a command with {type(reply).__name__}")
        return outcome_from_wire(reply)

    def _ask(self, request: Request) -> Reply:
        payload = encode(request)
        if len(payload) > REQUEST_BYTES_MAX:
            raise CommandRefused(f"the command has {len(payload)} bytes, at most {REQUEST_BYTES_MAX} go; ask for less")
        with self._lock:
            if self._closed:
                raise AgentUnreachable(f"the client of {self.command_url} is closed")
            number = next(self._numbers).to_bytes(8, "little")
            answer: bytes | None = None
            try:
                socket = self._connect()
                socket.send_multipart([number, payload], zmq.NOBLOCK)
                answer = self._wait_for(socket, number)
            except zmq.ZMQError as error:
                reason = zmq.strerror(error.errno or 0)
                raise AgentUnreachable(f"agent at {self.command_url} cannot be asked: {reason}") from error
            finally:
                if answer is None:  # an interrupt too: its late answer must not meet the next question
                    self._disconnect()
        if answer is None:
            raise AgentUnreachable(
                f"agent at {self.command_url} did not answer in {self._timeout_s} s; check that it runs, then ask again"
            )
        reply = decode_reply(answer)
        if isinstance(reply, RefusedReply):
            raise CommandRefused(reply.reason)
        return reply

    def _wait_for(self, socket: zmq.Socket[bytes], number: bytes) -> bytes | None:
        deadline = time.monotonic() + self._timeout_s
        while (left_s := deadline - time.monotonic()) > 0:
            if self._closed:
                raise AgentUnreachable(f"the client of {self.command_url} was closed while it waited")
            if not socket.poll(min(int(left_s * 1000) + 1, _CLOSED_LOOK_MS)):
                continue
            frames = socket.recv_multipart()
            if len(frames) == 2 and frames[0] == number:
                return frames[1]
        return None

    def _connect(self) -> zmq.Socket[bytes]:
        if self._socket is None:
            self._socket = self._context.socket(zmq.DEALER)
            self._socket.linger = 0
            self._socket.connect(self.command_url)
        return self._socket

    def _disconnect(self) -> None:
        if self._socket is not None:
            self._socket.close(linger=0)
            self._socket = None
