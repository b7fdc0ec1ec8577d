"""Which way bytes move between memory and files here: by NIXL where it works, else by threads."""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping

from storage_agent.block_header import PAGE_BYTES
from storage_agent.errors import TransferError
from storage_agent.file_transfer import FileTransfer
from storage_agent.nixl_transfer import NixlTransfer
from storage_agent.thread_transfer import ThreadTransfer

PROBE_DEADLINE_S = 5.0
_proofs: list[int] = []
"""Processes that NIXL was tried in and worked: a failure may pass, and is looked at each time."""
_log = logging.getLogger(__name__)


def open_transfer(
    name: str, files: Mapping[int, int], *, staging_bytes: int, deadline_s: float = 30.0
) -> FileTransfer:
    """`files`: bytes by file descriptor. Where NIXL cannot be had, `FileTransfer.how` says so and the log says why."""
    reason = nixl_fault()
    if not reason:
        try:
            return NixlTransfer(name, files, staging_bytes=staging_bytes, deadline_s=deadline_s)
        except TransferError as error:
            reason = str(error)
    _log.warning("%s: NIXL cannot move its bytes, plain calls on threads do: %s", name, reason)
    return ThreadTransfer(name, files, staging_bytes=staging_bytes, deadline_s=deadline_s)


def nixl_fault() -> str:
    """Why NIXL or its POSIX backend does not work here, as tried on a page of memory; or ''."""
    if os.getpid() in _proofs:
        return ""
    try:
        fd = os.memfd_create("kvadvisor-probe")
    except OSError as error:
        return f"nothing to try it on: {error.strerror}"
    try:
        os.ftruncate(fd, PAGE_BYTES)
        probe = NixlTransfer("probe", {fd: PAGE_BYTES}, staging_bytes=PAGE_BYTES, deadline_s=PROBE_DEADLINE_S)
        with probe.exclusive():
            probe.read([(0, 0, PAGE_BYTES, fd)])
        probe.close()
    except TransferError as error:
        return str(error)
    finally:
        os.close(fd)
    _proofs.append(os.getpid())
    return ""
