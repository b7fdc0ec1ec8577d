"""Recordings by command line: recorded, inspected, replayed and read by the examples, as a user would."""

from __future__ import annotations

import json
import signal
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from contextlib import closing
from pathlib import Path

import msgspec
import numpy as np
import pytest

from advisor.cli import main
from advisor.entries import EntryKind, NewEntry, Tick, control_entry
from advisor.log import SqlLog
from advisor.play_command import play
from advisor.recorded import Reading, read_recorded
from advisor.replay import live_blocks, replay_log, replay_recording
from advisor.traces import load_trace
from event_plane.parquet import ParquetRecorder, read_parquet, write_parquet
from event_plane.recording import CaptureRecorder, read_capture
from event_plane.schema import RECORD_DTYPE, Batch, Namespace
from event_plane.wire import encode

EXAMPLES = Path(__file__).parents[2] / "examples"
PATIENCE_S = 60.0


def vllm_frames(sequence: int, *hashes: int, removed: bool = False) -> list[bytes]:
    event = {"type": "BlockStored", "block_hashes": list(hashes), "parent_block_hash": None,
             "token_ids": [1] * 16 * len(hashes), "block_size": 16, "medium": "GPU", "group_idx": 0}  # fmt: skip
    gone = {"type": "BlockRemoved", "block_hashes": list(hashes), "medium": "GPU"}
    payload = msgspec.msgpack.encode([100.0 + sequence, [gone if removed else event], 0])
    return [b"kv-events", struct.pack(">Q", sequence), payload]


@pytest.fixture
def capture(tmp_path: Path) -> Path:
    """Three chains of two blocks stored, one of them removed again."""
    path = tmp_path / "engine.cap"
    with CaptureRecorder(path) as recorder:
        for number in range(3):
            recorder.write(vllm_frames(number, 2**63 + number * 2, 2**63 + number * 2 + 1))
        recorder.write(vllm_frames(3, 2**63 + 1, removed=True))
    return path


def run(*arguments: object) -> None:
    with pytest.raises(SystemExit) as ended:
        main([str(argument) for argument in arguments])
    assert ended.value.code in (0, None)


def wait_for(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.02)


