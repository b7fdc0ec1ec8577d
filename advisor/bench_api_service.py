"""The service that `kvadvisor bench api` asks, a process of its own: `python -m advisor.bench_api_service BLOCKS …`.

It lays so many blocks into the index as one volume's, serves the admin API on a free port, and says on standard output,
as JSON, where; it ends when its standard input does.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import sys
import threading
from pathlib import Path

import msgspec
import structlog

from advisor.admin_parts import parts_of
from advisor.api.app import create_app
from advisor.api.server import AdminServer, open_socket
from advisor.bench_publisher import NAMESPACES
from advisor.bench_stream import ChainStream
from advisor.entries import EntryKind, LogEntry, VolumeEntry
from advisor.process import answer_soon, die_with_parent
from advisor.service import AdvisorService
from advisor.settings import AdvisorSettings, LogSettings, SourceSettings
from event_plane.schema import Batch
from storage_agent.descriptor import VolumeDescriptor

PRODUCER = 78
VOLUMES = ("slow", "fast")
STEP_BLOCKS = 65_536


def lay_out(service: AdvisorService, blocks: int) -> ChainStream:
    """Two volumes, and `blocks` blocks on the slower one. Straight into the fold: the log has nothing of it."""
    for rank, volume in enumerate(reversed(VOLUMES)):
        capacity = blocks * 2 if volume == "slow" else blocks // 10
        described = VolumeDescriptor(id=volume, capacity_blocks=capacity, block_bytes_max=1 << 20, speed_rank=rank)
        descriptor = msgspec.to_builtins(described)
        service.submit(VolumeEntry(descriptor, "bench", PRODUCER)).result()
    stream = ChainStream()
    stream.grow(blocks)
    for sequence, first in enumerate(range(0, blocks, STEP_BLOCKS)):
        records = stream.stores(first, min(blocks, first + STEP_BLOCKS)).copy()
        records["storage_location"] = 0
        records["namespace"] = 0
        batch = Batch(PRODUCER, 1, sequence, records, namespaces=NAMESPACES, locations=(VOLUMES[0],))
        with service.lock:
            entry = LogEntry(service.fold.position, EntryKind.BATCH, b"", PRODUCER, 1, sequence, "bench")
            service.fold.apply(entry, batch)
    return stream


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("blocks", type=int)
    parser.add_argument("folder", type=Path)
    parser.add_argument("url")
    parser.add_argument("resend_url")
    asked = parser.parse_args()
    die_with_parent(os.getppid())
    structlog.configure(logger_factory=structlog.PrintLoggerFactory(sys.stderr))
    settings = AdvisorSettings(
        directory=asked.folder,
        log=LogSettings(kind="segments"),
        index_memory_bytes_max=8 << 30,
        sources=(SourceSettings(name="bench", url=asked.url, resend_url=asked.resend_url),),
    )
    with AdvisorService(settings) as service, parts_of(service) as parts:
        lay_out(service, asked.blocks)
        server = AdminServer(create_app(parts), open_socket("127.0.0.1", 0))

        def end_with_input() -> None:
            sys.stdin.read()
            server.should_exit = True

        threading.Thread(target=end_with_input, daemon=True).start()
        answer_soon()
        print(json.dumps({"url": server.url}), flush=True)
        asyncio.run(server.serve_until_told())


if __name__ == "__main__":
    main()
