"""What a command logs goes to standard error."""

from __future__ import annotations

import io
import json
import logging
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import stamina
import structlog

from advisor.command_log import log_to_standard_error
from advisor.log_format import LogFormat, LogLevel
from tests.ports import free_ports


def test_lost_connection_is_logged_to_standard_error_and_not_at_each_attempt(tmp_path: Path) -> None:
    port = free_ports(1)[0]
    command = [sys.executable, "-m", "advisor.cli", "record", "--source", f"nats://127.0.0.1:{port}/kv"]
    done = subprocess.run(
        [*command, "--seconds", "2", "--out", str(tmp_path / "out.parquet")],
        capture_output=True, text=True, check=True, timeout=60,
    )  # fmt: skip
    assert len(done.stdout.splitlines()) == 1, done.stdout
    assert done.stdout.startswith(str(tmp_path / "out.parquet"))
    warnings = [line for line in done.stderr.splitlines() if "[warning" in line]
    assert len(warnings) == 1, done.stderr
    assert f"no connection to nats://127.0.0.1:{port}/kv" in warnings[0]


@pytest.fixture
def _logging() -> Iterator[None]:
    log_to_standard_error()
    yield
    structlog.reset_defaults()
    stamina.instrumentation.set_on_retry_hooks(None)


class BrokenPipe(io.StringIO):
    """A pipe whose reader went away."""

    def write(self, text: str) -> int:
        raise BrokenPipeError


@pytest.mark.usefixtures("_logging")
def test_reader_of_standard_error_that_went_away_stops_no_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    closed, read = io.StringIO(), io.StringIO()
    closed.close()
    for stream in (closed, BrokenPipe(), read):
        monkeypatch.setattr(sys, "stderr", stream)
        structlog.get_logger().warning("the connection was lost")
    assert read.getvalue().count("the connection was lost") == 1


def test_json_lines_carry_level_time_and_ids_and_the_traceback(capsys: pytest.CaptureFixture[str]) -> None:
    log_to_standard_error(LogFormat.JSON, LogLevel.WARNING)
    try:
        structlog.get_logger().info("not told")
        structlog.get_logger().warning("move took abort", move="7-1", volume="fast", path=Path("x"))
        logging.getLogger("a.library").error("it %s", "broke")
        try:
            raise ValueError("why")
        except ValueError as fault:
            structlog.get_logger().error("failed", exc_info=fault)
    finally:
        structlog.reset_defaults()
        stamina.instrumentation.set_on_retry_hooks(None)
        logging.getLogger().handlers.clear()
    lines = [json.loads(line) for line in capsys.readouterr().err.splitlines()]
    assert [line["message"] for line in lines] == ["move took abort", "it broke", "failed"]
    assert lines[0].pop("timestamp").endswith("Z")
    assert lines[0] == {
        "message": "move took abort", "move": "7-1", "volume": "fast", "path": "x", "level": "warning",
    }  # fmt: skip
    assert lines[1]["level"] == "error"
    assert lines[2]["exception"][0]["exc_value"] == "why"


def test_the_command_line_takes_format_and_level() -> None:
    command = [sys.executable, "-m", "advisor.cli", "--log-format", "json", "--log-level", "error", "keys", "--help"]
    assert subprocess.run(command, capture_output=True, text=True, check=True, timeout=60).stderr == ""
    wrong = subprocess.run([*command[:4], "yaml", "keys"], capture_output=True, text=True, check=False, timeout=60)
    assert wrong.returncode == 2
    assert "'yaml'" in wrong.stderr
