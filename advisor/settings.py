"""The service's settings, from a TOML file and the environment (docs/settings.md)."""

from __future__ import annotations

import difflib
import itertools
import json
import tomllib
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any, Literal, get_args, get_origin

from pydantic import AfterValidator, BaseModel, Field, ValidationError, field_validator
from pydantic.fields import FieldInfo
from pydantic_settings import BaseSettings, EnvSettingsSource, PydanticBaseSettingsSource, SettingsConfigDict

from advisor.access.masking import masked_text
from advisor.api_settings import ApiSettings
from advisor.errors import SettingsError
from advisor.policies.eviction import EVICTIONS
from advisor.policies.registry import PolicyUnknown, policy_named, policy_version
from advisor.settings_section import Section, Url
from advisor.shadow import BLOCKS_MAX
from advisor.shadow_comparison import LIVE, SHADOWS_MAX
from event_plane.credentials import Credentials
from event_plane.errors import TransportError
from event_plane.transport import parse_url

ENVIRONMENT_PREFIX = "KVADVISOR_"
NESTED = "__"

Name = Annotated[str, Field(pattern=r"^[a-z0-9][a-z0-9._-]{0,63}$")]


class NatsIdentity(Section):
    """What a connection to a NATS server proves itself with."""

    user: str = ""
    password_file: Path | None = None
    nkey_file: Path | None = None
    creds_file: Path | None = None
    tls_ca_file: Path | None = None
    tls_cert_file: Path | None = None
    tls_key_file: Path | None = None

    @property
    def credentials(self) -> Credentials:
        return Credentials(
            user=self.user,
            password_file=self.password_file,
            nkey_file=self.nkey_file,
            creds_file=self.creds_file,
            tls_ca_file=self.tls_ca_file,
            tls_cert_file=self.tls_cert_file,
            tls_key_file=self.tls_key_file,
        )


class SourceSettings(NatsIdentity):
    """A stream of events to subscribe to."""

    name: Name
    url: Url
    resend_url: Url = ""
    """Empty: the port after `url`'s."""
    dialect: Literal[
        "auto", "kvadvisor", "vllm", "sglang", "trtllm", "dynamo", "dynamo-kvbm", "mooncake"
    ] = "auto"
    tenant: str = "default"
    model: str = ""
    revision: str = ""
    hash_root_shared: bool = False
    """A foreign engine's block hashes mean the same in each of its lives."""
    topic: str = ""
    when_slow: Literal["wait", "drop"] = "wait"
    """What becomes of messages when the log cannot keep up: see `event_plane.transport.WhenSlow`."""
    probe_interval_s: float = Field(default=10.0, ge=0.1, le=3_600)
    """A foreign engine silent for so long is asked whether something was lost."""
    curve_key_file: Path | None = None
    curve_server_key_file: Path | None = None

    @property
    def credentials(self) -> Credentials:
        return replace(
            super().credentials, curve_key_file=self.curve_key_file, curve_server_key_file=self.curve_server_key_file
        )

    @field_validator("url", "resend_url")
    @classmethod
    def _known_scheme(cls, url: str) -> str:
        if url:
            try:
                parse_url(url)
            except TransportError as error:
                raise ValueError(str(error)) from error
        return url


class LogSettings(Section):
    """Where the event log is kept and how much of it."""

    kind: Literal["sql", "segments"] = "sql"
    url: Url = ""
    """Of `sql`: empty is `log.db` in the directory; `postgresql://user@host/database` keeps it off this host."""
    password_file: Path | None = None
    retention_bytes: int = Field(default=20_000_000_000, ge=0)
    """Past it the oldest entries go, never past the second-newest good checkpoint; 0: no limit."""
    retention_age_s: float = Field(default=0.0, ge=0)
    """Entries older than this go, likewise; 0: no limit."""


