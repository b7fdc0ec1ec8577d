"""`kvadvisor demo`: an engine with its storage agent in one process, the advisor in another, and a live status view.

This process only starts, watches and stops the two; both die with it. All they make lies in one folder. Ctrl-C,
SIGTERM and SIGHUP are how it is meant to end: with the summary, a verification and status 0, or 1 where that finds a
fault.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
import urllib.error
import urllib.request
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any

import msgspec
import typer
from rich.console import Console
from rich.live import Live

from advisor.demo_config import EngineReport, demo_agent_toml, demo_engine_toml
from advisor.demo_view import MOVES_READ, status_view, summary_table
from advisor.errors import AdvisorError
from advisor.log_lock import WriterLock
from advisor.verify import ADVISOR_FILE, AGENT_FILE, DEMO_NAME, verify
from event_plane.recording import detect_format, read_trace

ENGINE_FILE = "engine.toml"
PORT_DEFAULT = 8470
START_S_MAX = 240.0
START_HINT_S = 8.0
"""After so long the demo says what it is waiting for."""
STOP_S_MAX = 20.0
STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
REFRESH_S = 0.5
PLAIN_LINE_S = 5.0
"""Where standard output is no terminal, a line this often takes the place of the live view."""


class DemoError(AdvisorError):
    """The demo cannot start, or one of its processes ended by itself; the message holds what that one said."""


def demo(
    seconds: Annotated[float | None, typer.Option(min=0.1, help="End by itself after so many seconds.")] = None,
    directory: Annotated[
        Path | None, typer.Option("--dir", help="Keep everything here, for `kvadvisor verify DIR`.")
    ] = None,
    trace: Annotated[
        Path | None, typer.Option(help="Serve this Mooncake trace (.jsonl, .jsonl.gz) instead of chats and agents.")
    ] = None,
    port: Annotated[
        int | None,
        typer.Option(min=0, max=65_535, help=f"Port of the admin view (default: {PORT_DEFAULT}, or any if taken)."),
    ] = None,
    seed: Annotated[int, typer.Option(help="Seed of the workload.")] = 1,
) -> None:
    """Watch the product do its job: an engine, two volumes, the advisor moving blocks between them."""
    console = Console()
    if trace is not None:
        _require_whole(trace)
    with _folder(directory) as folder, _stop_signals() as stop:
        with contextlib.ExitStack() as children:
            # Two demos on one folder would overwrite each other's settings before either's log or volumes refuse.
            children.callback(WriterLock(folder / DEMO_NAME).release)
            _write_settings(folder, _port(port))
            place = f"kvadvisor demo: engine, storage agent and advisor in {folder}"
            console.print(place, markup=False, soft_wrap=True)
            advisor = children.enter_context(_Child("advisor", folder, _advisor_command(folder)))
            engine = children.enter_context(_Child("engine", folder, _engine_command(folder, seed, trace)))
            url = _admin_url(console, advisor, [advisor, engine], stop)
            watch = Watch(url, engine)
            if url:
                console.print(f"admin page: [link={url}]{url}[/link]   (Ctrl-C stops the demo)")
                _show(console, watch, [advisor, engine], stop, seconds)
            engine.stop()
            watch.settle()
            advisor.stop()
        console.print(summary_table(watch.state))
        verify(folder)
        report = watch.state.report
        if report is not None and report.wrong_blocks:
            raise DemoError(f"{report.wrong_blocks} blocks were read with wrong bytes: please report this")


def _require_whole(trace: Path) -> None:
    """Read it to its end: a line that cannot be served is told before anything starts, not minutes later."""
    if detect_format(trace) != "trace":
        raise DemoError(f"{trace} is a capture of events, not a trace of requests: use `kvadvisor replay` for it")
    for _ in read_trace(trace):
        pass


# -- folder and settings


@contextlib.contextmanager
def _folder(directory: Path | None) -> Iterator[Path]:
    if directory is not None:
        try:
            directory.mkdir(parents=True, exist_ok=True)
        except OSError as fault:
            raise DemoError(f"{directory} cannot be made ({fault.strerror}): choose another folder") from fault
        yield directory.resolve()
        return
    folder = Path(tempfile.mkdtemp(prefix="kvadvisor-demo-"))
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _write_settings(folder: Path, admin_port: int) -> None:
    core, agent, command = free_ports()
    files = {
        AGENT_FILE: demo_agent_toml(
            agent_events_url=f"zmq+tcp://127.0.0.1:{agent}", command_url=f"tcp://127.0.0.1:{command}"
        ),
        ENGINE_FILE: demo_engine_toml(core_events_url=f"zmq+tcp://127.0.0.1:{core}", agent_file=AGENT_FILE),
        ADVISOR_FILE: _advisor_toml(core, agent, command, admin_port),
    }
    for name, content in files.items():
        # Whole or not at all: a run that was killed here leaves a folder that `verify` can read.
        part = folder / f"{name}.part"
        try:
            part.write_text(content)
            part.replace(folder / name)
        except OSError as fault:
            raise DemoError(f"{folder / name} cannot be written ({fault.strerror}): choose another folder") from fault


def _advisor_toml(core: int, agent: int, command: int, admin_port: int) -> str:
    return f"""\
