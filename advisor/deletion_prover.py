"""The shell of deletions: asks agents whether blocks are gone, and tells them whom to refuse.

A thread for each agent, so that one that does not answer holds up no other. What is to be asked is read from the fold,
so a restart goes on where the log ends; asking is freeing what is there still, so asking twice does no harm.
"""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import structlog

from advisor.entries import Control, DeletionStep, OutcomeBatch
from advisor.fold import Fold
from advisor.index import Key
from advisor.movers.port import DeadlinePassed, MoveBlock, MoveCommand, MoverPort, Phase
from advisor.moves import MoveKind
from advisor.pipeline import StoppedError
from advisor.turnstile import Turnstile
from storage_agent.errors import AgentUnreachable, CommandRefused, StaleTerm
from storage_agent.port import AgentStat, BlockKey, CommandOutcome, Result

QUESTION_KEYS_MAX = 512
"""Keys in one question, so that an agent's other commands do not wait long."""

LOOK_S = 0.1
"""Between two looks, at least."""

_log = structlog.get_logger()


@runtime_checkable
class RefusingMover(Protocol):
    """A mover whose agent can refuse tenants."""

    def refuse_tenants(self, tenants: Sequence[str], *, term: int) -> None:
        """See `storage_agent.port.AgentPort.refuse_tenants`."""


@dataclass(frozen=True, slots=True)
class Question:
    """A volume's open wave. `keys`: what its agent is to be asked for; None while its moves are under way."""

    deletion: str
    volume: str
    wave: int
    found: int
    note: str
    keys: tuple[Key, ...] | None


class DeletionProver:
    """Looks at its interval, and when it is woken, until `stopping` is set."""

    def __init__(
        self,
        movers: Mapping[str, MoverPort],
        fold: Fold,
        lock: Turnstile,
        submit: Callable[[Control], Future[int]],
        *,
        unreachable: Callable[[], Mapping[str, str]],
        stopping: threading.Event,
        fail: Callable[[BaseException], None],
        interval_s: float,
        term: int,
    ) -> None:
        """`movers`, by agent. `unreachable`: by agent, why it cannot be reached."""
        self._movers = movers
        self._fold = fold
        self._lock = lock
        self._submit = submit
        self._unreachable = unreachable
        self._stopping = stopping
        self._fail = fail
        self._interval_s = interval_s
        self._term = term
        self._woken = {agent: threading.Event() for agent in movers}

    def wake(self) -> None:
        """Something was folded: where deletions are open, there may be something to ask."""
        if self._fold.deletions.open:
            for woken in self._woken.values():
                woken.set()

    def threads(self) -> list[threading.Thread]:
        """One for each agent, to be started by the caller."""
        return [
            threading.Thread(target=self._run, args=(agent,), name=f"kvadvisor-deletions-{agent}", daemon=True)
            for agent in self._movers
        ]

    def _run(self, agent: str) -> None:
        asking, woken = _Asking(agent, self._movers[agent], self._term), self._woken[agent]
        try:
            looked_s = float("-inf")
            while not self._stopping.wait(min(LOOK_S, self._interval_s)):
                if woken.is_set() or time.monotonic() - looked_s >= self._interval_s:
                    woken.clear()
                    looked_s = time.monotonic()
                    for step in self._look(asking):
                        self._submit(step).result()
        except StoppedError:
            return
        except Exception as fault:  # noqa: BLE001 -- reported by the service, which stops everything
            self._fail(fault)

    def _look(self, asking: _Asking) -> list[DeletionStep]:
        """What became of the agent's open waves, where that is not known yet."""
        agent = asking.agent
        with self._lock:
            refused = sorted(self._fold.deletions.refused)
            questions = self._questions(agent)
        why = self._unreachable().get(agent, "")
        if why:
            why = f"agent {agent} is unreachable: {why}"
            return [_note(question, why) for question in questions if not question.note]
        due = [question for question in questions if question.keys is not None]
        if not (due or asking.is_to_refuse(refused)):
            return []
        try:
            stat = asking.mover.stat()
            asking.refuse(refused, stat)
            steps = [asking.ask(question, stat) for question in due]
        except (AgentUnreachable, DeadlinePassed) as fault:
            steps = [_note(question, f"agent {agent} does not answer: {fault}") for question in due]
        noted = {(question.deletion, question.volume): question.note for question in due}
        return [step for step in steps if not step.reason or step.reason != noted[step.deletion, step.volume]]

    def _questions(self, agent: str) -> list[Question]:
        """Open waves of the agent's volumes, but for those that wait for a person. Hold the lock."""
        mine = {volume.volume_id for volume in self._fold.volumes.values() if volume.agent == agent}
        return [
            Question(
                deletion.deletion_id,
                sweep.volume,
                sweep.wave,
                sweep.found,
                sweep.note,
                tuple(sweep.keys) if sweep.is_asking and sweep.answer is None else None,
            )
            for deletion in self._fold.deletions.open.values()
            for sweep in deletion.sweeps.values()
            if sweep.volume in mine and sweep.wave and not (sweep.is_clear or sweep.reason)
        ]


