"""A stranger's process, the example array, obeys published plans, through a kill of it too."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import nats

from advisor.movers.port import MoveBlock, MoveCommand, Phase
from advisor.movers.published import PublishedMover
from advisor.moves import MoveKind, MoveState
from advisor.service import AdvisorService
from advisor.settings import AdvisorSettings, AgentSettings, PolicySettings, SourceSettings
from storage_agent.port import BlockKey, CommandOutcome, Result
from tests.nats_server import nats_server
from tests.ports import free_ports

EXAMPLE = Path(__file__).parents[2] / "examples" / "array_mover.py"


def eventually(holds: Callable[[], bool], what: str, seconds: float = 60.0) -> None:
    deadline = time.monotonic() + seconds
    while not holds():
        assert time.monotonic() < deadline, f"not within {seconds} s: {what}"
        time.sleep(0.02)


@contextmanager
def running_array(plans: str, events: str) -> Iterator[subprocess.Popen[str]]:
    command = [sys.executable, str(EXAMPLE), plans, events]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as array:
        try:
            yield array
        finally:
            array.kill()


def held(service: AdvisorService, volume: str) -> set[int]:
    with service.lock:
        if volume not in service.fold.volumes:
            return set()
        place = service.fold.volumes[volume].place
        return {block.key.sequence_hash for block in service.fold.index.page(limit=100, place=place)[0]}


def test_the_example_array_moves_what_is_read_and_goes_on_after_a_kill(tmp_path: Path) -> None:
    port, _ = free_ports(2)
    plans, events = f"ipc://{tmp_path}/plans", f"zmq+tcp://127.0.0.1:{port}"
    settings = AdvisorSettings(
        directory=tmp_path / "state",
        tick_interval_s=0.2,
        sources=(SourceSettings(name="array", url=events),),
        agents=(AgentSettings(name="array", mover="published", command_url=plans),),
        policy=PolicySettings(admission="touch-2"),
    )

    def kept(service: AdvisorService) -> int:
        with service.lock:
            return service.fold.moves.counts[MoveKind.PROMOTE, MoveState.KEPT]

    with AdvisorService(settings) as service:
        assert service.fold.volumes == {}
        with running_array(plans, events) as array:
            assert array.stdout is not None
            eventually(lambda: held(service, "array-fast") == {1, 2, 3, 4}, "its blocks that are read, promoted")
            eventually(lambda: kept(service) == 4, "all four moves at their end")
            assert array.stdout.readline().startswith("promote copy copied")
        assert held(service, "array-slow") == set(range(1, 9)), "promotion keeps the slower copy"
        # Its next life has lost its fast copies; what it says of itself is what counts.
        with running_array(plans, events):
            eventually(lambda: kept(service) > 4 and held(service, "array-fast") == {1, 2, 3, 4}, "promoted again")
            assert service.fold.skipped["illegal move step"] == 0


def test_plans_go_over_nats_to_subjects_beside_the_one_named(tmp_path: Path) -> None:
    command = MoveCommand(
        "copy-1", 1, MoveKind.PROMOTE, Phase.COPY, "slow", "fast", (MoveBlock(BlockKey(7, 0, 1), 4096),)
    )
    volume = {"id": "fast", "kind": "array", "capacity_blocks": 8, "block_bytes_max": 4096}

    async def array(url: str, mover: PublishedMover) -> CommandOutcome:
        client = await nats.connect(url)
        commands = await client.subscribe("kv.plans.commands")
        await client.flush()
        asked = asyncio.create_task(asyncio.to_thread(mover.carry_out, command))
        heard = json.loads((await commands.next_msg(timeout=30)).data)
        hello = {"type": "volumes", "producer": f"{9:016x}", "volumes": [volume]}
        done = {"type": "outcome", "command_id": heard["command_id"], "results": [{"result": "copied"}]}
        for message in (hello, done):
            await client.publish("kv.plans.answers", json.dumps(message).encode())
        outcome = await asked
        await client.close()
        return outcome

    with nats_server(tmp_path / "nats") as server:
        mover = PublishedMover("array", server.url("kv.plans"))
        try:
            outcome = asyncio.run(array(f"nats://127.0.0.1:{server.port}", mover))
            assert outcome.outcomes[0].result is Result.COPIED
            assert [each.descriptor.id for each in mover.stat().volumes] == ["fast"]
        finally:
            mover.close()
