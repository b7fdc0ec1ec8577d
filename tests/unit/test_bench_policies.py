"""`bench policies`: a row for each goal, met or not by what the replays found, and unmet by nobody where none ran."""

from __future__ import annotations

from pathlib import Path

import pytest

from advisor import bench_policies
from advisor.bench_command import BenchError, bench
from advisor.bench_policies import simulated
from advisor.bench_policies_goals import (
    BUDGETS,
    BY_HASHES,
    BY_PRIORITY,
    BY_TURN,
    CONVERSATION,
    SECOND_TOUCH,
    Job,
    OnAnother,
    OnConversation,
    Outcome,
)
from advisor.bench_policies_speed import FLAT_ACCESSES, beginning
from advisor.caches import RequestTrace
from advisor.simulation import load_preset, simulate_requests
from event_plane.figures import Figure


def goals(figures: list[Figure]) -> dict[str, bool | None]:
    return {figure.name: figure.met for figure in figures if figure.goal}


def test_every_goal_on_conversation_has_a_row_without_the_trace() -> None:
    figures = list(OnConversation(BUDGETS, 0.3).figures({}, "no trace"))
    assert set(goals(figures).values()) == {None}
    assert len(figures) == 3 * len(BUDGETS) + 3
    assert {figure.note for figure in figures} == {"no trace"}


def test_what_the_replays_found_decides_each_goal() -> None:
    asked = OnConversation((0.25, None), 0.3)
    found = {job: Outcome(0.21, 0.2) for job in asked.jobs()}
    found |= {job: Outcome(1.0, 0.0) for job in found if job.wanted == "scan survival"}
    found[Job(CONVERSATION, SECOND_TOUCH)] = Outcome(0.21, 0.3)
    met = goals(list(asked.figures(found, "")))
    assert met == dict.fromkeys(met, True) | {"auto at 0.25: second half": True}
    found |= {job: Outcome(0.2, 0.25) for job in found if job.tiering.admission == "auto"}
    met = goals(list(asked.figures(found, "")))
    assert [name for name, each in met.items() if each] == ["auto at 0.25: fhit", "auto at no limit: fhit"]


@pytest.mark.parametrize(("share", "met"), [(0.491, True), (0.489, False)])
def test_auto_may_lose_a_hundredth_to_the_best_fixed_policy(share: float, met: bool) -> None:
    asked = OnAnother("chat", 100, (0.1,))
    found = {job: Outcome(share if job.tiering.admission == "auto" else 0.4, 0.1) for job in asked.jobs()}
    found[next(job for job in found if job.tiering.admission == "ghost")] = Outcome(0.5, 0.1)
    (figure,) = asked.figures(found, "")
    assert (figure.met, figure.name) == (met, f"chat at 0.10: auto {share} less ghost")


def test_a_simulated_workload_is_what_simulate_writes_told_in_three_ways() -> None:
    workload = simulated("signals", 2.0)
    requests = list(simulate_requests(load_preset("signals"), bench_policies.SEED))[:50]
    trace = workload.told[BY_HASHES]
    assert len(trace.depths) == trace.ids.max() + 1
    assert trace.ends[:50].tolist() == [sum(len(r.block_ids) for r in requests[: n + 1]) for n in range(50)]
    assert workload.told[BY_PRIORITY].priorities[:50].tolist() == [request.priority for request in requests]
    assert set(trace.priorities.tolist()) == {0}
    assert set(workload.told[BY_TURN].priorities.tolist()) == {0, 1, 2}


def test_the_first_accesses_are_whole_requests() -> None:
    workload = simulated("agents", 20.0)
    t = workload.told[BY_HASHES]
    part = beginning(RequestTrace(t.ids, t.ends, t.input_tokens, t.block_tokens, t.depths, t.parents))
    assert part.ends[-1] == len(part.ids) <= FLAT_ACCESSES < t.ends[len(part.ends)]


@pytest.mark.long
def test_without_traces_the_simulated_workloads_are_measured_and_the_rest_says_what_to_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    small = bench_policies.Size(1.0, (None,), (None,), (None,))
    monkeypatch.setattr(bench_policies, "QUICK", small)
    figures = bench_policies.run(True, tmp_path)
    unmeasured = {figure.name for figure in figures if figure.met is None and figure.goal}
    assert all("--shared-data" in figure.note for figure in figures if figure.name in unmeasured)
    measured = [figure.name.partition(" ")[0] for figure in figures if figure.goal and figure.name not in unmeasured]
    assert measured == ["chat", "agents", "rag", "scan", "mixed"]
    assert {name.partition(" ")[0] for name in unmeasured} >= {"auto", "ragpulse", "replay"}


def test_a_folder_that_is_none_and_a_benchmark_without_traces_are_refused(tmp_path: Path) -> None:
    with pytest.raises(BenchError, match="nowhere is no folder"):
        bench("policies", shared_data=tmp_path / "nowhere")
    with pytest.raises(BenchError, match="'index' takes no --shared-data"):
        bench("index", shared_data=tmp_path)
