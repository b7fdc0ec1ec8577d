"""What a volume descriptor may say, and where its file may lie."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from storage_agent.descriptor import BLOCK_BYTES_MAX, VolumeDescriptor, descriptor_of, validate
from storage_agent.errors import DescriptorError, FieldFault, VolumeError


def descriptor(path: Path | str, **fields: Any) -> VolumeDescriptor:
    sizes = {"capacity_blocks": 8, "block_bytes_max": 4096}
    return VolumeDescriptor(**{"id": "fast", "path": str(path), **sizes, **fields})


def test_a_path_inside_an_allowed_root_comes_back_resolved(tmp_path: Path) -> None:
    assert validate(descriptor(tmp_path / "a" / ".." / "fast.slab"), [tmp_path]) == tmp_path.resolve() / "fast.slab"


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"id": "Fast"}, "a-z, 0-9 and '-'"),
        ({"id": ""}, "1 to 64"),
        ({"id": "f" * 65}, "1 to 64"),
        ({"id": "fast\n"}, "1 to 64"),
        ({"tier": 2}, "tier is 2"),
        ({"tier": 5}, "tier is 5"),
        ({"capacity_blocks": 0}, "capacity_blocks is 0"),
        ({"block_bytes_max": 0}, "block_bytes_max is 0"),
        ({"block_bytes_max": BLOCK_BYTES_MAX + 1}, f"block_bytes_max is {BLOCK_BYTES_MAX + 1}"),
        ({"speed_rank": -1}, "speed_rank is -1"),
        ({"low_watermark": 0.0}, "low_watermark 0.0"),
        ({"low_watermark": 0.9, "high_watermark": 0.9}, "high_watermark 0.9"),
        ({"high_watermark": 1.01}, "high_watermark 1.01"),
        ({"high_watermark": float("nan")}, "high_watermark nan"),
    ],
)
def test_a_field_out_of_range_is_named_with_its_value(tmp_path: Path, fields: dict[str, Any], said: str) -> None:
    with pytest.raises(VolumeError, match=said):
        validate(descriptor(tmp_path / "fast.slab", **fields), [tmp_path])


def test_a_path_outside_every_root_names_path_and_roots_and_remedy(tmp_path: Path) -> None:
    roots = [tmp_path / "one", tmp_path / "two"]
    outside = tmp_path / "one" / ".." / "fast.slab"
    with pytest.raises(VolumeError) as caught:
        validate(descriptor(outside), roots)
    for said in (str(outside), str(roots[0]), str(roots[1]), "allowed_roots"):
        assert said in str(caught.value)


def test_a_symbolic_link_out_of_the_root_is_refused(tmp_path: Path) -> None:
    root, elsewhere = tmp_path / "root", tmp_path / "elsewhere"
    root.mkdir()
    elsewhere.mkdir()
    (root / "folder").symlink_to(elsewhere)
    (root / "file").symlink_to(elsewhere / "fast.slab")
    for path in (root / "folder" / "fast.slab", root / "file"):
        with pytest.raises(VolumeError, match="outside the allowed roots"):
            validate(descriptor(path), [root])


def test_a_root_that_is_a_link_allows_what_it_points_to(tmp_path: Path) -> None:
    real, link = tmp_path / "real", tmp_path / "link"
    real.mkdir()
    link.symlink_to(real)
    assert validate(descriptor(link / "fast.slab"), [link]) == real.resolve() / "fast.slab"


def test_the_root_itself_is_no_file_for_a_volume(tmp_path: Path) -> None:
    with pytest.raises(VolumeError, match="is an allowed root itself; give a path inside it"):
        validate(descriptor(tmp_path), [tmp_path])


def test_a_name_that_no_file_system_takes_is_told_by_its_field(tmp_path: Path) -> None:
    with pytest.raises(DescriptorError, match="a name of more than 255 bytes") as refused:
        validate(descriptor(tmp_path / ("x" * 300)), [tmp_path])
    assert refused.value.fault.field == "path"


def test_no_allowed_root_or_a_path_that_is_none_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(VolumeError, match="name one in allowed_roots"):
        validate(descriptor(tmp_path / "fast.slab"), [])
    (tmp_path / "loop").symlink_to(tmp_path / "loop")
    with pytest.raises(VolumeError, match="cannot be resolved"):
        validate(descriptor(tmp_path / "loop" / "fast.slab"), [tmp_path])


@pytest.mark.parametrize("path", ["/srv/a\0b", "/srv/a\nb", "/srv/\x1b[2J", "/srv/a\u202eb", "/srv/a\u2028b"])
def test_a_path_that_would_not_show_as_it_is_is_refused(path: str) -> None:
    with pytest.raises(DescriptorError, match="characters that cannot be printed; leave them out") as refused:
        descriptor_of({"id": "fast", "path": path, "capacity_blocks": 8, "block_bytes_max": 4096})
    assert refused.value.fault == FieldFault("path", repr(path), "leave them out")


@pytest.mark.parametrize(
    ("fields", "field", "value", "remedy"),
    [
        ({"capacity_blocks": 0}, "capacity_blocks", "0", "set it between 1 and 2147483648"),
        ({"capacity_blocks": "many"}, "capacity_blocks", "", "Expected `int`, got `str`; correct it"),
        ({"tenants": ["acme", 7]}, "tenants.1", "", "Expected `str`, got `int`; correct it"),
        ({"id": "Fast"}, "id", "'Fast'", "rename the volume"),
        ({"low_watermark": 0.95}, "low_watermark", "0.95", "change one of them"),
        ({"high_watermark": 2.0}, "high_watermark", "2.0", "change one of them"),
        ({"tenants": ["acme", "a\nb"]}, "tenants", "'a\\nb'", "leave them out"),
        ({"blocks": 7}, "blocks", "", "give id, kind, path"),
        ({"block_bytes_max": None}, "block_bytes_max", "", "Expected `int`, got `null`; correct it"),
        ({"path": "/" + "x" * 200 + "\n"}, "path", repr("/" + "x" * 200)[:80] + "…", "leave them out"),
    ],
)
def test_what_is_wrong_is_told_by_field(fields: dict[str, Any], field: str, value: str, remedy: str) -> None:
    with pytest.raises(DescriptorError) as refused:
        descriptor_of({"id": "fast", "path": "/srv/fast", "capacity_blocks": 8, "block_bytes_max": 4096, **fields})
    fault = refused.value.fault
    assert (fault.field, fault.value) == (field, value)
    assert fault.remedy.startswith(remedy)
    assert fault.remedy in str(refused.value) or "Expected" in str(refused.value)


def test_what_was_left_out_is_told_by_field() -> None:
    with pytest.raises(DescriptorError) as refused:
        descriptor_of({"id": "fast", "block_bytes_max": 4096})
    assert refused.value.fault.field == "capacity_blocks"


@pytest.mark.parametrize(
    ("field", "value", "words"),
    [
        ("read_bytes_per_s", -1.0, "read_bytes_per_s is -1.0; set it between 0 and"),
        ("write_bytes_per_s", 1e16, "write_bytes_per_s is 1e\\+16"),
        ("cost_per_gb_month", float("nan"), "cost_per_gb_month is nan"),
        ("cost_per_gb_moved", -0.5, "cost_per_gb_moved is -0.5"),
        ("endurance_bytes_per_day", float("inf"), "endurance_bytes_per_day is inf"),
        ("retention_s", 1e10, "retention_s is 10000000000.0"),
        ("tenants", tuple(str(n) for n in range(1_025)), "1025 tenants are given; 1024 are the most"),
    ],
)
def test_what_guides_the_advisor_has_limits(field: str, value: object, words: str, tmp_path: Path) -> None:
    descriptor = VolumeDescriptor(
        id="v", path=str(tmp_path / "v"), capacity_blocks=1, block_bytes_max=1, **{field: value}  # type: ignore[arg-type]
    )
    with pytest.raises(VolumeError, match=words):
        validate(descriptor, [tmp_path])