class _Asking:
    """One agent's thread asks here."""

    def __init__(self, agent: str, mover: MoverPort, term: int) -> None:
        self.agent = agent
        self.mover = mover
        self._term = term
        self._failures: Counter[tuple[str, str]] = Counter()
        """By deletion and volume: an answer that failed is remembered under its id, so the next has another one."""
        self._may_refuse = True
        """Whether the agent refuses somebody, as far as is known."""
        self._is_deaf = False

    def is_to_refuse(self, tenants: Sequence[str]) -> bool:
        """Whether to look if the agent refuses these and no others."""
        return bool(tenants) or self._may_refuse

    def refuse(self, tenants: list[str], stat: AgentStat) -> None:
        """Tell the agent whom to refuse, where it does not refuse these already. Raises `AgentUnreachable`."""
        self._may_refuse = bool(stat.refused_tenants)
        if stat.refused_tenants == tenants or not isinstance(self.mover, RefusingMover):
            return
        try:
            self.mover.refuse_tenants(tenants, term=self._term)
        except StaleTerm:
            raise
        except CommandRefused as fault:
            if not self._is_deaf:
                _log.warning("agent cannot refuse tenants", agent=self.agent, fault=str(fault))
            self._is_deaf = True
        else:
            self._may_refuse, self._is_deaf = True, False

    def ask(self, question: Question, stat: AgentStat) -> DeletionStep:
        """Ask for every key. What the agent has still it frees; it is asked again then.

        Raises `AgentUnreachable`, `DeadlinePassed`, and `StaleTerm`, which ends the service.
        """
        assert question.keys is not None
        volume = next((each for each in stat.volumes if each.descriptor.id == question.volume), None)
        if volume is None or volume.degraded:
            why = f"agent {self.agent} has no such volume now" if volume is None else volume.degraded
            return _note(question, f"{question.volume} cannot be asked: {why}")
        missing = found_bytes = 0
        outcome: CommandOutcome | None = None
        for number, start in enumerate(range(0, max(1, len(question.keys)), QUESTION_KEYS_MAX)):
            keys = question.keys[start : start + QUESTION_KEYS_MAX]
            try:
                outcome = self.mover.carry_out(self._command(question, number, keys))
            except StaleTerm:
                raise
            except CommandRefused as fault:
                return self._failed(question, str(fault))
            answers = {tuple(answer.key): answer for answer in outcome.outcomes}
            for key in keys:
                answer = answers.get(tuple(key))
                if answer is None or answer.result not in (Result.MISS, Result.DELETED):
                    why = "it gave no answer" if answer is None else answer.reason or str(answer.result)
                    return self._failed(question, f"block {key.sequence_hash:032x}: {why}")
                missing += answer.result is Result.MISS
                found_bytes += answer.payload_bytes if answer.result is Result.DELETED else 0
        assert outcome is not None
        return DeletionStep(
            question.deletion,
            question.volume,
            question.wave,
            len(question.keys),
            missing,
            found_bytes,
            outcome=OutcomeBatch(outcome.producer, outcome.epoch, outcome.sequence),
        )

    def _failed(self, question: Question, reason: str) -> DeletionStep:
        self._failures[question.deletion, question.volume] += 1
        return _note(question, reason)

    def _command(self, question: Question, number: int, keys: Sequence[Key]) -> MoveCommand:
        """An id for each round: the answer to the last one is remembered under its own."""
        failures = self._failures[question.deletion, question.volume]
        turn = f"{question.wave}.{number}-{question.found}.{failures}"
        return MoveCommand(
            command_id=f"prove-{question.deletion}-{question.volume}-{turn}-{self._term}",
            term=self._term,
            kind=MoveKind.DELETE,
            phase=Phase.FREE,
            source=question.volume,
            target="",
            blocks=tuple(MoveBlock(BlockKey(*key), 0, f"proof of {question.deletion}") for key in keys),
        )


def _note(question: Question, reason: str) -> DeletionStep:
    return DeletionStep(question.deletion, question.volume, question.wave, reason=reason)
