"""Modes of the folders that a log lies in."""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Literal

import pytest

from advisor.open_log import open_log
from advisor.settings import AdvisorSettings, LogSettings


@pytest.fixture(autouse=True)
def common_umask() -> Iterator[None]:
    former = os.umask(0o022)
    yield
    os.umask(former)


@pytest.mark.parametrize("kind", ["sql", "segments"])
def test_a_directory_that_is_made_is_its_users_alone(tmp_path: Path, kind: Literal["sql", "segments"]) -> None:
    settings = AdvisorSettings(directory=tmp_path / "service" / "state", log=LogSettings(kind=kind))
    with closing(open_log(settings)):
        assert stat.S_IMODE(settings.directory.stat().st_mode) == 0o700


def test_a_directory_that_is_there_keeps_its_mode(tmp_path: Path) -> None:
    directory = tmp_path / "state"
    directory.mkdir(0o755)
    with closing(open_log(AdvisorSettings(directory=directory))):
        assert stat.S_IMODE(directory.stat().st_mode) == 0o755
