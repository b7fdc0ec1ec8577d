"""Volume descriptors: validated facts about a place for blocks. They come from configuration or the API only."""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

import msgspec

from storage_agent.errors import DescriptorError, FieldFault

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

VALUE_SHOWN_CHARACTERS = 80
NAME_BYTES_MAX = 255
"""Of one file or folder: the most that Linux file systems take."""

_ID = re.compile(r"[a-z0-9-]{1,64}")
_AT = re.compile(r"`\$\.?([^`]*)`\Z")
_NAMED = re.compile(r"(?:missing required|unknown) field `([^`]*)`")


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
    """A descriptor that comes from outside, as JSON has it, checked but for its path. Raises `DescriptorError`.

    It names the field, and not what stands in a field that there is none of: that may be a secret.
    """
    if isinstance(fields, dict):
        unknown = sorted(set(map(str, fields)) - set(VolumeDescriptor.__struct_fields__))
        if unknown:
            known = ", ".join(VolumeDescriptor.__struct_fields__)
            raise wrong("descriptor", f"has no field {unknown[0]!r}", f"give {known}", unknown[0])
    try:
        descriptor = msgspec.convert(fields, VolumeDescriptor)
    except msgspec.ValidationError as error:
        raise of_another_type("descriptor", error) from error
    check(descriptor)
    return descriptor


def wrong(what: str, said: str, remedy: str, field: str = "", value: object = "") -> DescriptorError:
    """`what` (`volume 'a'`) has a fault in `field`, whose value is shown cut."""
    shown = repr(value) if value != "" else ""
    cut = shown if len(shown) <= VALUE_SHOWN_CHARACTERS else f"{shown[:VALUE_SHOWN_CHARACTERS]}…"
    return DescriptorError(f"{what} {said}; {remedy}", FieldFault(field, cut, remedy))


def of_another_type(what: str, error: Exception, within: str = "") -> DescriptorError:
    """msgspec's word on a value that does not fit. It names the field and the types, and never the value."""
    named, at = _NAMED.search(str(error)), _AT.search(str(error))
    place = re.sub(r"\[(\d+)\]", r".\1", at[1]).replace("[...]", "") if at else ""
    parts = (within, place, named[1] if named else "")
    expected = str(error).partition(" - at ")[0]
    fault = FieldFault(".".join(part for part in parts if part), "", f"{expected}; correct it")
    return DescriptorError(f"{what}: {error}; correct it", fault)


def validate(
    descriptor: VolumeDescriptor, allowed_roots: Sequence[Path], *, use: PathUse = "required"
) -> Path | None:
    """The file or folder that `descriptor` means, absolute and without symbolic links; None where it has none.

    Reads the file system to resolve links; changes nothing. Raises `DescriptorError` as `check` does, and for a path
    that ends up outside every allowed root.
    """
    check(descriptor)
    name = f"volume {descriptor.id!r}"
    if use == "none" and descriptor.path:
        said = f"kind {descriptor.kind!r} takes no path"
        raise wrong(f"{name}:", said, f"remove {descriptor.path!r}", "path", descriptor.path)
    if use != "required" and not descriptor.path:
        return None
    return _resolve_inside(name, descriptor.path, allowed_roots)


def check(descriptor: VolumeDescriptor) -> None:
    """Look at everything but where the path leads and what only its kind knows. Raises `DescriptorError` with the
    field, its value and the remedy: a field of another type, an id, number or watermark out of range."""
    name = f"volume {descriptor.id!r}"
    try:  # made in Python, it has whatever types its maker gave it
        msgspec.convert(msgspec.to_builtins(descriptor), VolumeDescriptor)
    except (msgspec.ValidationError, TypeError, RecursionError) as error:
        raise of_another_type(name, error) from error
    if not _ID.fullmatch(descriptor.id):
        raise wrong(f"{name}:", "an id is 1 to 64 of a-z, 0-9 and '-'", "rename the volume", "id", descriptor.id)
    if not descriptor.path.isprintable():
        said = f"path {descriptor.path!r} has characters that cannot be printed"
        raise wrong(f"{name}:", said, "leave them out", "path", descriptor.path)
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
            raise wrong(f"{name}:", f"{field} is {value}", f"set it between {low} and {high}", field, value)
    low_mark, high_mark = descriptor.low_watermark, descriptor.high_watermark
    if not 0 < low_mark < high_mark <= 1:
        said = f"low_watermark {low_mark} and high_watermark {high_mark} must satisfy 0 < low < high <= 1"
        field, value = ("low_watermark", low_mark) if 0 < high_mark <= 1 else ("high_watermark", high_mark)
        raise wrong(f"{name}:", said, "change one of them", field, value)
    for tenant in descriptor.tenants:
        if not tenant.isprintable():
            said = f"tenant {tenant!r} has characters that cannot be printed"
            raise wrong(f"{name}:", said, "leave them out", "tenants", tenant)
    for field, count, most in (
        ("tenants", len(descriptor.tenants), TENANTS_MAX), ("options", len(descriptor.options), OPTIONS_MAX)
    ):  # fmt: skip
        if count > most:
            raise wrong(f"{name}:", f"{count} {field} are given", f"{most} are the most", field)
    try:
        msgspec.msgpack.encode(descriptor)  # as messages and logs have it
    except (TypeError, OverflowError, UnicodeEncodeError, RecursionError) as error:
        raise wrong(f"{name}:", str(error), "correct it") from error


def _resolve_inside(name: str, path: str, allowed_roots: Sequence[Path]) -> Path:
    if not allowed_roots:
        raise wrong(f"{name}:", "no folder is allowed for volumes", "name one in allowed_roots", "path", path)
    if not path:
        raise wrong(f"{name}:", "no path is given", f"give one inside {', '.join(map(str, allowed_roots))}", "path")
    try:
        resolved = Path(path).resolve()
        roots = [Path(root).resolve() for root in allowed_roots]
    except (OSError, ValueError, RuntimeError) as error:
        raise wrong(f"{name}:", f"path {path!r} cannot be resolved: {error}", "correct it", "path", path) from error
    # A name can be too long for every file system there is; a path that nothing has yet resolves all the same.
    if any(len(os.fsencode(part)) > NAME_BYTES_MAX for part in resolved.parts):
        said = f"path has a name of more than {NAME_BYTES_MAX} bytes"
        raise wrong(f"{name}:", said, "shorten it", "path", path)
    if resolved in roots:
        said = f"path {path!r} is an allowed root itself"
        raise wrong(f"{name}:", said, "give a path inside it", "path", path)
    if not any(root in resolved.parents for root in roots):
        allowed = ", ".join(str(root) for root in roots)
        said = f"path {path!r} (in full {str(resolved)!r}) lies outside the allowed roots {allowed}"
        raise wrong(f"{name}:", said, "move it inside one or add its folder to allowed_roots", "path", path)
    return resolved
