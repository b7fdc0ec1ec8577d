"""Has moves carried out: the shell around `advisor.moves` and `advisor.move_turns`.

Every step is logged before the next command is sent. Open moves are read from the fold, so a restart goes on where the
log ends; command ids are made of what they carry, so a command asked again after a crash is the same one.
"""

from __future__ import annotations

import threading
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from functools import partial
from typing import TypeVar

import structlog

from advisor.agent_watch import volume_changes
from advisor.entries import Control, MoveStep, OutcomeBatch, VolumeEntry
from advisor.fold import Fold
from advisor.move_turns import Way, next_turns
from advisor.movers.port import GOOD, DeadlinePassed, MoverPort, Phase, command_for
from advisor.moves import FREES_SOURCE, Move, MoveKind, MoveState, Trigger
from advisor.pipeline import StoppedError
from advisor.tracing import Span, no_span
from advisor.transfer_times import RecentTransfers
from advisor.turnstile import Turnstile
from advisor.wording import moment_text
from storage_agent.errors import AgentUnreachable, CommandRefused, StaleTerm
from storage_agent.port import AgentStat, CommandOutcome

COMMANDS_MAX = 64
"""Commands under way, of all agents."""
LOOK_S = 0.2
UNREACHABLE_PAUSE_S = 1.0

_log = structlog.get_logger()
_T = TypeVar("_T")


