"""Servers that volumes may lie on. Only an agent's configuration has them: a descriptor names one, never a URL."""

from __future__ import annotations

from pathlib import Path

import msgspec


class Endpoint(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """An object store or another agent, as `[endpoints.NAME]` of an agent's settings has it. Secrets stay in files."""

    url: str
    region: str = ""
    access_key_file: Path | None = None
    secret_key_file: Path | None = None
    credentials_file: Path | None = None
    """What is shown to the NATS server that another agent's commands go over: `event_plane.credentials_file`."""
