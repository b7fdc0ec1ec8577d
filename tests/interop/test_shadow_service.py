"""A shadow in a real service with a real agent: compared over the API, and gone on with after a restart."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from advisor.exposition import render_metrics
from advisor.fold import Fold
from advisor.log import SqlLog, read_decoded
from advisor.reader import ServiceReader
from advisor.service import AdvisorService
from advisor.settings import AdvisorSettings, AgentSettings, PolicySettings, ShadowSettings, SourceSettings
from advisor.views import ComparisonView
from event_plane.connect import open_publisher
from event_plane.schema import Namespace, producer_id
from storage_agent.agent import StorageAgent
from storage_agent.config import load_settings
from storage_agent.port import BlockKey, PutBlock, Result
from storage_agent.service import AgentService
from tests.interop.test_service import eventually
from tests.ports import free_ports

NAMESPACE = Namespace(tenant="acme")
BLOCK_BYTES = 6_000
BLOCKS = 12
AGENT = """
name = "agent-1"
command_url = "ipc://{folder}/commands"
event_url = "zmq+tcp://127.0.0.1:{port}"
allowed_roots = ["."]
[[volumes]]
id = "fast"
path = "fast.slab"
capacity_blocks = 32
block_bytes_max = 6000
[[volumes]]
id = "slow"
path = "slow.slab"
speed_rank = 1
capacity_blocks = 64
block_bytes_max = 6000
"""


def key(number: int) -> BlockKey:
    return BlockKey(NAMESPACE.namespace_id, 0, number + 1)


def read_all(agent: StorageAgent) -> None:
    buffers = [bytearray(BLOCK_BYTES) for _ in range(BLOCKS)]
    outcomes = agent.get([key(number) for number in range(BLOCKS)], [memoryview(each) for each in buffers])
    assert {outcome.result for outcome in outcomes} == {Result.HIT}


def uses(view: ComparisonView) -> list[int]:
    return [policy.since_start.uses for policy in view.policies]


def folded(folder: Path) -> Fold:
    log, fold = SqlLog(folder / "log.db", read_only=True), Fold()
    for entry, batch in read_decoded(log, folder / "log.db"):
        fold.apply(entry, batch)
    log.close()
    return fold


def test_shadow_finds_what_its_policy_would_have_and_goes_on_after_a_restart(tmp_path: Path) -> None:
    port, _ = free_ports(2)
    file = tmp_path / "agent.toml"
    file.write_text(AGENT.format(folder=tmp_path, port=port))
    settings = load_settings(file)
    publisher = open_publisher(settings.event_url, producer=producer_id(settings.name), flush_interval_s=0.02)
    agent = StorageAgent(settings.name, publisher=publisher, allowed_roots=settings.allowed_roots)
    for volume in settings.volumes:
        agent.register_volume(volume)

    def service() -> AdvisorService:
        options: dict[str, Any] = {"hysteresis_s": 0.0}
        return AdvisorService(
            AdvisorSettings(
                directory=tmp_path, tick_interval_s=0.1,
                sources=(SourceSettings(name="agent", url=settings.event_url),),
                agents=(AgentSettings(name=settings.name, command_url=settings.command_url),),
                policy=PolicySettings(admission="touch-3", **options),
                shadow=(
                    ShadowSettings(name="same", policy=PolicySettings(admission="touch-3", **options)),
                    ShadowSettings(name="eager", policy=PolicySettings(admission="always", **options)),
                ),
            )
        )  # fmt: skip

    def put() -> None:
        payload = np.random.default_rng(1).bytes(BLOCK_BYTES)
        blocks = [PutBlock(key(number), NAMESPACE, memoryview(payload), block_tokens=16) for number in range(BLOCKS)]
        assert {outcome.result for outcome in agent.put("slow", blocks)} == {Result.STORED}

    def used(reader: ServiceReader, rounds: int) -> ComparisonView:
        eventually(lambda: uses(reader.comparison()) == 3 * [rounds * BLOCKS], f"{rounds} reads of each block")
        return reader.comparison()

    with AgentService(agent, settings.command_url):
        with service() as running:
            reader = ServiceReader(running)
            eventually(lambda: len(running.fold.volumes) == 2, "volumes")
            put()
            for rounds in (1, 2):
                read_all(agent)
                view = used(reader, rounds)
        assert view.fastest == "fast"
        assert [policy.name for policy in view.policies] == ["live", "same", "eager"]
        assert [policy.since_start.found for policy in view.policies] == [0, 0, BLOCKS]
        assert [policy.since_start.moves for policy in view.policies] == [0, 0, BLOCKS]
        with service() as running:
            reader = ServiceReader(running)
            eventually(lambda: not running.unreachable and len(reader.volumes()) == 2, "the agent")
            read_all(agent)
            used(reader, 3)
            eventually(lambda: reader.comparison().policies[0].since_start.moves == BLOCKS, "the live moves")
            read_all(agent)
            view = used(reader, 4)
            told = render_metrics(running, reader).decode()
            in_force = reader.policies()
        assert view.note == ""
        assert in_force.policy == PolicySettings(admission="touch-3", hysteresis_s=0.0)
        assert (in_force.eviction, in_force.shadows) == ("lru-leaf", ["same", "eager"])
        assert [policy.since_start.found for policy in view.policies] == [BLOCKS, BLOCKS, 3 * BLOCKS]
        assert [policy.since_start.precision for policy in view.policies] == [1.0, 1.0, 1.0]
        assert 'kvadvisor_policy_found_total{policy="eager"} 36.0' in told
    agent.close()
    publisher.close()
    assert folded(tmp_path).digest() == running.fold.digest()