class Mover(threading.Thread):
    """One thread that hands out commands, one for each command under way, and one for each agent that watches it."""

    def __init__(
        self,
        movers: Mapping[str, MoverPort],
        fold: Fold,
        lock: Turnstile,
        submit: Callable[[Control], Future[int]],
        *,
        stopping: threading.Event,
        fail: Callable[[BaseException], None],
        watch_interval_s: float,
        term: int,
        moves_at_once: Mapping[str, int],
        away_after_s: Mapping[str, float],
        span: Span = no_span,
    ) -> None:
        """`movers`, by agent. `moves_at_once`: commands under way on one way of an agent's, 1 where nothing is said.
        `away_after_s`: volumes of an agent that is unreachable for so long are away; never, where nothing is said."""
        super().__init__(name="kvadvisor-mover", daemon=True)
        self.unreachable: dict[str, str] = {}
        """By agent: why it cannot be reached, since when. Replaced whole, never changed."""
        self.stats: dict[str, AgentStat] = {}
        """By agent: what it said last. Replaced whole, never changed."""
        self._transfers = RecentTransfers()
        self._movers = movers
        self._fold = fold
        self._lock = lock
        self._submit = submit
        self._stopping = stopping
        self._fail = fail
        self._watch_interval_s = watch_interval_s
        self._term = term
        self._moves_at_once = moves_at_once
        self._away_after_s = away_after_s
        self._span = span
        self._wake = threading.Event()
        self._guard = threading.Lock()
        """Of what follows, and of what agents said."""
        self._taken: set[str] = set()
        """Moves that a command carries."""
        self._under_way: Counter[Way] = Counter()
        self._looking = {agent: threading.Lock() for agent in movers}
        """Held from an agent's answer to the entries made of it, so that the log has them in the agent's order."""
        self._totals: dict[str, dict[tuple[str, str], tuple[int, float]]] = {agent: {} for agent in movers}

    def wake(self) -> None:
        """There may be open moves."""
        self._wake.set()

    def run(self) -> None:
        for agent in self._movers:
            self._start(f"watch-{agent}", partial(self._watch, agent))
        self._guarded(self._hand_out)

    def _start(self, name: str, work: Callable[[], None]) -> None:
        threading.Thread(target=self._guarded, args=(work,), name=f"kvadvisor-{name}", daemon=True).start()

    def _guarded(self, work: Callable[[], None]) -> None:
        try:
            work()
        except StoppedError:
            return
        except Exception as fault:  # noqa: BLE001 -- reported by the service, which stops everything
            self._fail(fault)

    # -- agents

    def _watch(self, agent: str) -> None:
        """Look at an agent's volumes, again and again."""
        lost_s = 0.0
        while not self._stopping.is_set():
            answers = self.look(agent)
            if answers:
                lost_s = 0.0
            else:
                lost_s = lost_s or time.monotonic()
                if time.monotonic() - lost_s >= self._away_after_s.get(agent, float("inf")):
                    why = f"agent {agent} is unreachable: {self.unreachable.get(agent, 'it does not answer')}"
                    with self._looking[agent]:
                        self._log_changes(agent, None, away=why)
            self._stopping.wait(self._watch_interval_s if answers else min(self._watch_interval_s, UNREACHABLE_PAUSE_S))

    def look(self, agent: str, *, let_go: str = "") -> bool:
        """Log what changed in an agent's volumes and what its transfers took since the last look; it is applied when
        this returns. False: the agent does not answer. From any thread.

        `let_go`: a volume that a person has taken from the agent; it is unregistered also where it is optional.
        """
        with self._looking[agent]:
            stat = self._ask(agent, lambda mover: mover.stat())
            if stat is None:
                return False
            with self._guard:
                self.stats = {**self.stats, agent: stat}
                self._transfers.note(agent, stat.volumes, time.monotonic())
            self._log_changes(agent, stat, let_go=let_go)
            return True

    def transfer_times(self, agent: str, volume: str, operation: str) -> list[int]:
        """See `RecentTransfers.counts`. From any thread."""
        with self._guard:
            return self._transfers.counts(agent, volume, operation)

    def _log_changes(self, agent: str, stat: AgentStat | None, *, away: str = "", let_go: str = "") -> None:
        with self._lock:
            known = [volume for volume in self._fold.volumes.values() if volume.agent == agent]
            changes = volume_changes(agent, known, stat, self._totals[agent], away, let_go)
        for control in changes:
            self._log_and_wait(control)
            if isinstance(control, VolumeEntry):
                _tell_of_volume(control)

    # -- moves

    def _hand_out(self) -> None:
        while not self._stopping.is_set():
            for agent, turns in self._turns().items():
                for way, moves in turns.items():
                    self._start(f"move-{way.source}", partial(self._carry_out, agent, way, moves))
            self._wake.wait(min(LOOK_S, self._watch_interval_s))
            self._wake.clear()

    def _turns(self) -> dict[str, dict[Way, list[Move]]]:
        """By agent, the commands to send now; their moves are taken."""
        with self._guard, self._lock:
            fold = self._fold
            free = {
                volume.volume_id: volume.as_planned().capacity_blocks - fold.index.place_figures(volume.place).blocks
                for volume in fold.volumes.values()
            }
            turns = next_turns(fold.moves.open.values(), self._taken, fold.paused, free)
            chosen: dict[str, dict[Way, list[Move]]] = defaultdict(dict)
            for way, moves in turns.items():
                volume = fold.volumes.get(way.source)
                if volume is None or volume.agent not in self._movers or volume.agent in self.unreachable:
                    continue
                full = self._under_way.total() >= COMMANDS_MAX
                if full or self._under_way[way] >= self._moves_at_once.get(volume.agent, 1):
                    continue
                chosen[volume.agent][way] = moves
                self._taken.update(move.move_id for move in moves)
                self._under_way[way] += 1
            return chosen

    def _carry_out(self, agent: str, way: Way, moves: list[Move]) -> None:
        try:
            self._advance(agent, moves)
        finally:
            with self._guard:
                self._taken.difference_update(move.move_id for move in moves)
                self._under_way[way] -= 1
            self.wake()

    def _advance(self, agent: str, moves: list[Move]) -> None:
        """Take moves of one kind in one state as far as they go."""
        kind, state = moves[0].kind, moves[0].state
        if state is MoveState.PLANNED and kind in (MoveKind.PROMOTE, MoveKind.DEMOTE):
            moves = self._step(Trigger.BEGIN, moves, state)
            state = MoveState.COPYING
        if state is MoveState.COPYING:
            moves = self._command(agent, Phase.COPY, moves, state, Trigger.VERIFY)
            state = MoveState.VERIFIED
        elif state is MoveState.PLANNED and kind is MoveKind.DROP:
            moves = self._command(agent, Phase.CHECK, moves, state, Trigger.VERIFY)
            state = MoveState.VERIFIED
        if state in (MoveState.VERIFIED, MoveState.PLANNED):
            moves = self._step(Trigger.SWITCH, moves, state)
            state = MoveState.SWITCHED
        if kind in FREES_SOURCE:
            self._command(agent, Phase.FREE, moves, state, Trigger.FREE)
        else:
            self._step(Trigger.KEEP, moves, state)

    def _command(
        self, agent: str, phase: Phase, moves: Sequence[Move], state: MoveState, trigger: Trigger
    ) -> list[Move]:
        """Have a command carried out for those that are in `state` still, and log what became of them.

        Returns those that took `trigger`; none where there is no answer yet. Raises `StaleTerm`, which ends the
        service: another advisor carries these moves on.
        """
        moves = _still(moves, state)
        if not moves:
            return []
        command = command_for(phase, moves, self._term)
        try:
            with self._span("command", agent=agent, phase=str(phase), moves=len(moves)):
                outcome = self._ask(agent, lambda mover: mover.carry_out(command))
        except StaleTerm:
            raise
        except (CommandRefused, DeadlinePassed) as fault:
            self._step(Trigger.ABORT, moves, state, str(fault))
            return []
        if outcome is None:
            self._stopping.wait(UNREACHABLE_PAUSE_S)
            return []
        good, bad = _split(moves, outcome, phase)
        good = self._step(trigger, good, state, outcome=_batch_of(outcome))
        for reason, failed in bad.items():
            self._step(Trigger.ABORT, failed, state, reason)
        return good

    def _step(
        self,
        trigger: Trigger,
        moves: Sequence[Move],
        state: MoveState,
        reason: str = "",
        outcome: OutcomeBatch | None = None,
    ) -> list[Move]:
        """Log the step of those that are in `state` still: others were cancelled, or lost a volume, meanwhile.

        Returns those that took it.
        """
        moves = _still(moves, state)
        if moves:
            self._log_and_wait(MoveStep(str(trigger), [move.move_id for move in moves], reason, outcome))
        for move in moves:
            _tell(move, trigger, reason)
        return [move for move in moves if move.state is not MoveState.ABORTED]

    def _log_and_wait(self, control: Control) -> None:
        """Returns when the entry is committed and applied. Raises `StoppedError` when the service stops first."""
        self._submit(control).result()

    def _ask(self, name: str, ask: Callable[[MoverPort], _T]) -> _T | None:
        """One question to an agent's mover. None: it cannot be reached, which is noted and shown, and asked again."""
        try:
            answer = ask(self._movers[name])
        except AgentUnreachable as fault:
            with self._guard:
                if not self._stopping.is_set() and name not in self.unreachable:
                    _log.warning("agent unreachable", agent=name, fault=str(fault))
                    since = moment_text(time.time_ns() // 1000)
                    self.unreachable = {**self.unreachable, name: f"{fault} (since {since} UTC)"}
            return None
        with self._guard:
            if name in self.unreachable:
                _log.info("agent reachable again", agent=name)
                self.unreachable = {k: v for k, v in self.unreachable.items() if k != name}
        return answer


def _tell_of_volume(entry: VolumeEntry) -> None:
    facts = {"volume": entry.descriptor["id"], "agent": entry.agent}
    if entry.away:
        _log.warning(f"volume is away: {entry.away}", **facts)
    else:
        _log.debug("volume is there" if entry.registered else "volume is gone", **facts)


def _tell(move: Move, trigger: Trigger, reason: str) -> None:
    facts = {"kind": str(move.kind), "volume": move.source, "target": move.target}
    _log.debug(f"move took {trigger}", move=move.move_id, **facts, **({"reason": reason} if reason else {}))


def _still(moves: Sequence[Move], state: MoveState) -> list[Move]:
    return [move for move in moves if move.state is state]


def _batch_of(outcome: CommandOutcome) -> OutcomeBatch:
    return OutcomeBatch(outcome.producer, outcome.epoch, outcome.sequence)


def _split(
    moves: Sequence[Move], outcome: CommandOutcome, phase: Phase
) -> tuple[list[Move], dict[str, list[Move]]]:
    """Moves that may go on, and the others by why not."""
    good: list[Move] = []
    bad: dict[str, list[Move]] = defaultdict(list)
    by_key = {tuple(answer.key): answer for answer in outcome.outcomes}
    for move in moves:
        answer = by_key.get(tuple(move.key))
        if answer is not None and answer.result in GOOD[phase]:
            good.append(move)
        else:
            bad["the agent gave no answer" if answer is None else (answer.reason or str(answer.result))].append(move)
    return good, bad
