"""`kvadvisor agent` as a process, and `kvadvisor volumes` beside it."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest
from typer.testing import CliRunner

from event_plane import wire
from event_plane.connect import open_subscriber
from event_plane.schema import EventType, Namespace, producer_id
from event_plane.transport import Message
from storage_agent.agent import StorageAgent
from storage_agent.agent_command import serve
from storage_agent.block_header import PAGE_BYTES
from storage_agent.client import AgentClient
from storage_agent.config import AgentSettings, load_settings
from storage_agent.errors import StaleTerm, StorageAgentError
from storage_agent.port import BlockKey, PutBlock, Result
from storage_agent.slab_format import Superblock
from storage_agent.volumes_command import app
from tests import stopping
from tests.contract.transports import wait_for
from tests.nats_server import nats_server

NAMESPACE = Namespace(tenant="p")
BLOCK_BYTES = 5000
CAPACITY = 16
CONFIG = """
name = "agent-1"
command_url = "{command_url}"
event_url = "{event_url}"
allowed_roots = ["."]
state_folder = "state"

[[volumes]]
id = "fast"
path = "fast.slab"
capacity_blocks = 16
block_bytes_max = 5000

[[volumes]]
id = "slow"
kind = "directory"
path = "{slow}"
capacity_blocks = 16
block_bytes_max = 5000
speed_rank = 1
tier = 4
"""


def key(number: int) -> BlockKey:
    return BlockKey(NAMESPACE.namespace_id, 0, number + 1)


def write_config(folder: Path, command_url: str, event_url: str, slow: str = "slow") -> Path:
    file = folder / "agent.toml"
    file.write_text(CONFIG.format(command_url=command_url, event_url=event_url, slow=slow))
    return file


@pytest.fixture
def config(tmp_path: Path) -> Path:
    return write_config(tmp_path, f"ipc://{tmp_path}/commands", f"zmq+ipc://{tmp_path}/events")


def fill(config: Path, *numbers: int, volume: str = "fast") -> None:
    """Blocks on a volume, by an agent in this process."""
    settings = load_settings(config)
    with StorageAgent(settings.name, publisher=None, allowed_roots=settings.allowed_roots) as agent:
        agent.register_volumes(settings.volumes)
        blocks = [PutBlock(key(n), NAMESPACE, memoryview(b"%05d" % n * 1000)) for n in numbers]
        assert {outcome.result for outcome in agent.put(volume, blocks)} == {Result.STORED}


@contextmanager
def running(config: Path) -> Iterator[subprocess.Popen[str]]:
    command = [sys.executable, "-m", "advisor.cli", "agent", "--config", str(config)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            line = process.stdout.readline()
            if line:
                settings = load_settings(config)
                assert line == f"kvadvisor agent agent-1: commands at {settings.command_url} (Ctrl-C stops it)\n"
            yield process
        finally:
            process.kill()


def stop(process: subprocess.Popen[str], number: signal.Signals) -> str:
    """What it logged. It ends in order."""
    process.send_signal(number)
    _, logged = process.communicate(timeout=100)
    assert process.returncode == 0, logged
    return logged


class Events:
    """What is told on an event URL: blocks by volume."""

    def __init__(self, url: str) -> None:
        self._subscriber = open_subscriber("agent", url)
        self._subscriber.ask_resend(0, 1, producer_id("agent-1"))  # what was sent before the subscription stood
        self.held: dict[str, set[int]] = {}

    def take(self) -> dict[str, set[int]]:
        for message in self._subscriber.receive(64):
            if isinstance(message, Message):
                batch = wire.decode(message.payload)
                for row in batch.records:
                    held = self.held.setdefault(batch.locations[int(row["storage_location"])], set())
                    change = held.add if row["event_type"] == int(EventType.STORE) else held.discard
                    if row["event_type"] in (int(EventType.STORE), int(EventType.REMOVE)):
                        change(int(row["sequence_hash_lo"]) - 1)
        return self.held

    def close(self) -> None:
        self._subscriber.close()


@pytest.fixture
def events(config: Path) -> Iterator[Events]:
    heard = Events(load_settings(config).event_url)
    yield heard
    heard.close()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_an_agent_serves_until_it_is_told_to_stop_and_leaves_volumes_closed_in_order(
    config: Path, events: Events, number: signal.Signals
) -> None:
    fill(config, 1, 2)
    with running(config) as process:
        wait_for(lambda: events.take().get("fast") == {1, 2})
        with AgentClient(load_settings(config).command_url, 20.0) as client:
            assert client.stat().producer == producer_id("agent-1")
            moved = client.move("m", [key(1)], "fast", "slow", keep=False)
            assert [outcome.result for outcome in moved.outcomes] == [Result.COPIED]
            wait_for(lambda: events.take() == {"fast": {2}, "slow": {1}})
        logged = stop(process, number)
    assert "volume serves" in logged
    assert "volume=slow" in logged
    assert logged.count("GPU-direct storage") == 1 or Path("/dev/nvidiactl").exists(), "else it is proven meanwhile"
    assert f"signal={number.name}" in logged
    status, said = volumes("verify", "--config", str(config))
    assert status == 0, said
    assert [line.split("│")[-2].strip() for line in said.splitlines() if "fast" in line] == ["yes"]


def test_an_agent_that_is_frozen_for_a_while_goes_on(config: Path) -> None:
    with running(config) as process, AgentClient(load_settings(config).command_url, 20.0) as client:
        for _ in range(3):
            stopping.stop(process.pid)
            time.sleep(0.3)  # past the end of its wait for a signal
            process.send_signal(signal.SIGCONT)
            assert client.stat().producer == producer_id("agent-1")
        stop(process, signal.SIGTERM)


def test_after_a_kill_a_command_asked_again_does_no_harm_and_the_newest_term_is_known(config: Path) -> None:
    """Answers are remembered for a life; what a command does is the same when it is done twice."""
    fill(config, 1, 2)
    for life in range(2):
        with running(config) as process, AgentClient(load_settings(config).command_url, 20.0) as client:
            if life == 1:
                with pytest.raises(StaleTerm, match=r"of term 4, an advisor of term 5 has taken over; .*\.term and"):
                    client.delete("late", "slow", [key(1)], term=4)
            moved = client.move("m", [key(1)], "fast", "slow", keep=False, term=5)
            assert [outcome.result.ok for outcome in moved.outcomes] == [True]
            deleted = client.delete("d", "fast", [key(2)])
            assert [outcome.result for outcome in deleted.outcomes] == [[Result.DELETED], [Result.MISS]][life]
            assert [(each.descriptor.id, each.blocks) for each in client.stat().volumes] == [("fast", 0), ("slow", 1)]
            process.kill() if life == 0 else stop(process, signal.SIGTERM)


def test_an_agent_over_nats_is_commanded_and_heard_by_subjects(tmp_path: Path) -> None:
    with nats_server(tmp_path / "nats") as server:
        config = write_config(tmp_path, server.url("kv.commands.agent-1"), server.url("kv.events"))
        fill(config, 1)
        heard = Events(server.url("kv.events"))
        with running(config) as process, AgentClient(server.url("kv.commands.agent-1"), 20.0) as client:
            assert client.copy("c", [key(1)], "fast", "slow").outcomes[0].result is Result.COPIED
            wait_for(lambda: heard.take() == {"fast": {1}, "slow": {1}})
            stop(process, signal.SIGTERM)
        heard.close()


def test_a_volume_that_is_not_there_yet_does_not_keep_the_others(config: Path, tmp_path: Path) -> None:
    settings = load_settings(config)
    late = write_config(tmp_path, settings.command_url, settings.event_url, slow="late/slow")
    with running(late) as process, AgentClient(settings.command_url, 20.0) as client:
        assert [volume.mode == "absent" for volume in client.stat().volumes] == [False, True]
        status, said = volumes("ls", "--config", str(late))
        assert status == 0
        assert "serves" in said
        assert "absent" in said
        assert "volume cannot be used yet" in stop(process, signal.SIGTERM)


def test_an_agent_with_nothing_to_serve_says_why(config: Path, tmp_path: Path) -> None:
    config.write_text(config.read_text().split("[[volumes]]\nid = \"slow\"", maxsplit=1)[0])
    with running(config) as first:
        second = tmp_path / "second.toml"
        second.write_text(config.read_text().replace("/commands", "/commands-2").replace("/events", "/events-2"))
        with running(second) as process:
            _, logged = process.communicate(timeout=100)
            assert process.returncode == 2
        assert logged.splitlines()[-1].startswith("kvadvisor: volume 'fast': ")
        assert f"is open in process {first.pid} on {os.uname().nodename}" in logged
        stop(first, signal.SIGTERM)


# kvadvisor volumes


def volumes(*arguments: str) -> tuple[int, str]:
    """Exit status and what was said, as `kvadvisor volumes` would."""
    ended = CliRunner().invoke(app, arguments, env={"COLUMNS": "200"})
    if isinstance(ended.exception, StorageAgentError):
        return ended.exception.exit_status, f"{ended.output}{ended.exception}"
    if ended.exception is not None and not isinstance(ended.exception, SystemExit):
        raise ended.exception
    return ended.exit_code, ended.output


@contextmanager
def served(config: Path) -> Iterator[AgentSettings]:
    """The agent's service in this process."""
    settings = load_settings(config)
    with ExitStack() as closing:
        serve(settings, closing)
        yield settings


