"""Volume descriptors: validated facts about a place for blocks. They come from configuration or the API only."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

import msgspec

from storage_agent.errors import VolumeError

CAPACITY_BLOCKS_MAX = 1 << 31
BLOCK_BYTES_MAX = 256 * 1024 * 1024
"""Largest block a volume may take. A batch is staged in memory, at least one block at a time."""
SPEED_RANK_MAX = 0xFFFF
OPTIONS_MAX = 32
TENANTS_MAX = 1_024
RATE_BYTES_PER_S_MAX = 1e15
COST_PER_GB_MAX = 1e9
ENDURANCE_BYTES_PER_DAY_MAX = 1e18
RETENTION_S_MAX = 10 * 365 * 86_400.0

OptionValue = str | int | float | bool | list[Any] | dict[str, Any]

PathUse = Literal["required", "optional", "none"]
"""Whether volumes of a kind have a file or folder of their own."""

_ID = re.compile(r"[a-z0-9-]{1,64}")


class VolumeDescriptor(msgspec.Struct, frozen=True, kw_only=True):
    """A volume, as its owner describes it. Sizes in bytes, capacity in blocks (slots), watermarks as fractions."""

    id: str
    kind: str = "slab"
    """Name of an entry point of `kvadvisor.volumes`."""
    path: str = ""
    """A file or folder of the volume's own; empty for kinds that lie elsewhere."""
    tier: int = 3
    capacity_blocks: int
    block_bytes_max: int
    speed_rank: int = 0
    """Order of speed among volumes: 0 is the fastest."""
    high_watermark: float = 0.90
    low_watermark: float = 0.75
    when_full: Literal["refuse"] = "refuse"
    read_bytes_per_s: float = 0.0
    """What it reads at its best, as its owner knows it; 0: to be measured. It and the next guide the advisor alone."""
    write_bytes_per_s: float = 0.0
    cost_per_gb_month: float = 0.0
    """In any one currency for all volumes, as the next one. A GB is 10^9 bytes."""
    cost_per_gb_moved: float = 0.0
    endurance_bytes_per_day: float = 0.0
    """The most that it should be written a day; 0: no limit."""
    retention_s: float = 0.0
    """Blocks not used for so long leave; 0: they stay."""
    tenants: tuple[str, ...] = ()
    """Whose blocks may be moved here; empty is everybody's."""
    optional: bool = False
    """It may be away without that being a fault: the advisor does without it."""
    options: dict[str, OptionValue] = {}
    """The kind's own settings, checked against its type. Never secrets: descriptors are logged and shown."""


def descriptor_of(fields: object) -> VolumeDescriptor:
    """A descriptor that comes from outside, as JSON has it, checked but for its path. Raises `VolumeError`.

    It names the field, and not what stands in a field that there is none of: that may be a secret.
    """
    if isinstance(fields, dict):
        unknown = sorted(set(map(str, fields)) - set(VolumeDescriptor.__struct_fields__))
        if unknown:
            known = ", ".join(VolumeDescriptor.__struct_fields__)
            raise VolumeError(f"descriptor has no field {unknown[0]!r}; give {known}")
    try:
        descriptor = msgspec.convert(fields, VolumeDescriptor)
    except msgspec.ValidationError as error:
        raise VolumeError(f"descriptor: {error}; correct it") from error
    check(descriptor)
    return descriptor


def validate(
    descriptor: VolumeDescriptor, allowed_roots: Sequence[Path], *, use: PathUse = "required"
) -> Path | None:
    """The file or folder that `descriptor` means, absolute and without symbolic links; None where it has none.

    Reads the file system to resolve links; changes nothing. Raises `VolumeError` as `check` does, and for a path that
    ends up outside every allowed root.
    """
    check(descriptor)
    name = f"volume {descriptor.id!r}"
    if use == "none" and descriptor.path:
        raise VolumeError(f"{name}: kind {descriptor.kind!r} takes no path; remove {descriptor.path!r}")
    if use != "required" and not descriptor.path:
        return None
    return _resolve_inside(name, descriptor.path, allowed_roots)


