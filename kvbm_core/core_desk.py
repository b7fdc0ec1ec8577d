"""A running core's answers over HTTP on this machine: its metrics, and where a block is. Read only."""

from __future__ import annotations

import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import TracebackType
from typing import Self
from urllib.parse import urlsplit

import msgspec
from prometheus_client import CollectorRegistry
from prometheus_client.exposition import CONTENT_TYPE_LATEST, generate_latest

from kvbm_core.errors import ConfigError
from kvbm_core.manager import KvBlockManager
from kvbm_core.metrics import CoreCollector

_LOOPBACK = ("127.0.0.1", "::1", "localhost")
_MATCHES_MAX = 100
"""Blocks explained at once; a longer prefix names fewer."""


class CoreDesk:
    """Answers `GET /metrics` (Prometheus) and `GET /blocks/HASH` (JSON, a list of `BlockExplanation`).

    Listens at `url`, `http://127.0.0.1:PORT`; port 0 takes a free one, which `url` then names. Raises `ConfigError` for
    an address that is not this machine's own: there is no access control.
    """

    def __init__(self, manager: KvBlockManager, url: str = "http://127.0.0.1:0") -> None:
        address = urlsplit(url)
        if address.scheme != "http" or address.hostname not in _LOOPBACK or address.port is None:
            raise ConfigError(f"{url} is no address for the core's desk: give http://127.0.0.1:PORT")
        registry = CollectorRegistry(auto_describe=False)
        registry.register(CoreCollector(manager))
        try:
            self._server = ThreadingHTTPServer((address.hostname, address.port), _handler(manager, registry))
        except OSError as error:
            raise ConfigError(f"{url} cannot be listened at ({error.strerror}): give another port") from error
        self._server.daemon_threads = True
        self.url = f"http://{address.hostname}:{self._server.server_port}"
        self._thread = threading.Thread(target=self._server.serve_forever, name="kvbm-desk", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Answer nobody any more. Idempotent."""
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def _handler(manager: KvBlockManager, registry: CollectorRegistry) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        timeout = 10.0

        def do_GET(self) -> None:
            path = urlsplit(self.path).path
            if path == "/metrics":
                self._answer(200, CONTENT_TYPE_LATEST, generate_latest(registry))
            elif path.startswith("/blocks/"):
                self._explain(path.removeprefix("/blocks/"))
            else:
                self._answer(404, "text/plain", b"ask for /metrics or /blocks/HASH\n")

        def _explain(self, hash_prefix: str) -> None:
            try:
                keys = manager.find_keys(hash_prefix)
            except ValueError as error:
                self._answer(400, "text/plain", f"{error}\n".encode())
                return
            found = [manager.explain(key) for key in keys[:_MATCHES_MAX]]
            self._answer(200, "application/json", msgspec.json.encode(found))

        def _answer(self, status: int, kind: str, body: bytes) -> None:
            self.send_response(status)
            self.send_header("Content-Type", kind)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, format: str, *args: object) -> None:
            """Nothing: a scrape every few seconds is no news."""

    return Handler
