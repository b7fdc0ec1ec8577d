"""Whose blocks an agent does not take: tenants that were deleted, kept over restarts."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from pathlib import Path

import msgspec
import structlog

from event_plane.schema import producer_id
from storage_agent.errors import UNREADABLE, RefusalError
from storage_agent.files import replace_file

TENANTS_MAX = 1_024
TENANT_BYTES_MAX = 256

_log = structlog.get_logger()


class _Kept(msgspec.Struct, frozen=True):
    """What the file holds, in JSON. `agent` is for people."""

    agent: str
    refused_tenants: list[str]


class TenantRefusals:
    """Thread-safe."""

    def __init__(self, agent: str, state_folder: Path | None = None) -> None:
        """Remembers for its own life where no folder is given. Raises `RefusalError` for a file that is damaged."""
        self._agent = agent
        self._file = None if state_folder is None else state_folder / f".kvadvisor-{producer_id(agent):016x}.refused"
        self._lock = threading.Lock()
        self._tenants = self._read_kept()

    @property
    def tenants(self) -> list[str]:
        """In order."""
        return sorted(self._tenants)

    def reason(self, tenant: str) -> str:
        """Why a block of this tenant is not taken; empty where it is."""
        if tenant not in self._tenants:
            return ""
        return f"tenant {tenant!r} was deleted: enable it at the advisor before its blocks are put again"

    def __bool__(self) -> bool:
        return bool(self._tenants)

    def replace(self, tenants: Sequence[str]) -> None:
        """Refuse these and no others, from now on. On disk when this returns, unless the file cannot be written.

        Then it counts for this life, which is logged. Raises `RefusalError` for too many tenants, or too long a name.
        """
        if len(tenants) > TENANTS_MAX:
            raise RefusalError(f"{len(tenants)} tenants are to be refused, at most {TENANTS_MAX} can be: enable some")
        for tenant in tenants:
            if not 0 < len(tenant.encode()) <= TENANT_BYTES_MAX:
                raise RefusalError(f"{tenant[:80]!r} cannot be refused: a name has 1 to {TENANT_BYTES_MAX} bytes")
        with self._lock:
            self._tenants = frozenset(tenants)
            if self._file is None:
                return
            try:
                replace_file(self._file, [msgspec.json.encode(_Kept(self._agent, self.tenants))])
            except OSError as error:
                _log.warning("refused tenants cannot be kept", file=str(self._file), error=str(error))

    def _read_kept(self) -> frozenset[str]:
        if self._file is None:
            return frozenset()
        try:
            return frozenset(msgspec.json.decode(self._file.read_bytes(), type=_Kept).refused_tenants)
        except FileNotFoundError:
            return frozenset()
        except OSError as error:
            raise RefusalError(f"{self._file} cannot be read: {error.strerror}; it keeps whom to refuse") from error
        except UNREADABLE as error:
            raise RefusalError(
                f"{self._file} names no refused tenants ({error}); remove it: the advisor tells again whom to refuse"
            ) from error
