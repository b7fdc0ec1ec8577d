"""`kvadvisor explain` asking a running admin view."""

from __future__ import annotations

import json
from collections.abc import Sequence

import pytest
from sample_reader import SampleReader, block_hash
from served import serving

from advisor.cli import main


def explain(*arguments: str) -> object:
    """The status that the command ends with."""
    with pytest.raises(SystemExit) as ended:
        main(["explain", *arguments])
    return ended.value.code


def test_explain_says_who_owns_each_copy_and_which_moves_wait(capsys: pytest.CaptureFixture[str]) -> None:
    reader = SampleReader()
    block = next(each for each in reader.blocks(limit=100).blocks if each.hash == block_hash(3))
    agents = {volume.id: volume.agent for volume in reader.volumes()}
    with serving(reader) as served:
        assert explain(block.hash, "--advisor", served.url, "--json") == 0
        found = json.loads(capsys.readouterr().out)
        assert explain(block.hash[:9], "--advisor", served.url) == 0
        shown = capsys.readouterr().out
    (sighting,) = [each for each in found if each["block"]["namespace_id"] == block.namespace_id]
    assert sighting["source"] == f"advisor at {served.url.rstrip('/')}"
    assert [(copy["tier"], copy["location"]) for copy in sighting["block"]["copies"]] == [
        (f"G{placement.tier}", placement.place) for placement in block.placements
    ]
    assert owners(sighting["block"]["copies"]) == [
        f"agent {agents[placement.place]}" if placement.place in agents else placement.place.split("/")[0]
        for placement in block.placements
    ]
    assert sighting["block"]["waits"] == ["promote from s3-archive to nvme-b: copying"]
    assert block.hash in shown


def owners(copies: Sequence[dict[str, str]]) -> list[str]:
    return [copy["owner"] for copy in copies]


def test_a_hash_that_is_none_is_refused_with_the_advisors_words(capsys: pytest.CaptureFixture[str]) -> None:
    with serving(SampleReader()) as served:
        assert explain("nonsense", "--advisor", served.url) == 2
        assert "refuses with 422" in capsys.readouterr().err
        assert explain("f" * 32, "--advisor", served.url) == 2
        assert "nobody asked knows a block" in capsys.readouterr().err
