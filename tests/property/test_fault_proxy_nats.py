"""Connections to a NATS server that are cut and stalled, the publisher's and the subscriber's: nothing stays lost.

`KVADVISOR_FAULT_EXAMPLES` asks for more scripts, others each time (`make soak-plane`).
"""

from __future__ import annotations

import itertools
import os
import time
from collections.abc import Iterator
from contextlib import ExitStack, closing
from dataclasses import dataclass
from typing import Final, Literal

import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from advisor.intake import SourceFacts
from tests.fault_ends import Advisor, Core
from tests.faults import ByteProxy
from tests.nats_server import NatsServer, nats_server

PRODUCER: Final = 78
EXAMPLES: Final = int(os.environ.get("KVADVISOR_FAULT_EXAMPLES", "0"))
PAUSE_S: Final = 0.03

Step = (
    tuple[Literal["store", "remove"], int]
    | tuple[Literal["cut", "stall"], Literal["publisher", "subscriber"]]
    | tuple[Literal["clear", "snapshot", "restart", "resume", "pause"]]
)


@dataclass(frozen=True)
class Script:
    steps: tuple[Step, ...]
    buffer_batches: int = 64
    seed: int = 0


STEPS = st.one_of(
    st.tuples(st.sampled_from(["store", "store", "remove"]), st.integers(1, 6)),
    st.tuples(st.sampled_from(["cut", "stall"]), st.sampled_from(["publisher", "subscriber"])),
    st.tuples(st.sampled_from(["clear", "snapshot", "restart", "resume", "pause", "pause"])),
)
SCRIPTS = st.builds(
    Script,
    steps=st.lists(STEPS, min_size=6, max_size=14).map(tuple),
    buffer_batches=st.sampled_from([1, 4, 64]),
    seed=st.integers(0, 2**32),
)
_names = (f"faults-{number}" for number in itertools.count())


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[NatsServer]:
    with nats_server(tmp_path_factory.mktemp("nats"), jetstream=True) as running:
        yield running


def run(server: NatsServer, scheme: str, script: Script) -> None:
    name = next(_names)
    with ExitStack() as stack:
        wires = {end: stack.enter_context(closing(ByteProxy(server.port))) for end in ("publisher", "subscriber")}
        urls = {end: f"{scheme}://127.0.0.1:{wire.port}/{name}" for end, wire in wires.items()}
        core = stack.enter_context(closing(Core(
            PRODUCER, urls["publisher"], None, script.seed,
            {"flush_events": 3, "buffer_batches": script.buffer_batches, "heartbeat_s": 0.1, "window_wait_s": 0.1},
        )))  # fmt: skip
        advisor = stack.enter_context(closing(Advisor(urls["subscriber"], None, SourceFacts("core"))))
        for step in script.steps:
            take(step, core, wires)
        core.store(1)
        advisor.wait_for_all_of(core)
    advisor.check_log()


def take(step: Step, core: Core, wires: dict[str, ByteProxy]) -> None:
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
            core.restart(keep=step[0] == "resume")
        case ("cut", end):
            wires[end].cut()
        case ("stall", end):
            wires[end].stall()
            time.sleep(PAUSE_S)
            wires[end].flow()
        case ("pause",):
            time.sleep(PAUSE_S)


@pytest.mark.parametrize("scheme", ["nats", "jetstream"])
@settings(
    max_examples=EXAMPLES or 4,
    derandomize=not EXAMPLES,
    deadline=None,
    phases=[Phase.explicit, Phase.generate],  # what fails here fails by timing too: shrinking would take hours
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture],
)
@given(SCRIPTS)
def test_after_cuts_and_stalls_the_fold_holds_what_the_producer_placed(
    server: NatsServer, scheme: str, script: Script
) -> None:
    run(server, scheme, script)
