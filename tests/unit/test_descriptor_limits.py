"""What a descriptor cannot do: numbers without end, ways out of the allowed roots, messages that bring one."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any, get_args

import msgspec
import pytest
from msgspec import inspect

from storage_agent.command_wire import Request
from storage_agent.descriptor import BLOCK_BYTES_MAX, CAPACITY_BLOCKS_MAX, SPEED_RANK_MAX, VolumeDescriptor, validate
from storage_agent.errors import VolumeError
from storage_agent.kinds import ENTRY_POINT_GROUP, kind_named
from storage_agent.port import Result
from tests.contract.transports import wait_for
from tests.watched_agent import Watched, descriptor

KINDS = sorted(point.name for point in entry_points(group=ENTRY_POINT_GROUP))


def numbers(kind: inspect.Type, name: str) -> Iterator[tuple[str, inspect.IntType | inspect.FloatType]]:
    """Every number in a type, those of its parts too."""
    match kind:
        case inspect.IntType() | inspect.FloatType():
            yield name, kind
        case inspect.StructType(fields=fields):
            for field in fields:
                yield from numbers(field.type, f"{name}.{field.name}")
        case inspect.UnionType(types=types):
            for each in types:
                yield from numbers(each, name)
        case inspect.ListType(item_type=item) | inspect.VarTupleType(item_type=item):
            yield from numbers(item, f"{name}[]")


@pytest.mark.parametrize("kind", KINDS)
def test_every_number_of_a_kinds_options_has_a_least_and_a_most(kind: str) -> None:
    for name, number in numbers(inspect.type_info(kind_named(kind, "v").options), kind):
        assert number.ge is not None or number.gt is not None, f"{name} has no least value"
        assert number.le is not None or number.lt is not None, f"{name} has no most value"


@pytest.mark.parametrize(
    ("field", "most"),
    [
        ("tier", 4),
        ("capacity_blocks", CAPACITY_BLOCKS_MAX),
        ("block_bytes_max", BLOCK_BYTES_MAX),
        ("speed_rank", SPEED_RANK_MAX),
    ],
)
def test_every_number_of_a_descriptor_has_a_most(tmp_path: Path, field: str, most: int) -> None:
    facts: dict[str, Any] = {"id": "v", "capacity_blocks": 1, "block_bytes_max": 1, "path": str(tmp_path / "v")}
    assert validate(VolumeDescriptor(**{**facts, field: most}), [tmp_path]) == tmp_path.resolve() / "v"
    for value in (most + 1, 1 << 80):
        with pytest.raises(VolumeError, match=rf"{field} is {value}; set it between \d+ and {most}|out of range"):
            validate(VolumeDescriptor(**{**facts, field: value}), [tmp_path])


def test_one_message_to_an_agent_brings_a_descriptor_and_none_an_endpoint() -> None:
    """They come from the settings of a process, its own calls, or an admin's registration: test_volume_commands."""

    def names(kind: Any) -> set[str]:
        return {name for each in get_args(kind) for name in (names(each) or {each.__name__})}

    requests = names(Request)
    assert {"StatRequest", "CopyRequest", "CompactRequest"} <= requests
    assert [name for name in sorted(requests) if "egister" in name] == ["RegisterRequest", "UnregisterRequest"]
    assert not [name for name in VolumeDescriptor.__struct_fields__ if "url" in name or "key" in name]
    taken = msgspec.json.schema(Request)["$defs"]
    assert [name for name, facts in taken.items() if "path" in facts.get("properties", {})] == ["VolumeDescriptor"]


# Links that come later


@pytest.fixture
def watched(tmp_path: Path) -> Iterator[Watched]:
    root = tmp_path / "root"
    root.mkdir()
    made = Watched(root)
    yield made
    made.close()


def link_file(root: Path, outside: Path) -> None:
    (root / "own" / "v").rename(outside / "v")
    (root / "own" / "v").symlink_to(outside / "v")


def link_folder(root: Path, outside: Path) -> None:
    (root / "own").rename(outside / "own")
    (root / "own").symlink_to(outside / "own")


@pytest.mark.parametrize("escape", [link_file, link_folder])
@pytest.mark.parametrize("kind", ["slab", "directory"])
def test_a_link_put_in_a_volumes_place_is_not_followed_out_of_the_root(
    watched: Watched, tmp_path: Path, kind: str, escape: Callable[[Path, Path], None]
) -> None:
    root, outside = tmp_path / "root", tmp_path / "outside"
    (root / "own").mkdir()
    outside.mkdir()
    options = {"segment_bytes": 1 << 20} if kind == "directory" else {}
    watched.agent.register_volume(descriptor(root / "own" / "v", kind=kind, options=options))
    assert watched.put(1) == [Result.STORED]
    watched.agent.unregister_volume("v")
    escape(root, outside)
    before = {path: path.stat().st_mtime_ns for path in outside.rglob("*") if path.is_file()}
    with pytest.raises(VolumeError, match="outside the allowed roots"):
        watched.agent.register_volume(descriptor(root / "own" / "v", kind=kind, options=options))
    assert {path: path.stat().st_mtime_ns for path in outside.rglob("*") if path.is_file()} == before


def test_a_link_that_comes_while_a_volume_serves_is_not_followed_when_it_is_opened_anew(
    watched: Watched, tmp_path: Path
) -> None:
    root, outside = tmp_path / "root", tmp_path / "outside"
    (root / "own").mkdir()
    outside.mkdir()
    watched.agent.register_volume(descriptor(root / "own" / "v"))
    assert watched.put(1) == [Result.STORED]
    (root / "own" / "v").rename(root / "kept")
    copied = (root / "kept").read_bytes()
    (outside / "v").write_bytes(copied)
    (root / "own" / "v").symlink_to(outside / "v")
    wait_for(lambda: "outside the allowed roots" in watched.stat().degraded)
    assert (outside / "v").read_bytes() == copied
    (root / "own" / "v").unlink()
    (root / "kept").rename(root / "own" / "v")
    wait_for(lambda: watched.stat().degraded == "")
    assert watched.get(1) == [Result.HIT]


def test_a_link_among_a_directorys_segments_is_not_followed(watched: Watched, tmp_path: Path) -> None:
    facts: dict[str, Any] = {"kind": "directory", "options": {"segment_bytes": 1 << 20}}
    folder = tmp_path / "root" / "v"
    watched.agent.register_volume(descriptor(folder, **facts))
    assert watched.put(1) == [Result.STORED]
    watched.agent.unregister_volume("v")
    (segment,) = folder.glob("*.segment")
    segment.rename(tmp_path / "outside")
    before = (tmp_path / "outside").read_bytes()
    segment.symlink_to(tmp_path / "outside")
    with pytest.raises(VolumeError, match="Too many levels of symbolic links"):
        watched.agent.register_volume(descriptor(folder, **facts))
    assert (tmp_path / "outside").read_bytes() == before