def check(descriptor: VolumeDescriptor) -> None:
    """Look at everything but the path and what only its kind knows. Raises `VolumeError` with the field, its value and
    the remedy: a field of another type, an id, number or watermark out of range."""
    name = f"volume {descriptor.id!r}"
    try:  # made in Python, it has whatever types its maker gave it
        msgspec.convert(msgspec.to_builtins(descriptor), VolumeDescriptor)
    except (msgspec.ValidationError, TypeError, RecursionError) as error:
        raise VolumeError(f"{name}: {error}; correct it") from error
    if not _ID.fullmatch(descriptor.id):
        raise VolumeError(f"{name}: an id is 1 to 64 of a-z, 0-9 and '-'; rename the volume")
    for field, value, low, high in (
        ("tier", descriptor.tier, 3, 4),
        ("capacity_blocks", descriptor.capacity_blocks, 1, CAPACITY_BLOCKS_MAX),
        ("block_bytes_max", descriptor.block_bytes_max, 1, BLOCK_BYTES_MAX),
        ("speed_rank", descriptor.speed_rank, 0, SPEED_RANK_MAX),
        ("read_bytes_per_s", descriptor.read_bytes_per_s, 0, RATE_BYTES_PER_S_MAX),
        ("write_bytes_per_s", descriptor.write_bytes_per_s, 0, RATE_BYTES_PER_S_MAX),
        ("cost_per_gb_month", descriptor.cost_per_gb_month, 0, COST_PER_GB_MAX),
        ("cost_per_gb_moved", descriptor.cost_per_gb_moved, 0, COST_PER_GB_MAX),
        ("endurance_bytes_per_day", descriptor.endurance_bytes_per_day, 0, ENDURANCE_BYTES_PER_DAY_MAX),
        ("retention_s", descriptor.retention_s, 0, RETENTION_S_MAX),
    ):
        if not low <= value <= high:
            raise VolumeError(f"{name}: {field} is {value}; set it between {low} and {high}")
    if not 0 < descriptor.low_watermark < descriptor.high_watermark <= 1:
        raise VolumeError(
            f"{name}: low_watermark {descriptor.low_watermark} and high_watermark {descriptor.high_watermark} "
            "must satisfy 0 < low < high <= 1; change one of them"
        )
    if len(descriptor.tenants) > TENANTS_MAX:
        raise VolumeError(f"{name}: {len(descriptor.tenants)} tenants are given; {TENANTS_MAX} are the most")
    if len(descriptor.options) > OPTIONS_MAX:
        raise VolumeError(f"{name}: {len(descriptor.options)} options are given; {OPTIONS_MAX} are the most")
    try:
        msgspec.msgpack.encode(descriptor)  # as messages and logs have it
    except (TypeError, OverflowError, UnicodeEncodeError, RecursionError) as error:
        raise VolumeError(f"{name}: {error}; correct it") from error


def _resolve_inside(name: str, path: str, allowed_roots: Sequence[Path]) -> Path:
    if not allowed_roots:
        raise VolumeError(f"{name}: no folder is allowed for volumes; name one in allowed_roots")
    if not path:
        raise VolumeError(f"{name}: no path is given; give one inside {', '.join(map(str, allowed_roots))}")
    try:
        resolved = Path(path).resolve()
        roots = [Path(root).resolve() for root in allowed_roots]
    except (OSError, ValueError, RuntimeError) as error:
        raise VolumeError(f"{name}: path {path!r} cannot be resolved: {error}; correct it") from error
    if not any(root in resolved.parents for root in roots):
        allowed = ", ".join(str(root) for root in roots)
        raise VolumeError(
            f"{name}: path {path!r} (in full {str(resolved)!r}) lies outside the allowed roots {allowed}; "
            "move it inside one or add its folder to allowed_roots"
        )
    return resolved
