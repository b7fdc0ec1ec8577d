"""`kvadvisor bench vllm --quick` measures a real vLLM."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest


@pytest.mark.timeout(600)
def test_the_quick_benchmark_measures_the_host_and_the_fast_volume(tmp_path: Path) -> None:
    out = tmp_path / "figures.json"
    command = [sys.executable, "-m", "advisor.cli", "bench", "vllm", "--quick", "--json", str(out)]

    subprocess.run(command, check=True, capture_output=True, cwd=tmp_path)

    rows = {row["name"]: row["value"] for row in json.loads(out.read_text())}
    assert len(rows) == 9
    measured = {name: value for name, value in rows.items() if value is not None}
    assert set(measured) == {"first token, recomputed / host", "first token, recomputed / fast volume"}
    assert all(value > 0 for value in measured.values())
