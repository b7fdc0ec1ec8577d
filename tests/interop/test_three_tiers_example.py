"""The example of one document in three tiers, run as its reader would."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

EXAMPLE = Path(__file__).parents[2] / "examples" / "three_tiers.py"


def test_the_example_counts_each_block_in_the_column_of_its_tier() -> None:
    run = subprocess.run([sys.executable, str(EXAMPLE)], capture_output=True, text=True, timeout=120, check=True)
    shown = {name.strip(): text for name, text in ((line[:14], line[14:]) for line in run.stdout.splitlines())}
    assert shown["asked for"] == "6 blocks, 96 tokens, 98304 bytes"
    assert shown["ready"] == "2 in the device"
    assert (shown["found in G2"], shown["found in G3"], shown["found in G4"], shown["absent"]) == ("2", "2", "0", "0")
    assert shown["sources"] == "G1 G1 G2 G2 nvme nvme"
    assert shown["tokens"] == "96 of 96 matched"
