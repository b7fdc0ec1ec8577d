"""What a synthetic workload is made of, as its TOML says it, and the ones that come with the package."""

from __future__ import annotations

import tomllib
from importlib.resources import files
from pathlib import Path
from typing import Annotated, Self

import msgspec
from msgspec import Meta, Struct

from advisor.errors import AdvisorError

PRESETS = ("agents", "chat", "mixed", "rag", "scan", "signals")

Tokens = Annotated[int, Meta(ge=0, le=10_000_000)]
Seconds = Annotated[float, Meta(ge=0, le=1e7)]
Share = Annotated[float, Meta(ge=0, le=0.95)]


class WorkloadError(AdvisorError):
    """A workload that cannot be simulated."""


class TenantLoad(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One tenant's habits. Lengths and pauses are medians of what is drawn (log-normal).

    A session begins with the tenant's `system_tokens`, `documents_drawn` of its shared documents (the first is the most
    popular: Zipf) and `own_tokens` that no other session has. Each turn adds `turn_tokens` and its answer.
    """

    name: Annotated[str, Meta(min_length=1, max_length=64)]
    sessions_per_minute: Annotated[float, Meta(gt=0, le=1e5)]
    priority: Annotated[int, Meta(ge=0, le=100)] = 0
    system_tokens: Tokens = 0
    documents: Annotated[int, Meta(ge=0, le=10_000_000)] = 0
    documents_drawn: Annotated[int, Meta(ge=0, le=1_000)] = 0
    document_tokens: Tokens = 0
    zipf_exponent: Annotated[float, Meta(ge=0, le=5)] = 1.0
    own_tokens: Tokens = 0
    turns_mean: Annotated[float, Meta(ge=1, le=1e5)] = 1.0
    """Geometric, of those that go on at all."""
    one_turn_share: Share = 0.0
    """Sessions that end after their first turn whatever `turns_mean` says."""
    turn_tokens: Annotated[int, Meta(ge=1, le=10_000_000)] = 100
    answer_tokens: Annotated[int, Meta(ge=1, le=1_000_000)] = 200
    think_s: Seconds = 30.0
    keeps_context: bool = True
    """False: each turn begins again, with documents and a text of its own (questions to a search; a batch job)."""
    context_tokens_max: Annotated[int, Meta(ge=1, le=10_000_000)] = 128_000
    """A session ends before it would go beyond."""


class Burst(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """For a while, `times` as many sessions begin."""

    at_s: Seconds
    for_s: Seconds
    times: Annotated[float, Meta(ge=0, le=1000)]
    tenants: tuple[str, ...] = ()
    """Empty: all."""


class Restart(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The engine is away and comes back with an empty cache; whoever asked meanwhile asks again then."""

    at_s: Seconds
    for_s: Seconds = 30.0


class Faults(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Shares of an engine's messages. Of a trace nothing is lost."""

    lost: Share = 0.0
    doubled: Share = 0.0
    reordered: Share = 0.0


class Workload(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Everything but the seed."""

    minutes: Annotated[float, Meta(gt=0, le=100_000)] = 60.0
    tenants: Annotated[tuple[TenantLoad, ...], Meta(min_length=1, max_length=1_000)]
    bursts: tuple[Burst, ...] = ()
    restarts: tuple[Restart, ...] = ()
    faults: Faults = Faults()

    def checked(self) -> Self:
        """Raises `WorkloadError` where parts contradict each other."""
        names = [tenant.name for tenant in self.tenants]
        for name in names:
            if names.count(name) > 1:
                raise WorkloadError(f"two tenants are called {name!r}: give each its own name")
        for tenant in self.tenants:
            if tenant.documents_drawn > tenant.documents:
                raise WorkloadError(
                    f"tenant {tenant.name!r} draws {tenant.documents_drawn} of {tenant.documents} documents:"
                    " raise documents"
                )
        for burst in self.bursts:
            for name in burst.tenants:
                if name not in names:
                    raise WorkloadError(f"a burst names {name!r}, which is no tenant: give one of {', '.join(names)}")
        return self


def load_workload(path: Path) -> Workload:
    """Read a description. Raises `WorkloadError`."""
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise WorkloadError(f"{path} cannot be read ({error}): give a workload's TOML file") from error
    return _parsed(text, str(path))


def load_preset(name: str) -> Workload:
    """One that comes with the package. Raises `WorkloadError`, naming what there is."""
    return _parsed(preset_text(name), name)


def preset_text(name: str) -> str:
    """Its TOML, to begin one's own with. Raises `WorkloadError`."""
    if name not in PRESETS:
        raise WorkloadError(f"preset {name!r} is not known: choose one of {', '.join(PRESETS)}")
    return files("advisor.simulation").joinpath("presets", f"{name}.toml").read_text(encoding="utf-8")


def _parsed(text: str, source: str) -> Workload:
    try:
        return msgspec.convert(tomllib.loads(text), Workload).checked()
    except tomllib.TOMLDecodeError as error:
        raise WorkloadError(f"{source} is no TOML ({error}): mend it") from error
    except msgspec.ValidationError as error:
        raise WorkloadError(f"{source} is no workload ({error}): see docs/simulate.md") from error
