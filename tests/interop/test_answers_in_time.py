"""An answer that waits in our own queue came in time, however late the log thread looks."""

from __future__ import annotations

import threading
import time
from contextlib import ExitStack, closing
from typing import Final

import zmq

from advisor.hearing import hearing
from advisor.intake import Intake, SourceFacts
from advisor.memory_log import MemoryLog
from event_plane.connect import open_publisher
from event_plane.schema import Batch, BatchKind, EventRecord, EventType, Namespace
from event_plane.sequence import SequenceGate
from event_plane.transport import Message, Received
from event_plane.zmq_transport import ZmqSubscriber
from tests.contract.transports import PATIENCE_S
from tests.ports import free_ports

NAMESPACE: Final = Namespace(tenant="acme")
RESEND_WAIT_S: Final = 0.01


class LateLooker(ZmqSubscriber):
    """Loses batch 2 once. After each ask it is away until the answer is there and the wait for it is over."""

    loses = True

    def receive(self, count_max: int) -> list[Received]:
        received = super().receive(count_max)
        lost = [each for each in received if self.loses and isinstance(each, Message) and each.transport_sequence == 2]
        self.loses = self.loses and not lost
        return [each for each in received if each not in lost]

    def ask_resend(self, from_sequence: int, token: int, producer: int | None = None) -> bool:
        asked = super().ask_resend(from_sequence, token, producer)
        assert self._asks[token].poll(round(PATIENCE_S * 1_000), zmq.POLLIN)
        time.sleep(2 * RESEND_WAIT_S)
        return asked


def test_answer_that_came_while_nobody_looked_fills_its_gap() -> None:
    events, resends = free_ports(2)
    place = f"zmq+tcp://127.0.0.1:{events}", f"zmq+tcp://127.0.0.1:{resends}"
    gate = SequenceGate(resend_wait_us=round(RESEND_WAIT_S * 1_000_000), resend_attempts_max=1)
    intake = Intake([SourceFacts("core")], gate)
    log = MemoryLog()
    with ExitStack() as stack:
        publisher = stack.enter_context(closing(open_publisher(*place, producer=7, epoch=1)))
        heard = stack.enter_context(hearing(LateLooker("core", *place), intake, log, threading.Event()))
        deadline = time.monotonic() + PATIENCE_S
        batches: list[Batch] = []
        while len(batches) < 6:
            assert time.monotonic() < deadline, f"heard {len(batches)} batches"
            event = EventRecord(EventType.STORE, 1, len(batches) + 1, NAMESPACE, "gpu", block_size=64)
            publisher.publish([event], flush=True)
            batches += heard(0.05)
        stat = publisher.stat()
    # The ask at the start and that of the gap.
    assert stat.resends >= 2
    assert stat.requests_refused == 0, "a snapshot was asked for"
    assert [batch.sequence for batch in batches] == list(range(len(batches)))
    assert not any(batch.kind is BatchKind.LOST for batch in batches)
