"""README.md or a page of docs/ names every command."""

from __future__ import annotations

from importlib.metadata import entry_points
from pathlib import Path

import pytest
import typer

from advisor.log_command import app as log_app

ROOT = Path(__file__).resolve().parents[2]
PROSE = "\n".join(page.read_text(encoding="utf-8") for page in [ROOT / "README.md", *(ROOT / "docs").glob("*.md")])
COMMANDS = [each.name for each in entry_points(group="kvadvisor.commands")]
LOG_COMMANDS = sorted(typer.main.get_group(log_app).commands)


def test_commands_are_found() -> None:
    assert {"serve", "demo", "log"} <= set(COMMANDS)
    assert {"stat", "restore"} <= set(LOG_COMMANDS)


@pytest.mark.parametrize("command", [*COMMANDS, *(f"log {name}" for name in LOG_COMMANDS)])
def test_command_is_documented(command: str) -> None:
    assert f"kvadvisor {command}" in PROSE