class AgentSettings(NatsIdentity):
    """A storage agent whose volumes this advisor manages."""

    name: Name
    command_url: Url = Field(min_length=1)
    timeout_s: float = Field(default=10.0, gt=0, le=3_600)
    mover: Literal["agent", "published"] = "agent"
    """`published`: `command_url` is where plans are published to an array that moves blocks by itself."""
    deadline_s: float = Field(default=60.0, gt=0, le=86_400)
    """Of a published command: past it, it must not be carried out."""
    moves_at_once: int = Field(default=1, ge=1, le=64)
    """Commands under way at a time from one of its volumes to another."""
    away_after_s: float = Field(default=30.0, gt=0, le=86_400)
    """Unreachable for so long, its volumes are away: their moves are aborted, none is planned."""


def _encodable(text: str) -> str:
    """Half of a surrogate pair is no text that a log could keep."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise ValueError("it holds half of a surrogate pair: write whole characters") from error
    return text


Text = Annotated[str, Field(max_length=256, pattern=r"^[^\x00-\x1f\x7f]*$"), AfterValidator(_encodable)]


class VolumeBudgetSettings(Section):
    """What moves may write to one volume; 0: no limit."""

    volume: Text = Field(min_length=1)
    bytes_per_s: float = Field(default=0.0, ge=0, le=1e15)
    moves_per_s: float = Field(default=0.0, ge=0, le=1e9)


class QuotaSettings(Section):
    """The most that moves may bring a tenant to hold on a volume; 0: no limit."""

    tenant: Text
    volume: Text = Field(min_length=1)
    blocks: int = Field(default=0, ge=0, le=1 << 40)
    block_bytes: int = Field(default=0, ge=0, le=1 << 60)


class TracesSettings(Section):
    """Spans for OpenTelemetry, with the extra `otel`."""

    enabled: bool = False
    endpoint: Url = ""
    """Where spans go, over HTTP; empty: as the environment's `OTEL_EXPORTER_OTLP_ENDPOINT` says."""


class PolicySettings(Section):
    """What the planner may do: `advisor.policies.limits.Limits`, field for field. Logged whole."""

    admission: str = "auto"
    eviction: str = "auto"
    promote_moves_max: int = Field(default=64, ge=0, le=65_536)
    demote_moves_max: int = Field(default=64, ge=0, le=65_536)
    delete_moves_max: int = Field(default=1_024, ge=1, le=65_536)
    moves_open_max: int = Field(default=256, ge=0, le=65_536)
    moves_bytes_max: int = Field(default=1 << 30, ge=0)
    bytes_per_s: float = Field(default=0.0, ge=0, le=1e15)
    moves_per_s: float = Field(default=0.0, ge=0, le=1e9)
    moves_per_block: float = Field(default=0.0, ge=0, le=1e6)
    move_cost: float = Field(default=0.1, ge=0, le=1e6)
    second_worth: float = Field(default=0.0, ge=0, le=1e9)
    hysteresis_s: float = Field(default=600.0, ge=0, le=86_400)
    hysteresis_gain: float = Field(default=2.0, ge=1, le=1e6)
    pressure_ratio: float = Field(default=0.25, ge=0, le=1)
    prefill_tokens_per_s: float = Field(default=0.0, ge=0, le=1e9)
    dry_run: bool = False
    approve: bool = False
    approve_within_s: float = Field(default=600.0, ge=1, le=86_400)
    compaction: bool = True
    compaction_bytes_per_s: float = Field(default=float(32 << 20), ge=0, le=1e15)
    compaction_spread: float = Field(default=2.0, ge=1, le=1e6)
    compaction_dead_share: float = Field(default=0.25, gt=0, le=1)
    compaction_interval_s: float = Field(default=600.0, ge=1, le=86_400)
    budgets: tuple[VolumeBudgetSettings, ...] = Field(default=(), max_length=256)
    quotas: tuple[QuotaSettings, ...] = Field(default=(), max_length=1_024)

    @field_validator("admission")
    @classmethod
    def _known_admission(cls, name: str) -> str:
        try:
            policy_named(name)
        except PolicyUnknown as error:
            raise ValueError(str(error)) from error
        return name

    @field_validator("eviction")
    @classmethod
    def _known_eviction(cls, name: str) -> str:
        known = ("auto", *EVICTIONS)
        if name not in known:
            raise ValueError(f"choose one of {', '.join(known)}")
        return name


