"""Settings from TOML and environment, and what is said of bad ones."""

from __future__ import annotations

import json
import os
import re
from pathlib import Path

import msgspec
import pytest
from pydantic import BaseModel

from advisor.errors import SettingsError
from advisor.policies.limits import Limits
from advisor.settings import AdvisorSettings, PolicySettings, ShadowSettings, load_settings, section_of

FULL = """
directory = "state"
tick_interval_s = 0.5
queue_entries_max = 100
commit_batches_max = 8

[api]
host = "::1"
port = 0

[[sources]]
name = "core"
url = "zmq+tcp://127.0.0.1:5557"

[[sources]]
name = "vllm-0"
url = "zmq+tcp://10.0.0.7:5557"
resend_url = "zmq+tcp://10.0.0.7:5558"
dialect = "vllm"
tenant = "chat"
model = "llama"
revision = "r1"
hash_root_shared = true
topic = "kv-events"

[[agents]]
name = "local"
command_url = "tcp://127.0.0.1:5600"
timeout_s = 3

[policy]
eviction = "lfu"
admission = "touch-3"
"""


@pytest.fixture
def config(tmp_path: Path) -> Path:
    path = tmp_path / "advisor.toml"
    path.write_text(FULL)
    return path


def problems(text: str, path: Path, environ: dict[str, str] | None = None) -> tuple[str, ...]:
    path.write_text(text)
    with pytest.raises(SettingsError) as caught:
        load_settings(path, environ or {})
    assert str(caught.value) == "\n".join(caught.value.problems)
    return caught.value.problems


def test_file_is_read_whole(config: Path) -> None:
    settings = load_settings(config, {})
    assert settings.directory == config.parent / "state"
    assert settings.log_path == config.parent / "state" / "log.db"
    assert (settings.tick_interval_s, settings.queue_entries_max, settings.commit_batches_max) == (0.5, 100, 8)
    assert (settings.api.host, settings.api.port) == ("::1", 0)
    assert [source.name for source in settings.sources] == ["core", "vllm-0"]
    assert settings.sources[0].dialect == "auto"
    assert settings.sources[1].model_dump(exclude_unset=True) == {
        "name": "vllm-0",
        "url": "zmq+tcp://10.0.0.7:5557",
        "resend_url": "zmq+tcp://10.0.0.7:5558",
        "dialect": "vllm",
        "tenant": "chat",
        "model": "llama",
        "revision": "r1",
        "hash_root_shared": True,
        "topic": "kv-events",
    }
    assert settings.agents[0].timeout_s == 3.0
    assert (settings.policy.eviction, settings.policy.admission) == ("lfu", "touch-3")


def test_environment_wins_key_by_key(config: Path) -> None:
    environ = {
        "KVADVISOR_API__PORT": "9000",
        "KVADVISOR_TICK_INTERVAL_S": "7.5",
        "KVADVISOR_POLICY__ADMISSION": "ranked",
        "KVADVISOR_SOURCES": json.dumps([{"name": "other", "url": "memory://plane"}]),
        "PATH": "/usr/bin",
    }
    settings = load_settings(config, environ)
    assert (settings.api.host, settings.api.port) == ("::1", 9000)
    assert settings.tick_interval_s == 7.5
    assert (settings.policy.eviction, settings.policy.admission) == ("lfu", "ranked")
    assert [source.name for source in settings.sources] == ["other"]


