"""An agent's settings, from TOML."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Annotated

import msgspec

from event_plane.credentials import NO_CREDENTIALS, Credentials
from storage_agent.descriptor import VolumeDescriptor
from storage_agent.endpoints import Endpoint
from storage_agent.errors import ConfigError
from storage_agent.inspection import SlotReport
from storage_agent.kinds import inspect_volume


class _VolumeTable(VolumeDescriptor, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A `[[volumes]]` table: a descriptor in which a misspelt key is an error."""


class _CredentialKeys(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What the agent's publisher proves itself with: the fields of `Credentials` that a publisher uses."""

    curve_key_file: str = ""
    curve_clients_folder: str = ""
    user: str = ""
    password_file: str = ""
    nkey_file: str = ""
    creds_file: str = ""
    tls_ca_file: str = ""
    tls_cert_file: str = ""
    tls_key_file: str = ""

    def credentials(self, folder: Path) -> Credentials:
        """With the paths that are given, from `folder` on."""
        names = _CredentialKeys.__struct_fields__
        paths = {name: folder / getattr(self, name) for name in names if name != "user" and getattr(self, name)}
        return Credentials(user=self.user, **paths)


class _AgentTable(_CredentialKeys, frozen=True, kw_only=True, forbid_unknown_fields=True):
    name: Annotated[str, msgspec.Meta(min_length=1)]
    command_url: str
    event_url: str
    allowed_roots: list[str]
    state_folder: str = ""
    allow_faulty: bool = False
    volumes: list[_VolumeTable] = []
    endpoints: dict[str, Endpoint] = {}


class AgentSettings(msgspec.Struct, frozen=True, kw_only=True):
    """An agent, its two sockets and its volumes. Paths are absolute."""

    name: str
    command_url: str
    """ZeroMQ address that commands come in by: `tcp://127.0.0.1:PORT` or `ipc://PATH`."""
    event_url: str
    """Event-plane URL that its events go out by."""
    credentials: Credentials = NO_CREDENTIALS
    """What its publisher proves itself with there, and for ZeroMQ whom it lets in."""
    allowed_roots: list[Path]
    """Folders that volumes may lie in."""
    state_folder: Path | None = None
    """Where the newest term is kept; None: in memory alone."""
    allow_faulty: bool = False
    """Requests may register volumes that lose blocks on purpose."""
    volumes: list[VolumeDescriptor] = []
    endpoints: dict[str, Endpoint] = {}
    """Object stores that volumes may name."""


def load_settings(file: Path) -> AgentSettings:
    """Settings in the TOML `file`; relative paths start at its folder.

    Raises `ConfigError` that names the file and the key: unreadable, unknown, missing, of the wrong type.
    """
    try:
        tables = msgspec.toml.decode(file.read_bytes(), type=dict)
    except (OSError, msgspec.DecodeError) as error:
        raise ConfigError(f"{file} cannot be read: {error}") from error
    return settings_from_tables(tables, file)


def settings_from_tables(tables: dict[str, object], file: Path) -> AgentSettings:
    """As `load_settings`, from tables that were read from `file` already: an agent inside a larger configuration."""
    try:
        table = msgspec.convert(tables, _AgentTable, dec_hook=_path)
    except msgspec.ValidationError as error:
        raise ConfigError(f"{file}: {error}; correct or remove that key") from error
    folder = file.resolve().parent
    ids = [volume.id for volume in table.volumes]
    twice = sorted({name for name in ids if ids.count(name) > 1})
    if twice:
        raise ConfigError(f"{file}: volume id {twice[0]!r} is there twice; rename one")
    return AgentSettings(
        name=table.name,
        command_url=table.command_url,
        event_url=table.event_url,
        credentials=table.credentials(folder),
        allowed_roots=[folder / root for root in table.allowed_roots],
        state_folder=_state_folder(table, folder),
        allow_faulty=table.allow_faulty,
        volumes=[
            VolumeDescriptor(
                **{**msgspec.structs.asdict(volume), "path": str(folder / volume.path) if volume.path else ""}
            )
            for volume in table.volumes
        ],
        endpoints={name: _inside(folder, endpoint) for name, endpoint in table.endpoints.items()},
    )


def scan_volumes(settings: AgentSettings) -> Iterator[tuple[VolumeDescriptor, Iterator[SlotReport]]]:
    """Each volume with its slots as they lie on it, headers and payloads checked, independent of any agent's table.

    Takes no lock and writes nothing; run it while no agent has the volumes open, or puts under way may look torn.
    A volume is opened when its first report is asked for, which raises `VolumeError` if it cannot be.
    """
    return ((descriptor, _reports(descriptor, settings)) for descriptor in settings.volumes)


def was_closed_in_order(descriptor: VolumeDescriptor, settings: AgentSettings) -> bool:
    """Whether the volume's last opener closed it, so that no put or delete was cut short. Raises as a scan does."""
    with closing(inspect_volume(descriptor, settings.allowed_roots, settings.endpoints)) as inspection:
        return inspection.was_closed_in_order


def _reports(descriptor: VolumeDescriptor, settings: AgentSettings) -> Iterator[SlotReport]:
    with closing(inspect_volume(descriptor, settings.allowed_roots, settings.endpoints)) as inspection:
        yield from inspection.reports()


def _state_folder(table: _AgentTable, folder: Path) -> Path | None:
    """As it is set, or the first allowed root that outlasts a reboot: the agent may write there."""
    if table.state_folder:
        return folder / table.state_folder
    roots = [folder / root for root in table.allowed_roots]
    return next((root for root in roots if not root.is_relative_to("/dev")), None)


def _path(kind: type, value: object) -> Path:
    """TOML has no paths, and msgspec asks us about those it finds in a struct. Raises `TypeError`."""
    if kind is not Path or not isinstance(value, str):
        raise TypeError(f"a path is expected, {value!r} is given")
    return Path(value)


def _inside(folder: Path, endpoint: Endpoint) -> Endpoint:
    files = {
        name: folder / file
        for name in ("access_key_file", "secret_key_file", "credentials_file")
        if (file := getattr(endpoint, name)) is not None
    }
    return msgspec.structs.replace(endpoint, **files)
