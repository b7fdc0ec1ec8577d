"""Settings that would let somebody in are refused, and say what to do."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from advisor.api_settings import ApiSettings
from advisor.errors import SettingsError
from advisor.settings import load_settings

LOGIN = {"login": "required"}
TLS = {"tls_cert_file": "cert.pem", "tls_key_file": "key.pem"}
OIDC = {"issuer": "https://i", "audience": "kv", "jwks_url": "https://i/keys", "scopes": {"a": "read"}}


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"host": "0.0.0.0"}, 'others reach host 0.0.0.0, and login is "none"'),
        ({"host": "::"}, 'login is "none"'),
        ({"host": "192.0.2.1", **TLS}, 'login is "none"'),
        ({"host": "::ffff:192.0.2.1", **TLS}, 'login is "none"'),
        ({"host": "0.0.0.0", "behind_proxy": True}, 'login is "none"'),
        ({"behind_proxy": True}, "whoever reaches the proxy would reach this"),
        ({"host": "0.0.0.0", **LOGIN}, "without TLS, and would see tokens"),
        ({"host": "db.example"}, "it is no address"),
        ({"tls_cert_file": "cert.pem"}, "takes both tls_cert_file and tls_key_file"),
        ({"behind_proxy": True, **LOGIN, **TLS}, "give one"),
        ({"hosts": ["kv.example:443"]}, "is no host name"),
        ({"hosts": ["*"]}, "is no host name"),
        ({"hosts": ["::1"]}, "is no host name"),
        ({"proxies": ["proxy"]}, "'proxy' is no address or network"),
        ({"oidc": OIDC}, 'set login = "required"'),
        ({**LOGIN, "oidc": {"audience": "kv"}}, "audience is given and issuer is not"),
        ({**LOGIN, "oidc": {**OIDC, "audience": ""}}, "made for another service"),
        ({**LOGIN, "oidc": {**OIDC, "jwks_url": ""}}, "give either jwks_url or jwks_file"),
        ({**LOGIN, "oidc": {**OIDC, "jwks_file": "keys"}}, "give either jwks_url or jwks_file"),
        ({**LOGIN, "oidc": {**OIDC, "jwks_url": "http://i/keys"}}, "give an https:// URL"),
        ({**LOGIN, "oidc": {**OIDC, "jwks_url": "file:///etc/passwd"}}, "give an https:// URL"),
        ({**LOGIN, "oidc": {**OIDC, "jwks_url": "https://u:p@i/keys"}}, "holds a password or key: move it to a file"),
        ({**LOGIN, "oidc": {**OIDC, "scopes": {}}}, "scopes is empty"),
        ({**LOGIN, "oidc": {**OIDC, "scopes": {"a": "root"}}}, "'read', 'plan', 'operate' or 'admin'"),
        ({**LOGIN, "oidc": {**OIDC, "algorithms": ["HS256"]}}, "should be 'RS256'"),
        ({**LOGIN, "oidc": {**OIDC, "algorithms": []}}, "algorithms is empty"),
    ],
)
def test_a_door_left_open_is_refused(given: dict[str, Any], words: str) -> None:
    with pytest.raises(ValidationError) as refused:
        ApiSettings.model_validate(given)
    assert words in str(refused.value)


@pytest.mark.parametrize(
    ("given", "secure"),
    [
        ({}, False),
        ({"host": "::1", **LOGIN}, False),
        ({"host": "0.0.0.0", **LOGIN, **TLS}, True),
        ({"host": "10.0.0.7", **LOGIN, "behind_proxy": True, "proxies": ["10.0.0.0/8"]}, True),
        ({"hosts": ["kv.example", "[2001:db8::7]", "10.0.0.7"]}, False),
        ({**LOGIN, "oidc": {**OIDC, "jwks_url": "http://127.0.0.1:8080/keys"}}, False),
    ],
)
def test_a_door_that_is_guarded_is_taken(given: dict[str, Any], secure: bool) -> None:
    assert ApiSettings.model_validate(given).is_secure is secure


def test_files_are_found_beside_the_settings_and_scopes_come_from_the_environment(tmp_path: Path) -> None:
    (tmp_path / "a.toml").write_text(
        'directory = "state"\n[api]\nlogin = "required"\ntls_cert_file = "c.pem"\ntls_key_file = "k.pem"\n'
        '[api.oidc]\nissuer = "https://i"\naudience = "kv"\njwks_file = "keys.json"\n'
    )
    api = load_settings(tmp_path / "a.toml", {"KVADVISOR_API__OIDC__SCOPES": '{"kv-operators": "operate"}'}).api
    assert (api.tls_cert_file, api.oidc.jwks_file) == (tmp_path / "c.pem", tmp_path / "keys.json")
    assert api.oidc.scopes == {"kv-operators": "operate"}
    with pytest.raises(SettingsError, match=r"KVADVISOR_API__OIDC__SCOPES is not JSON"):
        load_settings(tmp_path / "a.toml", {"KVADVISOR_API__OIDC__SCOPES": "operate"})


@pytest.mark.parametrize(
    "line",
    ['url = "nats://u:planted@h/s"', 'url = "zmq://u:planted@h:1"', 'url = "https://h/x?token=planted"',
     'url = "zmq+tcp://u:planted@h:1"', 'url = "zmq+tcp://h:1"\nresend_url = "zmq+tcp://u:planted@h:1"',
     'url = "zmq+tcp://h:1"\n[log]\nurl = "postgresql://u:planted@h/kv"',
     'url = "zmq+tcp://h:1"\n[log]\nurl = "postgresql://u@h/kv?password=planted"',
     'url = "zmq+tcp://h:1"\n[[agents]]\nname = "a"\ncommand_url = "nats://u:planted@h/s"',
     'url = "zmq+tcp://h:1"\n[traces]\nendpoint = "https://u:planted@h"',
     'url = "zmq+tcp://u:plan/planted@h"'],
)  # fmt: skip
def test_a_setting_that_is_refused_is_shown_without_its_secret(tmp_path: Path, line: str) -> None:
    (tmp_path / "a.toml").write_text(f'directory = "state"\n[[sources]]\nname = "a"\n{line}\n')
    with pytest.raises(SettingsError, match=r"\*\*\*|holds a user|cannot be read") as refused:
        load_settings(tmp_path / "a.toml", {})
    assert "planted" not in str(refused.value)
