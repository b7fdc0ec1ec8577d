"""What the intake makes of messages that cannot be read, and what is said of them."""

from __future__ import annotations

import random

from structlog.testing import capture_logs

from advisor.intake import Intake, SourceFacts, Unreadable
from advisor.pipeline import UNREADABLE_QUIET_S, UnreadableLog
from event_plane.transport import Message


def test_a_thousand_different_garbage_messages_are_one_reason_and_each_says_its_detail() -> None:
    chance = random.Random(1)
    for dialect, reason in (("vllm", "undecodable message"), ("kvadvisor", "undecodable batch")):
        intake = Intake([SourceFacts("engine", dialect)])
        details = set()
        for number in range(1_000):
            garbage = b"\xc1" + chance.randbytes(chance.randrange(200))
            (unreadable,) = intake.offer(Message("engine", b"", number, garbage), 0).unreadable
            assert (unreadable.source, unreadable.reason) == ("engine", reason)
            details.add(unreadable.detail)
        assert intake.refused == {reason: 1_000}
        assert len(details) > 100


def test_unreadable_messages_are_said_once_per_source_and_reason_then_once_a_minute() -> None:
    said = UnreadableLog()
    with capture_logs() as lines:
        for number in range(100):
            said.say(Unreadable("engine", "undecodable message", f"message {number}"), 10.0 + number / 100)
        said.say(Unreadable("core", "undecodable batch", "cut"), 11.0)
        said.say(Unreadable("engine", "undecodable batch", "cut too"), 11.0)
        said.say(Unreadable("engine", "undecodable message", "a minute later"), 10.0 + UNREADABLE_QUIET_S)
    assert [(line["source"], line["event"], line["detail"], line["unsaid"]) for line in lines] == [
        ("engine", "undecodable message", "message 0", 0),
        ("core", "undecodable batch", "cut", 0),
        ("engine", "undecodable batch", "cut too", 0),
        ("engine", "undecodable message", "a minute later", 99),
    ]
