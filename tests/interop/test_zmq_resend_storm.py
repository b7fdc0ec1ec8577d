"""Many subscribers that ask for everything at once and then do not read: what it costs the publisher."""

from __future__ import annotations

from contextlib import closing
from pathlib import Path

import numpy as np
import zmq

from event_plane.schema import RECORD_DTYPE, EventType, Namespace, Tier
from event_plane.zmq_transport import ZmqPublisher
from tests.contract.transports import wait_for

ASKERS = 64
MIB = 1 << 20


def resident_bytes() -> int:
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * 4_096


def test_askers_that_do_not_read_share_the_buffers_bytes_and_keep_nothing_waiting() -> None:
    records = np.zeros(4_000, RECORD_DTYPE)
    records["event_type"], records["tier"] = EventType.STORE, Tier.G1
    records["sequence_hash_lo"] = np.arange(1, 4_001)
    publisher = ZmqPublisher(
        "zmq+tcp://127.0.0.1:0", "zmq+tcp://127.0.0.1:0", producer=1, epoch=1, flush_events=4_000
    )
    with closing(publisher), zmq.Context() as context:
        for _ in range(50):
            publisher.publish_records(records, [Namespace()], ["gpu"], flush=True)
        assert publisher.stat().buffered_bytes > 19 * MIB
        before = resident_bytes()
        askers = [context.socket(zmq.DEALER) for _ in range(ASKERS)]
        for asker in askers:
            asker.setsockopt(zmq.LINGER, 0)
            asker.setsockopt(zmq.RCVHWM, 1)
            asker.setsockopt(zmq.RCVBUF, 4_096)
            asker.connect(publisher.resend_url.endpoint)
            asker.send_multipart((b"", bytes(8)))
        wait_for(lambda: publisher.stat().resends == ASKERS)
        for sequence in range(50, 60):
            publisher.publish_records(records, [Namespace()], ["gpu"])
            assert publisher.flush() == sequence
        wait_for(lambda: all(asker.poll(0) for asker in askers))
        assert resident_bytes() - before < 400 * MIB, "64 copies of the buffer are 1,200 MiB"
        for asker in askers:
            asker.close()
