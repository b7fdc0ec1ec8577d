"""Credentials named in a TOML file, for commands: the keys that a source has in docs/settings.md."""

from __future__ import annotations

import tomllib
from dataclasses import fields
from pathlib import Path
from typing import Any

from event_plane.credentials import NO_CREDENTIALS, Credentials
from event_plane.errors import TransportError


def load_credentials(path: Path | None) -> Credentials:
    """None: no credentials. Relative paths in it are taken from its folder. Raises `TransportError`."""
    if path is None:
        return NO_CREDENTIALS
    try:
        read = tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise TransportError(f"{path} cannot be read ({error.strerror}): check the path") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise TransportError(f"{path} is no TOML ({error}): mend that line") from error
    known = [field.name for field in fields(Credentials)]
    for name, value in read.items():
        if name not in known or not isinstance(value, str):
            raise TransportError(f"{path} says {name} = {value!r}: the keys are {', '.join(known)}, each a text")
    return Credentials(**{name: _value(name, value, path.parent) for name, value in read.items()})


def _value(name: str, value: str, folder: Path) -> Any:
    return value if name == "user" else folder / value
