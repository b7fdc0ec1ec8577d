"""The hierarchy under eviction: what each scenario is there to show, in counts that one seed always gives."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kvbm_core.errors import ScenarioError
from kvbm_core.scenario_command import run_scenario, scenario
from kvbm_core.scenarios import worker_restart
from kvbm_core.scenarios.catalogue import SCENARIOS, scenario_named
from kvbm_core.scenarios.machine_model import LoadRate, MachineModel, Source
from kvbm_core.scenarios.script import Prompts, Request, Scenario, Setup, Step
from kvbm_core.scenarios.serving import Run, run_setup
from kvbm_core.scenarios.worker import Worker

SEED = 3
MODEL = MachineModel(
    prefill_tokens_per_s=1_000.0,
    answer_tokens_per_s=10.0,
    page_tokens=10,
    block_bytes=1_000,
    host=LoadRate(call_s=0.001, bytes_s=1e6),
)
"""A block takes 10 ms to compute, and 1 ms to load from the host beside the call's 1 ms."""


def run(name: str, setup: str, seed: int = SEED) -> Run:
    chosen = SCENARIOS[name]
    (named,) = [each for each in chosen.setups if each.name == setup]
    return run_setup(chosen, named, seed, chosen.model)


def found(served: Run, kind: str, source: Source) -> int:
    return sum(each.found[source] for each in served.served if each.kind == kind)


def computed(served: Run, kind: str) -> int:
    return sum(each.computed for each in served.served if each.kind == kind)


def useful(served: Run, limit_ms: float) -> int:
    return sum(each.ttft_s * 1e3 <= limit_ms for each in served.served)


def test_a_hot_set_survives_a_scan_where_the_host_takes_what_is_used_twice() -> None:
    everything, twice = run("hot-set", "host takes all"), run("hot-set", "host takes what is used twice")
    # All hot documents are computed in the first two rounds. In the other two they are there, or pushed out.
    hot_blocks = 24 * 16
    assert found(twice, "hot", Source.HOST) + found(twice, "hot", Source.DEVICE) == 2 * hot_blocks
    assert computed(twice, "hot") == 2 * hot_blocks
    assert found(everything, "hot", Source.HOST) < hot_blocks
    assert twice.tally.evicted["host"] == 0
    assert everything.tally.evicted["host"] > 3_000
    assert twice.tally.offload_skipped["host: too_rarely_used"] > 3_000
    assert useful(twice, 400.0) > useful(everything, 400.0)
    assert (twice.wrong_blocks, everything.wrong_blocks) == (0, 0)


def test_long_contexts_come_back_from_the_host_and_more_of_them_where_leaves_go_first() -> None:
    alone, lru, lineage = (run("long-bursts", name) for name in ("device alone", "host, lru", "host, lineage"))
    first = [computed(each, "first of a burst") for each in (alone, lru, lineage)]
    assert first == sorted(first, reverse=True)
    assert first[2] < first[0]
    # Within a burst only the questions are computed, whatever the tiers.
    assert {computed(each, "after it") for each in (alone, lru, lineage)} == {18 * 4}
    assert useful(lineage, 300.0) >= useful(lru, 300.0) > useful(alone, 300.0)


def test_after_a_restart_all_that_the_volume_holds_is_found_and_right() -> None:
    disk, alone = run("restart", "disk takes all"), run("restart", "host alone")
    documents: dict[bytes, str] = {}
    for step in worker_restart.steps(SEED):
        if isinstance(step, Request):
            documents.setdefault(step.prompt[: worker_restart.DOCUMENT_TOKENS].tobytes(), step.kind)
    asked_first_after = sum(kind == "after" for kind in documents.values())
    document_blocks = worker_restart.DOCUMENT_TOKENS // 64
    # What was put before is there; new are each request's question, and documents nobody had asked about.
    assert computed(disk, "after") == worker_restart.REQUESTS + asked_first_after * document_blocks
    assert found(disk, "after", Source.DISK) >= 8 * document_blocks
    assert computed(alone, "after") > computed(disk, "after")
    assert found(alone, "after", Source.DISK) == 0
    assert useful(disk, 300.0) > useful(alone, 300.0)
    assert (disk.wrong_blocks, alone.wrong_blocks) == (0, 0)


def test_without_the_vanished_tier_requests_are_computed_and_its_return_is_noticed() -> None:
    (mishap, spared) = (run("vanishing-tier", name) for name in ("it vanishes and returns", "it stays"))
    assert len(mishap.served) == len(spared.served) == 75
    assert found(mishap, "before", Source.REMOTE) == found(spared, "before", Source.REMOTE) > 0
    assert found(mishap, "while it is gone", Source.REMOTE) == 0
    lost = [each.lost for each in mishap.served if each.lost]
    assert {reason for each in lost for reason in each} == {"failed"}
    assert {each.kind for each in mishap.served if each.lost} == {"while it is gone"}
    assert mishap.tally.put_refused["failed"] > 0
    assert found(mishap, "after", Source.REMOTE) > 0
    assert found(spared, "while it is gone", Source.REMOTE) > 0
    assert spared.tally.put_refused == {}
    assert (mishap.wrong_blocks, spared.wrong_blocks) == (0, 0)


