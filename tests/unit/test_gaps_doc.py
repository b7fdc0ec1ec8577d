"""docs/gaps.md says what the gate's tables say."""

from __future__ import annotations

import inspect
import re
from pathlib import Path

from event_plane import sequence
from event_plane.sequence import FOREIGN_REMEDIES, FOREIGN_VERDICTS, OWN_REMEDIES, OWN_VERDICTS, SequenceGate, Standing

PAGE = (Path(__file__).parents[2] / "docs" / "gaps.md").read_text(encoding="utf-8")


def rows(heading: str) -> dict[str, list[str]]:
    """The table whose header begins with `heading`: first column to the others."""
    table = PAGE.split(f"| {heading} |", 1)[1].split("\n\n", 1)[0]
    lines = [[cell.strip() for cell in line.strip("|").split("|")] for line in table.splitlines()[2:]]
    return {first: rest for first, *rest in lines}


def test_verdicts_are_those_of_the_code() -> None:
    verdicts = {
        str(standing): [str(OWN_VERDICTS.get(standing, "")), str(FOREIGN_VERDICTS.get(standing, ""))]
        for standing in Standing
    }
    assert rows("an arrival is") == verdicts


def test_remedies_are_those_of_the_code() -> None:
    def then(table: dict[sequence.Remedy, sequence.Remedy | None], remedy: sequence.Remedy) -> str:
        return "" if remedy not in table else f"then {table[remedy] or 'it is lost'}"

    told = {remedy: cells[:2] for remedy, cells in rows("a gap is filled by").items()}
    assert told == {str(each): [then(OWN_REMEDIES, each), then(FOREIGN_REMEDIES, each)] for each in sequence.Remedy}


def test_limits_are_those_of_the_code() -> None:
    limits = {name: each.default for name, each in inspect.signature(SequenceGate).parameters.items()}
    assert f"{limits['hold_max']:,} or {limits['hold_bytes_max'] >> 20} MiB a producer" in PAGE
    assert f"last {limits['checksums_kept']:,} messages" in PAGE
    assert f"| {limits['resend_wait_us'] // 1_000_000} s since" in PAGE
    assert f"| {limits['snapshot_wait_us'] // 1_000_000} s |" in PAGE
    assert limits["resend_attempts_max"] == limits["snapshot_attempts_max"] == 3
    assert f"`too many producers` ({sequence.PRODUCERS_MAX:,})" in PAGE.replace("\n", " ")


def test_every_reason_is_named() -> None:
    reasons = [value for name, value in vars(sequence).items() if name.startswith("REASON_")]
    text = re.sub(r"\s+", " ", PAGE)
    assert [reason for reason in reasons if f"`{reason}`" not in text] == ["producer is both foreign and our own"]
