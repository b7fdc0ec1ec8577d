"""A slab of several sizes of slots from an agent's settings: its clients, and what `stat` shows."""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path

from typer.testing import CliRunner

from event_plane.schema import Namespace
from storage_agent.agent_command import serve
from storage_agent.client import AgentClient
from storage_agent.config import load_settings
from storage_agent.port import BlockKey, ClassStat, PutBlock, Result
from storage_agent.slab_client import SlabClient
from storage_agent.volumes_command import app
from tests.ports import free_ports

NAMESPACE = Namespace(tenant="t")
SMALL, LARGE = 3000, 70_000


def key(number: int) -> BlockKey:
    return BlockKey(NAMESPACE.namespace_id, 0, number)


def test_a_client_of_a_slab_of_classes_writes_and_reads_blocks_of_each(tmp_path: Path) -> None:
    (events,) = free_ports(1)
    file = tmp_path / "agent.toml"
    file.write_text(
        f"""
        name = "a"
        command_url = "ipc://{tmp_path}/commands"
        event_url = "zmq+tcp://127.0.0.1:{events}"
        allowed_roots = ["."]
        [[volumes]]
        id = "mixed"
        path = "mixed.slab"
        capacity_blocks = 5
        block_bytes_max = {LARGE}
        options.classes = [{{block_bytes = {SMALL}, blocks = 2}}, {{block_bytes = {LARGE}, blocks = 3}}]
        """
    )
    settings = load_settings(file)
    sizes = {1: SMALL, 2: LARGE, 3: 1, 4: SMALL, 5: LARGE, 6: LARGE}
    payloads = {number: bytes([number]) * size for number, size in sizes.items()}
    with ExitStack() as closing:
        serve(settings, closing)
        agent = closing.enter_context(AgentClient(settings.command_url))
        client = closing.enter_context(SlabClient(settings.command_url, "mixed"))
        outcomes = client.put([PutBlock(key(n), NAMESPACE, memoryview(p)) for n, p in payloads.items()])
        assert [outcome.result for outcome in outcomes] == [Result.STORED] * 5 + [Result.FULL]
        buffers = [bytearray(sizes[number]) for number in range(1, 6)]
        got = client.get([key(number) for number in range(1, 6)], [memoryview(buffer) for buffer in buffers])
        assert [outcome.result for outcome in got] == [Result.HIT] * 5
        assert [bytes(buffer) for buffer in buffers] == [payloads[number] for number in range(1, 6)]
        assert agent.stat().volumes[0].classes == [
            ClassStat(SMALL, 2, 2, SMALL + 1, 0),
            ClassStat(LARGE, 3, 3, 2 * LARGE + SMALL, 0),
        ]
        shown = CliRunner().invoke(app, ["stat", "mixed", "--config", str(file)], env={"COLUMNS": "200"}).output
        assert "blocks up to 3,000 bytes" in shown
        assert "3 of 3 slots, 0 free, 143,000 bytes" in shown
