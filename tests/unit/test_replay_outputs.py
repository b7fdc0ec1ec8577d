"""What `kvadvisor replay` writes: the same figures as JSON, CSV and a page, and results that are taken up again."""

from __future__ import annotations

import csv
import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from advisor.caches import replay_cache
from advisor.caches.distances import stack_distances
from advisor.cli import main
from advisor.replay_report import course_of
from advisor.replay_tiers import found_over_time, tierings, timed_of
from advisor.simulation.workload import TenantLoad, Workload
from advisor.simulation.writing import write_simulation
from advisor.tiers import Costs, replay_tiers
from advisor.trace_pictures import COURSE_BINS, Part, picture_trace
from advisor.traces import Trace, TraceRequests, load_trace
from advisor.web.replay_page import script_json

CHATS = TenantLoad(name="a", sessions_per_minute=40, system_tokens=1024, own_tokens=1500, turns_mean=3, think_s=15)
ONE_TIER = ("--policy", "lru", "--policy", "fifo", "--capacity", "50", "--capacity", "200")
TWO_TIERS = ("--fast", "60", "--admission", "touch-2", "--admission", "always", "--budget", "0.1", "--budget", "2")


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("outputs") / "chats.jsonl"
    write_simulation(path, Workload(minutes=4, tenants=(CHATS,)), 1, engine_blocks=1)
    return path


@pytest.fixture(scope="module")
def trace(file: Path) -> Trace:
    return load_trace(file)


def run(*arguments: object, status: int = 0) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["replay", *(str(argument) for argument in arguments)])
    assert (ended.value.code or 0) == status


def results_of(path: Path) -> list[dict[str, Any]]:
    content: list[dict[str, Any]] = json.loads(path.read_text())["files"][0]["results"]
    return content


@pytest.mark.parametrize("options", [ONE_TIER, TWO_TIERS])
def test_csv_has_the_figures_of_the_json(tmp_path: Path, file: Path, options: tuple[str, ...]) -> None:
    run(file, *options, "--json", tmp_path / "r.json", "--csv", tmp_path / "r.csv")
    results = results_of(tmp_path / "r.json")
    with (tmp_path / "r.csv").open(newline="") as text:
        rows = list(csv.DictReader(text))
    assert len(rows) == len(results) == 4
    for row, result in zip(rows, results, strict=True):
        for name, value in result.items():
            for part, each in value.items() if isinstance(value, dict) else [("", value)]:
                assert row[f"{name}_{part}" if part else name] == ("" if each is None else str(each))


@pytest.mark.parametrize(("options", "chart"), [(ONE_TIER, "0-capacity"), (TWO_TIERS, "0-moves")])
def test_the_page_draws_the_figures_of_the_json_and_fetches_nothing(
    tmp_path: Path, file: Path, options: tuple[str, ...], chart: str
) -> None:
    run(file, *options, "--json", tmp_path / "r.json", "--html", tmp_path / "r.html")
    page = (tmp_path / "r.html").read_text()
    assert not re.search(r"(?:src|href)\s*=|@import|url\(", re.sub(r"<script>.*?</script>", "", page, flags=re.S))
    drawn = re.search(r'id="charts">(.*?)</script>', page, re.S)
    assert drawn is not None
    lines = json.loads(drawn.group(1))[chart]["lines"]
    tokens = json.loads((tmp_path / "r.json").read_text())["files"][0]["input_tokens"]
    expected = sorted(
        (r["capacity_blocks"], r["run_tokens"] / tokens) if "policy" in r else (r["bytes_moved"], r["fhit"])
        for r in results_of(tmp_path / "r.json")
    )
    points = [pair for line in lines if not line["bound"] for pair in zip(line["x"], line["values"], strict=True)]
    assert np.allclose(sorted(points), expected)
    bounds = [value for line in lines if line["bound"] for value in line["values"]]
    assert max(value for _, value in points) <= max(bounds)


def test_rows_and_a_page_of_a_recording_are_of_the_requests_behind_it(tmp_path: Path) -> None:
    write_simulation(tmp_path / "t.cap", Workload(minutes=1, tenants=(CHATS,)), 1, engine_blocks=50)
    run(tmp_path / "t.cap", "--html", tmp_path / "r.html", "--csv", tmp_path / "r.csv")
    assert "Shared prefixes" in (tmp_path / "r.html").read_text()
    with (tmp_path / "r.csv").open(newline="") as text:
        assert {row["policy"] for row in csv.DictReader(text)} == {"lru", "lfu"}


