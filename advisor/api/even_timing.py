"""Answers to those who see one tenant alone go out at even times: how long others' rows took does not show."""

from __future__ import annotations

import asyncio
import time

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from advisor.access.identity import Identity

QUANTUM_S = 0.05
SAME_FOR_ALL = "/static/"
"""Files of the pages, which tell nothing."""


def wait_s(taken_s: float, quantum_s: float = QUANTUM_S) -> float:
    """Until the next multiple of the quantum, for an answer that took `taken_s`."""
    return quantum_s - taken_s % quantum_s


class EvenTiming:
    """ASGI middleware, within the door: a tenant's answer is held until it is whole, then until the next multiple of
    `QUANTUM_S` since its request came."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        who: Identity | None = scope.get("state", {}).get("identity")
        if who is None or not who.tenant or scope["path"].startswith(SAME_FOR_ALL):
            await self._app(scope, receive, send)
            return
        came_s = time.monotonic()
        held: list[Message] = []

        async def hold(message: Message) -> None:
            held.append(message)

        await self._app(scope, receive, hold)
        await asyncio.sleep(wait_s(time.monotonic() - came_s))
        for message in held:
            await send(message)
