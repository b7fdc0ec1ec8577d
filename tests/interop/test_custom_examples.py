"""The examples of other packages' kinds and policies pass the contract, in an environment that has them installed."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"


@pytest.mark.parametrize(
    ("folder", "module"),
    [("custom_volume", "files_volume"), pytest.param("custom_policy", "mine_policy", marks=pytest.mark.long)],
)
def test_the_example_of_another_package_passes_the_contract(folder: str, module: str, tmp_path: Path) -> None:
    site, example = tmp_path / "site", tmp_path / "example"
    shutil.copytree(EXAMPLES / folder, example)
    project = tomllib.loads((example / "pyproject.toml").read_text())["project"]
    # What an installation leaves: the module and its metadata on the path.
    metadata = site / f"{project['name'].replace('-', '_')}-{project['version']}.dist-info"
    metadata.mkdir(parents=True)
    about = ["Metadata-Version: 2.1", f"Name: {project['name']}", f"Version: {project['version']}"]
    (metadata / "METADATA").write_text("\n".join(about) + "\n")
    ((group, points),) = project["entry-points"].items()
    lines = [f"[{group}]", *(f"{name} = {place}" for name, place in points.items())]
    (metadata / "entry_points.txt").write_text("\n".join(lines) + "\n")
    shutil.copy(example / f"{module}.py", site)
    run = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-W", "error", "-p", "no:cacheprovider", "--rootdir", example, example],
        cwd=example,
        env={**os.environ, "PYTHONPATH": str(site)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert run.returncode == 0, run.stdout + run.stderr
    assert " passed" in run.stdout
    assert "skipped" not in run.stdout, "it can do everything that the suite asks of"
