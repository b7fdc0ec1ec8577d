"""Free TCP ports of 127.0.0.1 for servers that tests start."""

from __future__ import annotations

import contextlib
import secrets
import socket
from typing import Final

_PORTS: Final = range(10_000, 32_768, 2)
"""Below those that Linux gives to connections: one of these could be taken again before the server has it."""


def free_ports(count: int) -> list[int]:
    """Ports that were free a moment ago, all different, and with each the next, where a publisher serves resends.

    Drawn anew by each process, whatever Hypothesis seeds.
    """
    found: list[int] = []
    with contextlib.ExitStack() as probes:
        while len(found) < count:
            port = secrets.choice(_PORTS)
            with contextlib.suppress(OSError):
                for each in (port, port + 1):
                    probes.enter_context(socket.socket()).bind(("127.0.0.1", each))
                found.append(port)
    return found
