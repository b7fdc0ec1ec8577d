"""Volumes registered, resized and unregistered over the command socket: what an agent refuses, and what it keeps."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import msgspec
import pytest

from event_plane.schema import Namespace
from storage_agent.agent import StorageAgent
from storage_agent.client import AgentClient
from storage_agent.descriptor import VolumeDescriptor
from storage_agent.errors import CommandRefused, DescriptorError, StaleTerm, VolumeError
from storage_agent.port import BlockKey, PutBlock, Result
from storage_agent.registered_volumes import KeptVolumes, VolumeOrders
from storage_agent.service import AgentService
from tests.nats_server import nats_server

CONFIG = """
name = "a"
command_url = "{url}"
event_url = "zmq+ipc://{folder}/events"
allowed_roots = ["roots"]
state_folder = "state"

[endpoints.store]
url = "http://127.0.0.1:1"

[[volumes]]
id = "first"
kind = "directory"
path = "roots/first"
capacity_blocks = 8
block_bytes_max = 4096
"""
SECRET = "planted-secret"
SPACE = Namespace(tenant="t")


def described(folder: Path, **fields: object) -> VolumeDescriptor:
    facts = {"id": "extra", "path": str(folder / "extra.slab"), "capacity_blocks": 16, "block_bytes_max": 4096}
    return VolumeDescriptor(**{**facts, **fields})  # type: ignore[arg-type]


@contextmanager
def running(folder: Path) -> Iterator[AgentClient]:
    url = f"ipc://{folder}/commands"
    (folder / "roots").mkdir(exist_ok=True)
    config = folder / "agent.toml"
    config.write_text(CONFIG.format(url=url, folder=folder))
    command = [sys.executable, "-m", "advisor.cli", "agent", "--config", str(config)]
    with (
        open(folder / "errors", "a") as errors,
        subprocess.Popen(command, stdout=subprocess.PIPE, stderr=errors, text=True) as process,
    ):
        try:
            assert process.stdout is not None
            assert "commands at" in process.stdout.readline(), (folder / "errors").read_text()
            with AgentClient(url, 60.0) as client:
                yield client
        finally:
            process.send_signal(signal.SIGTERM)
            assert process.wait(60) == 0


def volumes(client: AgentClient) -> dict[str, int]:
    return {volume.descriptor.id: volume.descriptor.capacity_blocks for volume in client.stat().volumes}


def test_what_was_given_while_it_ran_is_there_after_a_restart(tmp_path: Path) -> None:
    extra = described(tmp_path / "roots")
    with running(tmp_path) as client:
        assert client.register_volume(extra, term=3).descriptor == extra
        assert client.register_volume(extra, term=3).slots_free == 16, "asked again it is as it was"
        with pytest.raises(CommandRefused, match="'extra' is registered already; unregister it first"):
            client.register_volume(described(tmp_path / "roots", speed_rank=7), term=3)
        with pytest.raises(StaleTerm, match="of term 2, an advisor of term 3 has taken over"):
            client.register_volume(described(tmp_path / "roots", id="late"), term=2)
        with pytest.raises(StaleTerm):
            client.resize_volume("extra", 4, term=2)
        with pytest.raises(StaleTerm):
            client.unregister_volume("extra", term=2)
        memory = described(tmp_path, id="memory", kind="memory", path="")
        client.register_volume(memory)
        assert client.resize_volume("extra", 32, term=3).slots_free == 32
        assert client.resize_volume("first", 12, term=3).descriptor.capacity_blocks == 12
        with pytest.raises(CommandRefused, match="'tape' is not registered"):
            client.resize_volume("tape", 3)
        client.unregister_volume("memory")
        with pytest.raises(CommandRefused, match="'memory' is not registered"):
            client.unregister_volume("memory")
    (kept,) = (tmp_path / "state").glob(".kvadvisor-*.registered")
    assert [volume["id"] for volume in json.loads(kept.read_bytes())["volumes"]] == ["extra"]
    with running(tmp_path) as client:
        assert volumes(client) == {"first": 12, "extra": 32}
        client.unregister_volume("extra")
        client.unregister_volume("first")
        assert volumes(client) == {}
    assert (tmp_path / "roots" / "extra.slab").exists(), "its blocks stay"
    with running(tmp_path) as client:
        assert volumes(client) == {"first": 12}, "the settings' own is back"


def test_nothing_gets_in_by_a_descriptor(tmp_path: Path) -> None:
    outside, roots = tmp_path / "outside", tmp_path / "roots"
    with running(tmp_path) as client:
        outside.mkdir()
        (roots / "link").symlink_to(outside)
        (roots / "file").symlink_to(outside / "target")
        (roots / "foreign").write_bytes(b"somebody's own" * 1_000)
        s3 = {"kind": "object", "path": "", "tier": 4}
        for fields, refusal in (
            ({"path": str(outside / "x.slab")}, "outside the allowed roots"),
            ({"path": str(roots / ".." / "outside" / "x.slab")}, "outside the allowed roots"),
            ({"path": str(roots / "link" / "x.slab")}, "outside the allowed roots"),
            ({"path": str(roots / "file")}, "outside the allowed roots"),
            ({"path": str(roots)}, "is an allowed root itself"),
            ({"path": "/etc/passwd"}, "outside the allowed roots"),
            ({"path": "x.slab"}, "path 'x.slab' is relative; give it from / on"),
            ({"path": str(roots / ".kvadvisor-00.term")}, "a name of the agent's own"),
            ({"path": str(roots / "foreign")}, "foreign"),
            ({**s3, "options": {"endpoint": "http://169.254.169.254/", "bucket": "b"}}, r"endpoint"),
            ({**s3, "options": {"endpoint": "nobody", "bucket": "b"}}, r"\[endpoints.nobody\]"),
            ({**s3, "options": {"endpoint": "store", "bucket": "b", "url": "http://x/"}}, "unknown field `url`"),
            ({**s3, "options": {"endpoint": "store", "bucket": "b", "secret_key": SECRET}}, "unknown field"),
            ({"kind": "remote", "path": "", "options": {"endpoint": "tcp://10.0.0.1:1", "volume": "v"}}, "endpoint"),
            ({"kind": "nothing"}, "kind 'nothing' is not known"),
            ({"id": "../up"}, "an id is 1 to 64 of a-z"),
            ({"low_watermark": 0.9, "high_watermark": 0.5}, "must satisfy 0 < low < high <= 1"),
        ):
            with pytest.raises((CommandRefused, DescriptorError), match=refusal) as refused:
                client.register_volume(described(roots, **fields))
            assert SECRET not in str(refused.value), fields
        assert volumes(client) == {"first": 8}
    assert list(outside.iterdir()) == []
    assert (roots / "foreign").read_bytes() == b"somebody's own" * 1_000
    assert not list((tmp_path / "state").glob(".kvadvisor-*.registered")), "nothing was kept"
    assert SECRET not in (tmp_path / "errors").read_text()


def test_over_nats_too(tmp_path: Path) -> None:
    with (
        nats_server(tmp_path / "nats") as server,
        StorageAgent("a", publisher=None, allowed_roots=[]) as agent,
        AgentService(agent, server.url("kv.agent-a")) as service,
        AgentClient(service.command_url, 60.0) as client,
    ):
        memory = described(tmp_path, kind="memory", path="")
        assert client.register_volume(memory).descriptor == memory
        assert client.resize_volume("extra", 4).slots_free == 4
        client.unregister_volume("extra", drain_s=float("inf"))
        assert volumes(client) == {}


def test_what_the_settings_say_comes_before_what_was_kept(tmp_path: Path) -> None:
    configured = described(tmp_path, id="first")
    kept = KeptVolumes("a", tmp_path, [configured])
    kept.add(described(tmp_path))
    kept.resize("first", 99)
    assert [volume.capacity_blocks for volume in KeptVolumes("a", tmp_path, [configured]).configured] == [99]
    changed = msgspec.structs.replace(configured, capacity_blocks=20)
    again = KeptVolumes("a", tmp_path, [changed, described(tmp_path, speed_rank=5)])
    assert [volume.capacity_blocks for volume in again.configured] == [20, 16], "settings that changed since count"
    assert again.registered == []
    assert KeptVolumes("b", tmp_path).registered == [], "another agent's file is its own"
    (file,) = tmp_path.glob(".kvadvisor-*.registered")
    file.write_bytes(b"[")
    with pytest.raises(VolumeError, match=r"names no volumes .*; remove it, and register its volumes again"):
        KeptVolumes("a", tmp_path)


def test_a_folder_that_cannot_be_written_keeps_for_this_life_alone(tmp_path: Path) -> None:
    kept = KeptVolumes("a", tmp_path / "not there")
    with StorageAgent("a", publisher=None, allowed_roots=[tmp_path]) as agent:
        VolumeOrders(agent, kept).register(described(tmp_path), term=0)
    assert [volume.id for volume in kept.registered] == ["extra"]
    assert KeptVolumes("a", tmp_path / "not there").registered == []


def test_a_miss_says_which_volumes_could_not_be_looked_at(tmp_path: Path) -> None:
    key = BlockKey(SPACE.namespace_id, 0, 1)

    def reason(agent: StorageAgent) -> str:
        (outcome,) = agent.get([key], [memoryview(bytearray(8))])
        assert outcome.result is Result.MISS
        return outcome.reason

    with StorageAgent("a", publisher=None, allowed_roots=[tmp_path]) as agent:
        agent.register_volumes([described(tmp_path / "gone")], absent_ok=True)
        assert reason(agent).startswith("no volume can be used now: 'extra': volume 'extra': there is no folder")
        agent.register_volume(described(tmp_path, id="memory", kind="memory", path=""))
        assert reason(agent).startswith("no volume that can be used now holds it; not looked at: 'extra': ")
        agent.put("memory", [PutBlock(key, SPACE, memoryview(b"12345678"))])
        assert agent.get([key], [memoryview(bytearray(8))])[0].result is Result.HIT
        agent.delete("", "memory", [key])
        agent.unregister_volume("extra")
        assert reason(agent) == "no volume holds it"


def test_a_registered_volume_that_the_settings_forbid_since_is_left_out(tmp_path: Path) -> None:
    with running(tmp_path) as client:
        client.register_volume(described(tmp_path / "roots"))
    (tmp_path / "roots" / "extra.slab").rename(tmp_path / "away.slab")
    (tmp_path / "roots" / "extra.slab").symlink_to(tmp_path / "away.slab")
    with running(tmp_path) as client:
        assert volumes(client) == {"first": 8}
    assert "registered volume is not allowed any more" in (tmp_path / "errors").read_text()
