"""docs/dialects.md names every dialect, and every medium with the tier that the code reads it as."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from event_plane.dialects import dynamo, mooncake, sglang, vllm
from event_plane.dialects.known import DIALECTS, HASHES_MAX
from event_plane.dialects.outgoing import MEDIA, STORAGE_TIERS
from event_plane.schema import Tier

PAGE = (Path(__file__).resolve().parents[2] / "docs" / "dialects.md").read_text()


def row(first: str) -> list[str]:
    """Cells of the first table row that begins so."""
    found = re.search(rf"^\| {re.escape(first)} \|.*$", PAGE, re.MULTILINE)
    assert found, f"no row {first!r}"
    return [cell.strip() for cell in found[0].strip("|").split("|")]


def test_every_dialect_has_its_row() -> None:
    for name in DIALECTS:
        assert len(row(f"`{name}`")) == 5


@pytest.mark.parametrize(
    ("engine", "tiers"),
    [("vLLM", vllm.TIERS), ("SGLang", sglang.FLAVOUR.tiers), ("Dynamo", dynamo.TIERS), ("Mooncake", mooncake.TIERS)],
)
def test_every_medium_is_named_with_its_tier(engine: str, tiers: dict[str, Tier]) -> None:
    said: dict[str, int] = {}
    for media, tier in re.findall(r"([A-Za-z_, ]+) (\d)(?:,|;|$)", row(engine)[1]):
        said |= dict.fromkeys((medium.strip() for medium in media.split(",")), int(tier))
    known = {medium: int(tier) for medium, tier in tiers.items() if medium != mooncake.DEFAULT_MEDIUM}
    assert {medium: tier for medium, tier in said.items() if medium in tiers} == known


def test_what_goes_out_is_named() -> None:
    told = row("tier")
    assert ", ".join(MEDIA.values()) in told[1]
    assert ", ".join(STORAGE_TIERS.values()) in told[2]


def test_how_many_hashes_decide_is_said() -> None:
    assert f"{HASHES_MAX} hashes without a mark" in PAGE