@pytest.mark.parametrize(("suffix", "summary"), [(".parquet", "7 events in 4 batches"), (".cap", "4 messages")])
def test_record_until_ctrl_c_keeps_what_was_played(capture: Path, tmp_path: Path, suffix: str, summary: str) -> None:
    url = f"zmq+ipc://{tmp_path}/events"
    out = tmp_path / f"recorded{suffix}"
    command = [sys.executable, "-m", "advisor.cli", "record", "--source", url, "--out", out, "--model", "m"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as recorder:
        try:
            run("play", capture, "--to", url, "--wait-subscriber", PATIENCE_S, "--linger", "1")
            part = tmp_path / f"recorded{suffix}.part"
            assert part.exists()
            if suffix == ".cap":  # it writes once a second; of .parquet all that came is taken at the end, too
                wait_for(lambda: part.stat().st_size == capture.stat().st_size)
            recorder.send_signal(signal.SIGINT)
            said, _ = recorder.communicate(timeout=PATIENCE_S)
        finally:
            recorder.kill()
    assert recorder.returncode == 0
    assert said.startswith(f"{out}: {summary} in ")
    assert not part.exists()
    if suffix == ".cap":
        assert list(read_capture(out)) == list(read_capture(capture))
    else:
        assert live_blocks(replay_recording(out).fold) == live_blocks(replay_recording(capture).fold)


def test_inspect_tells_what_a_capture_holds(
    capture: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run("inspect", capture, "--json", tmp_path / "out.json", "--html", tmp_path / "out.html")
    printed = capsys.readouterr().out
    assert printed.startswith("7 events in 4 batches")
    producer = next(line for line in printed.splitlines() if line.startswith("engine.cap"))
    assert producer.split() == ["engine.cap/kv-events/dp0", "1", "0–3", "4", "7", "0", "0"]
    figures = json.loads((tmp_path / "out.json").read_text())
    assert figures["types"] == {"store": {"G1": 6}, "remove": {"G1": 1}}
    assert figures["producers"][0]["epochs"][0]["last_sequence"] == 3
    assert figures["first_us"], figures["last_us"] == (100_000_000, 103_000_000)
    assert "engine.cap/kv-events/dp0" in (tmp_path / "out.html").read_text()


def test_inspect_cuts_no_name_and_no_number_in_a_narrow_window(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", "60")
    path = tmp_path / f"{'long-name-' * 8}.cap"
    with CaptureRecorder(path) as recorder:
        for number in (123_456_789, 123_456_789, 987_654_321):
            recorder.write(vllm_frames(number, 2**63))
    run("inspect", path)
    printed = capsys.readouterr().out
    rows = printed[printed.index("─\n") + 2 : printed.index("\ntype")].splitlines()
    assert "".join(row.split(" ")[0] for row in rows) == f"{path.name}/kv-events/dp0"
    assert {"0–987654321", "987,654,320"} <= set(rows[0].split())


@pytest.mark.parametrize(("option", "value"), [("--seconds", "-2"), ("--events", "0")])
def test_record_refuses_a_limit_that_is_none(tmp_path: Path, option: str, value: str) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["record", "--source", "memory://nobody", "--out", str(tmp_path / "out.cap"), option, value])
    assert ended.value.code == 2
    assert not list(tmp_path.iterdir())


def test_replay_reads_a_recording_as_it_reads_the_capture_it_came_from(capture: Path, tmp_path: Path) -> None:
    recording = tmp_path / "engine.parquet"
    write_parquet(recording, read_recorded(capture, Reading()))
    run("replay", capture, "--state", tmp_path / "capture.json", "--json", tmp_path / "a.json")
    run("replay", recording, "--state", tmp_path / "recording.json", "--json", tmp_path / "b.json")
    live = json.loads((tmp_path / "recording.json").read_text())
    assert live == json.loads((tmp_path / "capture.json").read_text()) == [2**63 + n for n in (0, 2, 3, 4, 5)]
    (report,) = json.loads((tmp_path / "b.json").read_text())["files"]
    assert (report["format"], report["events"], report["live_blocks"]) == ("parquet", 7, 5)


def stores(sequence: int, events: int) -> Batch:
    records = np.zeros(events, RECORD_DTYPE)
    records["event_type"], records["tier"] = 1, 3
    records["sequence_hash_lo"] = np.arange(events) + sequence * 1_000 + 1
    return Batch(7, 1, sequence, records, namespaces=(Namespace(model="m"),), locations=("nvme0",))


def test_replay_folds_an_advisors_log_again_ticks_included(tmp_path: Path) -> None:
    state = tmp_path / "state"
    with closing(SqlLog(state / "log.db")) as log:
        batches = [stores(0, 3), stores(1, 2)]
        log.append([control_entry(Tick(now_us=5_000_000))], 1)
        log.append([NewEntry(EntryKind.BATCH, encode(b), b.producer, b.epoch, b.sequence, "agent") for b in batches], 2)
    replayed = replay_log(state)
    assert (replayed.messages, replayed.fold.events_total, replayed.fold.now_us) == (2, 5, 5_000_000)
    assert replayed.fold.position == 3
    assert replayed.refused == {}
    exported = tmp_path / "exported.parquet"
    write_parquet(exported, read_recorded(state, Reading()))
    assert [(each.position, each.source) for each in read_parquet(exported)] == [(2, "agent"), (3, "agent")]
    assert live_blocks(replay_recording(exported).fold) == live_blocks(replayed.fold)


def test_replay_of_a_log_that_was_cut_says_what_is_missing(tmp_path: Path) -> None:
    with closing(SqlLog(tmp_path / "log.db")) as log:
        for sequence in range(4):
            batch = stores(sequence, 1)
            entry = NewEntry(EntryKind.BATCH, encode(batch), batch.producer, batch.epoch, batch.sequence, "agent")
            log.append([entry], sequence)
        cut = log.prune(2)
    assert cut > 0
    replayed = replay_log(tmp_path)
    assert replayed.refused == {"entry that retention has cut from the log": cut}
    assert replayed.messages == 4 - cut


def test_log_is_played_to_another_advisor_as_it_was(tmp_path: Path) -> None:
    with closing(SqlLog(tmp_path / "log.db")) as log:
        for sequence in range(4):
            batch = stores(sequence, 5)
            entry = NewEntry(EntryKind.BATCH, encode(batch), batch.producer, batch.epoch, batch.sequence, "agent")
            log.append([entry, control_entry(Tick(now_us=sequence))], sequence + 1)
    url, out = "memory://log-played", tmp_path / "heard.parquet"
    player = threading.Thread(target=play, args=(tmp_path, url))
    player.start()
    run("record", "--source", url, "--out", out, "--events", "20", "--seconds", PATIENCE_S)
    player.join(PATIENCE_S)
    assert not player.is_alive()
    heard, logged = list(read_parquet(out)), list(read_recorded(tmp_path, Reading()))
    assert [encode(each.batch) for each in heard] == [encode(each.batch) for each in logged]


def test_replay_at_a_speed_takes_the_recorded_time(capture: Path) -> None:
    # Three seconds of the engine's time at 30 times the speed.
    begun_s = time.monotonic()
    run("replay", capture, "--speed", "30")
    assert time.monotonic() - begun_s >= 0.1


def test_speed_that_is_none_is_refused(capture: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for command in (["replay", str(capture)], ["play", str(capture), "--to", "memory://x"]):
        with pytest.raises(SystemExit) as ended:
            main([*command, "--speed", "0"])
        assert ended.value.code == 2
        assert "speed 0.0 is none: give a number above 0" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["record", "--source", "memory://x", "--out", "x.txt"], "x.txt is no recording's name: end it in .parquet or"),
        (["record", "--source", "memory://x", "--out", "x.cap", "--dialect", "vlm"], "dialect 'vlm' is not known"),
        (["record", "--source", "ftp://x", "--out", "x.cap"], "unknown scheme 'ftp'"),
        (["play", "{capture}", "--to", "jetstream://h/s"], "keeps our own batches alone"),
        (["play", "{capture}", "--to", "memory://x", "--wait-subscriber", "0.1"], "nobody subscribed to memory://x"),
        (["play", "{capture}", "--to", "memory://x", "--credentials", "absent.toml"], "absent.toml cannot be read"),
    ],
)
def test_what_cannot_be_done_is_said_in_one_sentence(
    capture: Path, capsys: pytest.CaptureFixture[str], arguments: list[str], said: str
) -> None:
    with pytest.raises(SystemExit) as ended:
        main([each.format(capture=capture) for each in arguments])
    assert ended.value.code == 2
    errors = capsys.readouterr().err
    assert said in errors
    assert errors.count("\n") == 1


