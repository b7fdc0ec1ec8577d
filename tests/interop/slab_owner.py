"""An agent that owns one slab, `shared`, as a process: prints its command URL and serves until it is killed."""

from __future__ import annotations

import signal
import sys
from pathlib import Path

from storage_agent.agent import StorageAgent
from storage_agent.descriptor import VolumeDescriptor
from storage_agent.service import AgentService

VOLUME = "shared"


def descriptor(folder: Path, capacity_blocks: int, block_bytes_max: int) -> VolumeDescriptor:
    return VolumeDescriptor(
        id=VOLUME,
        path=str(folder / "shared.slab"),
        capacity_blocks=capacity_blocks,
        block_bytes_max=block_bytes_max,
    )


def main(folder: Path, capacity_blocks: int, block_bytes_max: int, command_url: str) -> None:
    with StorageAgent("owner", publisher=None, allowed_roots=[folder]) as agent:
        agent.register_volume(descriptor(folder, capacity_blocks, block_bytes_max))
        with AgentService(agent, command_url) as service:
            print(service.command_url, flush=True)
            signal.pause()


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]), sys.argv[4])
