"""The two threads of durable ingest (reference: ingest.md): one logs and acknowledges, one folds.

The log thread owns the subscribers, the intake and the log. It appends what the intake accepted in one transaction,
acknowledges after the commit, and hands the group to the fold thread through a bounded queue: when the fold is slow the
queue fills, the log thread stops receiving, and the publishers' windows fill in turn.
"""

from __future__ import annotations

import contextlib
import queue
import socket
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field

import structlog
import zmq

from advisor.entries import Appendable, Control, LogEntry, NewEntry, control_entry, logged
from advisor.errors import AdvisorError
from advisor.fold import Fold
from advisor.intake import Intake, Taken, Unreadable
from advisor.tracing import Span, no_span
from advisor.turnstile import Turnstile
from event_plane.schema import Batch, BatchKind
from event_plane.transport import Connection, Message, Received, Reconnected, ResendEnd, Subscriber

POLL_MS = 50
"""Longest wait for messages; also how often resend deadlines are looked at."""
PROBE_INTERVAL_S = 10.0
"""Of a source for which nothing is configured."""

_log = structlog.get_logger()


UNREADABLE_QUIET_S = 60.0
"""After a source's unreadable message was logged, others of the same reason are only counted for so long."""


class StoppedError(AdvisorError):
    """The service stopped before this entry was logged."""


@dataclass(slots=True)
class Group:
    """What one transaction appended, in order, and who waits for it to be applied."""

    entries: list[tuple[LogEntry, Batch | None]]
    waiting: list[Future[int]]
    appended_s: float
    """Monotonic time of the commit."""


def now_us() -> int:
    return time.time_ns() // 1000


@dataclass(slots=True)
class IngestFigures:
    """Counters of the log thread, written by it alone."""

    logged_position: int = 0
    batches: dict[str, int] = field(default_factory=dict)
    """By source."""
    heard_s: dict[str, float] = field(default_factory=dict)
    """By source: monotonic time at which its last message came, whatever became of it."""
    seen_s: dict[int, float] = field(default_factory=dict)
    """Monotonic time at which a producer's last batch was logged."""
    gaps_open: dict[str, int] = field(default_factory=dict)
    """By source: producers that something is missing of."""
    commits: int = 0
    commit_seconds_last: float = 0.0


class UnreadableLog:
    """Says what could not be read: the first message per source and reason at once, then at most one a minute.

    A publisher that sends nothing else would fill the disk with what it is told.
    """

    def __init__(self) -> None:
        self._said_s: dict[tuple[str, str], float] = {}
        self._silent: Counter[tuple[str, str]] = Counter()

    def say(self, unreadable: Unreadable, moment_s: float) -> None:
        """`moment_s`: monotonic."""
        which = (unreadable.source, unreadable.reason)
        said_s = self._said_s.get(which)
        if said_s is not None and moment_s - said_s < UNREADABLE_QUIET_S:
            self._silent[which] += 1
            return
        self._said_s[which] = moment_s
        since = self._silent.pop(which, 0)
        _log.warning(unreadable.reason, source=unreadable.source, detail=unreadable.detail, unsaid=since)


class _Asks:
    """A resend token for each producer of a source, the same each time: a second ask replaces the first."""

    def __init__(self) -> None:
        self._tokens: dict[tuple[str, int | None], int] = {}
        self._askers: list[tuple[str, int | None]] = []

    def token(self, source: str, producer: int | None) -> int:
        """`producer` None: of whoever the source carries."""
        token = self._tokens.setdefault((source, producer), len(self._askers))
        if token == len(self._askers):
            self._askers.append((source, producer))
        return token

    def asker(self, token: int) -> tuple[str, int | None]:
        """Source and producer that `token` was given to."""
        return self._askers[token]