def test_one_request_and_none_have_a_page(tmp_path: Path) -> None:
    for name, line in (
        ("one", '{"timestamp": 0, "input_length": 600, "output_length": 5, "hash_ids": [1, 2]}'),
        ("none", '{"timestamp": 0, "input_length": 0, "output_length": 5, "hash_ids": []}'),
    ):
        (tmp_path / f"{name}.jsonl").write_text(line)
        for options in (("--policy", "lru", "--capacity", "5"), ("--fast", "5")):
            run(tmp_path / f"{name}.jsonl", *options, "--html", tmp_path / "r.html")
            assert "No two requests begin alike" in (tmp_path / "r.html").read_text()


def test_nothing_in_a_name_ends_the_script() -> None:
    assert "<" not in script_json({"name": "</script><b>"})


@pytest.mark.parametrize("options", [ONE_TIER, TWO_TIERS])
def test_resume_takes_up_the_results_of_the_same_requests_and_settings(
    tmp_path: Path, file: Path, options: tuple[str, ...]
) -> None:
    out = tmp_path / "r.json"
    run(file, *options, "--json", out, "--resume")
    whole = results_of(out)
    content = json.loads(out.read_text())
    first = content["files"][0]["results"][0]
    first["seq_block_hits" if "policy" in first else "moves"] = marked = 123_456_789
    del content["files"][0]["results"][2:]
    out.write_text(json.dumps(content))
    run(file, *options, "--json", out, "--resume")
    resumed = results_of(out)
    assert marked in resumed[0].values()
    assert resumed[1:] == whole[1:]
    run(file, *options, "--last-half", "--json", out, "--resume")
    assert marked not in results_of(out)[0].values()


def test_what_an_earlier_run_has_of_later_files_stays_until_they_are_done(tmp_path: Path, file: Path) -> None:
    other = tmp_path / "other.jsonl"
    write_simulation(other, Workload(minutes=2, tenants=(CHATS,)), 2, engine_blocks=1)
    out = tmp_path / "r.json"
    run(other, *ONE_TIER, "--json", out, "--resume")
    of_other = results_of(out)
    run(file, other, *ONE_TIER, "--json", out, "--resume")
    files = json.loads(out.read_text())["files"]
    assert [Path(each["path"]).name for each in files] == ["chats.jsonl", "other.jsonl"]
    assert files[1]["results"] == of_other


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (("--resume",), "--json"),
        (("--resume", "--json", "r.json", "--speed", "100"), "--speed"),
        (("--resume", "--json", "held.json"), "no results to go on from"),
    ],
)
def test_a_resume_that_cannot_be_is_told(
    tmp_path: Path, file: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str],
    options: tuple[str, ...], said: str,
) -> None:  # fmt: skip
    monkeypatch.chdir(tmp_path)
    (tmp_path / "held.json").write_text("a letter to my aunt")
    run(file, *options, status=2)
    assert said in capsys.readouterr().err
    assert (tmp_path / "held.json").read_text() == "a letter to my aunt"


@pytest.mark.parametrize("option", ["--save-moves", "--by-priority"])
def test_what_is_of_two_tiers_is_refused_for_one(file: Path, capsys: pytest.CaptureFixture[str], option: str) -> None:
    run(file, option, status=2)
    assert f"{option} is of two tiers: give --fast" in capsys.readouterr().err


def test_curves_over_time_of_two_tiers_add_up_to_the_hits_found(file: Path, trace: Trace) -> None:
    jobs = tierings([60], ["touch-2", "always"], [], [0.1])
    for job, found in found_over_time(trace, jobs).items():
        fhit = replay_tiers(timed_of(trace, by_priority=False), job, Costs()).fhit
        assert fhit == found.sum() / sum(trace.input_tokens) > 0


