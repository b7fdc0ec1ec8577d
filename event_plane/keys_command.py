"""`kvadvisor keys`: makes the CURVE keys that ZeroMQ's ends prove themselves with."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Annotated

import typer
import zmq.auth

from event_plane.errors import TransportError

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")


def keys(
    folder: Annotated[Path, typer.Argument(help="Where the files are made; made itself if absent.")],
    name: Annotated[str, typer.Argument(help="Whose keys: a publisher or a subscriber.")],
) -> None:
    """Make NAME.key, to be given to the other ends, and NAME.key_secret, to be kept."""
    public, secret = make_keys(folder, name)
    typer.echo(f"{public}: public, for the other ends\n{secret}: secret, readable by you alone")


def make_keys(folder: Path, name: str) -> tuple[Path, Path]:
    """Files of the public and of the secret key. Raises `TransportError` rather than write over one."""
    if not _NAME.fullmatch(name):
        raise TransportError(f"key name {name!r} cannot be a file's: use letters, digits, dots, - and _")
    public, secret = folder / f"{name}.key", folder / f"{name}.key_secret"
    for file in (public, secret):
        if file.exists():
            raise TransportError(f"{file} exists: delete it if its keys are used nowhere, or choose another name")
    # Nobody else may read the secret, not even between its making and a change of mode.
    umask = os.umask(0o077)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        zmq.auth.create_certificates(folder, name)
    except OSError as error:
        raise TransportError(f"keys cannot be made in {folder}: {error.strerror}; choose another folder") from error
    finally:
        os.umask(umask)
    return public, secret
