"""Whatever is lost, doubled, delayed, reordered or cut: after the noise stops the fold holds what our producer placed.

`KVADVISOR_FAULT_EXAMPLES` asks for more scripts than the few of a test run, others each time (`make soak-plane`).
"""

from __future__ import annotations

import os
import time
from contextlib import ExitStack, closing
from dataclasses import dataclass
from typing import Final, Literal

import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from advisor.intake import SourceFacts
from tests.fault_ends import Advisor, Core, attach
from tests.faults import PASSES, ByteProxy, Fault, Lane, ZmqProxy
from tests.ports import free_ports

PRODUCER: Final = 77
EXAMPLES: Final = int(os.environ.get("KVADVISOR_FAULT_EXAMPLES", "0"))
PAUSE_S: Final = 0.03
"""Long enough for what is under way to arrive or be lost."""

Step = (
    tuple[Literal["store", "remove"], int]
    | tuple[Literal["clear", "snapshot", "restart", "resume", "cut", "stall", "pause"]]
)


@dataclass(frozen=True)
class Script:
    """`live`, `requests` and `replies` are the lanes' patterns; a small `buffer_batches` makes snapshots necessary."""

    live: tuple[Fault, ...]
    requests: tuple[Fault, ...]
    replies: tuple[Fault, ...]
    steps: tuple[Step, ...]
    buffer_batches: int = 4
    seed: int = 0


FAULTS = st.sampled_from([PASSES, PASSES, PASSES, (), (), (0, 0), (1,), (3,), (0, 4)])
PATTERNS = st.lists(FAULTS, min_size=1, max_size=9).map(tuple)
STEPS = st.one_of(
    st.tuples(st.sampled_from(["store", "store", "store", "remove"]), st.integers(1, 6)),
    st.tuples(st.sampled_from(["clear", "snapshot", "restart", "resume", "cut", "stall", "pause", "pause"])),
)
SCRIPTS = st.builds(
    Script,
    live=PATTERNS,
    requests=PATTERNS,
    replies=PATTERNS,
    steps=st.lists(STEPS, min_size=8, max_size=25).map(tuple),
    buffer_batches=st.sampled_from([1, 2, 4, 64]),
    seed=st.integers(0, 2**32),
)


def run(script: Script, wait_s: float = 0.1) -> Advisor:
    """Play `script`, let the noise end and wait until the fold holds what the producer placed.

    `wait_s`: see `Advisor`; long where no request is lost, and nothing may be given up.
    """
    with ExitStack() as stack:
        events, requests = free_ports(2)
        core = stack.enter_context(closing(Core(
            PRODUCER, f"zmq+tcp://127.0.0.1:{events}", f"zmq+tcp://127.0.0.1:{requests}", script.seed,
            {"flush_events": 3, "buffer_batches": script.buffer_batches, "heartbeat_s": 0.1, "window_wait_s": 0.1},
        )))  # fmt: skip
        lanes = stack.enter_context(closing(ZmqProxy((events, requests))))
        wires = [stack.enter_context(closing(ByteProxy(port))) for port in (lanes.events_port, lanes.requests_port)]
        urls = [f"zmq+tcp://127.0.0.1:{wire.port}" for wire in wires]
        advisor = stack.enter_context(closing(Advisor(urls[0], urls[1], SourceFacts("core"), wait_s=wait_s)))
        attach(lanes, lambda: core.store(1))
        lanes.disturb(live=script.live, requests=script.requests, replies=script.replies)
        for step in script.steps:
            take(step, core, lanes, wires)
        lanes.calm()
        core.store(1)
        advisor.wait_for_all_of(core)
        assert not advisor.fold.producers[PRODUCER].partial
    advisor.check_log()
    return advisor


def take(step: Step, core: Core, lanes: ZmqProxy, wires: list[ByteProxy]) -> None:
    match step:
        case ("store", count):
            core.store(count)
        case ("remove", count):
            core.remove(count)
        case ("clear",):
            core.clear()
        case ("snapshot",):
            core.list_all()
        case ("restart",) | ("resume",):
            # What was delayed of the life before went with its connections.
            lanes.forget()
            core.restart(keep=step[0] == "resume")
        case ("cut",):
            for wire in wires:
                wire.cut()
        case ("pause",):
            time.sleep(PAUSE_S)
        case ("stall",):
            for wire in wires:
                wire.stall()
            time.sleep(PAUSE_S)
            for wire in wires:
                wire.flow()


@settings(
    max_examples=EXAMPLES or 12,
    derandomize=not EXAMPLES,
    deadline=None,
    phases=[Phase.explicit, Phase.generate],  # what fails here fails by timing too: shrinking would take hours
    suppress_health_check=[HealthCheck.too_slow],
)
@given(SCRIPTS)
def test_after_the_noise_the_fold_holds_what_the_producer_placed(script: Script) -> None:
    run(script)


def test_undisturbed_stream_needs_no_healing() -> None:
    advisor = run(Script((PASSES,), (PASSES,), (PASSES,), (("store", 5), ("remove", 2), ("store", 5)), 64), wait_s=2.0)
    assert advisor.fold.producers[PRODUCER].gaps == 0


def test_gap_older_than_the_buffer_is_healed_by_a_snapshot() -> None:
    steps: tuple[Step, ...] = (("store", 3),) * 12
    script = Script((PASSES, PASSES, (), (), (), (), PASSES), (PASSES,), (PASSES,), steps, buffer_batches=1)
    advisor = run(script, wait_s=2.0)
    assert advisor.fold.producers[PRODUCER].gaps == 0


@pytest.mark.parametrize(
    ("pattern", "arrivals"),
    [
        ([], [0, 1, 2, 3]),
        ([()], []),
        ([(0,), ()], [0, 2]),
        ([(0, 0)], [0, 0, 1, 1, 2, 2, 3, 3]),
        ([(1,), (0,)], [1, 0, 3, 2]),
        ([(2,), (0,), (0,), (0,)], [1, 2, 0, 3]),
        ([(0, 2), (0,), (0,), (0,)], [0, 1, 2, 0, 3]),
    ],
)
def test_lane_does_to_each_message_what_the_pattern_says(pattern: list[Fault], arrivals: list[int]) -> None:
    lane = Lane(pattern)
    arrived = [frames for number in range(4) for frames in lane.through([bytes([number])])]
    assert [frames[0][0] for frames in arrived + lane.calm()] == arrivals
