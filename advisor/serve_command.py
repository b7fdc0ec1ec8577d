"""`kvadvisor serve`: the advisor service with its admin view."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated

import typer

from advisor.access.service_door import open_door, require_door
from advisor.actions import ServiceActions
from advisor.api.app import create_app
from advisor.api.parts import AdminParts
from advisor.api.server import AdminServer, open_socket, require_certificate
from advisor.audit_desk import ServiceAudit
from advisor.block_desk import ServiceBlocks
from advisor.deletion_desk import ServiceDeletions
from advisor.exposition import render_metrics
from advisor.log_desk import LogDesk
from advisor.plan_actions import ServicePlans
from advisor.policy_changes import ServicePolicies
from advisor.prefix_desk import ServicePrefixes
from advisor.process import die_with_parent, keep_what_is_made
from advisor.reader import ServiceReader
from advisor.recording_desk import RecordingDesk
from advisor.replay_desk import ReplayDesk
from advisor.service import AdvisorService
from advisor.settings import load_settings
from advisor.usage_desk import ServiceUsage
from advisor.volume_desk import ServiceVolumes


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
        RecordingDesk(service) as recordings,
        ReplayDesk(service, recordings) as replays,
    ):
        # Whoever reads the address below is answered, if only when the server runs.
        listener.listen()
        log = LogDesk(service)
        reader = ServiceReader(service, log)
        parts = AdminParts(
            reader=reader,
            metrics=lambda: render_metrics(service, reader),
            observe=service.metrics.observe_request,
            span=service.span,
            answers_file=settings.directory / "answers.sqlite",
            doorkeeper=open_door(service),
            api=settings.api,
            config=lambda: settings.model_dump(mode="json"),
            actions=ServiceActions(service),
            plans=ServicePlans(service),
            policies=ServicePolicies(service),
            deletions=ServiceDeletions(service),
            prefixes=ServicePrefixes(service),
            volumes=ServiceVolumes(service),
            usage=ServiceUsage(service),
            blocks=ServiceBlocks(service, log),
            audit=ServiceAudit(log),
            close=log.close,
            recordings=recordings,
            replays=replays,
        )
        server = _Server(create_app(parts), listener, settings.api)
        keep_what_is_made()
        asyncio.run(_serve(service, server))
        if service.failure is not None:
            raise service.failure


class _Server(AdminServer):
    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        # uvicorn raises a caught signal again when it has stopped, which would end us before the log is closed.
        yield


async def _serve(service: AdvisorService, server: AdminServer) -> None:
    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, setattr, server, "should_exit", True)
    typer.echo(f"kvadvisor serve: admin view at {server.url} (Ctrl-C stops it)")
    watch = asyncio.create_task(_stop_with(service, server))
    await server.serve_until_told()
    # Ends the watcher's thread too, which waits for the service's own event.
    service.stopping.set()
    await watch


async def _stop_with(service: AdvisorService, server: AdminServer) -> None:
    await asyncio.to_thread(service.stopping.wait)
    server.should_exit = True
