"""The advisor service: log, fold, mover and their threads, started and stopped as one. The admin view reads it.

A vendor's process embeds it as a context manager (`examples/embed.py`); `kvadvisor serve` adds the admin view.
"""

from __future__ import annotations

import contextlib
import os
import queue
import socket
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future
from importlib.metadata import version
from types import TracebackType
from typing import Self

import structlog

from advisor.changed_settings import changes_kept, settings_entry
from advisor.checkpoint import cut_without_checkpoint, load_newest
from advisor.checkpointer import Checkpointer
from advisor.compaction_runner import CompactionRunner
from advisor.deletion_prover import DeletionProver
from advisor.entries import Control, EntryKind, EventLog, LogEntry, Tick, control_entry
from advisor.errors import ActionRefused, AdvisorError, LogError, NothingSuch
from advisor.fold import Fold
from advisor.hooks import Hook, HookDesk, HookFigures, hook_named
from advisor.index import INDEX_FULL, ArrayIndex, IndexSize
from advisor.index.jit import has_compiled
from advisor.index.warm import warm as warm_index
from advisor.intake import Intake, SourceFacts
from advisor.log import read_decoded
from advisor.log_queries import LogQueries
from advisor.metrics import Metrics
from advisor.moment import Moment
from advisor.mover import Mover
from advisor.movers.agent import AgentMover
from advisor.movers.opening import open_mover
from advisor.movers.port import MoverPort
from advisor.movers.published import PublishedMover
from advisor.open_log import log_place, open_log, open_queries
from advisor.pipeline import FoldThread, Group, LogThread, StoppedError, now_us
from advisor.policies.warm import warm as warm_policies
from advisor.retention import Retention
from advisor.settings import AdvisorSettings, SourceSettings
from advisor.tracing import Span, no_span, open_tracing
from advisor.turnstile import Turnstile
from event_plane.connect import open_subscriber
from event_plane.schema import Namespace
from event_plane.transport import Subscriber
from storage_agent.client import AgentClient
from storage_agent.port import AgentPort, AgentStat

SAMPLES_KEPT_MAX = 3_600
STOP_WAIT_S = 10.0
COMPILE_HINT_S = 8.0
BLOCKS_AHEAD = 1 << 17
"""Blocks for which the index has memory ready, so that ingest does not wait for the kernel to find some."""

_log = structlog.get_logger()


class ServiceFault(AdvisorError):
    """Something in the service failed that is not the user's doing; what was acknowledged is in the log."""


