"""Files that a command writes its outcome to: tried before the work, refused in a sentence."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from advisor.errors import OutputError


def require_writable(path: Path) -> None:
    """Tried before the work whose outcome it is for. Leaves no file that was not there. Raises `OutputError`."""
    if path.exists() and not path.is_file() and not path.is_dir():
        return  # a pipe's reader would take it for the end
    was_there = path.exists()
    with _writing(path):
        path.open("a").close()
        if not was_there:
            path.unlink()


def write_text(path: Path, content: str) -> None:
    """Raises `OutputError`."""
    with _writing(path):
        path.write_text(content, encoding="utf-8")


def write_json(path: Path, content: object) -> None:
    """Raises `OutputError`."""
    write_text(path, json.dumps(content, indent=1) + "\n")


def replace_json(path: Path, content: object) -> None:
    """As `write_json`, whole or not at all: who is killed meanwhile leaves what was there. Raises `OutputError`."""
    part = path.with_name(f"{path.name}.part")
    write_json(part, content)
    with _writing(path):
        part.replace(path)


@contextmanager
def _writing(path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as fault:
        raise OutputError(f"{path} cannot be written ({fault.strerror}): choose another place") from fault
