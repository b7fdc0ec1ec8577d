"""Commands over ZeroMQ on this host: a ROUTER takes them, a DEALER sends one and waits for its answer.

Frames: the caller's number for the request (8 bytes, echoed), then the request or answer.
"""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Callable
from math import inf

import zmq
from zmq.utils.monitor import parse_monitor_message

from storage_agent.command_desk import Answer
from storage_agent.command_wire import REQUEST_BYTES_MAX
from storage_agent.errors import AgentUnreachable, ServiceError

LOOPBACK = ("tcp://127.0.0.1:", "tcp://[::1]:", "tcp://localhost:", "ipc://")
"""How the URLs begin that ZeroMQ is bound to: it has no login, so nobody of another host may reach it."""
_STOP = b""
"""On the socket that answers come by, instead of one."""
_CLOSED_LOOK_MS = 100
"""How often a waiting request looks whether the caller was closed meanwhile."""
_listener_numbers = itertools.count()


class ZmqCommandListener:
    """Hands what comes in to `take` until `close`."""

    def __init__(self, url: str, take: Callable[[bytes, Answer], None], name: str) -> None:
        """Binds before it returns. Raises `ServiceError`: not this host, port in use, or not a ZeroMQ URL."""
        if not url.startswith(LOOPBACK):
            raise ServiceError(
                f"command_url {url!r} is not on this host; use tcp://127.0.0.1:PORT or ipc://PATH, or over the "
                "network nats://HOST:PORT/SUBJECT"
            )
        self._take = take
        self._context = zmq.Context()
        self._router = self._context.socket(zmq.ROUTER)
        self._router.linger = 0
        self._router.setsockopt(zmq.MAXMSGSIZE, REQUEST_BYTES_MAX)
        inside = f"inproc://agent-commands-{next(_listener_numbers)}"
        self._answers = self._context.socket(zmq.PULL)
        self._answers_in = self._context.socket(zmq.PUSH)
        # Unbounded, for the listening thread answers itself too: what waits is bounded by who hands it to us.
        self._answers.rcvhwm = self._answers_in.sndhwm = 0
        self._answers.bind(inside)
        self._answers_in.connect(inside)
        self._answering = threading.Lock()
        try:
            self._router.bind(url)
        except zmq.ZMQError as error:
            self._context.destroy(linger=0)
            reason = zmq.strerror(error.errno or 0)
            raise ServiceError(
                f"command_url {url!r} cannot be bound: {reason}; stop what uses it or choose another"
            ) from error
        self.url = self._router.getsockopt_string(zmq.LAST_ENDPOINT)
        """Where it listens, with the port that was chosen where it was given `:*`."""
        self._closed = False
        self._thread = threading.Thread(target=self._listen, name=f"commands-{name}", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Answers given from now on are dropped. Idempotent."""
        with self._answering:
            if self._closed:
                return
            self._closed = True
            self._answers_in.send(_STOP)
        self._thread.join()
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
                    return
                self._router.send_multipart(answer)
            if self._router in ready:
                frames = self._router.recv_multipart()
                if len(frames) == 3:  # else nobody of ours, and no number to answer to
                    self._take(frames[2], self._answer_to(frames[:2]))

    def _answer_to(self, envelope: list[bytes]) -> Answer:
        def answer(payload: bytes) -> None:
            with self._answering:
                if not self._closed:
                    self._answers_in.send_multipart([*envelope, payload])

        return answer


class ZmqCommandCaller:
    """Asks one question at a time; its caller sees to that. Connects when first asked."""

    def __init__(self, url: str, connect_s: float = inf) -> None:
        """`connect_s`: an answer is waited for no longer than this while there is no connection."""
        self.request_bytes_max = REQUEST_BYTES_MAX
        self._url = url
        self._connect_s = connect_s
        self._context = zmq.Context()
        self._socket: zmq.Socket[bytes] | None = None
        self._events: zmq.Socket[bytes] | None = None
        """Tells when a connection of the socket stands, and when it has ended."""
        self._is_connected = False
        self._numbers = itertools.count()
        self._closed = False

    def ask(self, payload: bytes, timeout_s: float) -> bytes:
        """The answer. Raises `AgentUnreachable`, after which it may still be under way."""
        number = next(self._numbers).to_bytes(8, "little")
        answer: bytes | None = None
        waited_s = timeout_s
        try:
            socket, events = self._connect()
            self._follow(events)  # what ended was of an agent before: this question goes to the one that runs now
            socket.send_multipart([number, payload], zmq.NOBLOCK)
            answer = self._wait_for(socket, events, number, timeout_s)
        except zmq.ZMQError as error:
            reason = zmq.strerror(error.errno or 0)
            raise AgentUnreachable(f"agent at {self._url} cannot be asked: {reason}") from error
        finally:
            if answer is None:  # an interrupt too: its late answer must not meet the next question
                waited_s = timeout_s if self._is_connected else min(timeout_s, self._connect_s)
                self._disconnect()
        if answer is None:
            raise AgentUnreachable(
                f"agent at {self._url} did not answer in {waited_s} s; check that it runs, then ask again"
            )
        return answer

    def stop(self) -> None:
        """Ends the question under way with `AgentUnreachable`, from any thread."""
        self._closed = True

    def close(self) -> None:
        self._disconnect()
        self._context.term()

    def _wait_for(
        self, socket: zmq.Socket[bytes], events: zmq.Socket[bytes], number: bytes, timeout_s: float
    ) -> bytes | None:
        asked_s = time.monotonic()
        poller = zmq.Poller()
        poller.register(socket, zmq.POLLIN)
        poller.register(events, zmq.POLLIN)
        while True:
            wait_s = timeout_s if self._is_connected else min(timeout_s, self._connect_s)
            left_s = asked_s + wait_s - time.monotonic()
            if left_s <= 0:
                return None
            if self._closed:
                raise AgentUnreachable(f"the client of {self._url} was closed while it waited")
            if not poller.poll(min(int(left_s * 1000) + 1, _CLOSED_LOOK_MS)):
                continue
            if socket.poll(0):
                frames = socket.recv_multipart()
                if len(frames) == 2 and frames[0] == number:
                    return frames[1]
            elif self._follow(events):  # whoever connects anew has not heard the question
                raise AgentUnreachable(
                    f"agent at {self._url} ended the connection and did not answer; check that it runs, then ask again"
                )

    def _follow(self, events: zmq.Socket[bytes]) -> bool:
        """Take note of what became of the connection; whether one has ended."""
        has_ended = False
        while events.poll(0):
            self._is_connected = parse_monitor_message(events.recv_multipart())["event"] == zmq.EVENT_CONNECTED
            has_ended |= not self._is_connected
        return has_ended

    def _connect(self) -> tuple[zmq.Socket[bytes], zmq.Socket[bytes]]:
        if self._socket is None or self._events is None:
            self._socket = self._context.socket(zmq.DEALER)
            self._socket.linger = 0
            self._events = self._socket.get_monitor_socket(zmq.EVENT_CONNECTED | zmq.EVENT_DISCONNECTED)
            self._socket.connect(self._url)
        return self._socket, self._events

    def _disconnect(self) -> None:
        if self._socket is not None and self._events is not None:
            self._socket.disable_monitor()
            self._events.close(linger=0)
            self._socket.close(linger=0)
            self._socket = self._events = None
            self._is_connected = False
