"""Synthetic workloads: the same seed gives the same bytes, and what is described is what comes."""

from __future__ import annotations

import itertools
import json
from collections import Counter
from pathlib import Path

import msgspec
import pytest

from advisor.cli import main
from advisor.recorded import Reading, read_recorded
from advisor.simulation import PRESETS, WorkloadError, load_preset, load_workload, simulate_requests
from advisor.simulation.engine import SimulatedEngine
from advisor.simulation.faults import with_faults
from advisor.simulation.workload import Burst, Faults, Restart, TenantLoad, Workload
from advisor.simulation.writing import write_simulation
from advisor.traces import load_trace
from event_plane.recording import read_trace
from event_plane.schema import EventType

SHORT = 4.0


def one_tenant(minutes: float = SHORT, **habits: object) -> Workload:
    named: dict[str, object] = {"name": "acme", "sessions_per_minute": 30.0}
    return Workload(minutes=minutes, tenants=(TenantLoad(**(named | habits)),))  # type: ignore[arg-type]


@pytest.mark.parametrize("name", ["t.jsonl", "t.jsonl.gz", "t.cap", "t.parquet"])
def test_same_seed_gives_the_same_bytes(tmp_path: Path, name: str) -> None:
    workload = one_tenant(turns_mean=3, own_tokens=2000, think_s=5)
    files = [tmp_path / str(number) / name for number in range(3)]
    for file, seed in zip(files, (7, 7, 8), strict=True):
        file.parent.mkdir()
        write_simulation(file, workload, seed, engine_blocks=50)
    same, again, other = (file.read_bytes() for file in files)
    assert same == again
    assert same != other


