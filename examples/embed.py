"""The subscriber inside a process of your own: `python examples/embed.py zmq+tcp://127.0.0.1:5557 state`."""

import contextlib
import sys
from pathlib import Path

from advisor.reader import ServiceReader
from advisor.service import AdvisorService
from advisor.settings import AdvisorSettings, SourceSettings

engine = SourceSettings(name="engine", url=sys.argv[1])
settings = AdvisorSettings(directory=Path(sys.argv[2]), sources=(engine,))
with contextlib.suppress(KeyboardInterrupt), AdvisorService(settings) as service:
    reader = ServiceReader(service)
    while not service.wait(1.0):
        for block in reader.blocks(limit=5).blocks:
            print(block.hash, [placement.place for placement in block.placements], flush=True)
