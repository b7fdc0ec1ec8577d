"""Kinds of volumes by name, their options, and descriptors that no kind takes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from storage_agent.agent import StorageAgent
from storage_agent.descriptor import VolumeDescriptor
from storage_agent.errors import VolumeError
from storage_agent.faulty_volume import FaultyOptions
from storage_agent.kinds import inspect_volume, kind_named, prepare


def descriptor(**fields: Any) -> VolumeDescriptor:
    return VolumeDescriptor(**{"id": "v", "capacity_blocks": 4, "block_bytes_max": 100, **fields})


def test_kinds_are_found_by_name_and_an_unknown_one_is_told_which_there_are() -> None:
    assert kind_named("memory", "v").path == "none"
    with pytest.raises(VolumeError, match=r"'v': kind 'tape' is not known; use one of \[.*'memory'.*'slab'"):
        kind_named("tape", "v")


def test_a_kind_that_is_installed_while_the_agent_runs_is_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(VolumeError, match="'punched-cards' is not known"):
        kind_named("punched-cards", "v")
    package = tmp_path / "cards-1.0.dist-info"
    package.mkdir()
    (package / "METADATA").write_text("Metadata-Version: 2.1\nName: cards\nVersion: 1.0\n")
    (package / "entry_points.txt").write_text(
        "[kvadvisor.volumes]\npunched-cards = storage_agent.memory_volume:KIND\n"
    )
    assert kind_named("punched-cards", "v") is kind_named("memory", "v")


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"kind": "slab"}, "no path is given; give one inside"),
        ({"kind": "memory", "path": "/srv/x"}, "takes no path; remove '/srv/x'"),
        ({"kind": "faulty", "options": {"errors": 1.0}}, "unknown field `errors`"),
        ({"kind": "faulty", "options": {"error": 1.5}}, r"<= 1.0 - at `\$.error`"),
        ({"kind": "faulty", "options": {"slow_s": 61.0}}, r"<= 60.0 - at `\$.slow_s`"),
        ({"kind": "memory", "options": {f"o{n}": n for n in range(33)}}, "33 options are given; 32 are the most"),
    ],
)
def test_a_descriptor_that_its_kind_does_not_take_names_the_field(
    tmp_path: Path, fields: dict[str, Any], said: str
) -> None:
    with pytest.raises(VolumeError, match=said):
        prepare(descriptor(**fields), [tmp_path])


def test_options_are_of_the_kinds_own_type() -> None:
    _, opening = prepare(descriptor(kind="faulty", options={"seed": 3, "flipped": 0.5}), [])
    assert opening.options == FaultyOptions(seed=3, flipped=0.5)


@pytest.mark.parametrize("inner", ["faulty", "tape"])
def test_what_has_no_store_cannot_be_made_faulty(inner: str) -> None:
    kind, opening = prepare(descriptor(kind="faulty", options={"inner": inner}), [])
    with pytest.raises(VolumeError, match=f"kind '{inner}'"):
        kind.open(opening)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"inner": "slab", "inner_options": {"depth": 1}}, "options of kind 'slab': .* unknown field `depth`"),
        ({"inner": "slab", "inner_options": {"classes": [{"block_bytes": 9, "blocks": 9}]}}, "set them to 9 and 9"),
        ({"inner": "directory", "inner_options": {"segment_bytes": 1}}, "options of kind 'directory': .*segment_bytes"),
        ({"inner": "memory"}, "kind 'memory' takes no path"),
    ],
)
def test_the_kind_beneath_checks_its_own_options(tmp_path: Path, options: dict[str, Any], said: str) -> None:
    kind, opening = prepare(descriptor(kind="faulty", path=str(tmp_path / "v"), options=options), [tmp_path])
    with pytest.raises(VolumeError, match=said):
        kind.open(opening)
    assert list(tmp_path.iterdir()) == []


def test_a_faulty_slab_is_a_slab_beneath(tmp_path: Path) -> None:
    path = tmp_path / "v.slab"
    with StorageAgent("a", publisher=None, allowed_roots=[tmp_path]) as agent:
        stat = agent.register_volume(descriptor(kind="faulty", path=str(path), options={"inner": "slab"}))
    assert stat.mode.endswith(", faulty")
    inspection = inspect_volume(descriptor(path=str(path)), [tmp_path])
    assert [report.state for report in inspection.reports()] == ["free"] * 4
    inspection.close()


def test_a_kind_that_holds_nothing_outside_its_agent_cannot_be_looked_at() -> None:
    with pytest.raises(VolumeError, match="ask its agent"):
        inspect_volume(descriptor(kind="memory"), [])


def test_an_agent_scrubs_resizes_and_compacts_by_name(tmp_path: Path) -> None:
    with StorageAgent("a", publisher=None, allowed_roots=[]) as agent:
        agent.register_volume(descriptor(kind="memory"))
        assert agent.resize_volume("v", 9).slots_free == 9
        assert agent.scrub("", "v").good == 0
        assert agent.compact("", "v").freed_bytes == 0
        with pytest.raises(VolumeError, match="'w' is not registered with agent 'a'"):
            agent.scrub("", "w")