directory = "advisor"
tick_interval_s = 2.0

[api]
port = {admin_port}

[[sources]]
name = "core"
url = "zmq+tcp://127.0.0.1:{core}"
dialect = "kvadvisor"

[[sources]]
name = "agent"
url = "zmq+tcp://127.0.0.1:{agent}"
dialect = "kvadvisor"

[[agents]]
name = "demo-agent"
command_url = "tcp://127.0.0.1:{command}"

[policy]
admission = "touch-2"
promote_moves_max = 256
demote_moves_max = 2048
moves_open_max = 4096

[[shadow]]
name = "auto"
policy.promote_moves_max = 256
policy.demote_moves_max = 2048
policy.moves_open_max = 4096
"""


def _port(asked: int | None) -> int:
    """The port asked for; by default ours where it is free, else any."""
    if asked is not None and not _is_free(asked):
        raise DemoError(f"port {asked} of 127.0.0.1 is in use: stop what listens there, or leave --port out for any")
    if asked is not None:
        return asked
    return PORT_DEFAULT if _is_free(PORT_DEFAULT) else 0


def _is_free(port: int) -> bool:
    with socket.socket() as probe:
        # As the admin view binds it: a connection of a demo before, still winding down, is no hindrance.
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("127.0.0.1", port))
        except OSError as fault:
            return fault.errno != errno.EADDRINUSE
    return True


def free_ports() -> tuple[int, int, int]:
    """Ports for the core's events, the agent's and its commands; the port after each of the first two is free too."""
    found: list[int] = []
    for _ in range(1_000):
        with socket.socket() as probe, socket.socket() as beside:
            probe.bind(("127.0.0.1", 0))
            first = int(probe.getsockname()[1])
            with contextlib.suppress(OSError, OverflowError):
                beside.bind(("127.0.0.1", first + 1))
                if not {first - 1, first, first + 1} & set(found):
                    found.append(first)
        if len(found) == 3:
            return found[0], found[1], found[2]
    raise DemoError("no three free ports on 127.0.0.1: stop something that listens there")


# -- processes


class _Child:
    """A process of the demo. It has a process group of its own: Ctrl-C reaches the demo alone, which stops it."""

    def __init__(self, name: str, folder: Path, command: list[str]) -> None:
        self.name = name
        self.lines: deque[str] = deque(maxlen=64)
        """What it last said on standard output."""
        self.errors: deque[str] = deque(maxlen=64)
        """What it last said on standard error; all of it goes to a file, if that has room."""
        self._errors_file = folder / f"{name}.err"
        self._command = command

    def __enter__(self) -> _Child:
        self._process = subprocess.Popen(
            self._command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            process_group=0,
            text=True,
            errors="replace",
        )
        self._readers = [threading.Thread(target=read, daemon=True) for read in (self._read, self._read_errors)]
        for reader in self._readers:
            reader.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def _read(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            self.lines.append(line.rstrip("\n"))

    def _read_errors(self) -> None:
        assert self._process.stderr is not None
        # A full disk is what the last words may be about: they must not need it.
        with contextlib.suppress(OSError):
            self._errors_file.unlink(missing_ok=True)
        for line in self._process.stderr:
            self.errors.append(line.rstrip("\n"))
            with contextlib.suppress(OSError), self._errors_file.open("a") as file:
                file.write(line)

    @property
    def ended(self) -> bool:
        return self._process.poll() is not None

    def require_running(self) -> None:
        """Raises `DemoError` with its last words if it has ended."""
        if not self.ended:
            return
        status = self._process.returncode
        if status < 0:
            raise DemoError(f"the {self.name} was ended by {signal.Signals(-status).name}: start the demo again")
        self._join_readers()
        said = [line for line in self.errors if line.strip()]
        # Its command line's own prefix is not said twice.
        words = re.sub(r"^kvadvisor[a-z ]*: ", "", said[-1]) if said else "it said nothing"
        raise DemoError(f"the {self.name} ended with status {status}: {words}")

    def stop(self) -> None:
        """SIGTERM, then SIGKILL. Idempotent."""
        if self._process.poll() is None:
            self._process.terminate()
            try:
                self._process.wait(STOP_S_MAX)
            except subprocess.TimeoutExpired:
                self._process.kill()
                self._process.wait()
        self._join_readers()
        for pipe in (self._process.stdout, self._process.stderr):
            if pipe is not None:
                pipe.close()

    def _join_readers(self) -> None:
        for reader in self._readers:
            reader.join(1.0)


def _advisor_command(folder: Path) -> list[str]:
    arguments = ["serve", "--config", str(folder / ADVISOR_FILE), "--parent", str(os.getpid())]
    return [sys.executable, "-m", "advisor.cli", *arguments]


def _engine_command(folder: Path, seed: int, trace: Path | None) -> list[str]:
    arguments = ["--config", str(folder / ENGINE_FILE), "--parent", str(os.getpid()), "--seed", str(seed)]
    if trace is not None:
        arguments += ["--trace", str(trace)]
    return [sys.executable, "-m", "advisor.demo_engine", *arguments]


@contextlib.contextmanager
def _stop_signals() -> Iterator[threading.Event]:
    stop = threading.Event()
    # Under nohup a terminal's end is no reason to stop.
    wanted = [n for n in STOP_SIGNALS if n != signal.SIGHUP or signal.getsignal(n) != signal.SIG_IGN]
    before = {n: signal.signal(n, lambda *_: stop.set()) for n in wanted}
    try:
        yield stop
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _admin_url(console: Console, advisor: _Child, children: list[_Child], stop: threading.Event) -> str:
    """The admin page's address, once the advisor has said it and the engine has reported; empty if stopped before."""
    deadline = time.monotonic() + START_S_MAX
    hint_s = time.monotonic() + START_HINT_S
    while time.monotonic() < deadline and not stop.wait(0.05):
        if time.monotonic() >= hint_s:
            hint_s = float("inf")
            console.print("starting; the index's functions are compiled the first time, about half a minute")
        for child in children:
            child.require_running()
        words = [word for line in list(advisor.lines) for word in line.split() if word.startswith("http://")]
        if words and all(child.lines for child in children):
            return words[0]
    if stop.is_set():
        return ""
    raise DemoError(f"the demo did not start within {START_S_MAX:.0f} s: is this machine very busy?")


