"""Carries out moves: the shell around `advisor.moves`. Every step is logged before the next command is sent.

The mover asks agents through `AgentPort`. Command ids are made of the phase and the moves they carry, so that a command
asked again after a crash of the advisor is answered by the agent as before.
"""

from __future__ import annotations

import hashlib
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from typing import TypeVar

import msgspec
import structlog

from advisor.entries import Control, Measurement, MoveStep, OutcomeBatch, VolumeEntry
from advisor.fold import Fold
from advisor.moves import FREES_SOURCE, Move, MoveKind, MoveState, Trigger
from advisor.pipeline import StoppedError
from advisor.turnstile import Turnstile
from storage_agent.errors import AgentUnreachable, CommandRefused, StaleTerm
from storage_agent.port import AgentPort, AgentStat, BlockKey, CommandOutcome, VolumeStat

COMMAND_MOVES_MAX = 32
"""Moves in one command, so that an agent's reads and writes are never held up by a long one."""
UNREACHABLE_PAUSE_S = 1.0

_log = structlog.get_logger()
_T = TypeVar("_T")


class Mover(threading.Thread):
    """One thread for all agents. Open moves are read from the fold, so a restart goes on where the log ends."""

    def __init__(
        self,
        agents: Mapping[str, AgentPort],
        fold: Fold,
        lock: Turnstile,
        submit: Callable[[Control], Future[int]],
        *,
        stopping: threading.Event,
        fail: Callable[[BaseException], None],
        watch_interval_s: float,
        term: int,
    ) -> None:
        super().__init__(name="kvadvisor-mover", daemon=True)
        self.unreachable: dict[str, str] = {}
        """By agent: why it cannot be reached, since when. Replaced whole, never changed."""
        self._agents = agents
        self._fold = fold
        self._lock = lock
        self._submit = submit
        self._stopping = stopping
        self._fail = fail
        self._watch_interval_s = watch_interval_s
        self._term = term
        self._wake = threading.Event()
        self._totals: dict[tuple[str, str], tuple[int, float]] = {}

    def wake(self) -> None:
        """There may be open moves."""
        self._wake.set()

    def run(self) -> None:
        watched_s = float("-inf")
        try:
            while not self._stopping.is_set():
                if time.monotonic() - watched_s >= self._watch_interval_s:
                    watched_s = time.monotonic()
                    for name in self._agents:
                        self._watch(name)
                if not self._carry_out_one():
                    self._wake.wait(min(0.2, self._watch_interval_s))
                    self._wake.clear()
        except StoppedError:
            return
        except Exception as fault:  # noqa: BLE001 -- reported by the service, which stops everything
            self._fail(fault)

    # -- volumes and measurements

    def _watch(self, name: str) -> None:
        """Log what changed in an agent's volumes and what its transfers took since the last look."""
        stat = self._ask(name, lambda agent: agent.stat())
        if stat is None:
            return
        for control in self._changes(name, stat):
            self._log_and_wait(control)

    def _changes(self, name: str, stat: AgentStat) -> list[Control]:
        changes: list[Control] = []
        with self._lock:
            known = {v.volume_id: v for v in self._fold.volumes.values() if v.agent == name}
            for volume in stat.volumes:
                descriptor = _descriptor(volume)
                before = known.pop(volume.descriptor.id, None)
                if before is None or before.descriptor != descriptor or before.producer != stat.producer:
                    changes.append(VolumeEntry(descriptor, agent=name, producer=stat.producer))
            changes += [VolumeEntry(v.descriptor, name, v.producer, registered=False) for v in known.values()]
        for volume in stat.volumes:
            for operation, total_bytes, total_seconds in (
                ("read", volume.read_bytes_total, volume.read_seconds_total),
                ("write", volume.write_bytes_total, volume.write_seconds_total),
            ):
                key = (volume.descriptor.id, operation)
                seen_bytes, seen_seconds = self._totals.get(key, (0, 0.0))
                self._totals[key] = (total_bytes, total_seconds)
                moved, seconds = total_bytes - seen_bytes, total_seconds - seen_seconds
                if moved > 0 and seconds > 0:
                    changes.append(Measurement(volume.descriptor.id, operation, moved, seconds))
        return changes

    # -- moves

    def _carry_out_one(self) -> bool:
        """Send one command, for moves that are in the same state on the same way. False: nothing to do."""
        for (agent, kind, state), moves in self._open_moves().items():
            if agent in self.unreachable and self._ask(agent, lambda port: port.stat()) is None:
                continue
            self._advance(agent, kind, state, moves)
            return True
        return False

    def _open_moves(self) -> dict[tuple[str, MoveKind, MoveState], list[Move]]:
        ready: dict[tuple[str, MoveKind, MoveState], list[Move]] = defaultdict(list)
        routes: dict[tuple[str, MoveKind, MoveState], tuple[str, str]] = {}
        with self._lock:
            # Moves that are furthest come first: what is copied must be switched before more is copied.
            for move in sorted(self._fold.moves.open.values(), key=lambda m: -_ORDER[m.state]):
                volume = self._fold.volumes.get(move.source)
                if volume is None:
                    continue
                key = (volume.agent, move.kind, move.state)
                route = (move.source, move.target)
                if routes.setdefault(key, route) == route and len(ready[key]) < COMMAND_MOVES_MAX:
                    ready[key].append(move)
        return ready

    def _advance(self, agent: str, kind: MoveKind, state: MoveState, moves: list[Move]) -> None:
        """Take one group as far as it goes."""
        if state is MoveState.PLANNED and kind in (MoveKind.PROMOTE, MoveKind.DEMOTE):
            self._step(Trigger.BEGIN, moves)
            state = MoveState.COPYING
        if state is MoveState.COPYING or (state is MoveState.PLANNED and kind is MoveKind.DROP):
            moves = self._copy_and_verify(agent, moves)
            state = MoveState.VERIFIED
        if moves and (state is MoveState.VERIFIED or state is MoveState.PLANNED):
            self._step(Trigger.SWITCH, moves)
            state = MoveState.SWITCHED
        if moves and state is MoveState.SWITCHED:
            if kind in FREES_SOURCE:
                self._free(agent, moves)
            else:
                self._step(Trigger.KEEP, moves)

    def _copy_and_verify(self, agent: str, moves: list[Move]) -> list[Move]:
        """Copy, or for a drop check the copy that is there. Moves that failed are aborted; the others are returned."""
        keys = [BlockKey(*move.key) for move in moves]
        source, target = moves[0].source, moves[0].target
        command_id = _command_id("copy", moves)
        outcome = self._command(
            agent, moves, lambda port: port.copy(command_id, keys, source, target, term=self._term)
        )
        if outcome is None:
            return []
        good, bad = _split(moves, outcome)
        if good:
            self._step(Trigger.VERIFY, good, outcome=_batch_of(outcome))
        for reason, failed in bad.items():
            self._step(Trigger.ABORT, failed, reason)
        return good

    def _free(self, agent: str, moves: list[Move]) -> None:
        keys = [BlockKey(*move.key) for move in moves]
        source = moves[0].source
        command_id = _command_id("delete", moves)
        outcome = self._command(agent, moves, lambda port: port.delete(command_id, source, keys, term=self._term))
        if outcome is None:
            return
        # A block that is gone already was freed by this command before a crash.
        good, bad = _split(moves, outcome, also="miss")
        if good:
            self._step(Trigger.FREE, good, outcome=_batch_of(outcome))
        for reason, failed in bad.items():
            self._step(Trigger.ABORT, failed, reason)

    def _command(
        self, name: str, moves: Sequence[Move], ask: Callable[[AgentPort], CommandOutcome]
    ) -> CommandOutcome | None:
        """A command's outcome; None where there is none yet, or where it was refused and the moves are aborted.

        Raises `StaleTerm`, which ends the service: another advisor carries these moves on.
        """
        try:
            return self._ask(name, ask)
        except StaleTerm:
            raise
        except CommandRefused as fault:
            self._step(Trigger.ABORT, moves, str(fault))
            return None

    def _step(
        self, trigger: Trigger, moves: Sequence[Move], reason: str = "", outcome: OutcomeBatch | None = None
    ) -> None:
        self._log_and_wait(MoveStep(str(trigger), [move.move_id for move in moves], reason, outcome))

    def _log_and_wait(self, control: Control) -> None:
        """Returns when the entry is committed and applied. Raises `StoppedError` when the service stops first."""
        self._submit(control).result()

    def _ask(self, name: str, ask: Callable[[AgentPort], _T]) -> _T | None:
        """One question to an agent. None: it cannot be reached, which is noted and shown, and asked again later."""
        try:
            answer = ask(self._agents[name])
        except AgentUnreachable as fault:
            if self._stopping.is_set():
                return None
            if name not in self.unreachable:
                _log.warning("agent unreachable", agent=name, fault=str(fault))
                self.unreachable = {**self.unreachable, name: f"{fault} (since {time.strftime('%H:%M:%S')})"}
            self._stopping.wait(UNREACHABLE_PAUSE_S)
            return None
        if name in self.unreachable:
            _log.info("agent reachable again", agent=name)
            self.unreachable = {k: v for k, v in self.unreachable.items() if k != name}
        return answer


_ORDER = {state: number for number, state in enumerate(MoveState)}


def _descriptor(volume: VolumeStat) -> dict[str, object]:
    return dict(msgspec.to_builtins(volume.descriptor))


def _command_id(phase: str, moves: Sequence[Move]) -> str:
    ids = "\n".join(sorted(move.move_id for move in moves))
    return f"{phase}-{hashlib.blake2b(ids.encode(), digest_size=12).hexdigest()}"


def _batch_of(outcome: CommandOutcome) -> OutcomeBatch:
    return OutcomeBatch(outcome.producer, outcome.epoch, outcome.sequence)


def _split(
    moves: Sequence[Move], outcome: CommandOutcome, also: str = ""
) -> tuple[list[Move], dict[str, list[Move]]]:
    good: list[Move] = []
    bad: dict[str, list[Move]] = defaultdict(list)
    by_key = {tuple(answer.key): answer for answer in outcome.outcomes}
    for move in moves:
        answer = by_key.get(tuple(move.key))
        if answer is not None and (answer.result.ok or answer.result == also):
            good.append(move)
        else:
            bad["the agent gave no answer" if answer is None else (answer.reason or str(answer.result))].append(move)
    return good, bad
