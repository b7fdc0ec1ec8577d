"""The command line finds commands by entry point, imports only what it runs, and says expected errors in a sentence."""

from __future__ import annotations

import importlib
import os
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path

import pytest

COMMANDS = '''
"""Commands of another distribution."""

import sys
import time

import typer

from advisor.errors import LogError

class RoomError(Exception):
    exit_status = 7

def greet(name: str, shout: bool = False) -> None:
    """Greet someone.

    At length.
    """
    print(name.upper() if shout else name)

def ended() -> None:
    raise typer.Exit(3)

def refused() -> None:
    """Cannot."""
    raise LogError("the log is elsewhere: look there")

def refused_by_a_room() -> None:
    raise RoomError("first: do this\\nsecond: do that")

def broken() -> None:
    raise ValueError("a fault")

def patient() -> None:
    print("waiting", flush=True)
    time.sleep(60)

grouped = typer.Typer()

@grouped.command()
def one() -> None:
    print("one of two")

@grouped.command()
def two() -> None:
    print("two of two")
'''


@pytest.fixture
def site(tmp_path: Path) -> Path:
    """A folder with another distribution that registers commands."""
    (tmp_path / "other_commands.py").write_text(COMMANDS)
    metadata = tmp_path / "other-1.0.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: other\nVersion: 1.0\n")
    names = ("greet", "ended", "refused", "refused_by_a_room", "broken", "patient", "grouped")
    lines = "".join(f"{name.replace('_', '-')} = other_commands:{name}\n" for name in names)
    (metadata / "entry_points.txt").write_text(f"[kvadvisor.commands]\n{lines}absent = not_there:run\n")
    return tmp_path


def run(site: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-W", "error", "-c", "from advisor.cli import main; main()", *arguments],
        env=environment(site),
        capture_output=True,
        text=True,
        check=False,
    )


def environment(site: Path) -> dict[str, str]:
    return os.environ | {"PYTHONPATH": str(site), "TERM": "dumb", "COLUMNS": "120", "NO_COLOR": "1"}


def test_command_of_another_distribution_runs(site: Path) -> None:
    done = run(site, "greet", "ada", "--shout")
    assert (done.returncode, done.stdout, done.stderr) == (0, "ADA\n", "")


def test_typer_application_is_a_group_of_commands(site: Path) -> None:
    assert run(site, "grouped", "two").stdout == "two of two\n"


def test_help_shows_first_docstring_lines_and_imports_no_command(site: Path) -> None:
    (site / "other_commands.py").write_text(COMMANDS + "\nraise SystemExit('imported')\n")
    done = run(site, "--help")
    assert done.returncode == 0, done.stderr
    assert "Greet someone." in done.stdout
    assert "At length" not in done.stdout
    assert "patient" in done.stdout
    assert "absent" in done.stdout


def test_help_of_a_command_shows_its_options(site: Path) -> None:
    done = run(site, "greet", "--help")
    assert done.returncode == 0
    assert "--shout" in done.stdout
    assert "At length." in done.stdout


def test_only_the_command_line_itself_is_imported_for_the_version(site: Path) -> None:
    program = (
        "import sys; from advisor.cli import main\n"
        "try: main(['--version'])\n"
        "finally: print(sorted(sys.modules), file=sys.stderr)"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], env=environment(site), capture_output=True, text=True, check=True
    )
    assert done.stdout == f"kvadvisor {version('kvadvisor')}\n"
    for module in ("torch", "numpy", "sqlalchemy", "fastapi"):
        assert f"'{module}'" not in done.stderr
    # Looking for a room's commands loads its package, which is empty, and nothing in it.
    for room in ("event_plane", "storage_agent", "kvbm_core"):
        assert f"'{room}." not in done.stderr


def test_help_of_our_commands_names_their_choices_and_defaults(site: Path) -> None:
    words = " ".join(run(site, "replay", "--help").stdout.replace("│", " ").split())
    assert "s3-fifo-lcs, sieve; repeatable (default: lru, lfu)" in words
    assert "(default: 1000, 5859, 10000, 30000, 50000, 100000)" in words
    assert "(default: 8470, or any if taken)" in " ".join(run(site, "demo", "--help").stdout.replace("│", " ").split())


def test_exit_status_of_a_command_is_kept(site: Path) -> None:
    assert run(site, "ended").returncode == 3


def test_expected_error_is_one_sentence_and_status_2(site: Path) -> None:
    done = run(site, "refused")
    assert (done.returncode, done.stdout, done.stderr) == (2, "", "kvadvisor: the log is elsewhere: look there\n")


def test_any_rooms_error_is_known_by_its_exit_status(site: Path) -> None:
    done = run(site, "refused-by-a-room")
    assert (done.returncode, done.stderr) == (7, "kvadvisor: first: do this\nkvadvisor: second: do that\n")


def test_unexpected_error_keeps_its_traceback(site: Path) -> None:
    done = run(site, "broken")
    assert done.returncode == 1
    assert "Traceback" in done.stderr
    assert "ValueError: a fault" in done.stderr


def test_command_that_cannot_be_loaded_says_what_to_install(site: Path) -> None:
    done = run(site, "absent")
    assert (done.returncode, done.stderr) == (
        2,
        "kvadvisor: command absent cannot be loaded (No module named 'not_there'): install other again\n",
    )


def test_unknown_command_is_a_usage_error_with_the_nearest(site: Path) -> None:
    done = run(site, "gret")
    assert done.returncode == 2
    assert "Did you mean 'greet'" in done.stderr
    assert "Traceback" not in done.stderr


def test_interrupt_ends_with_130(site: Path) -> None:
    with subprocess.Popen(
        [sys.executable, "-c", "from advisor.cli import main; main()", "patient"],
        env=environment(site),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as child:
        assert child.stdout is not None
        assert child.stdout.readline() == "waiting\n"
        child.send_signal(2)
        _, errors = child.communicate()
    assert child.returncode == 130
    assert "Traceback" not in errors


@pytest.mark.parametrize("unbuffered", ["", "1"])
def test_output_that_cannot_be_written_is_one_sentence_and_one_that_nobody_reads_none(
    site: Path, unbuffered: str
) -> None:
    def greeted(stdout: int) -> tuple[int, str]:
        done = subprocess.run(
            [sys.executable, "-c", "from advisor.cli import main; main()", "greet", "ada"],
            env=environment(site) | {"PYTHONUNBUFFERED": unbuffered},
            stdout=stdout,
            stderr=subprocess.PIPE,
            text=True,
            check=False,
        )
        os.close(stdout)
        return done.returncode, done.stderr

    remedy = "free space there, or send it elsewhere"
    full = f"kvadvisor: standard output cannot be written (No space left on device): {remedy}\n"
    assert greeted(os.open("/dev/full", os.O_WRONLY)) == (1, full)
    reader, writer = os.pipe()
    os.close(reader)
    assert greeted(writer) == (1, "")


@pytest.mark.parametrize("room", ["advisor", "event_plane", "kernels", "kvbm_core", "storage_agent"])
def test_every_error_of_every_room_is_expected(room: str) -> None:
    errors = [
        each
        for each in vars(importlib.import_module(f"{room}.errors")).values()
        if isinstance(each, type) and issubclass(each, Exception)
    ]
    assert errors
    assert [each for each in errors if getattr(each, "exit_status", None) != 2] == []