# -- what is shown


@dataclass(slots=True)
class WatchedState:
    """The newest answers of the admin API and the engine's newest report."""

    summary: dict[str, Any] = field(default_factory=dict)
    volumes: list[dict[str, Any]] = field(default_factory=list)
    moves: dict[str, Any] = field(default_factory=dict)
    report: EngineReport | None = None


class Watch:
    """Polls the admin API, as any client would, and the engine's reports."""

    def __init__(self, url: str, engine: _Child) -> None:
        self.state = WatchedState()
        self._url = url
        self._engine = engine

    def look(self) -> None:
        """Refresh what answers; what does not stays as it was."""
        if self._url:
            with contextlib.suppress(urllib.error.URLError, TimeoutError, ConnectionError):
                self.state.summary = self._get("summary")
                self.state.volumes = self._get("volumes")
                self.state.moves = self._get(f"moves?limit={MOVES_READ}")
        if self._engine.lines:
            with contextlib.suppress(msgspec.DecodeError):
                self.state.report = msgspec.json.decode(self._engine.lines[-1], type=EngineReport)

    def settle(self) -> None:
        """Once the engine has stopped: wait a moment until the advisor has folded what it was sent."""
        events = -1
        for _ in range(10):
            self.look()
            if not self.state.summary or self.state.summary["events_total"] == events:
                return
            events = self.state.summary["events_total"]
            time.sleep(0.3)

    def _get(self, path: str) -> Any:
        with urllib.request.urlopen(f"{self._url}api/v1/{path}", timeout=2.0) as answer:
            return json.load(answer)


def _show(
    console: Console, watch: Watch, children: list[_Child], stop: threading.Event, seconds: float | None
) -> None:
    started_s = time.monotonic()
    ends_s = started_s + seconds if seconds is not None else float("inf")
    live_view = Live(console=console, auto_refresh=False, transient=True)
    with live_view if console.is_terminal else contextlib.nullcontext() as live:
        plain_due_s = started_s
        while not stop.is_set() and time.monotonic() < ends_s:
            for child in children:
                child.require_running()
            watch.look()
            if live is not None:
                live.update(status_view(watch.state), refresh=True)
            elif time.monotonic() >= plain_due_s:
                plain_due_s += PLAIN_LINE_S
                console.print(status_view(watch.state))
            stop.wait(max(0.0, min(REFRESH_S, ends_s - time.monotonic())))
