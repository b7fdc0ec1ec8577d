"""What a user can get wrong: each ends with one sentence (what, where, what to do), a status that is not 0, no harm."""

from __future__ import annotations

import gzip
import re
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import structlog

from advisor.cli import main
from advisor.log_lock import lock_path
from tests.crash.killed_demo import verified
from tests.disks import disk_of

Ends = Callable[..., str]
LINE = '{"timestamp": 0, "input_length": 9, "output_length": 1, "hash_ids": [1]}\n'


@pytest.fixture
def ends(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Iterator[Ends]:
    """Runs a command line that must end with status 2 and nothing but one sentence; gives that."""
    monkeypatch.setenv("COLUMNS", "200")

    def run(*arguments: object) -> str:
        capsys.readouterr()
        with pytest.raises(SystemExit) as ended:
            main([str(argument) for argument in arguments])
        out, err = capsys.readouterr()
        assert (ended.value.code, out, len(err.splitlines())) == (2, "", 1), err
        assert err.startswith("kvadvisor: ")
        return err.removeprefix("kvadvisor: ").rstrip("\n")

    yield run
    structlog.reset_defaults()  # `serve` has it write to this test's standard error


@pytest.fixture
def taken_port() -> Iterator[int]:
    with socket.socket() as held:
        held.bind(("127.0.0.1", 0))
        held.listen()
        yield int(held.getsockname()[1])


def write(path: Path, content: str | bytes) -> Path:
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    return path


# -- replay


def test_replay_of_what_cannot_be_read(tmp_path: Path, ends: Ends) -> None:
    absent, empty = tmp_path / "absent.cap", write(tmp_path / "empty.cap", b"")
    assert ends("replay", tmp_path) == f"{tmp_path} cannot be read (Is a directory): check the path"
    assert ends("replay", absent) == f"{absent} cannot be read (No such file or directory): check the path"
    accepted = "give a capture (.cap), a recording (.parquet) or a trace of requests (.jsonl, .jsonl.gz)"
    assert ends("replay", empty) == f"{empty} is empty: {accepted}"
    zeros = write(tmp_path / "zeros.cap", bytes(100))
    assert ends("replay", zeros).endswith(f"like no capture, recording or trace: {accepted}")


def test_replay_of_a_damaged_capture_names_the_place(shared_data: Path, tmp_path: Path, ends: Ends) -> None:
    whole = (shared_data / "captures" / "vllm033_int.cap").read_bytes()
    cut = write(tmp_path / "cut.cap", whole[: len(whole) // 2])
    sentence, _, advice = ends("replay", cut).rpartition("head -c ")
    assert sentence.endswith("it was cut or damaged; record it again, or keep the whole messages before with `")
    kept = int(advice.rstrip("`"))
    with pytest.raises(SystemExit) as ended:
        main(["replay", str(write(tmp_path / "kept.cap", whole[:kept]))])
    assert ended.value.code == 0
    flipped = bytearray(whole)
    flipped[7] = 0x7F  # the first frame's length
    assert "like no capture, recording or trace" in ends("replay", write(tmp_path / "flipped.cap", bytes(flipped)))
    zeroed = bytearray(whole)
    zeroed[len(whole) // 2 : len(whole) // 2 + 300] = bytes(300)
    sentence = ends("replay", write(tmp_path / "zeroed.cap", bytes(zeroed)))
    assert sentence.startswith(f"{tmp_path / 'zeroed.cap'}: message ")
    assert sentence.endswith("record it again")


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ('{"timestamp": 1,', "truncated"),
        (LINE.replace("[1]", '"one"').strip(), "hash_ids"),
        (LINE.replace("[1]", "[-1]").strip(), "hash_ids"),
        (LINE.replace("0,", "1e300,", 1).strip(), "timestamp"),
        (LINE.replace("9,", "-9,").strip(), "input_length -9"),
        ("\N{BELL}", "malformed"),
    ],
)
def test_replay_of_a_trace_names_the_line(tmp_path: Path, ends: Ends, line: str, words: str) -> None:
    trace = write(tmp_path / "trace.jsonl", f"{LINE}\n{line}\n")
    sentence = ends("replay", trace)
    assert sentence.startswith(f"{trace}, line 3 ")
    assert words in sentence
    assert sentence.endswith("mend or remove that line")


def test_replay_with_options_that_mean_nothing(tmp_path: Path, ends: Ends) -> None:
    trace = write(tmp_path / "trace.jsonl", LINE)
    assert ends("replay", trace, "--policy", "lruu").startswith("policy 'lruu' is not known: choose one of 2q, arc, ")
    sentence = "policy 'arc' is none of the live service's: choose one of lfu, lru with --speed"
    assert ends("replay", trace, "--policy", "arc", "--speed", "1000") == sentence
    for capacity in ("0", "2147483648", "99999999999999999999"):
        sentence = f"capacity {capacity} is no number of blocks: give 1 to 2147483647"
        assert ends("replay", trace, "--capacity", capacity) == sentence


def test_replay_that_could_not_write_its_outcome_does_not_begin(tmp_path: Path, ends: Ends) -> None:
    # Its line is never read.
    trace = write(tmp_path / "trace.jsonl", '{"timestamp": 1,')
    nowhere = {tmp_path: "Is a directory", tmp_path / "nowhere" / "out.json": "No such file or directory"}
    for option in ("--json", "--state"):
        for place, why in nowhere.items():
            assert ends("replay", trace, option, place) == f"{place} cannot be written ({why}): choose another place"
        with pytest.raises(SystemExit):
            main(["replay", str(trace), option, str(tmp_path / "out.json")])
        assert not (tmp_path / "out.json").exists()


# -- serve


@pytest.fixture
def config(tmp_path: Path) -> Path:
    return write(tmp_path / "advisor.toml", 'directory = "state"\n[api]\nport = 0\n')


def test_serve_with_a_setting_that_does_not_exist(
    config: Path, ends: Ends, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("KVADVISOR_API__PRT", "1")
    assert ends("serve", "--config", config) == (
        "the environment variable KVADVISOR_API__PRT is no setting: did you mean KVADVISOR_API__PORT?"
    )
    monkeypatch.delenv("KVADVISOR_API__PRT")
    write(config, 'directory = "state"\ntick_intervall_s = 1\n')
    assert ends("serve", "--config", config) == (
        f"tick_intervall_s in {config} is no setting: did you mean tick_interval_s?"
    )
    assert not (config.parent / "state").exists()


def test_serve_on_a_port_in_use_touches_nothing(
    config: Path, ends: Ends, taken_port: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("KVADVISOR_API__PORT", str(taken_port))
    assert ends("serve", "--config", config) == (
        f"port {taken_port} of 127.0.0.1 is in use: stop what listens there, or set api.port to another (0: any)"
    )
    assert not (config.parent / "state").exists()


def test_serve_in_a_folder_that_cannot_be_one(config: Path, ends: Ends) -> None:
    file = write(config.parent / "state", "a file")
    assert ends("serve", "--config", config).startswith(f"{file} cannot be made (File exists): choose")


def test_second_serve_on_one_directory_is_refused_and_the_first_goes_on(config: Path, ends: Ends) -> None:
    command = [sys.executable, "-m", "advisor.cli", "serve", "--config", str(config)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as first:
        assert first.stdout is not None
        assert first.stdout.readline().startswith("kvadvisor serve: admin view at http://127.0.0.1:")
        log = config.parent / "state" / "log.db"
        assert ends("serve", "--config", config).startswith(f"{log} is in use by process {first.pid} on ")
        assert ends("verify", config.parent / "state").startswith(f"{log} is in use by process {first.pid} on ")
        first.terminate()
        _, errors = first.communicate()
    assert (first.returncode, errors) == (0, "")


# -- demo


def test_demo_with_arguments_that_cannot_be(tmp_path: Path, ends: Ends, taken_port: int, shared_data: Path) -> None:
    file = write(tmp_path / "file", "x")
    assert ends("demo", "--dir", file) == f"{file} cannot be made (File exists): choose another folder"
    capture = shared_data / "captures" / "vllm033_int.cap"
    assert ends("demo", "--trace", capture).startswith(f"{capture} is a capture of events, not a trace of requests")
    assert ends("demo", "--trace", tmp_path / "absent") == (
        f"{tmp_path / 'absent'} cannot be read (No such file or directory): check the path"
    )
    broken = write(tmp_path / "broken.jsonl", LINE * 500 + "{")
    assert ends("demo", "--trace", broken).startswith(f"{broken}, line 501 is no request (")
    cut = write(tmp_path / "cut.jsonl.gz", gzip.compress(LINE.encode() * 500)[:-20])
    assert ends("demo", "--trace", cut).endswith(": fetch or record it again")
    other = write(tmp_path / "other.jsonl", '{"prompt": "hello"}\n')
    assert ends("demo", "--trace", other).startswith(f"{other} holds JSON of another format than Mooncake's (")
    assert ends("demo", "--port", taken_port) == (
        f"port {taken_port} of 127.0.0.1 is in use: stop what listens there, or leave --port out for any"
    )


def demo_ends(folder: Path) -> str:
    command = [sys.executable, "-m", "advisor.cli", "demo", "--dir", str(folder), "--port", "0"]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=120)
    assert (done.returncode, len(done.stderr.splitlines())) == (2, 1), done.stderr
    return done.stderr.removeprefix("kvadvisor: ").rstrip("\n")


@pytest.mark.crash
@pytest.mark.parametrize(
    ("size_mib", "sentence"),
    [
        (30, r"the engine ended with status 2: volume 'slow' needs 167788544 bytes, .* has \d+ free: lower"),
        # Room for the volumes, and little for the log; none is left for a child's last words either.
        pytest.param(
            182, r"the advisor ended with status 2: cannot append to .*log\.db: the disk is full: free space there",
            marks=pytest.mark.long,
        ),
    ],
    ids=["volumes", "log"],
)
def test_demo_on_a_disk_too_small(tmp_path: Path, size_mib: int, sentence: str) -> None:
    with disk_of(tmp_path / "disk", size_mib) as disk:
        assert re.match(sentence, demo_ends(disk / "demo"))
        done = verified(disk / "demo")
        assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.crash
def test_demo_on_a_folder_in_use_leaves_it_alone(tmp_path: Path, ends: Ends) -> None:
    folder = tmp_path / "demo"
    folder.mkdir()
    program = (
        "import sys, time; from pathlib import Path; from advisor.log_lock import WriterLock\n"
        "lock = WriterLock(Path(sys.argv[1])); print('held', flush=True); time.sleep(60)"
    )
    holding = [sys.executable, "-c", program, str(folder / "demo")]
    with subprocess.Popen(holding, stdout=subprocess.PIPE, text=True) as holder:
        assert holder.stdout is not None
        assert holder.stdout.readline() == "held\n"
        assert ends("demo", "--dir", folder).startswith(f"{folder / 'demo'} is in use by process {holder.pid} on ")
        holder.kill()
    assert list(folder.iterdir()) == [lock_path(folder / "demo")]


def test_bench_with_workers_that_mean_nothing(ends: Ends) -> None:
    sentence = "--workers '1,x' is no list of counts: give some of 1 to 16, e.g. 1,2,4"
    assert ends("bench", "core", "--workers", "1,x") == sentence
    sentence = "benchmark 'index' takes no --workers: leave it out, or choose core"
    assert ends("bench", "index", "--workers", "1") == sentence
