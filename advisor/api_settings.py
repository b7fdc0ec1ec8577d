"""Settings of the admin API: where it is served, under which names, and who comes in (docs/security.md)."""

from __future__ import annotations

import ipaddress
import re
from pathlib import Path
from typing import Literal, Self
from urllib.parse import urlsplit

from pydantic import Field, field_validator, model_validator

from advisor.settings_section import Section, Url

ScopeWord = Literal["read", "plan", "operate", "admin"]
Algorithm = Literal["RS256", "RS384", "RS512", "PS256", "PS384", "PS512", "ES256", "ES384", "ES512", "EdDSA"]
"""Signatures with a key pair alone: with a shared secret, whoever can check a token can make one."""

_HOST_NAME = re.compile(r"[a-z0-9]([a-z0-9.-]{0,251}[a-z0-9])?", re.ASCII | re.IGNORECASE)


class OidcSettings(Section):
    """Whose JSON Web Tokens open the door too. Without an issuer: nobody's."""

    issuer: str = ""
    audience: str = ""
    jwks_url: Url = ""
    jwks_file: Path | None = None
    algorithms: tuple[Algorithm, ...] = ("RS256", "ES256")
    name_claim: str = Field(default="sub", min_length=1)
    scope_claim: str = Field(default="groups", min_length=1)
    scopes: dict[str, ScopeWord] = Field(default={})
    """What each value of the claim may do; a token with several has the largest."""
    tenant_claim: str = ""
    """Given, a token without it is refused; `*` in it is every tenant."""

    @field_validator("jwks_url")
    @classmethod
    def _private(cls, url: str) -> str:
        parts = urlsplit(url)
        near = parts.scheme == "http" and is_loopback(parts.hostname or "")
        if url and not (near or (parts.scheme == "https" and parts.hostname)):
            raise ValueError("what tells good tokens from bad must not be changed on its way: give an https:// URL")
        return url

    @model_validator(mode="after")
    def _whole(self) -> Self:
        given = sorted(self.model_fields_set - {"issuer"})
        if not self.issuer:
            if given:
                raise ValueError(f"{given[0]} is given and issuer is not: name the issuer, as its tokens do in iss")
            return self
        if not self.audience:
            raise ValueError("audience is missing: a token that was made for another service would open this one")
        if bool(self.jwks_url) == bool(self.jwks_file):
            raise ValueError("give either jwks_url or jwks_file: the issuer's public keys")
        if not self.scopes:
            raise ValueError("scopes is empty, so that no token may do anything: map a value of scope_claim to a scope")
        if not self.algorithms:
            raise ValueError("algorithms is empty, so that no token is good: leave it out, or name one")
        return self


class ApiSettings(Section):
    """Where the admin API and pages are served, and to whom."""

    host: str = "127.0.0.1"
    port: int = Field(default=8470, ge=0, le=65_535)
    """0: any free port."""
    login: Literal["none", "required"] = "none"
    """`none`: whoever reaches it may do everything."""
    hosts: tuple[str, ...] = ()
    """Names in a request's `Host` that are served beside the loopback ones, without ports."""
    tls_cert_file: Path | None = None
    tls_key_file: Path | None = None
    behind_proxy: bool = False
    """A proxy in front has the TLS, and all requests come by it."""
    proxies: tuple[str, ...] = ("127.0.0.1", "::1")
    """Addresses or networks of that proxy: their word for a client's address is taken."""
    oidc: OidcSettings = OidcSettings()
    upload_bytes_max: int = Field(default=1 << 30, ge=1 << 10, le=1 << 40)
    """Of a recording or trace that is sent to be kept."""

    @field_validator("host")
    @classmethod
    def _address(cls, host: str) -> str:
        try:
            ipaddress.ip_address("127.0.0.1" if host == "localhost" else host)
        except ValueError as error:
            raise ValueError("it is no address: give 127.0.0.1, ::1 or an interface's; 0.0.0.0: all") from error
        return host

    @field_validator("hosts")
    @classmethod
    def _names(cls, hosts: tuple[str, ...]) -> tuple[str, ...]:
        for host in hosts:
            if not _HOST_NAME.fullmatch(host) and not _is_bracketed(host):
                raise ValueError(f"{host!r} is no host name: give names alone, no port, no *; an IPv6 address in []")
        return hosts

    @field_validator("proxies")
    @classmethod
    def _networks(cls, proxies: tuple[str, ...]) -> tuple[str, ...]:
        for each in proxies:
            try:
                ipaddress.ip_network(each)
            except ValueError as error:
                raise ValueError(f"{each!r} is no address or network (10.0.0.0/8): {error}") from error
        return proxies

    @model_validator(mode="after")
    def _guarded(self) -> Self:
        if bool(self.tls_cert_file) != bool(self.tls_key_file):
            raise ValueError("TLS takes both tls_cert_file and tls_key_file: give the one that is missing")
        if self.behind_proxy and self.tls_cert_file:
            raise ValueError("behind_proxy says that a proxy has the TLS, and tls_cert_file that we do: give one")
        if self.behind_proxy and self.login == "none":
            raise ValueError('whoever reaches the proxy would reach this, and login is "none": set login = "required"')
        if self.oidc.issuer and self.login == "none":
            raise ValueError('oidc names an issuer and login is "none": set login = "required"')
        if is_loopback(self.host):
            return self
        if self.login == "none":
            raise ValueError(
                f'others reach host {self.host}, and login is "none": set login = "required", or bind 127.0.0.1'
            )
        if not self.is_secure:
            raise ValueError(
                f"others reach host {self.host} without TLS, and would see tokens: give tls_cert_file and tls_key_file,"
                " or set behind_proxy = true where a proxy has the TLS"
            )
        return self

    @property
    def is_secure(self) -> bool:
        """Whether browsers reach it over TLS."""
        return self.tls_cert_file is not None or self.behind_proxy


def is_loopback(host: str) -> bool:
    """Whether only this machine reaches an address."""
    try:
        return host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def _is_bracketed(host: str) -> bool:
    try:
        return ipaddress.IPv6Address(host.removeprefix("[").removesuffix("]")) is not None and host.startswith("[")
    except ValueError:
        return False