def test_one_seed_gives_one_result_and_another_seed_another() -> None:
    first, again = (run("vanishing-tier", "it vanishes and returns", 5) for _ in range(2))
    assert first == again
    for each in SCENARIOS.values():
        times = [[step.at_s for step in each.steps(seed)] for seed in (5, 5, 6)]
        assert times[0] == times[1] != times[2]
        assert times[0] == sorted(times[0])


def requests(*prompts: Sequence[int], at_s: float = 0.0, answer_tokens: int = 1) -> list[Step]:
    return [Request(at_s, "", np.array(prompt, np.uint32), answer_tokens) for prompt in prompts]


def serve(steps: list[Step], **sizes: Any) -> Run:
    made_up = Scenario(name="made-up", says="", limit_ms=1.0, setups=(), steps=lambda seed: steps)
    return run_setup(made_up, Setup(name="it", **sizes), 0, MODEL)


def test_a_request_waits_for_those_before_it_and_takes_its_loads_and_its_prefill() -> None:
    one, two = list(range(40)), list(range(100, 145))
    run = serve([*requests(one, two), *requests(one, at_s=10.0)], device_blocks=8)
    # 40 tokens; behind them 45, of which 5 fill no block; then one token of a prompt that is there.
    assert [each.ttft_s for each in run.served] == pytest.approx([0.040, 0.085, 0.001])
    assert [(each.found[Source.DEVICE], each.computed) for each in run.served] == [(0, 4), (0, 4), (4, 0)]


def test_blocks_of_the_host_take_a_call_and_their_bytes() -> None:
    one, two = list(range(40)), list(range(100, 180))
    run = serve([*requests(one), *requests(two, at_s=10.0), *requests(one, at_s=20.0)], device_blocks=8, host_blocks=16)
    assert run.served[2].found == {Source.HOST: 4}
    assert run.served[2].ttft_s == pytest.approx(0.001 + 4 * 0.001 + 0.001)
    assert run.tally.moved == {"device_to_host": 12, "host_to_device": 4}


def test_a_request_waits_until_answers_give_it_room_on_the_device() -> None:
    one, two = list(range(60)), list(range(100, 160))
    run = serve(requests(one, two, answer_tokens=5), device_blocks=8)
    # The first answer holds 6 of 8 blocks for half a second.
    assert [each.ttft_s for each in run.served] == pytest.approx([0.060, 0.060 + 0.5 + 0.060])


def test_blocks_with_other_bytes_than_theirs_are_counted(tmp_path: Path) -> None:
    with Worker(Setup(name="it", device_blocks=8), tmp_path, page_tokens=4) as worker:
        blocks = worker.blocks_of(Prompts(1).once(16))
        for block in worker.compute(blocks):
            block.release()
        worker._manager.device_tensor[:2] += 1.0
        assert len(worker.find(blocks).held) == 4
        assert worker.wrong_blocks == 2


def test_the_command_prints_rows_and_writes_all_figures(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "figures.json"
    scenario("vanishing-tier", seed=1, limit_ms=250.0, prefill=20_000.0, json_out=out)
    printed = capsys.readouterr().out
    assert "first token within 250 ms is useful" in printed
    written = json.loads(out.read_text())
    assert (written["seed"], written["limit_ms"], written["model"]["prefill_tokens_per_s"]) == (1, 250.0, 20_000.0)
    setups = scenario_named(written["scenario"]).setups
    assert [each["setup"] for each in written["setups"]] == [each.name for each in setups]
    for setup in written["setups"]:
        assert setup["setup"] in printed
        assert setup["wrong_blocks"] == 0
        for row in [setup["all"], *setup["kinds"].values()]:
            assert row["blocks"] == sum(row["found"].values()) + row["computed"] == row["requests"] * 33
            assert row["ttft_p50_ms"] <= row["ttft_p90_ms"] <= row["ttft_p99_ms"]
            assert 0 <= row["useful"] <= row["requests"]


def test_the_command_alone_lists_the_scenarios(capsys: pytest.CaptureFixture[str]) -> None:
    scenario(None)
    printed = capsys.readouterr().out
    assert set(SCENARIOS) == {"hot-set", "long-bursts", "restart", "vanishing-tier"}
    assert all(name in printed and each.says in printed for name, each in SCENARIOS.items())


def test_a_scenario_that_is_not_there_is_refused_with_those_that_are() -> None:
    with pytest.raises(ScenarioError, match="there is no scenario 'hot': choose one of hot-set, long-bursts"):
        scenario("hot")


def test_figures_that_cannot_be_written_are_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    quick = Scenario(
        name="quick", says="", limit_ms=1.0, setups=(Setup(name="it", device_blocks=8),),
        steps=lambda seed: requests(range(64)),
    )  # fmt: skip
    monkeypatch.setitem(SCENARIOS, "quick", quick)
    assert run_scenario(quick, 0).setups[0].all.computed == 1
    with pytest.raises(ScenarioError, match=r"cannot be written \(Is a directory\): choose another place"):
        scenario("quick", 0, None, None, tmp_path)
