"""Moves by a function of the embedder's: commands in, outcomes out."""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from typing import Any

import structlog

from advisor.movers.port import MoveCommand
from storage_agent.errors import AgentUnreachable, CommandRefused
from storage_agent.port import AgentStat, CommandOutcome, Outcome

Outcomes = Sequence[Outcome] | CommandOutcome
CarryOut = Callable[[MoveCommand], Outcomes | Awaitable[Outcomes]]

_ITS_OWN = (AgentUnreachable, CommandRefused)
"""What a function may raise to say what became of a command: see `MoverPort.carry_out`."""

_log = structlog.get_logger()


class CallbackMover:
    """Implements `MoverPort` by `carry_out`, a function or coroutine function.

    It answers with one `Outcome` for each block, in any order (a block without one is aborted), or with a
    `CommandOutcome` that also names the batch of its events. Called on a thread for each command under way; a coroutine
    runs on `loop` where one is given, else on a loop of its own. Whatever else it raises aborts the command's moves and
    is logged: a fault of the embedder's never ends the service.
    """

    def __init__(
        self,
        carry_out: CarryOut,
        stat: Callable[[], AgentStat],
        *,
        loop: asyncio.AbstractEventLoop | None = None,
    ) -> None:
        """`stat`: the volumes, and the producer of their events; an agent's `stat` serves."""
        self._carry_out = carry_out
        self._stat = stat
        self._loop = loop

    def stat(self) -> AgentStat:
        """See `MoverPort.stat`. While the embedder's function fails, what it moves is unreachable."""
        try:
            return self._stat()
        except Exception as fault:
            raise AgentUnreachable(f"the mover's stat raised {type(fault).__name__}: {fault}") from fault

    def carry_out(self, command: MoveCommand) -> CommandOutcome:
        """See `MoverPort.carry_out`."""
        try:
            answer = self._carry_out(command)
            outcomes = self._awaited(answer) if inspect.isawaitable(answer) else answer
        except _ITS_OWN:
            raise
        except Exception as fault:
            _log.error("the mover's function failed", command=command.command_id, exc_info=fault)
            raise CommandRefused(f"the mover's function raised {type(fault).__name__}: {fault}") from fault
        if isinstance(outcomes, CommandOutcome):
            return outcomes
        if not isinstance(outcomes, Sequence) or not all(isinstance(each, Outcome) for each in outcomes):
            raise CommandRefused(
                f"the mover's function answered {command.command_id} with {type(outcomes).__name__}: return a list "
                "with an Outcome for each block"
            )
        return CommandOutcome(command.command_id, list(outcomes), sequence=-1)

    def close(self) -> None:
        """Nothing: what runs is the embedder's."""

    def _awaited(self, answer: Awaitable[Outcomes]) -> Outcomes:
        if self._loop is None:
            return asyncio.run(_run(answer))
        return asyncio.run_coroutine_threadsafe(_run(answer), self._loop).result()


def _run(answer: Awaitable[Outcomes]) -> Coroutine[Any, Any, Outcomes]:
    async def run() -> Outcomes:
        return await answer

    return run()
