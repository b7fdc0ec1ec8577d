"""uvicorn, with the two things a long-lived dashboard needs: a plain word on a port in use, and streams that end."""

from __future__ import annotations

import errno
import ipaddress
import socket

import uvicorn
from fastapi import FastAPI

from advisor.api.errors import ApiError
from advisor.api.feed import LiveFeed

_SHUTDOWN_S_MAX = 3


def open_socket(host: str, port: int) -> socket.socket:
    """A TCP socket that listens on a loopback address; port 0 takes any free one. Connections wait for the server.

    Raises `ApiError` for an address that others can reach, and for a port in use.
    """
    try:
        address = ipaddress.ip_address("127.0.0.1" if host == "localhost" else host)
    except ValueError as error:
        raise ApiError(f"the API's host is {host!r}: give 127.0.0.1 or ::1") from error
    if not address.is_loopback:
        raise ApiError(f"the API's host is {host!r}, which others can reach, and it has no login yet: give 127.0.0.1")
    family = socket.AF_INET6 if address.version == 6 else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((str(address), port))
        listener.listen()
    except OSError as error:
        listener.close()
        if error.errno == errno.EADDRINUSE:
            reason = f"port {port} of {address} is in use: stop what listens there, or set api.port to another (0: any)"
        else:
            reason = f"port {port} of {address} cannot be opened: {error.strerror}; set api.port to another (0: any)"
        raise ApiError(reason) from error
    return listener


class AdminServer(uvicorn.Server):
    """Serves one app on one socket. Setting `should_exit` ends it: open streams are told to stop, then it waits.

    `url` is where the dashboard is: `http://127.0.0.1:8470/`.
    """

    def __init__(self, app: FastAPI, listener: socket.socket) -> None:
        super().__init__(
            uvicorn.Config(
                app, log_config=None, access_log=False, server_header=False, ws="none",
                timeout_graceful_shutdown=_SHUTDOWN_S_MAX,
            )
        )
        self._listener = listener
        host, port = listener.getsockname()[:2]
        self.url = f"http://{f'[{host}]' if ':' in host else host}:{port}/"
        self._feed: LiveFeed = app.state.feed

    async def serve_until_told(self) -> None:
        """Serve on the socket until `should_exit`."""
        await self.serve(sockets=[self._listener])

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        # uvicorn waits for open answers to end, and a stream never ends by itself.
        self._feed.close()
        await super().shutdown(sockets)
