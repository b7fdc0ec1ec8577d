"""Moves by whoever reads published plans: an array that moves blocks by itself.

Commands are sent again each second until they are answered or their deadline passes, so whoever carries them out may
get one twice. What comes back late, twice or as garbage is counted and changes nothing.
"""

from __future__ import annotations

import threading
import time
from collections import Counter
from dataclasses import dataclass

import structlog

from advisor.movers.carriers import open_carrier
from advisor.movers.messages import (
    BadAnswer,
    PublishedOutcome,
    PublishedRefusal,
    PublishedVolumes,
    decode_answer,
    encode_command,
    outcome_of,
    stat_of,
)
from advisor.movers.port import DeadlinePassed, MoveCommand
from event_plane.credentials import NO_CREDENTIALS, Credentials
from storage_agent.errors import AgentUnreachable, CommandRefused
from storage_agent.port import AgentStat, CommandOutcome

ASK_AGAIN_S = 1.0
SILENT_S = 15.0
"""An array that has not said its volumes for so long is unreachable."""
QUIET_S = 60.0
"""After garbage was logged, more of it is only counted for so long."""

_log = structlog.get_logger()


@dataclass(slots=True)
class _Waiting:
    command: MoveCommand
    answer: CommandOutcome | None = None
    refusal: str | None = None


class PublishedMover:
    """Implements `MoverPort` over published plans (docs/moves.md). Thread-safe."""

    def __init__(
        self, agent: str, url: str, *, deadline_s: float = 60.0, credentials: Credentials = NO_CREDENTIALS
    ) -> None:
        """Listens when it returns. `url`: `tcp://127.0.0.1:PORT` or `ipc://PATH`, where the array connects to, or
        `nats://HOST:PORT/SUBJECT`, whose `SUBJECT.commands` it reads. Raises `MoverUnusable`."""
        self.agent = agent
        self.ignored: Counter[str] = Counter()
        """Answers that changed nothing: `late` (or a second one), `garbage`."""
        self._deadline_s = deadline_s
        self._changed = threading.Condition()
        self._waiting: dict[str, _Waiting] = {}
        self._stat: AgentStat | None = None
        self._heard_s = 0.0
        self._said_s = float("-inf")
        self._closed = False
        self._carrier = open_carrier(agent, url, self._take, credentials)
        self.url = self._carrier.url

    def stat(self) -> AgentStat:
        """See `MoverPort.stat`: as the array said last."""
        with self._changed:
            stat, silent_s = self._stat, time.monotonic() - self._heard_s
        if stat is None:
            raise AgentUnreachable(f"no array has connected to {self.url} and said its volumes")
        if silent_s > SILENT_S:
            raise AgentUnreachable(f"the array at {self.url} has said nothing for {silent_s:.0f} s")
        return stat

    def carry_out(self, command: MoveCommand) -> CommandOutcome:
        """See `MoverPort.carry_out`. Waits until the deadline at most."""
        deadline_s = time.monotonic() + self._deadline_s
        payload = encode_command(command, time.time_ns() // 1000 + int(self._deadline_s * 1e6))
        waiting = _Waiting(command)
        with self._changed:
            self._waiting[command.command_id] = waiting
        try:
            while (rest_s := deadline_s - time.monotonic()) > 0:
                self._carrier.send(payload)
                with self._changed:
                    self._changed.wait_for(lambda: self._is_over(waiting), min(ASK_AGAIN_S, rest_s))
                    if waiting.answer is not None:
                        return waiting.answer
                    if waiting.refusal is not None:
                        raise CommandRefused(waiting.refusal)
                    if self._closed:
                        raise AgentUnreachable(f"no more is published to {self.url}: the service is stopping")
        finally:
            with self._changed:
                del self._waiting[command.command_id]
        raise DeadlinePassed(f"{self.agent} did not answer {command.command_id} within {self._deadline_s:g} s")

    def close(self) -> None:
        """See `MoverPort.close`."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        self._carrier.close()

    def _is_over(self, waiting: _Waiting) -> bool:
        return waiting.answer is not None or waiting.refusal is not None or self._closed

    def _take(self, payload: bytes) -> bool:
        """What came in. True where whoever sent it is the array: it said its volumes."""
        try:
            answer = decode_answer(payload)
            with self._changed:
                match answer:
                    case PublishedVolumes():
                        self._stat = stat_of(self.agent, answer)
                        self._heard_s = time.monotonic()
                        return True
                    case PublishedOutcome() | PublishedRefusal():
                        self._answer(answer)
        except BadAnswer as fault:
            self._ignore_garbage(fault)
        return False

    def _answer(self, answer: PublishedOutcome | PublishedRefusal) -> None:
        waiting = self._waiting.get(answer.command_id)
        if waiting is None or self._is_over(waiting):
            self.ignored["late"] += 1
        elif isinstance(answer, PublishedRefusal):
            waiting.refusal = answer.reason or "refused without a reason"
        else:
            waiting.answer = outcome_of(answer, waiting.command)
        self._changed.notify_all()

    def _ignore_garbage(self, fault: BadAnswer) -> None:
        with self._changed:
            self.ignored["garbage"] += 1
            say = time.monotonic() - self._said_s >= QUIET_S
            if say:
                self._said_s = time.monotonic()
        if say:
            _log.warning("an answer was ignored", agent=self.agent, fault=str(fault))
