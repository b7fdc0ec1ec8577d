"""The end at every change that an agent makes while it lays chains out: every block can be read afterwards."""

from __future__ import annotations

import random
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path
from typing import get_args

import pytest

from storage_agent.agent import StorageAgent
from storage_agent.port import PutBlock, Result
from tests.crash.agent_script import KINDS, NAMESPACE, key, open_agent, payload
from tests.crash.test_every_change_cut import EVERY, Promised, require_promises_kept
from tests.disk_shim import Disk, Kept, Recording

FIRST, SECOND = (42, 45), (51, 54)
"""Two chains, put turn by turn, of blocks of the larger size where there are two."""
WAYS = get_args(Kept) if EVERY else ("some",)
"""To lose changes: the one that is hardest, or all."""


def put(agent: StorageAgent, numbers: Sequence[int], parents: Sequence[int]) -> None:
    blocks = [
        PutBlock(key(n), NAMESPACE, memoryview(payload(n)), key(parent).sequence_hash if parent else 0)
        for n, parent in zip(numbers, parents, strict=True)
    ]
    assert {outcome.result for outcome in agent.put("first", blocks)} == {Result.STORED}


@pytest.fixture(scope="module", params=KINDS)
def recording(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[str, Recording]:
    folder = tmp_path_factory.mktemp("whole")
    recorded = Recording(folder)
    with recorded.watching(), closing(open_agent(folder, request.param)) as agent:
        put(agent, (42, 51), (0, 0))
        put(agent, (45, 54), (42, 51))
        recorded.say("laying out")
        report = agent.compact("", "first", [key(n) for n in (*FIRST, *SECOND)])
        recorded.say("laid out")
    assert (report.extents_before, report.extents_after, report.moved_blocks) == (4, 2, 4)
    return request.param, recorded


@pytest.mark.crash
@pytest.mark.parametrize("kept", WAYS)
def test_every_block_is_there_after_a_cut_at_any_change(
    recording: tuple[str, Recording], kept: Kept, tmp_path: Path
) -> None:
    kind, recorded = recording
    chance = random.Random(f"{kind}{kept}")
    disk, promised, cuts, within = Disk(), Promised(), 0, False
    promised.hear(f"put {','.join(map(str, (*FIRST, *SECOND)))}")
    for at, change in enumerate(recorded.changes):
        if isinstance(change, str):
            within = change == "laying out"
            continue
        if within:
            folder = tmp_path / str(at)
            disk.write_to(folder, kept, chance)
            cuts += 1
            try:
                require_promises_kept(folder, kind, promised)
            except Exception as fault:
                fault.add_note(f"{kind}, {kept} kept, cut before change {at}")
                raise
        disk.apply(change)
    assert cuts > 3
