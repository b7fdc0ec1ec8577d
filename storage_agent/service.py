"""The agent's command socket: commands in, outcomes out, over ZeroMQ on this host.

One thread owns the socket and answers `stat`; a second carries out copies and deletes, one after another. A command
that was given up by its caller still runs, and its answer is kept for when it is asked again.
"""

from __future__ import annotations

import itertools
import queue
import threading
from types import TracebackType

import zmq

from event_plane.errors import EventPlaneError
from storage_agent.agent import StorageAgent
from storage_agent.command_wire import (
    REQUEST_BYTES_MAX,
    CopyRequest,
    DeleteRequest,
    RefusedReply,
    Reply,
    Request,
    StatReply,
    StatRequest,
    decode_request,
    encode,
    keys_from_wire,
    outcome_to_wire,
)
from storage_agent.errors import CommandRefused, ServiceError, StorageAgentError

WAITING_COMMANDS_MAX = 1024
_LOOPBACK = ("tcp://127.0.0.1:", "tcp://[::1]:", "tcp://localhost:", "ipc://")
_STOP = b""
"""On the socket that answers come by, instead of one."""
_service_numbers = itertools.count()


class AgentService:
    """Serves one agent's commands on `command_url` until `close`. The agent itself stays open."""

    def __init__(self, agent: StorageAgent, command_url: str) -> None:
        """Binds before it returns. Raises `ServiceError`: not this host, port in use, or not a ZeroMQ URL."""
        if not command_url.startswith(_LOOPBACK):
            raise ServiceError(
                f"command_url {command_url!r} is not on this host; use tcp://127.0.0.1:PORT or ipc://PATH"
            )
        self._agent = agent
        self._context = zmq.Context()
        self._router = self._context.socket(zmq.ROUTER)
        self._router.linger = 0
        self._router.setsockopt(zmq.MAXMSGSIZE, REQUEST_BYTES_MAX)
        inside = f"inproc://agent-service-{next(_service_numbers)}"
        self._answers = self._context.socket(zmq.PULL)
        self._answers.bind(inside)
        # One socket for the worker, one for `close`: a socket belongs to one thread.
        self._answers_in = self._context.socket(zmq.PUSH)
        self._answers_in.connect(inside)
        self._stop_in = self._context.socket(zmq.PUSH)
        self._stop_in.connect(inside)
        try:
            self._router.bind(command_url)
        except zmq.ZMQError as error:
            self._close_sockets()
            reason = zmq.strerror(error.errno or 0)
            raise ServiceError(
                f"command_url {command_url!r} cannot be bound: {reason}; stop what uses it or choose another"
            ) from error
        self.command_url = self._router.getsockopt_string(zmq.LAST_ENDPOINT)
        """Where it listens, with the port that was chosen where `command_url` ended in `:*`."""
        self._commands: queue.Queue[tuple[list[bytes], Request] | None] = queue.Queue(WAITING_COMMANDS_MAX)
        self._closed = False
        self._threads = [
            threading.Thread(target=self._listen, name=f"commands-{agent.name}", daemon=True),
            threading.Thread(target=self._work, name=f"moves-{agent.name}", daemon=True),
        ]
        for thread in self._threads:
            thread.start()

    def close(self) -> None:
        """Finish the command under way, forget those that wait, close the sockets. Idempotent."""
        if self._closed:
            return
        self._closed = True
        self._stop_in.send(_STOP)
        for thread in self._threads:
            thread.join()
        self._close_sockets()

    def __enter__(self) -> AgentService:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _close_sockets(self) -> None:
        self._context.destroy(linger=0)

    def _listen(self) -> None:
        poller = zmq.Poller()
        poller.register(self._router, zmq.POLLIN)
        poller.register(self._answers, zmq.POLLIN)
        while True:
            ready = dict(poller.poll())
            if self._answers in ready:
                answer = self._answers.recv_multipart()
                if answer == [_STOP]:
                    break
                self._router.send_multipart(answer)
            if self._router in ready:
                self._receive(self._router.recv_multipart())
        while True:  # what waits is dropped, so that the worker ends with the command under way
            try:
                self._commands.get_nowait()
            except queue.Empty:
                break
        self._commands.put(None)

    def _receive(self, frames: list[bytes]) -> None:
        """Frames: the peer, the caller's number for the request, the request."""
        if len(frames) != 3:
            return  # nobody of ours, and no number to answer to
        envelope, payload = frames[:2], frames[2]
        try:
            request = decode_request(payload)
            if isinstance(request, StatRequest):
                self._reply(self._router, envelope, StatReply(self._agent.stat()))
            else:
                self._commands.put_nowait((envelope, request))
        except CommandRefused as error:
            self._reply(self._router, envelope, RefusedReply(str(error)))
        except queue.Full:
            reason = f"{WAITING_COMMANDS_MAX} commands wait already; ask again later"
            self._reply(self._router, envelope, RefusedReply(reason))

    def _work(self) -> None:
        while (command := self._commands.get()) is not None:
            envelope, request = command
            self._reply(self._answers_in, envelope, self._carry_out(request))

    def _carry_out(self, request: Request) -> Reply:
        try:
            match request:
                case CopyRequest(command_id, keys, source, target):
                    return outcome_to_wire(self._agent.copy(command_id, keys_from_wire(keys), source, target))
                case DeleteRequest(command_id, volume, keys):
                    return outcome_to_wire(self._agent.delete(command_id, volume, keys_from_wire(keys)))
                case StatRequest():
                    return StatReply(self._agent.stat())
        except EventPlaneError as error:  # bytes may have moved: asked again, the answer says what became of them
            return RefusedReply(f"the agent cannot publish what it did: {error}")
        except StorageAgentError as error:
            return RefusedReply(str(error))

    @staticmethod
    def _reply(socket: zmq.Socket[bytes], envelope: list[bytes], reply: Reply) -> None:
        socket.send_multipart([*envelope, encode(reply)])
