"""One scrape: the service's figures in Prometheus' text format."""

from __future__ import annotations

from advisor.reader import ServiceReader
from advisor.service import AdvisorService


def render_metrics(service: AdvisorService, reader: ServiceReader) -> bytes:
    """Copy this moment into the service's metrics and render them. Thread-safe."""
    metrics = service.metrics
    producers = reader.producers()
    names = {int(each.id, 16): each.name for each in producers}
    metrics.show(reader.summary(), reader.volumes(), producers)
    with service.lock:
        moves = {(str(kind), str(state)): float(n) for (kind, state), n in service.fold.moves.counts.items()}
    metrics.moves.replace(moves)
    thread = service.log_thread
    if thread is not None:
        metrics.batches.replace({(source,): float(n) for source, n in list(thread.figures.batches.items())})
        intake = thread.intake
        for family, counts in ((metrics.producer_duplicates, intake.duplicates), (metrics.producer_lost, intake.lost)):
            totals: dict[tuple[str, ...], float] = {(f"{p:016x}", names.get(p, "")): n for p, n in list(counts.items())}
            family.replace(totals)
        metrics.refused_messages.replace({(reason,): float(count) for reason, count in list(intake.refused.items())})
    return metrics.render()