def test_two_sizes_have_a_curve_against_size_and_the_middle_ones_a_curve_over_time(tmp_path: Path, file: Path) -> None:
    options = ("--fast", "30", "--fast", "90", "--admission", "touch-2", "--budget", "0.1", "--budget", "1")
    run(file, *options, "--json", tmp_path / "r.json", "--html", tmp_path / "r.html")
    drawn = re.search(r'id="charts">(.*?)</script>', (tmp_path / "r.html").read_text(), re.S)
    assert drawn is not None
    charts = json.loads(drawn.group(1))
    by_size = {(r["fast_blocks"], r["budget"]): r["fhit"] for r in results_of(tmp_path / "r.json")}
    lines = {line["name"]: line for line in charts["0-capacity"]["lines"]}
    assert lines["touch-2, lfuda-leaf, budget 0.1"]["values"] == [by_size[30, 0.1], by_size[90, 0.1]]
    assert [line["name"] for line in charts["0-course"]["lines"]] == ["belady-leaf", "touch-2, lfuda-leaf"]
    assert charts["0-course"]["says"].startswith("At 90 blocks, budget 1.")


# -- pictures


def requests_of(*paths: str, seconds: float = 10.0) -> Trace:
    """One request a path; each letter is a block, the same where the whole path to it is."""
    requests = TraceRequests()
    for number, path in enumerate(paths):
        hashes = [path[: end + 1].encode().ljust(16, b"\0") for end in range(len(path))]
        requests.add(number * seconds * 1000, 512 * len(path), 512, hashes)
    return requests.trace()


def test_an_lru_cache_finds_what_is_nearer_than_its_capacity(trace: Trace) -> None:
    requests = trace.as_requests()
    found = np.empty(len(requests.ids), np.int64)
    stack_distances(requests.ids, np.empty(requests.blocks, np.int64), np.zeros(len(found) + 1, np.int64), found)
    for capacity in (20, 100, 1000):
        hits = replay_cache(requests, "lru", capacity).figures.seq_block_hits
        assert np.count_nonzero((found > 0) & (found <= capacity)) == hits


def test_the_course_adds_up_to_the_whole(trace: Trace) -> None:
    course = picture_trace(trace).course
    width_s = course.starts_s[1]
    tokens = (sum(course.seen_tokens_per_s) + sum(course.new_tokens_per_s)) * width_s
    assert tokens == pytest.approx(sum(trace.input_tokens))
    assert sum(course.requests_per_s) * width_s == pytest.approx(trace.requests)
    endless = replay_cache(trace.as_requests(), "lru", trace.accesses)
    assert sum(course.seen_tokens_per_s) * width_s == pytest.approx(endless.figures.run_tokens)


def test_a_hit_ratio_over_time_adds_up_too(trace: Trace) -> None:
    ran = replay_cache(trace.as_requests(), "lru", 100)
    assert ran.run_tokens.sum() == ran.figures.run_tokens
    course = course_of(trace, ran.run_tokens)
    assert len(course) == COURSE_BINS
    assert all(value is None or 0 <= value <= 1 for value in course)


def test_bars_say_how_far_and_how_long_apart_uses_are() -> None:
    pictures = picture_trace(requests_of("ab", "ac", "ab", seconds=10))
    assert pictures.distances.names == ["≤ 2", "≤ 4", "never before"]
    assert pictures.distances.shares == pytest.approx([2 / 6, 1 / 6, 3 / 6])
    assert pictures.waits.names == ["< 15 s", "< 1 min"]
    assert pictures.waits.shares == pytest.approx([2 / 3, 1 / 3])
    assert pictures.sharing.names == ["1", "2", "3 – 4"]
    assert pictures.sharing.shares == pytest.approx([1 / 6, 2 / 6, 3 / 6])


def test_shared_prefixes_are_parts_below_one_another() -> None:
    parts = picture_trace(requests_of("abx", "aby", "abc", "abcd", "abcd", "q")).prefixes
    assert parts == [
        Part(row=0, left=0.0, width=5 / 6, requests=5, first_block=0, blocks=2),
        Part(row=1, left=0.0, width=3 / 6, requests=3, first_block=2, blocks=1),
        Part(row=2, left=0.0, width=2 / 6, requests=2, first_block=3, blocks=1),
    ]


def test_narrow_prefixes_are_one_part_together() -> None:
    paths = [f"a{chr(200 + number // 2)}" for number in range(1000)]
    (whole, others) = picture_trace(requests_of(*["a" * 5] * 1000, *paths)).prefixes[0:3:2]
    assert (whole.requests, whole.blocks) == (2000, 1)
    assert (others.others, others.requests, others.row) == (500, 1000, 1)


def test_an_empty_trace_has_pictures_of_nothing() -> None:
    pictures = picture_trace(TraceRequests().trace())
    assert (pictures.prefixes, pictures.distances.names, pictures.course.starts_s) == ([], [], [])
