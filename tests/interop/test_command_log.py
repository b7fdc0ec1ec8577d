"""What a command logs goes to standard error."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

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
