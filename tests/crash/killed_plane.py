"""Kills whatever takes part in the event plane at random moments, then compares the log with what the engines hold.

`python -m tests.crash.killed_plane` does so for every transport and log, many rounds (`make soak-plane`).
"""

from __future__ import annotations

import argparse
import json
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing
from dataclasses import dataclass
from itertools import groupby, product
from pathlib import Path

from advisor.checkpoint import load_newest
from advisor.entries import EntryKind, LogEntry
from advisor.errors import AdvisorError
from advisor.fold import Fold
from advisor.index import IndexSize
from advisor.open_log import open_log
from advisor.settings import AdvisorSettings, load_settings
from advisor.turnstile import Turnstile
from event_plane import wire
from event_plane.schema import Batch, BatchKind
from tests.nats_server import NatsServer
from tests.ports import free_ports
from tests.postgres import PostgresServer

SCHEMES = ("zmq+tcp", "nats", "jetstream")
LOGS = ("sqlite", "postgres", "segments")
PRODUCERS = (71, 72)
PATIENCE_S = 300.0
CONFIG = """
directory = "{directory}"
tick_interval_s = 0.2
checkpoint_interval_s = 1.0
[api]
port = 0
[log]
{log}
"""


@dataclass(frozen=True)
class Held:
    """What an engine says of itself when it is quiet."""

    epoch: int
    sequence: int
    blocks: tuple[int, ...]