def test_environment_alone_is_enough(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    settings = load_settings(None, {"KVADVISOR_DIRECTORY": "state", "KVADVISOR_API": '{"port": 1}'})
    assert settings.directory == Path.cwd() / "state"
    assert settings.api.port == 1


def test_direct_construction_reads_no_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVADVISOR_TICK_INTERVAL_S", "9")
    assert AdvisorSettings(directory=Path("/state")).tick_interval_s == 2.0


def test_policy_round_trips_through_the_log() -> None:
    policy = PolicySettings(eviction="lfu", admission="ghost")
    logged = AdvisorSettings(directory=Path("/state"), policy=policy).planning.for_fold()
    again = msgspec.msgpack.decode(msgspec.msgpack.encode(logged))
    assert PolicySettings.model_validate(again["policy"]) == policy


def test_policy_settings_are_the_planners_limits_field_for_field() -> None:
    assert PolicySettings().model_dump(mode="json") == msgspec.json.decode(msgspec.json.encode(Limits()))


def test_settings_are_frozen(config: Path) -> None:
    settings = load_settings(config, {})
    with pytest.raises(ValueError, match="frozen"):
        settings.policy.promote_moves_max = 1  # type: ignore[misc]


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("directry = 's'", "directry in {path} is no setting: did you mean directory?"),
        ("[api]\nprot = 1", "api.prot in {path} is no setting: did you mean port?"),
        (
            "[[sources]]\nname='a'\nurl='memory://x'\ntopick=1",
            "sources[0].topick in {path} is no setting: did you mean topic?",
        ),
        (
            "[api]\nport = 70000",
            "api.port = 70000 in {path} cannot be used: input should be less than or equal to 65535",
        ),
        (
            "tick_interval_s = 0.01",
            "tick_interval_s = 0.01 in {path} cannot be used: input should be greater than or equal to 0.05",
        ),
        (
            "[api]\nhost = '0.0.0.0'",
            'api = {{"host": "0.0.0.0"}} in {path} cannot be used: others reach host 0.0.0.0, and login is "none": set '
            'login = "required", or bind 127.0.0.1',
        ),
        (
            "[[sources]]\nname='a'\nurl='tcp://h:1'",
            "sources[0].url = \"tcp://h:1\" in {path} cannot be used: event URL 'tcp://h:1' lacks its protocol: write "
            "zmq+tcp://h:1",
        ),
        ("[[agents]]\nname='a'", "agents[0].command_url in {path} is missing: add it"),
        (
            "[policy]\neviction='mru'",
            "policy.eviction = \"mru\" in {path} cannot be used: choose one of auto, lru, lru-leaf, lfu, "
            "lfuda-leaf, value, worth, gdsf, length-aware, sieve, s3-fifo, 2q, arc",
        ),
    ],
)
def test_bad_key_is_one_sentence(tmp_path: Path, text: str, sentence: str) -> None:
    path = tmp_path / "advisor.toml"
    whole = text if text.startswith("direct") else f"directory = 's'\n{text}"
    assert sentence.format(path=path) in problems(whole, path)
    if whole is not text:
        assert len(problems(whole, path)) == 1


def test_each_bad_key_has_its_own_sentence(tmp_path: Path) -> None:
    path = tmp_path / "advisor.toml"
    found = problems("tick_interval_s = 'soon'\nqueue = 1\n[policy]\npromote_moves_max = -1", path)
    assert [sentence.split(" ")[0] for sentence in found] == [
        "directory",
        "tick_interval_s",
        "policy.promote_moves_max",
        "queue",
    ]
    assert found[0] == f"directory in {path} is missing: add it or set KVADVISOR_DIRECTORY"


def test_name_given_twice_is_named(tmp_path: Path) -> None:
    source = "[[sources]]\nname='a'\nurl='memory://x'\n"
    (sentence,) = problems(f"directory='s'\n{source}{source}", tmp_path / "advisor.toml")
    assert sentence.startswith("sources = ")
    assert sentence.endswith("the name 'a' is given twice: rename one")


@pytest.mark.parametrize(
    ("variable", "value", "sentence"),
    [
        (
            "KVADVISOR_API__PROT",
            "1",
            "the environment variable KVADVISOR_API__PROT is no setting: did you mean KVADVISOR_API__PORT?",
        ),
        (
            "KVADVISOR_APY__PORT",
            "1",
            "the environment variable KVADVISOR_APY__PORT is no setting: did you mean KVADVISOR_API__PORT?",
        ),
        (
            "KVADVISOR_SOURCES",
            "core",
            "the environment variable KVADVISOR_SOURCES is not JSON: write a JSON list or object",
        ),
        (
            "KVADVISOR_API__PORT",
            "many",
            'api.port = "many" (environment variable KVADVISOR_API__PORT) cannot be used: input should be a valid '
            "integer, unable to parse string as an integer",
        ),
        (
            "KVADVISOR_SOURCES",
            '[{"name": "a", "url": "memory://x", "modell": "m"}]',
            "sources[0].modell (environment variable KVADVISOR_SOURCES) is no setting: did you mean model?",
        ),
        (
            "KVADVISOR_API",
            '{"prot": 1}',
            "api.prot (environment variable KVADVISOR_API) is no setting: did you mean port?",
        ),
    ],
)
def test_bad_variable_is_one_sentence(config: Path, variable: str, value: str, sentence: str) -> None:
    with pytest.raises(SettingsError) as caught:
        load_settings(config, {variable: value})
    assert caught.value.problems == (sentence,)


