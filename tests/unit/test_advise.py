"""Advice on a fast volume: what it says is what a replay at that capacity gives."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from advisor.advice import STEPS_MAX, Advice, AdviceError, Choice, Sizing, WorkloadFacts, advise_on, best
from advisor.advise_command import in_words
from advisor.cli import main
from advisor.simulation.workload import TenantLoad, Workload
from advisor.simulation.writing import write_simulation
from advisor.tiers import Costs, Tiering, own_eviction, replay_tiers, timed
from advisor.traces import Trace, TraceRequests, load_trace

BLOCK_BYTES = 1_000_000
CHATS = TenantLoad(name="a", sessions_per_minute=30, system_tokens=1024, own_tokens=2000, turns_mean=4, think_s=20)


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("advise") / "chats.jsonl"
    write_simulation(path, Workload(minutes=8, tenants=(CHATS,)), 1, engine_blocks=1)
    return path


@pytest.fixture(scope="module")
def trace(file: Path) -> Trace:
    return load_trace(file)


@pytest.fixture(scope="module")
def sizing(trace: Trace) -> Sizing:
    return Sizing(trace, Costs(), BLOCK_BYTES, None, lambda _: None)


def test_the_capacity_advised_reaches_the_target_and_much_less_does_not(trace: Trace, sizing: Sizing) -> None:
    advice = advise_on(sizing, target=0.5)
    requests = timed(trace.as_requests(), [ms / 1000 for ms in trace.timestamps_ms])

    def served(blocks: int) -> float:
        admission = advice.chosen.admission
        return replay_tiers(requests, Tiering(admission, own_eviction(admission), blocks, None), Costs()).fhit

    assert served(advice.chosen.capacity_blocks) == advice.chosen.hit_ratio >= 0.5
    assert served(advice.chosen.capacity_blocks * 3 // 4) < 0.5
    assert advice.chosen.capacity_bytes == advice.chosen.capacity_blocks * BLOCK_BYTES


def test_nothing_serves_more_than_who_knows_the_future_and_he_no_more_than_was_seen(sizing: Sizing) -> None:
    curve = sizing.curve()
    assert all(choice.hit_ratio <= choice.bound + 1e-9 <= sizing.facts.seen_before + 1e-6 for choice in curve)
    assert [c.bound for c in curve] == sorted(c.bound for c in curve)
    assert curve[-1].capacity_blocks == sizing.facts.blocks
    assert curve[-1].bound == pytest.approx(sizing.facts.seen_before)


def test_a_capacity_is_judged_as_it_is(sizing: Sizing) -> None:
    advice = advise_on(sizing, capacity_blocks=200)
    assert advice.target is None
    assert {choice.capacity_blocks for choice in advice.at_capacity} == {200}
    assert advice.chosen in advice.at_capacity


def test_more_than_there_are_blocks_is_the_same(sizing: Sizing) -> None:
    all_blocks = advise_on(sizing, capacity_blocks=sizing.facts.blocks)
    assert advise_on(sizing, capacity_blocks=10**9).chosen == all_blocks.chosen


def test_what_may_be_written_is_not_exceeded(trace: Trace, sizing: Sizing) -> None:
    free = advise_on(sizing, capacity_blocks=300).chosen
    allowed_per_s = free.written_bytes_per_day / 86_400 / 4
    bound = advise_on(Sizing(trace, Costs(), BLOCK_BYTES, allowed_per_s, lambda _: None), capacity_blocks=300).chosen
    # The bucket of a replay begins with 200 blocks.
    start = 200 * BLOCK_BYTES / sizing.facts.span_s * 86_400
    assert bound.written_bytes_per_day <= allowed_per_s * 86_400 + start
    assert bound.written_bytes_per_day < free.written_bytes_per_day


def test_what_takes_long_is_tried_at_few_capacities_on_the_way_to_a_target(trace: Trace) -> None:
    steps: list[int] = []
    sizing = Sizing(trace, Costs(), BLOCK_BYTES, None, steps.append)
    for target in (0.3, 0.55):
        steps.clear()
        chosen = advise_on(sizing, target=target).chosen
        assert chosen.hit_ratio >= target
        assert sum(steps) <= STEPS_MAX


def test_a_target_out_of_reach_says_what_is_within_it(sizing: Sizing) -> None:
    with pytest.raises(AdviceError, match=f"{sizing.facts.seen_before:.3f} of the prompt tokens"):
        advise_on(sizing, target=0.99)


def test_a_recording_of_one_moment_is_refused() -> None:
    requests = TraceRequests()
    requests.add(5.0, 512, 512, [bytes(16)])
    for trace in (requests.trace(), TraceRequests().trace()):
        with pytest.raises(AdviceError, match="record for longer"):
            Sizing(trace, Costs(), 1, None, lambda _: None)


def choice(admission: str, hit_ratio: float, moves_per_block: float) -> Choice:
    return Choice(1, 1, admission, hit_ratio, 1.0, moves_per_block, 0.0, 0.0)


@pytest.mark.parametrize(
    ("choices", "expected"),
    [
        ([("auto", 0.30, 0.9), ("touch-2", 0.305, 0.2)], "auto"),
        ([("auto", 0.30, 0.1), ("touch-2", 0.32, 0.3), ("always", 0.322, 1.4)], "touch-2"),
        ([("auto", 0.30, 0.1), ("touch-2", 0.32, 0.3), ("always", 0.35, 1.4)], "always"),
    ],
)
def test_the_default_is_advised_where_it_is_about_as_good_else_what_writes_least(
    choices: list[tuple[str, float, float]], expected: str
) -> None:
    assert best([choice(*each) for each in choices]).admission == expected


def advised(tmp_path: Path, file: Path, *options: str) -> dict[str, Any]:
    with pytest.raises(SystemExit) as ended:
        main(["advise", str(file), *options, "--json", str(tmp_path / "out.json")])
    assert ended.value.code in (0, None)
    content: dict[str, Any] = json.loads((tmp_path / "out.json").read_text())
    return content


def test_the_command_says_it_in_words_and_json(
    tmp_path: Path, file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    content = advised(tmp_path, file, "--target-hit-ratio", "0.5", "--block-bytes", "2000000")
    chosen = content["chosen"]
    assert chosen["hit_ratio"] >= 0.5
    assert chosen["capacity_bytes"] == chosen["capacity_blocks"] * 2_000_000
    said = capsys.readouterr().out
    assert f"{chosen['capacity_blocks']:,} blocks" in said
    assert f'policy.admission = "{chosen["admission"]}"' in said
    assert len(content["curve"]) == 7


def test_a_recordings_own_block_size_is_used(tmp_path: Path) -> None:
    write_simulation(tmp_path / "t.cap", Workload(minutes=1, tenants=(CHATS,)), 1, engine_blocks=100)
    assert advised(tmp_path, tmp_path / "t.cap")["workload"]["block_bytes"] == 512 * 327_680


def test_what_writes_much_less_is_told_too() -> None:
    chosen, sparing, other = choice("auto", 0.3, 1.0), choice("touch-2", 0.25, 0.3), choice("touch-3", 0.2, 0.1)
    written = [replace(each, written_bytes_per_day=each.moves_per_block * 1e12) for each in (chosen, sparing, other)]
    facts = WorkloadFacts(10, 60.0, 1000, 10, 1, 0.5, 1.0)
    advice = Advice(facts, None, written[0], tuple(written), ())
    (line,) = [line for line in in_words(advice, "t", Costs()) if "wears" in line]
    assert '"touch-2" would serve 25.0 % and write 300 GB a day' in line
    alone = Advice(facts, None, written[0], (written[0],), ())
    assert not any("wears" in line for line in in_words(alone, "t", Costs()))


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (("--target-hit-ratio", "0.5", "--capacity-bytes", "1e9"), "two questions"),
        (("--capacity-bytes", "1000"), "hold no block"),
        (("--target-hit-ratio", "2"), "--target-hit-ratio"),
    ],
)
def test_a_slip_is_told(file: Path, capsys: pytest.CaptureFixture[str], options: tuple[str, ...], said: str) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["advise", str(file), *options])
    assert ended.value.code == 2
    assert said in capsys.readouterr().err