class EngineProcess:
    """One producer; each start is a new life of it."""

    def __init__(self, url: str, resend_url: str, producer: int) -> None:
        self.producer = producer
        self._command = [sys.executable, "-m", "tests.crash.plane_engine", url, resend_url, str(producer)]
        self.start()

    def start(self) -> None:
        self._process = subprocess.Popen(self._command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)

    def kill(self) -> None:
        self._process.kill()
        self._process.communicate()

    def ask(self, word: str) -> Held:
        """`quiet`: publish no more of its own. Any word: say what it holds now."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(f"{word}\n")
        self._process.stdin.flush()
        said = json.loads(self._process.stdout.readline())
        return Held(said["epoch"], said["sequence"], tuple(said["blocks"]))


class Service:
    """`kvadvisor serve`, which ends by itself when its database is gone and is then started again."""

    def __init__(self, config: Path) -> None:
        self._command = [sys.executable, "-m", "advisor.cli", "serve", "--config", str(config)]
        self._errors = config.with_suffix(".err")
        self.start()

    def start(self) -> None:
        with self._errors.open("ab") as errors:
            self._process = subprocess.Popen(self._command, stdout=subprocess.DEVNULL, stderr=errors)

    def is_running(self) -> bool:
        return self._process.poll() is None

    def end(self, how: signal.Signals) -> None:
        self._process.send_signal(how)
        self._process.wait(60)

    def said(self) -> str:
        return self._errors.read_text()[-3_000:]


class Plane:
    """Engines, the transport's server, the log's server and the service, in one folder."""

    def __init__(self, folder: Path, scheme: str, log: str, ended: ExitStack, extra: str = "") -> None:
        self.folder = folder
        self._log = log
        self._nats = NatsServer(folder / "nats", "", jetstream=True, monitor=False)
        self._postgres: PostgresServer | None = None
        self.victims: list[Callable[[], None]] = [self._kill_service, self._kill_service]
        if log == "postgres":
            self._postgres = PostgresServer()
            ended.callback(self._postgres.close)
            self.victims.append(self._kill_postgres)
        if scheme != "zmq+tcp":
            self._nats.start()
            ended.callback(self._nats.stop)
            self.victims.append(self._kill_nats)
        self.config = folder / "advisor.toml"
        text = CONFIG.format(directory=folder / "state", log=self._log_lines() + extra)
        self.engines: list[EngineProcess] = []
        for producer in PRODUCERS:
            url, resend_url = self._urls(scheme, producer)
            text += f'[[sources]]\nname = "p{producer}"\nurl = "{url}"\nresend_url = "{resend_url}"\n'
            self.engines.append(EngineProcess(url, resend_url, producer))
            ended.callback(self.engines[-1].kill)
            self.victims.append(lambda engine=self.engines[-1]: self._kill_engine(engine))  # type: ignore[misc]
        self.config.write_text(text)
        self.service = Service(self.config)
        ended.callback(lambda: self.service.end(signal.SIGKILL))

    @property
    def settings(self) -> AdvisorSettings:
        return load_settings(self.config, {})

    def _log_lines(self) -> str:
        match self._log:
            case "segments":
                return 'kind = "segments"\n'
            case "postgres":
                assert self._postgres is not None
                return f'url = "{self._postgres.url("postgres")}"\npassword_file = "{self._postgres.password_file}"\n'
        return ""

    def _urls(self, scheme: str, producer: int) -> tuple[str, str]:
        if scheme == "zmq+tcp":
            publish, resend = free_ports(2)
            return f"zmq+tcp://127.0.0.1:{publish}", f"zmq+tcp://127.0.0.1:{resend}"
        return self._nats.url(f"kv{producer}", scheme), ""

    def _kill_service(self) -> None:
        self.service.end(signal.SIGKILL)
        self.service.start()

    def _kill_engine(self, engine: EngineProcess) -> None:
        engine.kill()
        engine.start()

    def _kill_nats(self) -> None:
        self._nats.kill()
        self._nats.start()

    def _kill_postgres(self) -> None:
        assert self._postgres is not None
        self._postgres.stop()
        self._postgres.start()
        self.keep_serving()

    def keep_serving(self) -> None:
        """A service whose database went away, or whose predecessor still holds it, ends with a sentence."""
        if not self.service.is_running():
            self.service.start()

    def quiet(self) -> dict[int, Held]:
        """Stop the engines' work and wait until the log has all of it; by producer, what its engine holds."""
        for engine in self.engines:
            engine.ask("quiet")
        deadline = time.monotonic() + PATIENCE_S
        while True:
            self.keep_serving()
            time.sleep(0.5)
            held = {engine.producer: engine.ask("told") for engine in self.engines}
            if self._logged() == {producer: (h.epoch, h.sequence) for producer, h in held.items()}:
                return held
            if time.monotonic() > deadline:
                raise AssertionError(f"the log has {self._logged()}, the engines {held}; it said {self.service.said()}")

    def wait_for_progress(self) -> None:
        """Until the log takes what comes."""
        deadline = time.monotonic() + PATIENCE_S
        before = self._last_position()
        while self._last_position() <= before:
            self.keep_serving()
            assert time.monotonic() < deadline, f"nothing is logged; the service said {self.service.said()}"
            time.sleep(0.2)

    def _last_position(self) -> int:
        try:
            with closing(open_log(self.settings, read_only=True)) as log:
                return log.last_position()
        except AdvisorError:
            return 0

    def _logged(self) -> dict[int, tuple[int, int]]:
        """By producer: epoch and last number in the log."""
        try:
            batches = [wire.decode(entry.payload) for entry in self.entries() if entry.kind is EntryKind.BATCH]
        except AdvisorError:  # it is being written to, or its server starts
            return {}
        return {batch.producer: (batch.epoch, last_of(batch)) for batch in batches}

    def entries(self) -> Iterator[LogEntry]:
        with closing(open_log(self.settings, read_only=True)) as log:
            yield from log.read()


def last_of(batch: Batch) -> int:
    """The last number that a batch accounts for."""
    return batch.snapshot.through if batch.kind is BatchKind.LOST and batch.snapshot else batch.sequence