def test_missing_file_and_missing_directory_say_what_to_do(tmp_path: Path) -> None:
    with pytest.raises(SettingsError, match=r"absent\.toml cannot be read \(No such file or directory\)"):
        load_settings(tmp_path / "absent.toml", {})
    with pytest.raises(SettingsError, match=r"^directory in the settings is missing: add it or set KVADVISOR_DIR"):
        load_settings(None, {})


@pytest.mark.parametrize(
    ("content", "words"),
    [(b"directory = \n", r"is not TOML: .*line 1.*: mend that line"), (b"\xff\xfe", "is not UTF-8")],
)
def test_file_that_is_no_toml_is_named(tmp_path: Path, content: bytes, words: str) -> None:
    path = tmp_path / "advisor.toml"
    path.write_bytes(content)
    with pytest.raises(SettingsError, match=re.escape(str(path)) + " " + words):
        load_settings(path, {})


def test_policy_version_names_every_package_that_a_policy_comes_from(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("advisor.settings.policy_version", lambda name: f"of {name}")
    shadows = [ShadowSettings(name=n, policy=PolicySettings(admission=n)) for n in ("touch-2", "touch-3", "always")]
    settings = AdvisorSettings(directory=Path("d"), policy=PolicySettings(admission="touch-2"), shadow=tuple(shadows))
    assert settings.planning.policy_version == "of touch-2, of touch-3, of always"


@pytest.mark.parametrize(
    ("shadow", "sentence"),
    [
        ('name = "live"', "the policy that moves is called live: choose another name"),
        ('name = "a"\nadmission = "touch-2"', "is no setting: the known ones are blocks_max, name, policy"),
        ('name = "a"\npolicy.admission = "touch-9"', 'shadow[0].policy.admission = "touch-9"'),
        ('name = "a"\n[[shadow]]\nname = "a"', "the name 'a' is given twice: rename one"),
        ("\n[[shadow]]\n".join(f'name = "s{n}"' for n in range(5)), "5 shadows are named, 4 may run at a time"),
    ],
)
def test_bad_shadow_is_one_sentence(tmp_path: Path, shadow: str, sentence: str) -> None:
    path = tmp_path / "advisor.toml"
    path.write_text(f'directory = "state"\n[[shadow]]\n{shadow}\n')
    with pytest.raises(SettingsError) as caught:
        load_settings(path, {})
    (problem,) = caught.value.problems
    assert sentence in problem


def documented_keys(model: type[BaseModel], prefix: str = "") -> dict[str, str]:
    """Each setting's key as the documentation spells it, and its default."""
    keys = {}
    for key, field in model.model_fields.items():
        section, is_list = section_of(field)
        if section is PolicySettings and prefix:
            keys[prefix + key] = "as policy"
        elif section is not None:
            keys |= documented_keys(section, f"{prefix}{key}{'[]' if is_list else ''}.")
        else:
            default = "required" if field.is_required() else json.dumps(field.default)
            keys[prefix + key] = "none" if default == "null" else default
    return keys


def test_every_setting_is_documented_with_its_default() -> None:
    page = (Path(__file__).parents[2] / "docs" / "settings.md").read_text()
    rows = dict(re.findall(r"^\| `([^`]+)` \| `?([^|`]+?)`? \|", page, re.MULTILINE))
    assert rows == documented_keys(AdvisorSettings)


def test_example_in_the_documentation_loads(tmp_path: Path) -> None:
    page = (Path(__file__).parents[2] / "docs" / "settings.md").read_text()
    example = re.search(r"```toml\n(.*?)```", page, re.DOTALL)
    assert example is not None
    (tmp_path / "advisor.toml").write_text(example[1])
    settings = load_settings(tmp_path / "advisor.toml", {})
    assert os.fspath(settings.directory).startswith(str(tmp_path))
    assert settings.sources