class LogThread(threading.Thread):
    """Receives, logs, acknowledges. `submit` may be called from any thread; all else belongs to this one."""

    def __init__(
        self,
        log: Appendable,
        intake: Intake,
        subscribers: Sequence[Subscriber],
        groups: queue.Queue[Group],
        *,
        batches_max: int,
        stopping: threading.Event,
        fail: Callable[[BaseException], None],
        committed: Callable[[float], None] = lambda _: None,
        span: Span = no_span,
        probe_interval_s: Mapping[str, float] | None = None,
    ) -> None:
        """`probe_interval_s`, by source: how long a foreign producer may be silent before it is asked."""
        super().__init__(name="kvadvisor-log", daemon=True)
        self.figures = IngestFigures(logged_position=log.last_position())
        self.intake = intake
        self.unapplied: deque[Group] = deque()
        """Logged and not yet applied, oldest first; the fold thread takes off the left."""
        self._log = log
        self._subscribers = {subscriber.source: subscriber for subscriber in subscribers}
        self._groups = groups
        self._batches_max = batches_max
        self._stopping = stopping
        self._fail = fail
        self._committed = committed
        self._span = span
        self.ended = threading.Event()
        """Nothing is logged any more."""
        self._fold_is_behind = False
        self._controls: queue.SimpleQueue[tuple[NewEntry, Future[int]]] = queue.SimpleQueue()
        self._submitting = threading.Lock()
        """Held while a control is put in line, so that none is after the last was refused."""
        self._wake_in, self._wake_out = socket.socketpair()
        self._wake_in.setblocking(False)
        self._wake_out.setblocking(False)
        self._asks = _Asks()
        self._probe_interval_s = dict.fromkeys(self._subscribers, PROBE_INTERVAL_S) | dict(probe_interval_s or {})
        self._probe_due_s: dict[str, float] = {}
        self._unreadable = UnreadableLog()

    def connections(self) -> dict[str, Connection]:
        """How each source stands. From any thread."""
        return {source: subscriber.connection() for source, subscriber in self._subscribers.items()}

    def submit(self, control: Control) -> Future[int]:
        """Log an entry of our own. The future gives its position once it is applied, or raises `StoppedError`."""
        future: Future[int] = Future()
        with self._submitting:
            if self._stopping.is_set() or self.ended.is_set():
                future.set_exception(StoppedError("the service is stopping: nothing more is logged"))
                return future
            self._controls.put((control_entry(control), future))
        with contextlib.suppress(BlockingIOError, OSError):  # a full or closed pipe: the thread is awake or gone
            self._wake_in.send(b"x")
        return future

    def run(self) -> None:
        try:
            self._loop()
        except Exception as fault:  # noqa: BLE001 -- reported by the service, which stops everything
            self._fail(fault)
        finally:
            self._refuse_waiting()
            for subscriber in self._subscribers.values():
                subscriber.close()
            self._wake_in.close()
            self._wake_out.close()

    def _loop(self) -> None:
        # What was published while we were away, last known batch included: its checksum tells a new life apart.
        self._take([self.intake.connected(source, now_us()) for source in self._subscribers], [], [], [])
        while not self._stopping.is_set():
            if not any(self._receive_once()):
                self._poll()
        # What was submitted before the stop is still logged, so that no step that was taken is missing.
        self._receive_once()

    def _poll(self) -> None:
        # Anew each time: a resend that was asked for has a socket of its own.
        poller = zmq.Poller()
        poller.register(self._wake_out, zmq.POLLIN)
        for subscriber in self._subscribers.values():
            for pollable in subscriber.pollables():
                poller.register(pollable, zmq.POLLIN)
        poller.poll(POLL_MS)

    def _receive_once(self) -> tuple[int, int]:
        """One round over controls and subscribers; returns how many of each were logged."""
        with contextlib.suppress(BlockingIOError):
            while self._wake_out.recv(4096):
                pass
        new: list[NewEntry] = []
        batches: list[Batch | None] = []
        waiting: list[tuple[int, Future[int]]] = []
        while not self._controls.empty() and len(new) < self._batches_max:
            entry, future = self._controls.get_nowait()
            waiting.append((len(new), future))
            new.append(entry)
            batches.append(None)
        controls = len(new)
        taken = self._probes()
        for source, subscriber in self._subscribers.items():
            taken += [self._offered(source, received) for received in subscriber.receive(self._batches_max)]
        # Last: what came while a commit took long, or the thread had no turn, came in time.
        taken.append(self.intake.tick(now_us()))
        self._take(taken, new, batches, waiting)
        self.figures.gaps_open = self.intake.gaps_open()
        return controls, len(new) - controls

    def _offered(self, source: str, received: Received) -> Taken:
        match received:
            case Message():
                self.figures.heard_s[source] = time.monotonic()
                return self.intake.offer(received, now_us())
            case ResendEnd():
                return self.intake.resend_ended(source, now_us(), self._asks.asker(received.token)[1])
            case Reconnected():
                return self.intake.connected(source, now_us())

    def _probes(self) -> list[Taken]:
        """Ask foreign producers that are silent whether something of theirs was lost."""
        moment = time.monotonic()
        taken = []
        for source, interval_s in self._probe_interval_s.items():
            if moment >= self._probe_due_s.setdefault(source, moment + interval_s):
                self._probe_due_s[source] = moment + interval_s
                taken.append(self.intake.probe(source, round(interval_s * 1_000_000), now_us()))
        return taken

    def _take(
        self,
        taken: list[Taken],
        new: list[NewEntry],
        batches: list[Batch | None],
        waiting: list[tuple[int, Future[int]]],
    ) -> None:
        """Log what was accepted, after `new`; acknowledge it; ask for what is missing, and log what nobody has."""
        while taken:
            for step in taken:
                for unreadable in step.unreadable:
                    self._unreadable.say(unreadable, time.monotonic())
                new += [accepted.entry for accepted in step.accepted]
                batches += [accepted.batch for accepted in step.accepted]
            if new:
                self._append(new, batches, waiting)
            # The last word on a producer says all that those before it do.
            last = {(source, producer): rest for step in taken for source, producer, *rest in step.acknowledged}
            for (source, producer), (epoch, sequence) in last.items():
                self._subscribers[source].acknowledge(producer, epoch, sequence)
            taken = [answer for step in taken for answer in self._ask(step)]
            new, batches, waiting = [], [], []

    def _ask(self, step: Taken) -> list[Taken]:
        """Send what a step asks for; returns what follows where a source cannot be asked."""
        refused = []
        for source, asked, from_sequence in step.resends:
            if asked is not None:
                missing = {"source": source, "producer": f"{asked:016x}", "from_sequence": from_sequence}
                _log.debug("batches are missing and are asked for again", **missing)
            token = self._asks.token(source, asked)
            if not self._subscribers[source].ask_resend(from_sequence, token, asked):
                refused.append(self.intake.cannot_resend(source, now_us(), asked))
        for source, producer, epoch in step.snapshots:
            _log.debug("a snapshot is asked for", source=source, producer=f"{producer:016x}", epoch=f"{epoch:x}")
            if not self._subscribers[source].ask_snapshot(producer, epoch):
                refused.append(self.intake.cannot_ask_snapshot(producer, now_us()))
        return refused

    def _append(
        self, new: list[NewEntry], batches: list[Batch | None], waiting: list[tuple[int, Future[int]]]
    ) -> None:
        started = time.perf_counter()
        recorded_us = now_us()
        try:
            with self._span("commit", entries=len(new)) as span:
                first = self._log.append(new, recorded_us)
                span.set("position", first)
        except AdvisorError:
            for _, future in waiting:
                future.set_exception(StoppedError("the log could not take this"))
            raise
        self.figures.commit_seconds_last = time.perf_counter() - started
        self._committed(self.figures.commit_seconds_last)
        self.figures.commits += 1
        self.figures.logged_position = first + len(new) - 1
        moment = time.monotonic()
        entries: list[tuple[LogEntry, Batch | None]] = []
        for number, (entry, batch) in enumerate(zip(new, batches, strict=True)):
            entries.append((logged(first + number, entry, recorded_us), batch))
            if batch is not None:
                if batch.kind is BatchKind.LOST:
                    _log.warning("batches are lost", source=entry.source, producer=f"{batch.producer:016x}")
                self.figures.batches[entry.source] = self.figures.batches.get(entry.source, 0) + 1
                self.figures.seen_s[batch.producer] = moment
        group = Group(entries, [future for _, future in waiting], moment)
        self.unapplied.append(group)
        while not self._fold_is_behind:
            try:
                self._groups.put(group, timeout=0.2)
                return
            except queue.Full:
                if self._stopping.is_set():
                    # Nothing that follows may be folded either: the fold skips no entry.
                    self._fold_is_behind = True
                    _log.info("stopping with the fold behind; the log has what it lacks", position=first)

    def _refuse_waiting(self) -> None:
        with self._submitting:
            self.ended.set()
            while not self._controls.empty():
                _, future = self._controls.get_nowait()
                future.set_exception(StoppedError("the service stopped before this was logged"))


