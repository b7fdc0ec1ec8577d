"""Agent settings from TOML, and the look at volumes that `kvadvisor verify` takes."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest

from event_plane.credentials import NO_CREDENTIALS, Credentials
from event_plane.schema import Namespace
from storage_agent.agent import StorageAgent
from storage_agent.config import AgentSettings, _CredentialKeys, load_settings, scan_volumes
from storage_agent.errors import ConfigError, VolumeError
from storage_agent.port import BlockKey, PutBlock

TEXT = """
name = "agent-1"
command_url = "tcp://127.0.0.1:7001"
event_url = "zmq+tcp://127.0.0.1:7002"
allowed_roots = ["volumes", "/srv/kv"]

[[volumes]]
id = "fast"
path = "volumes/fast.slab"
capacity_blocks = 4
block_bytes_max = 100

[[volumes]]
id = "slow"
path = "volumes/slow.slab"
tier = 4
speed_rank = 1
capacity_blocks = 6
block_bytes_max = 100
high_watermark = 0.8
"""


def write(folder: Path, text: str) -> Path:
    file = folder / "agent.toml"
    file.write_text(text)
    return file


def test_relative_paths_start_at_the_files_folder(tmp_path: Path) -> None:
    settings = load_settings(write(tmp_path, TEXT))
    assert settings.name == "agent-1"
    assert settings.allowed_roots == [tmp_path / "volumes", Path("/srv/kv")]
    assert settings.state_folder == tmp_path / "volumes", "the first folder that the agent may write in"
    assert [volume.path for volume in settings.volumes] == [
        str(tmp_path / "volumes" / "fast.slab"),
        str(tmp_path / "volumes" / "slow.slab"),
    ]
    assert (settings.volumes[1].tier, settings.volumes[1].high_watermark) == (4, 0.8)


def test_the_state_folder_is_named_or_the_first_root_or_none(tmp_path: Path) -> None:
    named = load_settings(write(tmp_path, TEXT.replace("\n[[volumes]]", 'state_folder = "state"\n[[volumes]]', 1)))
    assert named.state_folder == tmp_path / "state"
    devices = load_settings(write(tmp_path, TEXT.replace('["volumes", "/srv/kv"]', '["/dev", "/srv/kv"]')))
    assert devices.state_folder == Path("/srv/kv"), "what lies beside devices is gone after a reboot"
    no_roots = TEXT.split("[[volumes]]")[0].replace('["volumes", "/srv/kv"]', "[]")
    assert load_settings(write(tmp_path, no_roots)).state_folder is None


def test_credentials_are_paths_from_the_files_folder(tmp_path: Path) -> None:
    keys = 'curve_key_file = "agent.key_secret"\ncurve_clients_folder = "/etc/kv/clients"\nuser = "kv"\n'
    settings = load_settings(write(tmp_path, TEXT.replace("\n[[volumes]]", keys + "\n[[volumes]]", 1)))
    assert settings.credentials == Credentials(
        curve_key_file=tmp_path / "agent.key_secret", curve_clients_folder=Path("/etc/kv/clients"), user="kv"
    )
    assert load_settings(write(tmp_path, TEXT)).credentials == NO_CREDENTIALS


def test_every_credential_of_a_publisher_can_be_set() -> None:
    said = set(_CredentialKeys.__struct_fields__)
    assert {field.name for field in dataclasses.fields(Credentials)} - said == {"curve_server_key_file"}


@pytest.mark.parametrize(
    ("found", "instead", "said"),
    [
        ('name = "agent-1"', 'nmae = "agent-1"', "nmae"),
        ('name = "agent-1"', 'name = ""', r"length >= 1 - at `\$\.name`"),
        ("speed_rank = 1", "speed_rnak = 1", r"speed_rnak.*volumes"),
        ("capacity_blocks = 4", 'capacity_blocks = "four"', r"Expected `int`, got `str` - at `\$\.volumes"),
        ('event_url = "zmq+tcp://127.0.0.1:7002"', "", "event_url"),
        ('id = "slow"', 'id = "fast"', "'fast' is there twice"),
        ("[[volumes]]", "[[volumes", "cannot be read"),
    ],
)
def test_a_wrong_key_is_named_with_its_file(tmp_path: Path, found: str, instead: str, said: str) -> None:
    file = write(tmp_path, TEXT.replace(found, instead, 1))
    with pytest.raises(ConfigError, match=said) as caught:
        load_settings(file)
    assert str(file) in str(caught.value)


def test_a_file_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"absent\.toml cannot be read"):
        load_settings(tmp_path / "absent.toml")


@pytest.fixture
def settings(tmp_path: Path) -> AgentSettings:
    (tmp_path / "volumes").mkdir()
    loaded = load_settings(write(tmp_path, TEXT))
    namespace = Namespace(tenant="t")
    with StorageAgent(loaded.name, publisher=None, allowed_roots=loaded.allowed_roots) as agent:
        for volume in loaded.volumes:
            agent.register_volume(volume)
        for name, count in (("fast", 3), ("slow", 2)):
            keys = [BlockKey(namespace.namespace_id, 0, number) for number in range(count)]
            agent.put(name, [PutBlock(key, namespace, memoryview(b"%030d" % key.sequence_hash)) for key in keys])
    return loaded


def test_endpoints_have_their_keys_in_files_beside_the_settings(tmp_path: Path) -> None:
    keys = 'access_key_file = "access"\nsecret_key_file = "/run/secret"\n'
    table = f'[endpoints.store]\nurl = "http://s3.example"\n{keys}'
    loaded = load_settings(write(tmp_path, TEXT + table))
    endpoint = loaded.endpoints["store"]
    assert (endpoint.url, endpoint.region) == ("http://s3.example", "")
    assert (endpoint.access_key_file, endpoint.secret_key_file) == (tmp_path / "access", Path("/run/secret"))
    with pytest.raises(ConfigError, match=r"a path is expected, 7 is given - at .*\.access_key_file"):
        load_settings(write(tmp_path, TEXT + table.replace('"access"', "7")))


def test_a_scan_reports_every_slot_of_every_volume_and_changes_nothing(settings: AgentSettings) -> None:
    files = [Path(volume.path) for volume in settings.volumes]
    with files[0].open("r+b") as file:
        file.seek(5 * 4096)  # the first payload
        file.write(b"9")
    before = [file.read_bytes() for file in files]
    found = {
        volume.id: [(r.slot, r.state, r.key.sequence_hash if r.key else None, r.payload_bytes) for r in reports]
        for volume, reports in scan_volumes(settings)
    }
    assert found == {
        "fast": [(0, "torn", 0, 30), (1, "live", 1, 30), (2, "live", 2, 30), (3, "free", None, 0)],
        "slow": [(0, "live", 0, 30), (1, "live", 1, 30), *((slot, "free", None, 0) for slot in range(2, 6))],
    }
    assert [file.read_bytes() for file in files] == before


def test_a_scan_says_why_a_slot_is_torn(settings: AgentSettings) -> None:
    with Path(settings.volumes[0].path).open("r+b") as file:
        file.seek(4 * 4096 + 100)
        file.write(b"\xff")
    _, reports = next(scan_volumes(settings))
    first = next(iter(reports))
    assert (first.state, first.key) == ("torn", None)
    assert "header at 0 has checksum" in first.reason


def test_a_scan_of_a_volume_that_is_not_there_or_not_allowed_is_an_error(settings: AgentSettings) -> None:
    Path(settings.volumes[0].path).unlink()
    with pytest.raises(VolumeError, match=r"fast\.slab cannot be opened: No such file"):
        list(next(scan_volumes(settings))[1])
    outside = AgentSettings(
        name="a", command_url="", event_url="", allowed_roots=[Path("/srv/kv")], volumes=settings.volumes
    )
    with pytest.raises(VolumeError, match="outside the allowed roots"):
        list(next(scan_volumes(outside))[1])
