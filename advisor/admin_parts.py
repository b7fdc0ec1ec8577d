"""All parts of the admin view over a running service: what `kvadvisor serve` shows, and `kvadvisor bench api` asks."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing, contextmanager

from advisor.access.service_door import open_door
from advisor.actions import ServiceActions
from advisor.api.parts import AdminParts
from advisor.audit_desk import ServiceAudit
from advisor.block_desk import ServiceBlocks
from advisor.deletion_desk import ServiceDeletions
from advisor.exposition import render_metrics
from advisor.log_desk import LogDesk
from advisor.plan_actions import ServicePlans
from advisor.policy_changes import ServicePolicies
from advisor.prefix_desk import ServicePrefixes
from advisor.reader import ServiceReader
from advisor.recording_desk import RecordingDesk
from advisor.replay_desk import ReplayDesk
from advisor.service import AdvisorService
from advisor.usage_desk import ServiceUsage
from advisor.volume_desk import ServiceVolumes


@contextmanager
def parts_of(service: AdvisorService) -> Iterator[AdminParts]:
    """Recordings and replays that are under way end with it. Raises as `open_door` and the desks do."""
    with closing(RecordingDesk(service)) as recordings, closing(ReplayDesk(service, recordings)) as replays:
        log = LogDesk(service)
        reader = ServiceReader(service, log)
        yield AdminParts(
            reader=reader,
            metrics=lambda: render_metrics(service, reader),
            observe=service.metrics.observe_request,
            span=service.span,
            answers_file=service.settings.directory / "answers.sqlite",
            doorkeeper=open_door(service),
            api=service.settings.api,
            config=lambda: service.settings.model_dump(mode="json"),
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
