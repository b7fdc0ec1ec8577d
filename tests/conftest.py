"""Fixtures shared by every kind of test."""

from __future__ import annotations

import gc
import os
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest
import structlog
from hypothesis import settings

from tests.examples import LONG, examples
from tests.ports import free_ports
from tests.postgres import PostgresServer
from tests.seaweed import seaweed  # noqa: F401 -- a fixture, one server for all tests

# Collection makes no garbage worth looking for.
gc.disable()

# The same examples in each run of `make test`, on however busy a machine; others in each of `make test-long`.
settings.register_profile("kvadvisor", max_examples=examples(100), derandomize=not LONG, deadline=None)
settings.load_profile("kvadvisor")


def pytest_collection_finish() -> None:
    """What was collected stays to the end: thousands of tests are not gone through whenever garbage is collected."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(20_000)
    gc.enable()


@pytest.fixture(autouse=True)
def process_log_is_reset() -> Iterator[None]:
    """A command has its process log to the standard error of its test, which is closed when another test logs."""
    yield
    structlog.reset_defaults()


@pytest.fixture(scope="session")
def shared_data() -> Path:
    """The folder of real captures and traces; it lies beside the checkout and is never copied into it."""
    named = os.environ.get("SHARED_DATA")
    folder = Path(named) if named else Path(__file__).resolve().parents[2] / "shared" / "data"
    if not (folder / "README.md").is_file():
        pytest.skip(f"{folder} is absent: set SHARED_DATA to the folder with captures/ and traces/")
    return folder


@pytest.fixture
def free_port() -> int:
    """A TCP port of 127.0.0.1 that was free a moment ago."""
    return free_ports(1)[0]


@pytest.fixture(scope="session")
def postgres() -> Iterator[PostgresServer]:
    """One for all tests; a test that stops it makes its own."""
    with closing(PostgresServer()) as server:
        yield server