def figures(said: str, volume: str) -> list[str]:
    row = next(line for line in said.splitlines() if f"│ {volume} " in line)
    return [cell.strip() for cell in row.split("│")[2:-1]]


def test_ls_and_stat_show_what_a_running_agent_says(config: Path) -> None:
    fill(config, 1, 2)
    with served(config) as settings:
        for where in (["--config", str(config)], ["--command-url", settings.command_url]):
            status, said = volumes("ls", *where)
            assert status == 0
            assert figures(said, "fast")[0:3] == ["slab", "G3", "0"]
            assert figures(said, "fast")[4:7] == ["serves", "2", "14"]
            assert figures(said, "slow")[0:3] == ["directory", "G4", "1"]
            assert said.splitlines()[-1].startswith("GPU-direct storage: ")
        status, said = volumes("stat", "fast", "--config", str(config))
        assert status == 0
        assert "10,000" in said
        said = "agent agent-1 has no volume 'tape'; it has fast, slow"
        assert volumes("stat", "tape", "--config", str(config)) == (2, said)


def test_ls_of_an_agent_that_does_not_run_tells_of_its_settings(
    config: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("storage_agent.volumes_command.ASK_TIMEOUT_S", 0.2)
    fill(config, 1)
    status, said = volumes("ls", "--config", str(config))
    assert status == 0
    assert "does not answer" in said
    assert figures(said, "fast")[3:5] == ["closed in order", "16"]
    with pytest.raises(StorageAgentError, match="did not answer"):
        raise _error(["stat", "fast", "--config", str(config)])
    assert volumes("ls") == (2, "which agent? Give --config FILE or --command-url URL")


def _error(arguments: Sequence[str]) -> BaseException:
    fault = CliRunner().invoke(app, list(arguments)).exception
    assert fault is not None
    return fault


def damage(config: Path) -> None:
    """Flip a bit of every block on the slab."""
    slab = Superblock("fast", CAPACITY, BLOCK_BYTES)
    with (config.parent / "fast.slab").open("r+b") as file:
        for slot in range(CAPACITY):
            file.seek(slab.slot_offset(slot) + PAGE_BYTES + 77)
            (byte,) = file.read(1)
            file.seek(-1, 1)
            file.write(bytes([byte ^ 1]))


def test_scrub_has_damage_found_and_ends_with_1(config: Path) -> None:
    fill(config, 1, 2)
    fill(config, 3, volume="slow")
    with served(config):
        status, said = volumes("scrub", "fast", "--config", str(config))
        assert (status, figures(said, "fast")[:3]) == (0, ["2", "0", "0"])
        damage(config)
        status, said = volumes("scrub", "fast", "--config", str(config))
        assert (status, figures(said, "fast")[:3]) == (1, ["0", "2", "0"])
        assert "fast: blocks were lost" in said
        status, said = volumes("scrub", "slow", "--config", str(config))
        assert (status, figures(said, "slow")[:3]) == (0, ["1", "0", "0"])


def test_verify_finds_damage_without_changing_a_byte_and_fsck_frees_it(config: Path) -> None:
    fill(config, 1, 2)
    status, said = volumes("verify", "fast", "--config", str(config))
    assert (status, figures(said, "fast")) == (0, ["16", "2", "14", "0", "0", "yes"])
    damage(config)
    before = (config.parent / "fast.slab").read_bytes()
    status, said = volumes("verify", "fast", "--config", str(config))
    assert (status, figures(said, "fast")) == (1, ["16", "0", "14", "2", "0", "yes"])
    assert "the device lost or changed bytes" in said
    assert (config.parent / "fast.slab").read_bytes() == before
    status, said = volumes("fsck", "fast", "--config", str(config))
    assert (status, figures(said, "fast")[:3]) == (1, ["0", "2", "0"])
    status, said = volumes("fsck", "fast", "--config", str(config))
    assert (status, figures(said, "fast")[:3]) == (0, ["0", "0", "0"])


def test_fsck_refuses_while_an_agent_runs_or_where_there_is_nothing(config: Path) -> None:
    with served(config):
        status, said = volumes("fsck", "fast", "--config", str(config))
        assert status == 2
        assert f"is open in process {os.getpid()}" in said
    (config.parent / "fast.slab").unlink()
    status, said = volumes("fsck", "fast", "--config", str(config))
    assert status == 2
    assert "is not there; nothing to check" in said
    assert not (config.parent / "fast.slab").exists()
    status, said = volumes("verify", "tape", "--config", str(config))
    assert (status, said) == (2, "the settings have no volume 'tape'; they have fast, slow")


def test_fsck_of_an_empty_folder_makes_no_directory_volume(tmp_path: Path) -> None:
    folder = tmp_path / "shared"
    folder.mkdir()
    file = tmp_path / "agent.toml"
    file.write_text(
        f"""
        name = "a"
        command_url = "ipc://{tmp_path}/commands"
        event_url = "zmq+tcp://127.0.0.1:1"
        allowed_roots = ["."]
        [[volumes]]
        id = "shared"
        kind = "directory"
        path = "shared"
        capacity_blocks = 8
        block_bytes_max = 8192
        """
    )
    status, said = volumes("fsck", "--config", str(file))
    assert status == 2
    assert str(folder) in said
    assert list(folder.iterdir()) == []
