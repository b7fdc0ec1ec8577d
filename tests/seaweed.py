"""A real S3 server (SeaweedFS, from its wheel) for as long as tests need it."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from storage_agent.bench_seaweed import SeaweedServer


def running_server() -> Iterator[SeaweedServer]:
    # Loaded here: tests that need no server need no obstore either.
    from storage_agent.bench_seaweed import SeaweedServer

    folder = Path(tempfile.mkdtemp(prefix="kvadvisor-seaweed-"))
    server = SeaweedServer(folder)
    server.start()
    yield server
    server.kill()
    shutil.rmtree(folder)


seaweed = pytest.fixture(scope="session", name="seaweed")(running_server)
"""One for all tests; a test that kills it makes its own `SeaweedServer`."""