@pytest.mark.parametrize("preset", PRESETS)
def test_each_preset_is_a_trace_by_time_whose_blocks_cover_its_tokens(preset: str) -> None:
    requests = list(simulate_requests(msgspec.structs.replace(load_preset(preset), minutes=8), 1))
    assert 500 < len(requests) < 4_000
    assert all(a.timestamp_ms <= b.timestamp_ms for a, b in itertools.pairwise(requests))
    assert all(len(r.block_ids) == -(-r.input_tokens // 512) for r in requests)
    assert all(len(set(r.block_ids)) == len(r.block_ids) for r in requests)


def test_a_turn_continues_the_whole_blocks_of_the_turn_before() -> None:
    last: dict[str, list[int]] = {}
    continued = 0
    for request in simulate_requests(one_tenant(turns_mean=4, own_tokens=3000, think_s=2), 1):
        if before := last.get(request.session_id):
            whole = len(before) - 1
            assert request.block_ids[:whole] == before[:whole]
            continued += 1
        last[request.session_id] = request.block_ids
    assert continued > 50


def test_a_block_after_different_blocks_is_a_different_block() -> None:
    requests = list(simulate_requests(one_tenant(documents=5, documents_drawn=2, document_tokens=700), 1))
    parents: dict[int, set[int]] = {}
    for request in requests:
        for parent, block in zip([-1, *request.block_ids], request.block_ids, strict=False):
            parents.setdefault(block, set()).add(parent)
    assert all(len(each) == 1 for each in parents.values())


def test_shared_texts_are_shared_and_own_ones_are_not() -> None:
    requests = list(simulate_requests(one_tenant(system_tokens=1024, own_tokens=4096, keeps_context=False), 1))
    assert len({tuple(r.block_ids[:2]) for r in requests}) == 1
    assert len({r.block_ids[2] for r in requests}) == len(requests)


def test_popular_documents_are_drawn_more_often() -> None:
    workload = one_tenant(minutes=60, documents=50, documents_drawn=1, document_tokens=512, zipf_exponent=1.0)
    drawn = Counter(r.block_ids[0] for r in simulate_requests(workload, 1))
    ordered = [count for _, count in drawn.most_common()]
    assert ordered[0] > 5 * ordered[20]


def test_tenants_do_not_disturb_each_other() -> None:
    alone = one_tenant(turns_mean=3, own_tokens=900)
    other = TenantLoad(name="other", sessions_per_minute=50, own_tokens=500)
    both = Workload(minutes=SHORT, tenants=(*alone.tenants, other))

    def acme(workload: Workload) -> list[tuple[int, int, int]]:
        requests = simulate_requests(workload, 3)
        return [(r.timestamp_ms, r.input_tokens, r.output_tokens) for r in requests if r.tenant == "acme"]

    assert acme(alone) == acme(both)


def test_a_share_of_sessions_ends_after_one_turn() -> None:
    workload = one_tenant(minutes=60, turns_mean=20, one_turn_share=0.7, think_s=1)
    turns = Counter(r.session_id for r in simulate_requests(workload, 1))
    assert 0.68 < sum(count == 1 for count in turns.values()) / len(turns) < 0.82


def test_a_session_ends_before_its_context_is_too_long() -> None:
    workload = one_tenant(minutes=8, turns_mean=100, turn_tokens=2000, think_s=1, context_tokens_max=20_000)
    turns = Counter[str]()
    for request in simulate_requests(workload, 1):
        turns[request.session_id] += 1
        assert request.input_tokens < 20_000 + 8 * 2000
    assert 2 < max(turns.values()) < 25


def test_a_burst_brings_so_many_times_the_sessions_of_its_tenants() -> None:
    tenants = tuple(TenantLoad(name=name, sessions_per_minute=60) for name in ("busy", "calm"))
    burst = Burst(at_s=600, for_s=600, times=5, tenants=("busy",))
    begun = Counter(
        (r.tenant, r.timestamp_ms // 600_000)
        for r in simulate_requests(Workload(minutes=30, tenants=tenants, bursts=(burst,)), 1)
    )
    assert 2_700 < begun["busy", 1] < 3_300
    for quiet in (("busy", 0), ("busy", 2), ("calm", 0), ("calm", 1), ("calm", 2)):
        assert 500 < begun[quiet] < 700


def test_nobody_is_served_during_a_restart_and_all_come_back_after_it() -> None:
    restart = Restart(at_s=60, for_s=30)
    workload = Workload(minutes=3, tenants=one_tenant(sessions_per_minute=600).tenants, restarts=(restart,))
    by_second = Counter(r.timestamp_ms // 1000 for r in simulate_requests(workload, 1))
    assert not any(by_second[second] for second in range(60, 90))
    assert by_second[90] > 200


def test_an_engine_removes_what_it_has_no_room_for_and_begins_an_epoch_after_a_restart() -> None:
    workload = Workload(
        minutes=4, tenants=one_tenant(own_tokens=4000, turns_mean=3, think_s=3).tenants, restarts=(Restart(at_s=120),)
    )
    cached: set[int] = set()
    epochs: list[int] = []
    hits = 0
    for batch in SimulatedEngine(200, workload.restarts).batches(simulate_requests(workload, 1)):
        if batch.epoch not in epochs:
            epochs.append(batch.epoch)
            assert batch.sequence == 0
            cached.clear()
        for record in batch.records:
            block = int(record["sequence_hash_lo"])
            match record["event_type"]:
                case EventType.STORE:
                    assert block not in cached
                    cached.add(block)
                case EventType.ACCESS:
                    assert block in cached
                    hits += 1
                case EventType.REMOVE:
                    cached.remove(block)
        assert len(cached) <= 200 + 64
    assert epochs == [1, 2]
    assert hits > 100


def test_faults_are_done_as_often_as_told() -> None:
    done = Counter[str]()
    faults = Faults(lost=0.1, doubled=0.1, reordered=0.1)
    messages = list(with_faults(range(10_000), faults, 1, done))
    assert len(set(messages)) == 10_000 - done["lost"]
    assert len(messages) == len(set(messages)) + done["doubled"]
    out_of_order = sum(a > b for a, b in itertools.pairwise(messages))
    assert out_of_order == done["reordered"]
    for name in ("lost", "doubled", "reordered"):
        assert 700 < done[name] < 1_300


def test_a_capture_with_faults_reads_as_what_the_engine_sent_but_the_lost(tmp_path: Path) -> None:
    faults = Faults(lost=0.02, doubled=0.05, reordered=0.05)
    workload = Workload(minutes=SHORT, tenants=one_tenant(own_tokens=2000).tenants, faults=faults)
    summary = write_simulation(tmp_path / "t.cap", workload, 2, engine_blocks=100)
    reading = Reading()
    sequences = [each.batch.sequence for each in read_recorded(tmp_path / "t.cap", reading)]
    assert sequences == sorted(sequences)
    assert summary.faults["lost"] > 0
    assert summary.faults["doubled"] == reading.duplicates


def test_requests_say_session_tenant_and_priority(tmp_path: Path) -> None:
    main_ends("simulate", tmp_path / "t.jsonl", "--preset", "mixed", "--minutes", "2")
    lines = [json.loads(line) for line in (tmp_path / "t.jsonl").read_text().splitlines()]
    assert {"assistant": 2, "helpdesk": 1}.items() <= {line["tenant"]: line["priority"] for line in lines}.items()
    assert all(line["session_id"].startswith(line["tenant"]) for line in lines)
    requests = list(read_trace(tmp_path / "t.jsonl"))
    assert [request.session_id for request in requests] == [line["session_id"] for line in lines]
    assert load_trace(tmp_path / "t.jsonl").requests == len(lines)


def main_ends(*arguments: object) -> None:
    with pytest.raises(SystemExit) as ended:
        main([str(argument) for argument in arguments])
    assert ended.value.code in (0, None)


@pytest.mark.parametrize(
    ("toml", "said"),
    [
        ("tenants = 3", "tenants"),
        ("[[tenants]]\nname = 'a'", "sessions_per_minute"),
        ("[[tenants]]\nname = 'a'\nsessions_per_minute = 1\nspeed = 2", "speed"),
        ("[[tenants]]\nname = 'a'\nsessions_per_minute = -1", "sessions_per_minute"),
        ("[[tenants]]\nname = 'a'\nsessions_per_minute = 1\ndocuments_drawn = 2", "draws 2 of 0 documents"),
        ("[[tenants]]\nname = 'a'\nsessions_per_minute = 1\n" * 2, "two tenants"),
        (
            "[[tenants]]\nname = 'a'\nsessions_per_minute = 1\n"
            "[[bursts]]\nat_s = 1\nfor_s = 1\ntimes = 2\ntenants = ['b']",
            "'b'",
        ),
        ("tenants = [", "TOML"),
    ],
)
def test_a_workload_that_makes_no_sense_is_refused_by_name(tmp_path: Path, toml: str, said: str) -> None:
    (tmp_path / "w.toml").write_text(toml)
    with pytest.raises(WorkloadError, match=said):
        load_workload(tmp_path / "w.toml")


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("t.txt",), "t.txt"),
        ((), "--print"),
        (("t.jsonl", "--preset", "chats"), "chats"),
        (("t.jsonl", "--minutes", "-1"), "--minutes -1"),
        (("t.cap", "--lost", "2"), "--lost 2"),
        (("t.jsonl", "--preset", "chat", "--workload", "w.toml"), "--workload"),
    ],
)
def test_a_slip_on_the_command_line_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str],
    arguments: tuple[str, ...], said: str,
) -> None:  # fmt: skip
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit) as ended:
        main(["simulate", *arguments])
    assert ended.value.code == 2
    assert said in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


def test_a_printed_preset_is_a_workload(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    main_ends("simulate", "--print", "--preset", "scan")
    (tmp_path / "own.toml").write_text(capsys.readouterr().out)
    assert load_workload(tmp_path / "own.toml") == load_preset("scan")
