"""A storage product's own events: `python examples/publish.py zmq+tcp://127.0.0.1:5557`, a block a second until Ctrl-C.

Any transport will do. Each start begins an epoch, whose first snapshot replaces what the one before had placed.
"""

import contextlib
import hashlib
import itertools
import sys
import threading
import time

from event_plane.connect import open_publisher
from event_plane.schema import EventRecord, EventType, Namespace, Tier, producer_id

space, stored, storing = Namespace(model="my-model"), dict[int, EventRecord](), threading.Lock()
publisher = open_publisher(sys.argv[1], producer=producer_id("storage-0"))


def announce() -> None:
    """Say all that is stored: at the start, and when a subscriber misses what is no longer buffered."""
    with storing:
        publisher.publish_snapshot(list(stored.values()))


publisher.serve_snapshots(announce)
announce()
with contextlib.suppress(KeyboardInterrupt), contextlib.closing(publisher):
    for number in itertools.count():
        block = int.from_bytes(hashlib.blake2b(b"block %d" % number, digest_size=16).digest(), "little")
        event = EventRecord(EventType.STORE, Tier.G3, block, space, "nvme0", block_size=4096, block_tokens=16)
        with storing:
            stored[block] = event
            publisher.publish([event])
        time.sleep(1)
