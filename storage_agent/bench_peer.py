"""Another agent with a slab, as a process on this host: what `kvadvisor bench agent` measures kind `remote` on."""

from __future__ import annotations

import multiprocessing
import os
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing.connection import Connection
from pathlib import Path

from storage_agent.agent import StorageAgent
from storage_agent.descriptor import VolumeDescriptor
from storage_agent.errors import ServiceError
from storage_agent.service import AgentService


@contextmanager
def serving_peer(descriptor: VolumeDescriptor, root: Path) -> Iterator[str]:
    """Its command URL, while it serves the volume. Raises `ServiceError` where it does not come up.

    Bytes go over TCP as between hosts, unless UCX_TLS is set: UCX would take shared memory on one host.
    """
    os.environ.setdefault("UCX_TLS", "tcp")
    spawning = multiprocessing.get_context("spawn")
    ours, its = spawning.Pipe()
    process = spawning.Process(target=_serve, args=(descriptor, root, its), name="peer")
    process.start()
    its.close()
    try:
        try:
            url: str = ours.recv()
        except EOFError:
            raise ServiceError("the peer's process ended at its start; see what it printed") from None
        yield url
    finally:
        ours.close()
        process.join()


def _serve(descriptor: VolumeDescriptor, root: Path, caller: Connection) -> None:
    with StorageAgent("bench-peer", publisher=None, allowed_roots=[root]) as agent:
        agent.register_volume(descriptor)
        with AgentService(agent, "tcp://127.0.0.1:*") as service:
            caller.send(service.command_url)
            caller.poll(None)  # until it lets go of its end