def test_ragpulse_trace_is_read_by_time_and_group(shared_data: Path) -> None:
    trace = load_trace(shared_data / "traces" / "ragpulse_0_trace.jsonl.gz")
    assert (trace.requests, trace.accesses) == (7_106, 71_583)
    assert trace.timestamps_ms == sorted(trace.timestamps_ms)
    assert trace.timestamps_ms[-1] == 604_603_000
    assert max(trace.block_tokens) <= 512


def test_ragpulse_line_gives_ids_of_their_groups(tmp_path: Path) -> None:
    lines = [
        {"timestamp": "2", "input_length": 30, "output_length": 1, "hash_ids": {"a": [5], "b": [5, 6]}},
        {"timestamp": "1", "input_length": 30, "output_length": 1, "hash_ids": {"a": [5], "b": []}},
    ]
    path = tmp_path / "rag.jsonl"
    path.write_bytes(b"\n".join(msgspec.json.encode(line) for line in lines))
    trace = load_trace(path)
    assert trace.timestamps_ms == [1_000, 2_000]
    assert trace.ends == [1, 4]
    assert trace.block_tokens == [30, 10]
    # The same id in another group is another block; the same path is the same block.
    assert trace.hashes[0].tolist() == trace.hashes[1].tolist() != trace.hashes[2].tolist()


@pytest.fixture(scope="module")
def sample(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """22:13: 4 stores in G1 of two prefixes; 22:14: 1 store in G3, 2 removes in G1."""
    path = tmp_path_factory.mktemp("sample") / "it's.parquet"
    minute_us = 1_700_000_000_000_000 // 60_000_000 * 60_000_000
    with ParquetRecorder(path) as recorder:
        for sequence, (minute, tier, event_type, prefixes) in enumerate(
            [(0, 1, 1, [11, 11, 11, 12]), (1, 3, 1, [12]), (1, 1, 2, [11, 11])]
        ):
            records = np.zeros(len(prefixes), RECORD_DTYPE)
            records["event_type"], records["tier"], records["prefix_hash_lo"] = event_type, tier, prefixes
            records["sequence_hash_lo"] = np.arange(len(prefixes)) + 100
            batch = Batch(7, 1, sequence, records, namespaces=(Namespace(),), locations=("x",))
            recorder.write(batch, "engine", received_us=minute_us + minute * 60_000_000)
        recorder.write(Batch(7, 1, 3, np.empty(0, RECORD_DTYPE)), "engine", received_us=minute_us)
    return path


@pytest.mark.parametrize("name", ["pandas", "polars", "duckdb"])
def test_example_tabulates_a_recording(sample: Path, name: str) -> None:
    command = [sys.executable, "-W", "error", EXAMPLES / f"read_recording_{name}.py", sample]
    done = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE_S, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    rows = [line.split() for line in done.stdout.splitlines()]
    first, second = "22:13", "22:14"
    assert [first, "1", "4", "0"] in rows
    assert [second, "1", "0", "2"] in rows
    # pandas writes a minute once.
    assert (["3", "1", "0"] if name == "pandas" else [second, "3", "1", "0"]) in rows
    assert [row for row in rows if row][-2:] == [["11", "3"], ["12", "2"]]


@pytest.mark.parametrize("name", ["pandas", "polars", "duckdb"])
def test_example_without_a_file_says_how_it_is_used(name: str) -> None:
    done = subprocess.run(
        [sys.executable, EXAMPLES / f"read_recording_{name}.py"],
        capture_output=True, text=True, timeout=PATIENCE_S, check=False,
    )  # fmt: skip
    assert (done.returncode, done.stderr) == (1, f"use: python examples/read_recording_{name}.py FILE.parquet\n")