def require_laws(plane: Plane, held: dict[int, Held], *, whole: bool = True) -> int:
    """Of a stopped service: each batch once, in order, and every way to fold the log gives what the engines hold.

    `whole`: the log was not cut. Returns how many batches the log has.
    """
    entries = list(plane.entries())
    batches = [wire.decode(entry.payload) for entry in entries if entry.kind is EntryKind.BATCH]
    require_once_in_order(batches, whole=whole)
    lock = Turnstile()
    with closing(open_log(plane.settings, read_only=True)) as log:
        saved, _, passed_over = load_newest(
            plane.settings.checkpoints_path, IndexSize.for_bytes(plane.settings.index_memory_bytes_max),
            log.last_position(), lock, first_position=log.first_position(), set_aside=False,
        )  # fmt: skip
    assert not passed_over
    folds = [saved]
    for entry in entries:
        if entry.position > saved.position:
            saved.apply(entry)
    if whole:
        folds += [Fold(), Fold()]
        for fold in folds[1:]:
            for entry in entries:
                fold.apply(entry)
    assert len({fold.digest() for fold in folds}) == 1, "folds differ"
    for producer, state in held.items():
        folded = saved.producers[producer]
        assert (folded.epoch, folded.sequence, folded.partial) == (state.epoch, state.sequence, False), folded
        assert placed(saved, producer) == list(state.blocks)
    return len(batches)


def placed(fold: Fold, producer: int) -> list[int]:
    keys = [fold.index.placed_keys(place) for place in fold.index.places_of(producer)]
    return sorted(int(key["sequence_hash_lo"]) for each in keys for key in each)


def require_once_in_order(batches: list[Batch], *, whole: bool) -> None:
    """Each (producer, epoch, sequence) once; epochs one after another; a hole only where a snapshot makes up for it."""
    for producer in PRODUCERS:
        of_producer = [batch for batch in batches if batch.producer == producer]
        lives = [(epoch, list(life)) for epoch, life in groupby(of_producer, lambda batch: batch.epoch)]
        epochs = [epoch for epoch, _ in lives]
        assert len(set(epochs)) == len(epochs), f"{producer}: an epoch was opened again"
        for number, (epoch, life) in enumerate(lives):
            following = life[0].sequence if number == 0 and not whole else 0
            for batch in life:
                made_up_for = batch.kind is BatchKind.SNAPSHOT_BEGIN and batch.sequence > following
                assert batch.sequence == following or made_up_for, (
                    f"{producer}/{epoch}: {batch.sequence} ({batch.kind.name}) where {following} should be"
                )
                following = last_of(batch) + 1


def disturb(scheme: str, log: str, rounds: int, moments: random.Random, folder: Path, extra: str = "") -> str:
    """Kill something every second or so, `rounds` times, then require the laws. Returns a line about it."""
    with ExitStack() as ended:
        plane = Plane(folder, scheme, log, ended, extra)
        for _ in range(rounds):
            if moments.random() < 0.7:
                plane.wait_for_progress()
            time.sleep(moments.uniform(0.0, 2.0))
            moments.choice(plane.victims)()
        held = plane.quiet()
        plane.service.end(signal.SIGTERM)
        count = require_laws(plane, held, whole=not extra)
        blocks = sum(len(each.blocks) for each in held.values())
        return f"{scheme} to {log}: {rounds} kills, {count} batches, each once; {blocks} blocks"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--seed", type=int, default=int(time.time()))
    parser.add_argument("--scheme", choices=SCHEMES, action="append")
    parser.add_argument("--log", choices=LOGS, action="append")
    parser.add_argument("--retention-bytes", type=int, default=0)
    arguments = parser.parse_args()
    print(f"seed {arguments.seed}", flush=True)
    moments = random.Random(arguments.seed)
    extra = f"retention_bytes = {arguments.retention_bytes}\n" if arguments.retention_bytes else ""
    for scheme, log in product(arguments.scheme or SCHEMES, arguments.log or LOGS):
        with tempfile.TemporaryDirectory(prefix="kvadvisor-plane-") as made:
            print(disturb(scheme, log, arguments.rounds, moments, Path(made), extra), flush=True)


if __name__ == "__main__":
    main()
