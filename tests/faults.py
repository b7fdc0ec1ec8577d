"""Proxies that disturb what passes between a real publisher and a real subscriber, by a script.

`ZmqProxy` stands between ZeroMQ ends and loses, doubles, delays and reorders whole messages; `ByteProxy` stands between
any TCP ends and cuts or stalls their connections.
"""

from __future__ import annotations

import asyncio
import queue
import threading
from collections import OrderedDict
from collections.abc import Callable, Coroutine, Sequence
from typing import Any, Final, TypeVar

import zmq

Fault = tuple[int, ...]
"""What becomes of one message: for each copy that arrives, how many later messages overtake it.

`(0,)` passes, `()` is lost, `(0, 0)` doubled, `(2,)` delayed past the next two, `(0, 5)` heard again much later.
"""
PASSES: Final[Fault] = (0,)
Frames = list[bytes]
_DEALERS_MAX: Final = 64
_POLL_MS: Final = 20
_PATIENCE_S: Final = 60.0
_T = TypeVar("_T")


class Lane:
    """Messages in one direction, the nth of which suffers the nth fault of a pattern that repeats. Pure."""

    def __init__(self, pattern: Sequence[Fault] = ()) -> None:
        self._pattern = tuple(pattern) or (PASSES,)
        self._count = 0
        self._delayed: list[tuple[int, int, Frames]] = []
        """Number of the message with which it is due, by how many it is overtaken, frames."""

    def through(self, message: Frames) -> list[Frames]:
        """What arrives now that `message` was sent: in order, but for what is overtaken."""
        fault = self._pattern[self._count % len(self._pattern)]
        self._count += 1
        self._delayed += [(self._count + overtaken, overtaken, message) for overtaken in fault]
        self._delayed.sort(key=lambda each: each[:2])
        due = [frames for at, _, frames in self._delayed if at <= self._count]
        del self._delayed[: len(due)]
        return due

    def calm(self) -> list[Frames]:
        """End the faults. Returns what was still delayed."""
        self._pattern = (PASSES,)
        return self.forget()

    def forget(self) -> list[Frames]:
        """Take out what is delayed: the connection that it was sent on is gone."""
        delayed = [frames for _, _, frames in self._delayed]
        self._delayed = []
        return delayed


class ZmqProxy:
    """Passes batches, requests and replies on through a lane each. One thread owns the sockets.

    It listens on `events_port` and `requests_port`, and connects to the publisher's two; each asker keeps an identity
    of its own there. Publishers may come and go on their ports. Everything passes until `disturb` and after `calm`.
    """

    def __init__(self, publisher_ports: tuple[int, int]) -> None:
        self.attached = threading.Event()
        """A batch has come by while somebody subscribed."""
        self._subscribed = False
        self._live, self._requests, self._replies = Lane(), Lane(), Lane()
        self._context = zmq.Context()
        self._sub = self._open(zmq.SUB)
        self._sub.setsockopt(zmq.SUBSCRIBE, b"")
        self._sub.setsockopt(zmq.RECONNECT_IVL, 10)
        self._sub.connect(f"tcp://127.0.0.1:{publisher_ports[0]}")
        self._publisher_requests = f"tcp://127.0.0.1:{publisher_ports[1]}"
        self._pub, self._router = self._open(zmq.XPUB), self._open(zmq.ROUTER)
        self.events_port = self._pub.bind_to_random_port("tcp://127.0.0.1")
        self.requests_port = self._router.bind_to_random_port("tcp://127.0.0.1")
        self._askers: OrderedDict[bytes, zmq.Socket[bytes]] = OrderedDict()
        self._orders: queue.SimpleQueue[tuple[Callable[[], None], threading.Event]] = queue.SimpleQueue()
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, name="zmq-proxy")
        self._thread.start()

    def disturb(
        self, *, live: Sequence[Fault] = (), requests: Sequence[Fault] = (), replies: Sequence[Fault] = ()
    ) -> None:
        """Have messages suffer these patterns from now on."""

        def disturb() -> None:
            self._live, self._requests, self._replies = Lane(live), Lane(requests), Lane(replies)

        self._order(disturb)

    def calm(self) -> None:
        """Let everything through from now on, what was delayed first."""

        def calm() -> None:
            for lane, send in self._lanes():
                for frames in lane.calm():
                    send(frames)

        self._order(calm)

    def forget(self) -> None:
        """Lose what is delayed, as when the publisher's connections end."""

        def forget() -> None:
            for lane, _ in self._lanes():
                lane.forget()

        self._order(forget)

    def close(self) -> None:
        self._stopping.set()
        self._thread.join()

    def _lanes(self) -> list[tuple[Lane, Callable[[Frames], object]]]:
        return [(self._live, self._pub.send_multipart), (self._requests, self._ask), (self._replies, self._reply)]

    def _order(self, order: Callable[[], None]) -> None:
        """Have the thread do it, and wait until it did."""
        done = threading.Event()
        self._orders.put((order, done))
        assert done.wait(_PATIENCE_S)

    def _open(self, kind: int) -> zmq.Socket[bytes]:
        opened = self._context.socket(kind)
        opened.setsockopt(zmq.LINGER, 0)
        # What is lost is lost by the script alone.
        opened.setsockopt(zmq.SNDHWM, 0)
        opened.setsockopt(zmq.RCVHWM, 0)
        return opened

    def _run(self) -> None:
        while not self._stopping.is_set():
            poller = zmq.Poller()
            for each in (self._sub, self._pub, self._router, *self._askers.values()):
                poller.register(each, zmq.POLLIN)
            ready = dict(poller.poll(_POLL_MS))
            while not self._orders.empty():
                order, done = self._orders.get()
                order()
                done.set()
            if self._pub in ready:
                self._subscribed = self._pub.recv().startswith(b"\x01")
            if self._sub in ready:
                if self._subscribed:
                    self.attached.set()
                self._pass(self._live, self._sub.recv_multipart(), self._pub.send_multipart)
            if self._router in ready:
                self._pass(self._requests, self._router.recv_multipart(), self._ask)
            for identity, asker in list(self._askers.items()):
                if asker in ready:
                    self._pass(self._replies, [identity, *asker.recv_multipart()], self._reply)
        self._context.destroy(linger=0)

    @staticmethod
    def _pass(lane: Lane, frames: Frames, send: Callable[[Frames], object]) -> None:
        for each in lane.through(frames):
            send(each)

    def _ask(self, frames: Frames) -> None:
        identity, *request = frames
        asker = self._askers.get(identity)
        if asker is None:
            if len(self._askers) == _DEALERS_MAX:
                self._askers.popitem(last=False)[1].close()
            asker = self._askers[identity] = self._open(zmq.DEALER)
            asker.setsockopt(zmq.RECONNECT_IVL, 10)
            asker.connect(self._publisher_requests)
        asker.send_multipart(request)

    def _reply(self, frames: Frames) -> None:
        # An asker that is gone, as one is that asked again, gets nothing: a ROUTER drops it in silence.
        self._router.send_multipart(frames)


