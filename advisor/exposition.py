"""One scrape: the service's figures in Prometheus' text format."""

from __future__ import annotations

from advisor.compactions import CompactionTable
from advisor.metrics import Metrics
from advisor.pipeline import LogThread
from advisor.policies.compaction import spread_of
from advisor.reader import ServiceReader
from advisor.service import AdvisorService


def _show_sources(metrics: Metrics, thread: LogThread) -> None:
    connections = thread.connections()
    intake = thread.intake
    told = {source: each for source, each in connections.items() if each.connected is not None}
    metrics.source_connected.replace({(source,): float(each.connected or False) for source, each in told.items()})
    for family, totals in (
        (metrics.source_reconnects, {source: each.reconnects for source, each in connections.items()}),
        (metrics.source_dropped, {source: each.dropped for source, each in connections.items()}),
        (metrics.source_gaps_open, thread.figures.gaps_open),
        (metrics.source_resends, intake.by_source(intake.resends)),
        (metrics.source_snapshots_asked, intake.by_source(intake.snapshots)),
        (metrics.source_heartbeats, intake.heartbeats),
    ):
        family.replace({(source,): float(totals.get(source, 0)) for source in connections})


def show_compactions(metrics: Metrics, table: CompactionTable) -> None:
    """The caller holds the fold's lock."""
    metrics.compactions.replace({(str(state),): float(count) for state, count in table.counts.items()})
    metrics.compactions_open.set(len(table.open))
    metrics.compaction_bytes.set(table.moved_bytes)
    metrics.compaction_freed_bytes.set(table.freed_bytes)
    figures = {volume: layout.figures for volume, layout in table.layouts.items()}
    metrics.volume_reclaimable_bytes.replace({(volume,): each.reclaimable_bytes for volume, each in figures.items()})
    metrics.volume_chain_spread.replace({(volume,): spread_of(each) for volume, each in figures.items()})


def _show_keeping(metrics: Metrics, service: AdvisorService) -> None:
    """Whether what the service stands on is well: agents, checkpoints, the log's retention."""
    unreachable = service.unreachable
    agents = {each.name for each in service.settings.agents} | set(unreachable)
    told = [volume for stat in service.agent_stats.values() for volume in stat.volumes]
    metrics.volume_transfer_seconds.replace(
        {
            (volume.descriptor.id, operation): (times, seconds)
            for volume in told
            for operation, times, seconds in (
                ("read", volume.read_times, volume.read_seconds_total),
                ("write", volume.write_times, volume.write_seconds_total),
            )
            if times
        }
    )
    metrics.agent_reachable.replace({(agent,): float(agent not in unreachable) for agent in agents})
    if service.checkpointer is not None:
        metrics.checkpoint_failing.set(bool(service.checkpointer.problem))
    if service.retention is not None:
        metrics.retention_failing.set(bool(service.retention.problem))


def render_metrics(service: AdvisorService, reader: ServiceReader) -> bytes:
    """Copy this moment into the service's metrics and render them. Thread-safe."""
    metrics = service.metrics
    producers = reader.producers()
    names = {int(each.id, 16): each.name for each in producers}
    metrics.show(reader.summary(), reader.volumes(), producers)
    metrics.show_policies(reader.comparison())
    with service.lock.shared():
        moves = {(str(kind), str(state)): float(n) for (kind, state), n in service.fold.moves.counts.items()}
        metrics.moves_waiting.set(service.fold.plans.moves_waiting)
        show_compactions(metrics, service.fold.compactions)
        deletions = service.fold.deletions
        metrics.deletions_open.set(len(deletions.open))
        metrics.deletion_blocks.set(deletions.deleted_blocks)
        metrics.deletion_bytes.set(deletions.deleted_bytes)
        metrics.tenants_refused.set(len(deletions.refused))
        away = {(volume.volume_id,): float(bool(volume.away)) for volume in service.fold.volumes.values()}
        metrics.index_bytes.set(service.fold.index.memory_bytes())
        metrics.index_room_blocks.set(service.fold.index.room()[0])
    metrics.volume_away.replace(away)
    _show_keeping(metrics, service)
    metrics.moves.replace(moves)
    hooks = service.hook_figures
    metrics.hook_calls.replace({(name,): each.calls for name, each in hooks.items()})
    metrics.hook_failures.replace({(name,): each.failures for name, each in hooks.items()})
    metrics.hook_dropped.replace({(name,): each.dropped for name, each in hooks.items()})
    metrics.mover_ignored.replace(service.ignored_answers)
    thread = service.log_thread
    if thread is not None:
        metrics.batches.replace({(source,): float(n) for source, n in list(thread.figures.batches.items())})
        intake = thread.intake
        _show_sources(metrics, thread)
        for family, counts in ((metrics.producer_duplicates, intake.duplicates), (metrics.producer_lost, intake.lost)):
            totals: dict[tuple[str, ...], float] = {(f"{p:016x}", names.get(p, "")): n for p, n in list(counts.items())}
            family.replace(totals)
        metrics.refused_messages.replace({(reason,): float(count) for reason, count in list(intake.refused.items())})
    return metrics.render()
