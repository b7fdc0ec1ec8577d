"""uvicorn, with the two things a long-lived dashboard needs: a plain word on a port in use, and streams that end."""

from __future__ import annotations

import errno
import ipaddress
import socket
import ssl

import uvicorn
from fastapi import FastAPI

from advisor.api.errors import ApiError
from advisor.api.feed import LiveFeed
from advisor.api.stopping import Stop
from advisor.api_settings import ApiSettings, is_loopback

_SHUTDOWN_S_MAX = 3


def open_socket(host: str, port: int, *, asks_login: bool = False) -> socket.socket:
    """A TCP socket that listens; port 0 takes any free one. Connections wait for the server.

    Raises `ApiError` for a port in use, and for an address that others can reach unless whoever comes `asks_login`.
    """
    try:
        address = ipaddress.ip_address("127.0.0.1" if host == "localhost" else host)
    except ValueError as error:
        raise ApiError(f"the API's host is {host!r}: give an address, as 127.0.0.1 or ::1") from error
    if not asks_login and not is_loopback(host):
        raise ApiError(
            f"the API's host is {host!r}, which others can reach without a login: set api.login = \"required\", or give"
            " 127.0.0.1"
        )
    family = socket.AF_INET6 if address.version == 6 else socket.AF_INET
    # asyncio has connections send at once (TCP_NODELAY) only where the protocol is named; else each answer of two parts
    # waits 40 ms for the reader to confirm the first.
    listener = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
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

    def __init__(self, app: FastAPI, listener: socket.socket, api: ApiSettings | None = None) -> None:
        """`api` says whether with TLS, and which proxies' word for a client's address is taken."""
        settings = api or ApiSettings()
        super().__init__(
            uvicorn.Config(
                app, log_config=None, access_log=False, server_header=False, ws="none",
                timeout_graceful_shutdown=_SHUTDOWN_S_MAX,
                ssl_certfile=settings.tls_cert_file, ssl_keyfile=settings.tls_key_file,
                # Without a proxy, whoever sends X-Forwarded-For would choose the address that its failures count for.
                proxy_headers=settings.behind_proxy, forwarded_allow_ips=list(settings.proxies),
            )
        )
        self._listener = listener
        host, port = listener.getsockname()[:2]
        scheme = "http" if settings.tls_cert_file is None else "https"
        self.url = f"{scheme}://{f'[{host}]' if ':' in host else host}:{port}/"
        self._feed: LiveFeed = app.state.feed
        self._stop: Stop = app.state.stop

    async def serve_until_told(self) -> None:
        """Serve on the socket until `should_exit`."""
        await self.serve(sockets=[self._listener])

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        # uvicorn waits for open answers to end: a stream never ends by itself, nor does a request whose sender stalls.
        self._feed.close()
        self._stop.begin()
        await super().shutdown(sockets)


def require_certificate(settings: ApiSettings) -> None:
    """Raises `ApiError` where TLS is asked for with files that cannot be used."""
    if settings.tls_cert_file is None or settings.tls_key_file is None:
        return
    for file in (settings.tls_cert_file, settings.tls_key_file):
        try:
            file.open("rb").close()
        except OSError as error:
            raise ApiError(f"{file}, of the API's TLS, cannot be read ({error.strerror}): make it readable") from error
    try:
        # A password would be asked for on a terminal that a service has none of.
        ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).load_cert_chain(settings.tls_cert_file, settings.tls_key_file, "")
    except (ssl.SSLError, ValueError) as error:
        raise ApiError(
            f"{settings.tls_cert_file} and {settings.tls_key_file} are no certificate with its key ({error}): give PEM"
            " files that go together, the key without a password"
        ) from error
