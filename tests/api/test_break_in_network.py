"""Attempts from the network: without TLS, under another name or address, and by a stream that stays open."""

from __future__ import annotations

import datetime
import ssl
from collections.abc import Iterator
from ipaddress import ip_address
from pathlib import Path

import httpx
import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import BestAvailableEncryption, Encoding, NoEncryption, PrivateFormat
from cryptography.x509.oid import NameOID
from direct import Direct
from sample_door import SampleDoor
from sample_reader import SampleReader
from served import serving

from advisor.access.identity import Scope
from advisor.api.errors import ApiError
from advisor.api.server import require_certificate
from advisor.api_settings import ApiSettings

PATIENCE_S = 60


@pytest.fixture(scope="module")
def tls(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a self-made `cert.pem`, its `key.pem`, and `locked.pem`, the key with a password."""
    folder = tmp_path_factory.mktemp("tls")
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "kv.example")])
    now = datetime.datetime.now(datetime.UTC)
    names = x509.SubjectAlternativeName([x509.DNSName("localhost"), x509.IPAddress(ip_address("127.0.0.1"))])
    certificate = (
        x509.CertificateBuilder().subject_name(name).issuer_name(name).public_key(key.public_key())
        .serial_number(x509.random_serial_number()).not_valid_before(now - datetime.timedelta(days=1))
        .not_valid_after(now + datetime.timedelta(days=1)).add_extension(names, critical=False)
        .add_extension(x509.BasicConstraints(ca=True, path_length=None), critical=True)
        .sign(key, hashes.SHA256())
    )  # fmt: skip
    (folder / "cert.pem").write_bytes(certificate.public_bytes(Encoding.PEM))
    for file, lock in (("key.pem", NoEncryption()), ("locked.pem", BestAvailableEncryption(b"word"))):
        (folder / file).write_bytes(key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, lock))
    return folder


def with_tls(folder: Path, key: str = "key.pem") -> ApiSettings:
    return ApiSettings(login="required", tls_cert_file=folder / "cert.pem", tls_key_file=folder / key)


def test_over_tls_alone_and_browsers_are_told_to_stay_with_it(tls: Path, tmp_path: Path) -> None:
    api = with_tls(tls)
    door = SampleDoor(tmp_path, api=api)
    token = door.token(Scope.READ)
    trusted = ssl.create_default_context(cafile=str(tls / "cert.pem"))
    with serving(SampleReader(), api=api, doorkeeper=door.doorkeeper) as served:
        assert served.url.startswith("https://127.0.0.1:")
        with httpx.Client(verify=trusted, timeout=PATIENCE_S) as client:
            told = client.get(f"{served.url}api/v1/identity", headers={"Authorization": f"Bearer {token}"})
            assert (told.json()["name"], told.headers["strict-transport-security"]) == ("ann", "max-age=31536000")
            origin = served.url.rstrip("/")
            answer = client.post(f"{served.url}login", data={"token": token}, headers={"Origin": origin})
            assert answer.status_code == 303
            assert client.get(f"{served.url}api/v1/identity").json()["name"] == "ann"
        with pytest.raises(httpx.HTTPError):
            httpx.get(served.url.replace("https", "http") + "healthz", timeout=PATIENCE_S)


def test_a_certificate_that_cannot_be_used_is_said_and_no_password_is_asked_for(tls: Path, tmp_path: Path) -> None:
    require_certificate(with_tls(tls))
    with pytest.raises(ApiError, match=r"locked\.pem are no certificate with its key .*without a password"):
        require_certificate(with_tls(tls, "locked.pem"))
    with pytest.raises(ApiError, match="are no certificate with its key"):
        require_certificate(with_tls(tls, "cert.pem"))
    with pytest.raises(ApiError, match=r"absent\.pem, of the API's TLS, cannot be read \(No such file"):
        require_certificate(with_tls(tls, "absent.pem"))


@pytest.fixture(scope="module")
def named() -> Direct:
    return Direct(SampleReader(), api=ApiSettings(hosts=("kv.example", "10.0.0.7", "[2001:db8::7]")))


@pytest.mark.parametrize("host", ["kv.example", "KV.example:443", "10.0.0.7:8470", "[2001:db8::7]:1", "localhost"])
def test_names_of_the_settings_are_served(named: Direct, host: str) -> None:
    assert named.get("/healthz", headers={"host": host}).status_code == 200


@pytest.mark.parametrize(
    "host", ["evil.example", "kv.example.evil.example", "a.kv.example", "kv.example:", "kv.example:80:1", "kv.example.",
             "kv.example@evil.example", "10.0.0.70", "2001:db8::7", "kv.example\n"],
)  # fmt: skip
def test_other_names_are_not(named: Direct, host: str) -> None:
    answer = named.get("/healthz", headers={"host": host})
    assert answer.status_code == 421
    assert "name the host in api.hosts" in answer.json()["detail"]


def test_two_host_headers_are_none(named: Direct) -> None:
    assert named.get("/healthz", headers=[("host", "kv.example"), ("host", "kv.example")]).status_code == 421


def refusals(api: ApiSettings, door: SampleDoor) -> list[int]:
    """Of twelve guesses, each for a client of another address, as its sender says."""
    with (
        serving(SampleReader(), api=api, doorkeeper=door.doorkeeper) as served,
        httpx.Client(timeout=PATIENCE_S) as client,
    ):
        return [
            client.get(
                f"{served.url}api/v1/identity",
                headers={"Authorization": "Bearer kva_wrong", "X-Forwarded-For": f"10.1.{number}.1"},
            ).status_code
            for number in range(12)
        ]


def test_an_address_that_the_sender_made_up_is_not_believed(tmp_path: Path) -> None:
    assert refusals(ApiSettings(login="required"), SampleDoor(tmp_path)) == [401] * 10 + [429] * 2


def test_an_address_that_our_proxy_tells_is(tmp_path: Path) -> None:
    assert refusals(ApiSettings(login="required", behind_proxy=True), SampleDoor(tmp_path)) == [401] * 12


def events(answer: httpx.Response) -> Iterator[str]:
    return (line for line in answer.iter_lines() if line.startswith("event:"))


def test_an_open_stream_ends_when_its_token_is_revoked(tmp_path: Path) -> None:
    door = SampleDoor(tmp_path)
    token = door.token()
    with serving(SampleReader(), doorkeeper=door.doorkeeper) as served, httpx.Client(timeout=PATIENCE_S) as client:
        headers = {"Authorization": f"Bearer {token}"}
        with client.stream("GET", f"{served.url}api/v1/stream", headers=headers) as answer:
            told = events(answer)
            assert next(told).startswith("event:")
            door.tokens.revoke(token[4:16])
            assert sum(1 for _ in told) < PATIENCE_S * 20
        assert client.get(f"{served.url}api/v1/identity", headers=headers).status_code == 401
