"""A core and its storage client whose agent is not there, ends, or lacks what it is asked for."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import pytest
from structlog.testing import capture_logs

from event_plane.memory_transport import MemoryPublisher
from event_plane.schema import Namespace, producer_id
from kvbm_core.config import KvbmConfig, TierVolumes
from kvbm_core.errors import ConfigError
from kvbm_core.manager import KvBlockManager
from kvbm_core.sequence import TokenBlockSequence
from storage_agent import client_storage, remote_volume
from storage_agent.agent import StorageAgent
from storage_agent.client_storage import ClientStorage
from storage_agent.descriptor import VolumeDescriptor
from storage_agent.errors import ServiceError
from storage_agent.port import BlockKey, PutBlock, Result
from storage_agent.service import AgentService
from tests.core_room import DISK, SIZES
from tests.ports import free_ports

NEVER_S = 600.0
NAMESPACE = Namespace(tenant="acme", model="tiny", block_tokens=4)


@pytest.fixture
def url() -> str:
    (port,) = free_ports(1)
    return f"tcp://127.0.0.1:{port}"


@pytest.fixture(autouse=True)
def _brief(monkeypatch: pytest.MonkeyPatch) -> None:
    for where, name, seconds in (
        (client_storage, "PROBE_S", 0.5),
        (client_storage, "ABSENT_S", 0.0),
        (remote_volume, "ABSENT_S", 0.0),
    ):
        monkeypatch.setattr(where, name, seconds)


@contextmanager
def served(folder: Path, url: str) -> Iterator[None]:
    """An agent with the slab `disk` and the memory volume `ram`."""
    with StorageAgent("owner", publisher=None, allowed_roots=[folder]) as agent:
        sizes = {"capacity_blocks": 16, "block_bytes_max": 4096}
        agent.register_volumes(
            [
                VolumeDescriptor(id="disk", path=str(folder / "disk.slab"), **sizes),
                VolumeDescriptor(id="ram", kind="memory", **sizes),
            ]
        )
        with AgentService(agent, url):
            yield


def block(number: int) -> PutBlock:
    return PutBlock(BlockKey(NAMESPACE.namespace_id, 0, number << 64 | 1), NAMESPACE, memoryview(b"%04d" % number))


def of_client(said: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """The lines of the storage client, not those of an agent in this process."""
    return [line for line in said if "agent_url" in line]


def put_until_stored(storage: ClientStorage, volume: str, number: int) -> None:
    while storage.put(volume, [block(number)])[0].result not in (Result.STORED, Result.PRESENT):
        pass  # it has to connect within PROBE_S


@contextmanager
def core(storage: ClientStorage, **settings: Any) -> Iterator[KvBlockManager]:
    with (
        closing(MemoryPublisher("memory://absent-agent", producer=producer_id("core"))) as publisher,
        KvBlockManager(KvbmConfig(**SIZES | settings), publisher, storage) as manager,
    ):
        yield manager


def test_an_absent_agent_is_logged_once_and_its_return_once(tmp_path: Path, url: str) -> None:
    with capture_logs() as said, ClientStorage(url, timeout_s=NEVER_S) as storage:
        for number in range(3):
            (outcome,) = storage.put("disk", [block(number)])
            assert (outcome.result, "did not answer in 0.5 s" in outcome.reason) == (Result.FAILED, True)
        (warning,) = of_client(said)
        assert (warning["log_level"], warning["agent_url"]) == ("warning", url)
        assert "start the agent, or correct the URL" in warning["remedy"]
        with served(tmp_path, url):
            put_until_stored(storage, "disk", 1)
            put_until_stored(storage, "disk", 2)
    assert [each["log_level"] for each in of_client(said)] == ["warning", "info"]  # and closing is no absence


@pytest.mark.parametrize("volume", ["disk", "ram"])
def test_an_agent_that_ends_between_two_questions_is_not_waited_for(tmp_path: Path, url: str, volume: str) -> None:
    with ClientStorage(url, timeout_s=NEVER_S) as storage:
        with served(tmp_path, url):
            put_until_stored(storage, volume, 1)
            storage.get([block(1).key], [memoryview(bytearray(4))])
        (put,) = storage.put(volume, [block(2)])
        (got,) = storage.get([block(1).key], [memoryview(bytearray(4))])
    assert (put.result, got.result) == (Result.FAILED, Result.FAILED)


@pytest.mark.parametrize("wrong", ["http://127.0.0.1:25600", "127.0.0.1:25600", ""])
def test_a_url_that_no_agent_can_have_is_refused_at_once(wrong: str) -> None:
    with pytest.raises(ServiceError, match="tcp://, ipc://, nats://: give the command_url") as told:
        ClientStorage(wrong)
    assert repr(wrong) in str(told.value)


def test_a_core_is_refused_a_volume_that_an_agent_which_answers_lacks(tmp_path: Path, url: str) -> None:
    wrong = TierVolumes(volumes=("disk", "fsat"), retention_s=60.0)
    with served(tmp_path, url), ClientStorage(url, timeout_s=NEVER_S) as storage:
        while storage.put("ram", [block(1)])[0].result is Result.FAILED:
            pass
        with pytest.raises(ConfigError) as told, core(storage, disk=wrong):
            pass
    assert str(told.value) == (
        "disk.volumes names 'fsat', which agent 'owner' does not have: register it there, or name one of its own, "
        "'disk', 'ram'"
    )


def test_a_core_of_an_absent_agent_starts_offloads_and_ends_without_it(url: str) -> None:
    with (
        capture_logs() as said,
        ClientStorage(url, timeout_s=NEVER_S) as storage,
        core(storage, disk=DISK) as manager,
    ):
        blocks = TokenBlockSequence(manager.config, "acme", range(16)).blocks
        placed = manager.allocate(len(blocks)).blocks
        manager.register_many(manager.complete(placed, blocks))
        assert manager.offload(len(blocks)) == len(blocks)
        assert sum(manager.totals().put_refused.values()) == len(blocks)
    assert [each["log_level"] for each in of_client(said)] == ["warning"]
