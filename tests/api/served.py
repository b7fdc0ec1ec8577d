"""The admin view over real sockets, for tests that stream or drive a browser."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from sample_parts import sample_parts

from advisor.api.app import create_app
from advisor.api.feed import LiveFeed
from advisor.api.server import AdminServer, open_socket
from advisor.views import AdvisorReader


class Served:
    """A running server; `url` ends with a slash. `stop` returns when its thread has ended."""

    def __init__(self, reader: AdvisorReader, port: int = 0, **parts: Any) -> None:
        app = create_app(sample_parts(reader=reader, **parts))
        self._server = AdminServer(app, open_socket("127.0.0.1", port), parts.get("api"))
        self._feed: LiveFeed = app.state.feed
        self._thread = threading.Thread(target=lambda: asyncio.run(self._serve()), name="served")
        self._thread.start()

    async def _serve(self) -> None:
        self._loop = asyncio.get_running_loop()
        await self._server.serve_until_told()

    @property
    def url(self) -> str:
        return self._server.url

    def streams(self) -> int:
        """Places of the live feed that are taken."""
        return self._feed._streams.total()

    def awaited(self) -> int:
        """Requests of which more is waited for."""
        return len(self._server._stop._waiting)

    def tasks(self) -> int:
        """Of the event loop, that are not done."""

        async def counted() -> int:
            return len(asyncio.all_tasks()) - 1

        return asyncio.run_coroutine_threadsafe(counted(), self._loop).result(60)

    def stop(self) -> None:
        self._server.should_exit = True
        self._thread.join(timeout=60)
        assert not self._thread.is_alive()


@contextmanager
def serving(reader: AdvisorReader, **parts: Any) -> Iterator[Served]:
    served = Served(reader, **parts)
    try:
        yield served
    finally:
        served.stop()
