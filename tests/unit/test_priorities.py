"""Classes by the priority of requests: of use where priorities tell apart what hashes do not, else without effect."""

from __future__ import annotations

import json
from pathlib import Path

import msgspec
import numpy as np
import pytest

from advisor.cli import main
from advisor.policies.rules import hazard
from advisor.simulation import load_preset
from advisor.simulation.writing import write_simulation
from advisor.tiers import Costs, TierFigures, Tiering, replay_tiers, timed
from advisor.traces import Trace, load_trace


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("priorities") / "signals.jsonl"
    write_simulation(path, msgspec.structs.replace(load_preset("signals"), minutes=20), 1, engine_blocks=1)
    return path


@pytest.fixture(scope="module")
def trace(file: Path) -> Trace:
    return load_trace(file)


def replayed(trace: Trace, priorities: list[int] | None) -> TierFigures:
    requests = timed(trace.as_requests(), [ms / 1000 for ms in trace.timestamps_ms], priorities)
    return replay_tiers(requests, Tiering("hazard", "value", 1_000, 0.1), Costs(), counted_from=trace.requests // 2)


def test_priorities_that_tell_apart_what_hashes_do_not_add_hits(trace: Trace) -> None:
    assert replayed(trace, list(trace.priorities)).fhit > replayed(trace, None).fhit + 0.01


def test_one_priority_for_all_changes_nothing(trace: Trace) -> None:
    alone = replayed(trace, None)
    for priority in (2, 99, -5):
        assert replayed(trace, [priority] * trace.requests) == alone


def test_no_class_of_one_priority_is_one_of_another() -> None:
    classes = {
        hazard.block_class(touches, kind, gap_s, shape, priority)
        for touches in (1, 2, 3, 5, 8, 15, 31, 10**6)
        for kind in range(hazard.KINDS)
        for gap_s in (0.0, 20.0, 60.0, 300.0, 1e6)
        for shape in range(hazard.SHAPES)
        for priority in range(hazard.PRIORITIES)
    }
    assert len(classes) % hazard.PRIORITIES == 0
    assert max(classes) < hazard.TOLD_CLASSES
    by_priority = np.bincount([each // hazard.CLASSES for each in classes])
    assert len(set(by_priority.tolist())) == 1


def test_the_command_takes_a_traces_priorities(tmp_path: Path, file: Path, trace: Trace) -> None:
    found = {}
    for options in ((), ("--by-priority",)):
        with pytest.raises(SystemExit) as ended:
            main(["replay", str(file), "--fast", "1000", "--admission", "hazard", "--budget", "0.1", "--last-half",
                  *options, "--json", str(tmp_path / "r.json")])  # fmt: skip
        assert ended.value.code in (0, None)
        found[bool(options)] = json.loads((tmp_path / "r.json").read_text())["files"][0]["results"][0]["fhit"]
    assert found == {False: replayed(trace, None).fhit, True: replayed(trace, list(trace.priorities)).fhit}