class FoldThread(threading.Thread):
    """Applies groups in order, each under the lock that readers share. Ends when nothing more is logged."""

    def __init__(
        self,
        fold: Fold,
        lock: Turnstile,
        cursors: Intake,
        groups: queue.Queue[Group],
        unapplied: deque[Group],
        *,
        ended: threading.Event,
        fail: Callable[[BaseException], None],
        applied: Callable[[Group], None],
        span: Span = no_span,
    ) -> None:
        """`cursors` is moved past each batch that is folded: the gate's memory at the fold's position. `ended`: the log
        thread's."""
        super().__init__(name="kvadvisor-fold", daemon=True)
        self._fold = fold
        self._lock = lock
        self._cursors = cursors
        self._groups = groups
        self._unapplied = unapplied
        self._ended = ended
        self._fail = fail
        self._applied = applied
        self._span = span

    def run(self) -> None:
        try:
            while not (self._ended.is_set() and self._groups.empty()):
                try:
                    group = self._groups.get(timeout=0.1)
                except queue.Empty:
                    continue
                self._apply(group)
        except Exception as fault:  # noqa: BLE001 -- reported by the service, which stops everything
            self._fail(fault)
        while self._unapplied:
            for future in self._unapplied.popleft().waiting:
                if not future.done():
                    future.set_exception(StoppedError("the service stopped before this was applied; the log has it"))

    def _apply(self, group: Group) -> None:
        with self._span("fold", entries=len(group.entries)) as span:
            for entry, batch in group.entries:
                # Let go after each: a reader waits for one batch at most.
                with self._lock:
                    self._fold.apply(entry, batch)
                    if batch is not None:
                        self._cursors.restore(entry, batch)
            span.set("position", self._fold.position)
        self._unapplied.popleft()
        for future in group.waiting:
            future.set_result(self._fold.position)
        self._applied(group)