def _abort(opening: asyncio.Task[tuple[asyncio.StreamReader, asyncio.StreamWriter]]) -> None:
    if not opening.cancelled() and opening.exception() is None:
        opening.result()[1].transport.abort()


class ByteProxy:
    """Passes TCP connections on to a port of this machine; `cut` ends them, `stall` holds up what they carry."""

    def __init__(self, target_port: int) -> None:
        self._target_port = target_port
        self._connections: set[asyncio.Task[None]] = set()
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="byte-proxy")
        self._thread.start()
        self._flowing = asyncio.Event()
        self._server = self._do(self._listen())
        self.port: int = self._server.sockets[0].getsockname()[1]

    def cut(self) -> None:
        """End every connection at once, what is under way included; new ones are let in."""
        self._do(self._cut())

    def stall(self) -> None:
        """Hold up every byte until `flow`."""
        self._loop.call_soon_threadsafe(self._flowing.clear)

    def flow(self) -> None:
        self._loop.call_soon_threadsafe(self._flowing.set)

    def close(self) -> None:
        self._do(self._close())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    def _do(self, what: Coroutine[Any, Any, _T]) -> _T:
        return asyncio.run_coroutine_threadsafe(what, self._loop).result(_PATIENCE_S)

    async def _listen(self) -> asyncio.Server:
        self._flowing.set()
        return await asyncio.start_server(self._connected, "127.0.0.1", 0)

    def _connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        connection = self._loop.create_task(self._carry(reader, writer))
        self._connections.add(connection)
        connection.add_done_callback(self._connections.discard)
        # Not in the task: one that is cancelled before its first step never runs.
        connection.add_done_callback(lambda _: writer.transport.abort())

    async def _carry(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """One connection, both ways, until either end goes or it is cut."""
        opening = self._loop.create_task(asyncio.open_connection("127.0.0.1", self._target_port))
        try:
            target_reader, target_writer = await asyncio.shield(opening)
        except OSError:
            # The target is away: the client sees its connection end, as it would without a proxy.
            return
        except asyncio.CancelledError:
            # Cut while it is opened: what comes of it all the same has nobody else to end it.
            opening.add_done_callback(_abort)
            raise
        both = [self._pump(reader, target_writer), self._pump(target_reader, writer)]
        tasks = [self._loop.create_task(each) for each in both]
        try:
            await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            target_writer.transport.abort()

    async def _pump(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while chunk := await reader.read(65_536):
            await self._flowing.wait()
            writer.write(chunk)
            await writer.drain()

    async def _cut(self) -> None:
        connections = list(self._connections)
        for connection in connections:
            connection.cancel()
        await asyncio.gather(*connections, return_exceptions=True)

    async def _close(self) -> None:
        self._server.close()
        await self._server.wait_closed()
        # One that was let in a moment ago is served yet, and an aborted transport closes in the loop's next turn.
        await asyncio.sleep(0.01)
        await self._cut()
        await asyncio.sleep(0.01)
