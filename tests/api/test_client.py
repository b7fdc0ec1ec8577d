"""The client that `make client` generates: complete, typed, and able to do what a vendor's program does."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from openapi_document import write_document
from sample_actions import SampleActions
from sample_reader import SampleReader
from served import serving

ROOT = Path(__file__).resolve().parents[2]
PROGRAM = Path(__file__).with_name("client_program.py")


def ran(*command: str, cwd: Path, **environment: str) -> str:
    """What a command prints; it must end well."""
    done = subprocess.run(
        command, cwd=cwd, env={**os.environ, **environment}, capture_output=True, text=True, timeout=170, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def client(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the package `kvadvisor_client`."""
    folder = tmp_path_factory.mktemp("client")
    write_document(folder / "openapi.json")
    ran(
        sys.executable, "-m", "openapi_python_client", "generate", "--path", "openapi.json", "--meta", "none",
        "--config", str(ROOT / "deploy" / "client.yaml"), "--output-path", "kvadvisor_client", "--fail-on-warning",
        cwd=folder,
    )  # fmt: skip
    return folder


def test_client_has_every_route(client: Path) -> None:
    document = json.loads((client / "openapi.json").read_text("utf-8"))
    routes = {about["operationId"] for methods in document["paths"].values() for about in methods.values()}
    made = {path.stem for path in (client / "kvadvisor_client" / "api").glob("*/*.py")} - {"__init__"}
    assert made == routes


def test_program_is_well_typed(client: Path) -> None:
    ran(
        sys.executable, "-m", "mypy", "--strict", "--config-file", os.devnull, "--follow-imports", "silent",
        "--no-incremental", str(PROGRAM), cwd=client, MYPYPATH=str(client),
    )  # fmt: skip


def test_program_reads_pages_pauses_once_and_is_told_what_is_wrong(client: Path) -> None:
    reader, actions = SampleReader(), SampleActions()
    with serving(reader, actions=actions) as served:
        seen = json.loads(ran(sys.executable, str(PROGRAM), served.url, cwd=client, PYTHONPATH=str(client)))
    assert seen["blocks"] == reader.summary_view.blocks
    assert seen["hashes"] == [block.hash for block in reader.block_views]
    assert seen["paused"] == [["nvme-a"], ["nvme-a"]]
    assert seen["replayed"] == [None, "true"]
    assert actions.asked == [("pause", "operator", "nvme-a")]
    assert seen["problem"] == [404, "volume 'nowhere' is not registered: name one of nvme-a"]
