"""`kvadvisor serve`: the advisor service with its admin view."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Annotated

import typer

from advisor.access.service_door import require_door
from advisor.admin_parts import parts_of
from advisor.api.app import create_app
from advisor.api.server import AdminServer, open_socket, require_certificate
from advisor.process import answer_soon, die_with_parent, end_within
from advisor.service import AdvisorService
from advisor.settings import load_settings


def serve(
    config: Annotated[
        Path | None, typer.Option("--config", help="Settings (TOML); docs/settings.md lists the keys.")
    ] = None,
    parent: Annotated[int | None, typer.Option(hidden=True, help="End when this process ends.")] = None,
) -> None:
    """Run the advisor: subscribe to KV events, log and index them, plan and have moves made, show it all."""
    if parent is not None:
        die_with_parent(parent)
    settings = load_settings(config, os.environ)
    require_certificate(settings.api)
    require_door(settings)
    # The port first: whoever finds it taken has not touched the log yet.
    listener = open_socket(settings.api.host, settings.api.port, asks_login=settings.api.login == "required")
    with (
        contextlib.closing(listener),
        AdvisorService(settings) as service,
        parts_of(service) as parts,
    ):
        # Whoever reads the address below is answered, if only when the server runs.
        listener.listen()
        server = _Server(create_app(parts), listener, settings.api)
        answer_soon()
        asyncio.run(_serve(service, server, settings.stop_within_s))
        if service.failure is not None:
            raise service.failure


class _Server(AdminServer):
    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        # uvicorn raises a caught signal again when it has stopped, which would end us before the log is closed.
        yield


async def _serve(service: AdvisorService, server: AdminServer, stop_within_s: float) -> None:
    def stop(*_: object) -> None:
        end_within(stop_within_s)
        server.should_exit = True

    # Not by the loop, which may be what is stuck.
    former = {number: signal.signal(number, stop) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        typer.echo(f"kvadvisor serve: admin view at {server.url} (Ctrl-C stops it)")
        watch = asyncio.create_task(_stop_with(service, stop))
        await server.serve_until_told()
        # Ends the watcher's thread too, which waits for the service's own event.
        service.stopping.set()
        await watch
    finally:
        for number, handler in former.items():
            signal.signal(number, handler)


async def _stop_with(service: AdvisorService, stop: Callable[[], None]) -> None:
    await asyncio.to_thread(service.stopping.wait)
    stop()