class ShadowSettings(Section):
    """A policy that plans on the same stream and moves nothing, compared with the live one."""

    name: Name
    policy: PolicySettings = PolicySettings()
    blocks_max: int = Field(default=BLOCKS_MAX, ge=1_024, le=1 << 26)
    """Blocks that it may know of, 170 bytes each, used as they come."""

    @field_validator("name")
    @classmethod
    def _not_live(cls, name: str) -> str:
        if name == LIVE:
            raise ValueError("the policy that moves is called live: choose another name")
        return name


def _distinct(named: tuple[Any, ...]) -> tuple[Any, ...]:
    twice = [name for name, times in Counter(each.name for each in named).items() if times > 1]
    if twice:
        raise ValueError(f"the name {twice[0]!r} is given twice: rename one")
    return named


def _few(shadows: tuple[ShadowSettings, ...]) -> tuple[ShadowSettings, ...]:
    if len(shadows) > SHADOWS_MAX:
        raise ValueError(f"{len(shadows)} shadows are named, {SHADOWS_MAX} may run at a time: leave some out")
    return shadows


Shadows = Annotated[tuple[ShadowSettings, ...], AfterValidator(_distinct), AfterValidator(_few)]


class PlanningSettings(Section):
    """The settings that the fold reads."""

    policy: PolicySettings = PolicySettings()
    shadow: Shadows = ()

    @property
    def policy_version(self) -> str:
        """Of all policies that are named, the live one's first: what a `SettingsEntry` holds."""
        names = [self.policy.admission, *(each.policy.admission for each in self.shadow)]
        return ", ".join(dict.fromkeys(policy_version(name) for name in names))

    def for_fold(self) -> dict[str, Any]:
        """Whole, as JSON types: what a `SettingsEntry` holds."""
        shadow = [each.model_dump(mode="json") for each in self.shadow]
        return {"policy": self.policy.model_dump(mode="json"), **({"shadow": shadow} if shadow else {})}


class AdvisorSettings(BaseSettings):
    """All settings of one advisor. Built directly it reads neither file nor environment; `load_settings` does."""

    model_config = SettingsConfigDict(
        frozen=True, extra="forbid", env_prefix=ENVIRONMENT_PREFIX, env_nested_delimiter=NESTED
    )

    directory: Path
    """Where `log.db` lies; made if absent."""
    tick_interval_s: float = Field(default=2.0, ge=0.05, le=3_600)
    queue_entries_max: int = Field(default=4_096, ge=1, le=1_000_000)
    """Logged entries that wait for the fold; past it the log thread stops receiving."""
    commit_batches_max: int = Field(default=64, ge=1, le=4_096)
    checkpoint_interval_s: float = Field(default=300.0, ge=1.0, le=86_400)
    """Between checkpoints of the folded state; one more is made at an orderly stop."""
    stop_within_s: float = Field(default=90.0, ge=1.0, le=3_600)
    """From a signal to the end of `kvadvisor serve`, by force where something is stuck."""
    index_memory_bytes_max: int = Field(default=4 << 30, ge=1 << 20, le=1 << 44)
    """Memory of the index. When it is full, Stores of blocks that are not there are skipped and counted."""
    api: ApiSettings = ApiSettings()
    log: LogSettings = LogSettings()
    traces: TracesSettings = TracesSettings()
    sources: tuple[SourceSettings, ...] = ()
    agents: tuple[AgentSettings, ...] = ()
    hooks: tuple[str, ...] = ()
    """Hooks of installed packages that are called, by the names they have under `kvadvisor.hooks`."""
    policy: PolicySettings = PolicySettings()
    shadow: Shadows = ()

    @classmethod
    def settings_customise_sources(
        cls,
        settings_cls: type[BaseSettings],
        init_settings: PydanticBaseSettingsSource,
        env_settings: PydanticBaseSettingsSource,
        dotenv_settings: PydanticBaseSettingsSource,
        file_secret_settings: PydanticBaseSettingsSource,
    ) -> tuple[PydanticBaseSettingsSource, ...]:
        return (init_settings,)

    @field_validator("sources", "agents")
    @classmethod
    def _distinct(cls, named: tuple[Any, ...]) -> tuple[Any, ...]:
        return _distinct(named)

    @property
    def log_path(self) -> Path:
        return self.directory / "log.db"

    @property
    def checkpoints_path(self) -> Path:
        return self.directory / "checkpoints"

    @property
    def planning(self) -> PlanningSettings:
        """What the fold reads of it, unless an operator changed it since."""
        return PlanningSettings(policy=self.policy, shadow=self.shadow)


