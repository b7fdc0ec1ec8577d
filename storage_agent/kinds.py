"""Kinds of volumes, by name: ours and those of installed packages (entry point group `kvadvisor.volumes`).

An entry point names a `VolumeKind`. A vendor writes a `slot_store.SlotStore` and gives it to `slot_kind`, or a whole
`volume.Volume`; `storage_agent.volume_contract` is the pytest plugin that tells whether it keeps the contract.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from functools import cache
from importlib.metadata import EntryPoint, entry_points
from pathlib import Path

import msgspec

from storage_agent.descriptor import PathUse, VolumeDescriptor, of_another_type, validate, wrong
from storage_agent.endpoints import Endpoint
from storage_agent.errors import VolumeError
from storage_agent.inspection import Inspection
from storage_agent.slot_store import SlotStore
from storage_agent.slot_volume import SlotVolume
from storage_agent.volume import Announce, Volume

ENTRY_POINT_GROUP = "kvadvisor.volumes"
DEADLINE_S = 30.0
"""How long one batch of transfers may take."""


def _say_nothing(headers: Sequence[object]) -> None:
    pass


@dataclass(frozen=True, kw_only=True, slots=True)
class Opening:
    """A validated descriptor and what its kind may use to open it."""

    descriptor: VolumeDescriptor
    path: Path | None
    """Absolute, without links, inside an allowed root; None where the kind has none."""
    options: msgspec.Struct
    """Of the kind's own type, checked."""
    endpoints: Mapping[str, Endpoint] = field(default_factory=dict)
    on_stored: Announce = _say_nothing
    on_freed: Announce = _say_nothing
    ordering: AbstractContextManager[object] = field(default_factory=nullcontext)
    """Held while a Store is announced and its block becomes live: listed under it, `live_headers` are what was
    announced so far. The Removes of blocks that are live no more may still come."""
    deadline_s: float = DEADLINE_S

    @property
    def required_path(self) -> Path:
        """Raises `VolumeError` where there is none."""
        if self.path is None:
            raise VolumeError(f"volume {self.descriptor.id!r} of kind {self.descriptor.kind!r} has no path; give one")
        return self.path


VolumeOn = Callable[[Opening, SlotStore, SlotStore], Volume]
"""Makes the volume of an opening on a store; the last is the kind's own store beneath it, which may be the same."""


def slot_volume_on(opening: Opening, store: SlotStore, own: SlotStore) -> SlotVolume:
    """A `VolumeOn`: all that most kinds need."""
    return SlotVolume(
        opening.descriptor,
        store,
        on_stored=opening.on_stored,
        on_freed=opening.on_freed,
        ordering=opening.ordering,
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class VolumeKind:
    """How volumes of one kind are opened."""

    options: type[msgspec.Struct]
    """A frozen Struct that forbids unknown fields; limits of its numbers are `msgspec.Meta`."""
    open: Callable[[Opening], Volume]
    """Opens or makes the volume. Raises `VolumeError`."""
    inspect: Callable[[Opening], Inspection] | None = None
    """Opens it to look at it; None where there is nothing to look at without an agent."""
    open_store: Callable[[Opening], SlotStore] | None = None
    """The store that `open` puts a volume on by `volume_on`; None where it does not. Kind `faulty` wraps it."""
    volume_on: VolumeOn = slot_volume_on
    path: PathUse = "required"
    is_view: bool = False
    """Another agent owns these volumes and tells of what is on them."""
    is_harmful: bool = False
    """It loses or changes blocks on purpose: nobody but the agent's settings may ask for it, unless they say so."""


def slot_kind(
    options: type[msgspec.Struct],
    open_store: Callable[[Opening], SlotStore],
    *,
    inspect: Callable[[Opening], Inspection] | None = None,
    path: PathUse = "required",
    volume_on: VolumeOn = slot_volume_on,
) -> VolumeKind:
    """A kind whose volumes are `SlotVolume`s on the stores that `open_store` opens."""

    def open_volume(opening: Opening) -> Volume:
        store = open_store(opening)
        return volume_on(opening, store, store)

    return VolumeKind(
        options=options, open=open_volume, inspect=inspect, open_store=open_store, path=path, volume_on=volume_on
    )


def kind_named(name: str, volume: str) -> VolumeKind:
    """Raises `VolumeError` that names `volume`: unknown, or its package does not load."""
    found = _installed_kinds(tuple(sys.path))
    if name not in found:  # its package may have come since
        _installed_kinds.cache_clear()
        found = _installed_kinds(tuple(sys.path))
    if name not in found:
        raise wrong(f"volume {volume!r}:", f"kind {name!r} is not known", f"use one of {sorted(found)}", "kind", name)
    try:
        kind = found[name].load()
    except (ImportError, AttributeError) as error:
        raise VolumeError(
            f"volume {volume!r}: kind {name!r} of {found[name].value} cannot be loaded: {error}; "
            "repair or remove that package"
        ) from error
    if not isinstance(kind, VolumeKind):
        raise VolumeError(f"volume {volume!r}: kind {name!r} is {found[name].value}, which is no VolumeKind")
    return kind


@cache
def _installed_kinds(path: tuple[str, ...]) -> dict[str, EntryPoint]:
    """Kept: looking through all installed packages takes 50 ms. `path` is `sys.path`."""
    return {point.name: point for point in entry_points(group=ENTRY_POINT_GROUP)}


def prepare(
    descriptor: VolumeDescriptor,
    allowed_roots: Sequence[Path],
    endpoints: Mapping[str, Endpoint] | None = None,
) -> tuple[VolumeKind, Opening]:
    """The kind of `descriptor`, and its checked opening. Opens nothing. Raises `VolumeError` with the remedy."""
    kind = kind_named(descriptor.kind, descriptor.id)
    path = validate(descriptor, allowed_roots, use=kind.path)
    options = checked_options(kind, descriptor)
    return kind, Opening(descriptor=descriptor, path=path, options=options, endpoints=endpoints or {})


def checked_options(kind: VolumeKind, descriptor: VolumeDescriptor) -> msgspec.Struct:
    """The descriptor's options as `kind`'s own type. Raises `VolumeError` with the remedy."""
    try:
        return msgspec.convert(descriptor.options, kind.options)
    except msgspec.ValidationError as error:
        what = f"volume {descriptor.id!r}: options of kind {descriptor.kind!r}"
        raise of_another_type(what, error, "options") from error


def inspect_volume(
    descriptor: VolumeDescriptor, allowed_roots: Sequence[Path], endpoints: Mapping[str, Endpoint] | None = None
) -> Inspection:
    """Raises `VolumeError`: not valid, not there, or of a kind that cannot be looked at without an agent."""
    kind, opening = prepare(descriptor, allowed_roots, endpoints)
    if kind.inspect is None:
        raise VolumeError(
            f"volume {descriptor.id!r}: kind {descriptor.kind!r} cannot be looked at from outside; ask its agent"
        )
    return kind.inspect(opening)
