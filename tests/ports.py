"""Free TCP ports of 127.0.0.1 for servers that tests start."""

from __future__ import annotations

import socket


def free_ports(count: int) -> list[int]:
    """Ports that were free a moment ago, all different."""
    probes = [socket.socket() for _ in range(count)]
    try:
        for probe in probes:
            probe.bind(("127.0.0.1", 0))
        return [int(probe.getsockname()[1]) for probe in probes]
    finally:
        for probe in probes:
            probe.close()