def load_settings(path: Path | None, environ: Mapping[str, str]) -> AdvisorSettings:
    """Settings of the file at `path`, overridden by `environ`'s `KVADVISOR_…`.

    Relative paths are taken from the file's folder, those of the environment from the working directory. Raises
    `SettingsError` with one sentence for each key that is unknown, missing or out of range.
    """
    named = {name: value for name, value in environ.items() if _is_setting(name)}
    problems = _environment_problems(named)
    if problems:
        raise SettingsError(problems)
    from_environment = _Environment(named)()
    from_file = {} if path is None else _read_toml(path)
    _anchor(from_file, Path() if path is None else path.parent)
    _anchor(from_environment, Path())
    try:
        return AdvisorSettings(**_merged(from_file, from_environment))
    except ValidationError as error:
        raise SettingsError(
            [
                _sentence(detail, _place(detail, path, [name.upper() for name in named], from_environment))
                for detail in error.errors(include_url=False)
            ]
        ) from error


class _Environment(EnvSettingsSource):
    """pydantic-settings' reading of the environment, of the variables given instead of the process's."""

    def __init__(self, environ: Mapping[str, str]) -> None:
        self._environ = environ
        super().__init__(AdvisorSettings)

    def _load_env_vars(self) -> Mapping[str, str | None]:
        return {name.lower(): value for name, value in self._environ.items()}


def _is_setting(variable: str) -> bool:
    return variable.upper().startswith(ENVIRONMENT_PREFIX)


def _read_toml(path: Path) -> dict[str, Any]:
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise SettingsError([f"{path} cannot be read ({error.strerror}): check the path"]) from error
    except UnicodeDecodeError as error:
        raise SettingsError([f"{path} is not UTF-8 at byte {error.start}: save it as UTF-8"]) from error
    except tomllib.TOMLDecodeError as error:
        raise SettingsError([f"{path} is not TOML: {error}: mend that line"]) from error


def _anchor(values: dict[str, Any], folder: Path) -> None:
    """Makes the paths in `values` absolute: the directory, and every key whose name ends in `_file`."""
    if isinstance(values.get("directory"), str):
        values["directory"] = (folder / values["directory"]).absolute()
    _anchor_files(values, folder)


def _anchor_files(value: Any, folder: Path) -> None:
    for key, each in value.items() if isinstance(value, dict) else []:
        if key.endswith("_file") and isinstance(each, str):
            value[key] = (folder / each).absolute()
        else:
            _anchor_files(each, folder)
    for each in value if isinstance(value, list) else []:
        _anchor_files(each, folder)


def _merged(base: Mapping[str, Any], over: Mapping[str, Any]) -> dict[str, Any]:
    """`base` with `over`'s values, tables merged key by key."""
    merged = dict(base)
    for key, value in over.items():
        both = isinstance(value, Mapping) and isinstance(base.get(key), Mapping)
        merged[key] = _merged(base[key], value) if both else value
    return merged


