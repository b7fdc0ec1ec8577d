"""Scrubs that people ask for: each in a thread of its own, over a connection of its own, one at a time a volume."""

from __future__ import annotations

import threading
from uuid import uuid4

from advisor.entries import OperatorEntry
from advisor.errors import ActionRefused
from advisor.pipeline import now_us
from advisor.service import AdvisorService
from advisor.volume_views import ScrubView
from storage_agent.errors import AgentUnreachable, StorageAgentError
from storage_agent.port import AgentPort, ScrubReport

RUNNING, DONE, FAILED = "running", "done", "failed"


class ScrubRunner:
    """Thread-safe. What it knows is forgotten with the service."""

    def __init__(self, service: AdvisorService) -> None:
        self._service = service
        self._guard = threading.Lock()
        self._last: dict[str, ScrubView] = {}

    def last(self, volume: str) -> ScrubView | None:
        with self._guard:
            return self._last.get(volume)

    def begin(self, actor: str, volume: str, agent: str) -> ScrubView:
        """Raises `ActionRefused` while one of the volume runs, or where its agent is none of ours."""
        with self._service.agent(agent):
            pass
        view = ScrubView(
            volume=volume, state=RUNNING, actor=actor, started_us=now_us(), ended_us=None, good_blocks=0,
            corrupt_blocks=0, unreadable_blocks=0, good_bytes=0, reason="",
        )  # fmt: skip
        with self._guard:
            running = self._last.get(volume)
            if running is not None and running.state == RUNNING:
                raise ActionRefused(f"volume {volume} is being scrubbed for {running.actor}: wait for its end")
            self._last[volume] = view
        try:
            self._service.submit(OperatorEntry(actor, "scrub", volume)).result()
        except BaseException as fault:
            self._end(view, reason=f"it was not begun: {fault}")
            raise
        name = f"kvadvisor-scrub-{volume}"
        threading.Thread(target=self._run, args=(view, agent), name=name, daemon=True).start()
        return view

    def _run(self, view: ScrubView, agent: str) -> None:
        try:
            with self._service.agent(agent) as port:
                report = self._ask(port, view.volume, agent)
        except (ActionRefused, StorageAgentError) as fault:
            self._end(view, reason=str(fault))
        else:
            self._end(view, report)

    def _ask(self, port: AgentPort, volume: str, agent: str) -> ScrubReport:
        """It takes as long as reading the volume does: asked again under one id until it is answered.

        Raises `StorageAgentError`, and `ActionRefused` when the service stops.
        """
        command_id = f"scrub-{uuid4().hex}"
        while not self._service.stopping.is_set():
            try:
                return port.scrub(command_id, volume, term=self._service.term)
            except AgentUnreachable:
                if agent in self._service.unreachable:
                    raise
        raise ActionRefused("the service stopped meanwhile")

    def _end(self, view: ScrubView, report: ScrubReport | None = None, reason: str = "") -> None:
        found = report if report is not None else ScrubReport(0, 0, 0, 0)
        changes = {
            "state": FAILED if report is None else DONE,
            "ended_us": now_us(),
            "good_blocks": found.good,
            "corrupt_blocks": found.corrupt,
            "unreadable_blocks": found.failed,
            "good_bytes": found.payload_bytes,
            "reason": reason,
        }
        with self._guard:
            self._last[view.volume] = view.model_copy(update=changes)