class AdvisorService:
    """One advisor. `start` raises what is wrong with settings, log or sources; later faults end it, see `failure`."""

    def __init__(
        self,
        settings: AdvisorSettings,
        *,
        agents: Mapping[str, AgentPort] | None = None,
        movers: Mapping[str, MoverPort] | None = None,
        hooks: Mapping[str, Hook] | None = None,
    ) -> None:
        """`agents`, by name, stand in the place of those of the settings. `movers`, by agent, carry out its moves. Both
        are the caller's to close. `hooks`, by name, are called beside those that the settings name."""
        self.settings = settings
        self.lock = Turnstile()
        """Held by whoever reads or changes `fold`."""
        self.fold = Fold(ArrayIndex(self._index_size(), lock=self.lock))
        self.metrics = Metrics()
        self.term = 0
        self.started_s = time.monotonic()
        self.failure: BaseException | None = None
        self.stopping = threading.Event()
        self.samples: deque[tuple[int, Moment]] = deque(maxlen=SAMPLES_KEPT_MAX)
        self._agents = agents
        self._movers = dict(movers or {})
        self._hooks = dict(hooks or {})
        self._hook_desk: HookDesk | None = None
        self._log: EventLog | None = None
        self._opened: list[MoverPort] = []
        self._clients: list[AgentClient] = []
        self._threads: list[threading.Thread] = []
        self.checkpointer: Checkpointer | None = None
        self.retention: Retention | None = None
        self.settings_note = ""
        """What became of settings that were changed here, at the start."""
        self.passed_over: list[str] = []
        """Checkpoints that the start could not use, a sentence each."""
        self._log_thread: LogThread | None = None
        self.span: Span = no_span
        """Opens a span of a trace, where the settings ask for them."""
        self._end_traces: Callable[[], None] = _nothing
        self._mover: Mover | None = None
        self._prover: DeletionProver | None = None

    # -- life

    def start(self) -> None:
        """Open the log, fold it, connect, and run. Raises `AdvisorError` or the event plane's errors."""
        _prepare_index()
        if self.settings.traces.enabled:
            self.span, self._end_traces = open_tracing(self.settings.traces.endpoint, version("kvadvisor"))
        self._log = open_log(self.settings)
        try:
            self._start(self._log)
        except BaseException:
            self.stop()
            raise

    def _start(self, log: EventLog) -> None:
        self.term = log.next_term(now_us(), socket.gethostname(), os.getpid(), version("kvadvisor"))
        facts = [_facts(source) for source in self.settings.sources]
        cursors = Intake(facts)
        self._fold_log(log, cursors)
        intake = Intake(facts)
        intake.load(cursors.cursors())
        for producer, state in self.fold.producers.items():
            if state.partial:
                intake.want_snapshot(producer, state.epoch)
        kept = changes_kept(self.settings.planning, self.fold.file_settings, self.fold.changed_settings)
        self.settings_note = kept.note
        if kept.note:
            _log.warning(kept.note)
        entry = control_entry(settings_entry(self.settings.planning, kept.changes, self.term))
        position = log.append([entry], now_us())
        self.fold.apply(LogEntry(position, EntryKind.SETTINGS, entry.payload))
        subscribers = self._connect(intake)
        groups: queue.Queue[Group] = queue.Queue(maxsize=self.settings.queue_entries_max)
        self._log_thread = LogThread(
            log,
            intake,
            subscribers,
            groups,
            batches_max=self.settings.commit_batches_max,
            stopping=self.stopping,
            fail=self._fail,
            committed=self.metrics.commit_seconds.observe,
            span=self.span,
            probe_interval_s={source.name: source.probe_interval_s for source in self.settings.sources},
        )
        movers = self._open_movers()
        self._mover = mover = Mover(
            movers,
            self.fold,
            self.lock,
            self.submit,
            stopping=self.stopping,
            fail=self._fail,
            watch_interval_s=self.settings.tick_interval_s,
            term=self.term,
            moves_at_once={each.name: each.moves_at_once for each in self.settings.agents},
            away_after_s={each.name: each.away_after_s for each in self.settings.agents},
            span=self.span,
        )
        hooks = {name: hook_named(name) for name in self.settings.hooks} | self._hooks
        if hooks:
            self._hook_desk = HookDesk(hooks, self.fold, self.lock)
            self._hook_desk.start()
        fold_thread = FoldThread(
            self.fold,
            self.lock,
            cursors,
            groups,
            self._log_thread.unapplied,
            ended=self._log_thread.ended,
            fail=self._fail,
            applied=self._applied,
            span=self.span,
        )
        self._prover = DeletionProver(
            movers,
            self.fold,
            self.lock,
            self.submit,
            unreachable=lambda: mover.unreachable,
            stopping=self.stopping,
            fail=self._fail,
            interval_s=self.settings.tick_interval_s,
            term=self.term,
        )
        pulse = threading.Thread(target=self._pulse, name="kvadvisor-pulse", daemon=True)
        self.checkpointer = Checkpointer(
            self.fold,
            self.lock,
            cursors,
            self.settings.checkpoints_path,
            interval_s=self.settings.checkpoint_interval_s,
            stopping=self.stopping,
            fail=self._fail,
        )
        self.retention = Retention(
            log,
            self.settings.checkpoints_path,
            self.checkpointer,
            retention_bytes=self.settings.log.retention_bytes,
            retention_age_s=self.settings.log.retention_age_s,
            now_us=now_us,
            stopping=self.stopping,
            fail=self._fail,
        )
        runners = self._compaction_runners()
        self._threads = [fold_thread, self._log_thread, pulse, self._mover, self.checkpointer, self.retention, *runners]
        self._threads += self._prover.threads()
        for thread in self._threads:
            thread.start()

    def _applied(self, group: Group) -> None:
        """A group was folded: there may be moves to carry out, agents to ask, and hooks to call."""
        if self._mover is not None:
            self._mover.wake()
        if self._prover is not None:
            self._prover.wake()
        if self._hook_desk is not None:
            self._hook_desk.tell(group.entries)

    def _open_movers(self) -> dict[str, MoverPort]:
        """By agent: those of the settings, or the embedder's agents, and in their places the embedder's movers."""
        movers: dict[str, MoverPort] = {}
        if self._agents is not None:
            movers.update({name: AgentMover(agent) for name, agent in self._agents.items()})
        else:
            for each in self.settings.agents:
                if each.name not in self._movers:
                    self._opened.append(open_mover(each))
                    movers[each.name] = self._opened[-1]
        return movers | dict(self._movers)

    def _compaction_runners(self) -> list[CompactionRunner]:
        """One for each agent, unless its moves are carried out by another hand; over a connection of its own."""
        agents: dict[str, AgentPort] = dict(self._agents or {})
        if self._agents is None:
            for each in self.settings.agents:
                if each.mover == "agent":
                    self._clients.append(AgentClient(each.command_url, each.timeout_s, each.credentials))
                    agents[each.name] = self._clients[-1]
        return [
            CompactionRunner(
                name,
                agent,
                self.fold,
                self.lock,
                self.submit,
                stopping=self.stopping,
                fail=self._fail,
                tick_interval_s=self.settings.tick_interval_s,
                term=self.term,
            )
            for name, agent in agents.items()
            if name not in self._movers
        ]

    def _fold_log(self, log: EventLog, intake: Intake) -> None:
        first, last = log.first_position(), log.last_position()
        place = log_place(self.settings)
        self.fold, saved, self.passed_over = load_newest(
            self.settings.checkpoints_path, self._index_size(), last, self.lock, first_position=first
        )
        for sentence in self.passed_over:
            _log.warning(sentence)
        if self.fold.position < first - 1:
            raise cut_without_checkpoint(place, first, self.settings.checkpoints_path, self.passed_over)
        intake.load(saved)
        if last:
            _log.info("folding the log", checkpoint=self.fold.position, entries=last - self.fold.position)
        for entry, batch in read_decoded(log, place, self.fold.position + 1):
            self.fold.apply(entry, batch)
            if batch is not None:
                intake.restore(entry, batch)

    def _index_size(self) -> IndexSize:
        return IndexSize.for_bytes(self.settings.index_memory_bytes_max)

    def _connect(self, intake: Intake) -> list[Subscriber]:
        subscribers: list[Subscriber] = []
        with contextlib.ExitStack() as opened:
            for source in self.settings.sources:
                subscriber = open_subscriber(
                    source.name,
                    source.url,
                    source.resend_url or None,
                    topic=source.topic.encode(),
                    credentials=source.credentials,
                    resume=intake.resume(source.name),
                    when_slow=source.when_slow,
                )
                opened.callback(subscriber.close)
                subscribers.append(subscriber)
            opened.pop_all()
        return subscribers

    def stop(self) -> None:
        """Stop the threads and close the log. Idempotent; what was acknowledged is in the log."""
        self.stopping.set()
        for mover in self._opened:
            mover.close()
        self._opened = []
        if self._hook_desk is not None:
            self._hook_desk.stop()
        for client in self._clients:
            client.close()
        self._clients = []
        for thread in self._threads:
            if thread.is_alive() and thread is not threading.current_thread():
                thread.join(STOP_WAIT_S)
        if self.checkpointer is not None and self.failure is None and not any(t.is_alive() for t in self._threads):
            self.checkpointer.write_last()
        self.checkpointer = None
        self._threads = []
        if self._log is not None:
            self._log.close()
            self._log = None
        self._end_traces()
        self.span, self._end_traces = no_span, _nothing

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, fault: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    def wait(self, timeout_s: float | None = None) -> bool:
        """Until it is asked to stop or fails; False on timeout. Raises the failure."""
        ended = self.stopping.wait(timeout_s)
        if self.failure is not None:
            raise self.failure
        return ended

    def _fail(self, fault: BaseException) -> None:
        if isinstance(fault, StoppedError):
            return
        if self.failure is None:
            if not isinstance(fault, AdvisorError):
                _log.error("the service failed", exc_info=fault)
            self.failure = fault
        self.stopping.set()

    # -- entries

    def submit(self, control: Control) -> Future[int]:
        """Log an entry; the future gives its position once it is applied."""
        if self._log_thread is None:
            raise ServiceFault("the service is not running: start it first")
        return self._log_thread.submit(control)

    def _pulse(self) -> None:
        """Ticks at their interval and a sample each second."""
        try:
            tick_s = sample_s = time.monotonic()
            wall_s = time.time() - sample_s
            told_full = False
            while not self.stopping.wait(max(0.0, min(tick_s, sample_s) - time.monotonic())):
                moment = time.monotonic()
                if moment >= sample_s:
                    # The second it was due: two samples never share one, however late they come.
                    self.samples.append((int(wall_s + sample_s), self.moment()))
                    sample_s += 1.0
                    self.fold.index.touch_ahead(BLOCKS_AHEAD)
                    if not told_full and self.fold.skipped[INDEX_FULL]:
                        told_full = True
                        _log.warning("the index is full; blocks that are not there yet are skipped")
                if moment >= tick_s:
                    tick_s = moment + self.settings.tick_interval_s
                    self.submit(Tick(now_us())).result()
        except Exception as fault:  # noqa: BLE001 -- reported by the service, which stops everything
            self._fail(fault)

    # -- figures

    def moment(self) -> Moment:
        """Counters now."""
        with self.lock:
            return Moment.of(self.fold, self.behind_s(), self.queue_entries())

    def open_queries(self) -> LogQueries:
        """Of the log, for one event loop. Raises `LogError`."""
        return open_queries(self.settings, self.log)

    @property
    def log(self) -> EventLog:
        """To be read, on any thread; what is appended goes through `submit`. Raises `LogError` before the start."""
        if self._log is None:
            raise LogError("the service is not running: start it first")
        return self._log

    def queue_entries(self) -> int:
        """Entries that are logged and not yet applied."""
        unapplied = self._log_thread.unapplied if self._log_thread is not None else deque[Group]()
        return sum(len(group.entries) for group in list(unapplied))

    def behind_s(self) -> float:
        """Age of the oldest of them."""
        thread = self._log_thread
        try:
            return time.monotonic() - thread.unapplied[0].appended_s if thread is not None else 0.0
        except IndexError:
            return 0.0

    @property
    def log_thread(self) -> LogThread | None:
        return self._log_thread

    @property
    def hook_figures(self) -> Mapping[str, HookFigures]:
        """By hook."""
        return {name: t.figures for name, t in self._hook_desk.threads.items()} if self._hook_desk is not None else {}

    @property
    def ignored_answers(self) -> Mapping[tuple[str, str], float]:
        """By agent and reason: answers to published plans that changed nothing."""
        return {
            (mover.agent, reason): count
            for mover in (*self._opened, *self._movers.values())
            if isinstance(mover, PublishedMover)
            for reason, count in list(mover.ignored.items())
        }

    @property
    def unreachable(self) -> Mapping[str, str]:
        """By agent: why it cannot be reached, since when."""
        return self._mover.unreachable if self._mover is not None else {}

    # -- agents

    @property
    def agent_stats(self) -> Mapping[str, AgentStat]:
        """By agent: what it said last."""
        return self._mover.stats if self._mover is not None else {}

    def transfer_times(self, agent: str, volume: str, operation: str) -> list[int]:
        """See `advisor.transfer_times.RecentTransfers.counts`."""
        return self._mover.transfer_times(agent, volume, operation) if self._mover is not None else []

    @contextlib.contextmanager
    def agent(self, name: str) -> Iterator[AgentPort]:
        """A storage agent to ask about its volumes, over a connection of its own.

        Raises `NothingSuch` where there is none of that name, `ActionRefused` for one that is no storage agent of ours.
        """
        if name in self._movers:
            raise ActionRefused(f"agent {name} moves blocks by a mover of this process: ask whoever embeds it")
        if self._agents is not None and name in self._agents:
            yield self._agents[name]
            return
        known = {} if self._agents is not None else {each.name: each for each in self.settings.agents}
        if name not in known:
            names = ", ".join(sorted([*known, *(self._agents or ())])) or "none: [[agents]] is empty"
            raise NothingSuch(f"agent {name!r} is not in the settings: name one of {names}")
        if known[name].mover != "agent":
            raise ActionRefused(f"agent {name} is an array that moves blocks by itself: change its volumes there")
        with AgentClient(known[name].command_url, known[name].timeout_s, known[name].credentials) as client:
            yield client

    def look(self, agent: str, *, let_go: str = "") -> bool:
        """See `Mover.look`."""
        return self._mover is not None and self._mover.look(agent, let_go=let_go)


def _nothing() -> None:
    """What ends traces where there are none."""


def _prepare_index() -> None:
    """Load the compiled functions. Where they must be compiled first, say so: it takes half a minute."""

    def say_if_compiling() -> None:
        if has_compiled():  # a start may be slow for other reasons
            _log.info("compiling the index's functions; `kvadvisor warm` does it at install")

    hint = threading.Timer(COMPILE_HINT_S, say_if_compiling)
    hint.start()
    try:
        warm_index()
        warm_policies()
    finally:
        hint.cancel()


def _facts(source: SourceSettings) -> SourceFacts:
    namespace = Namespace(tenant=source.tenant, model=source.model, revision=source.revision)
    return SourceFacts(source.name, source.dialect, namespace, source.hash_root_shared)