def _environment_problems(environ: Mapping[str, str]) -> list[str]:
    """A sentence for each variable that names no setting, or whose setting needs JSON and has none."""
    known = _variables(AdvisorSettings, ENVIRONMENT_PREFIX)
    problems = []
    for variable, value in environ.items():
        if variable.upper() not in known:
            problems.append(f"the environment variable {variable} is no setting: {_nearest(variable.upper(), known)}")
        elif not known[variable.upper()] and not _is_json(value):
            problems.append(f"the environment variable {variable} is not JSON: write a JSON list or object")
    return problems


def _variables(model: type[BaseModel], prefix: str) -> dict[str, bool]:
    """Every environment variable that is read, and whether its value is plain text, not JSON."""
    variables = {}
    for key, field in model.model_fields.items():
        variable = prefix + key.upper()
        section, is_list = section_of(field)
        variables[variable] = section is None and not is_list and get_origin(field.annotation) is not dict
        if section is not None and not is_list:
            variables |= _variables(section, variable + NESTED)
    return variables


def section_of(field: FieldInfo) -> tuple[type[BaseModel] | None, bool]:
    """The section that a field holds, if it holds one, and whether it holds a list of them."""
    is_list = get_origin(field.annotation) is tuple
    annotation = get_args(field.annotation)[0] if is_list else field.annotation
    return (annotation if isinstance(annotation, type) and issubclass(annotation, BaseModel) else None), is_list


def _is_json(value: str) -> bool:
    try:
        json.loads(value)
    except ValueError:
        return False
    return True


def _nearest(key: str, known: Iterable[str]) -> str:
    known = sorted(known)
    near = difflib.get_close_matches(key, known, n=1)
    return f"did you mean {near[0]}?" if near else f"the known ones are {', '.join(known)}"


def _sentence(detail: Any, place: str) -> str:
    """One of pydantic's error details as a sentence: the key, where it stands, what is wrong, what to do."""
    location: tuple[str | int, ...] = detail["loc"]
    key = "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in location).removeprefix(".")
    if detail["type"] == "extra_forbidden":
        return f"{key} {place} is no setting: {_nearest(str(location[-1]), _fields_beside(location))}"
    if detail["type"] == "missing":
        variable = f" or set {ENVIRONMENT_PREFIX}{key.upper()}" if len(location) == 1 else ""
        return f"{key} {place} is missing: add it{variable}"
    problem = str(detail["ctx"]["error"]) if detail["type"] == "value_error" else _lowered(detail["msg"])
    return masked_text(f"{key} = {_shown(detail['input'])} {place} cannot be used: {problem}")


def _place(detail: Any, path: Path | None, variables: Iterable[str], from_environment: Mapping[str, Any]) -> str:
    location: tuple[str | int, ...] = detail["loc"]
    names = [str(part).upper() for part in itertools.takewhile(lambda part: isinstance(part, str), location)]
    spelled = (ENVIRONMENT_PREFIX + NESTED.join(names[:count]) for count in range(len(names), 0, -1))
    variable = next((each for each in spelled if each in variables), None)
    if variable and _holds(from_environment, location[:-1] if detail["type"] == "missing" else location):
        return f"(environment variable {variable})"
    return "in the settings" if path is None else f"in {path}"


def _holds(value: Any, location: Iterable[str | int]) -> bool:
    for part in location:
        try:
            value = value[part]
        except (LookupError, TypeError):
            return False
    return True


def _fields_beside(location: tuple[str | int, ...]) -> list[str]:
    model: type[BaseModel] = AdvisorSettings
    for part in location[:-1]:
        if isinstance(part, str):
            section, _ = section_of(model.model_fields[part])
            assert section is not None
            model = section
    return list(model.model_fields)


def _lowered(message: str) -> str:
    return message[:1].lower() + message[1:]


def _shown(value: Any) -> str:
    text = str(value) if isinstance(value, Path) else json.dumps(value, default=str)
    text = masked_text(text)
    return text if len(text) <= 80 else text[:77] + "…"
