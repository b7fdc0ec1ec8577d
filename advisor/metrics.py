"""Every Prometheus metric of the service, named here and nowhere else (docs/metrics.md)."""

from __future__ import annotations

import threading
from collections.abc import Iterable, Mapping, Sequence
from itertools import accumulate
from typing import TypeVar

from prometheus_client import CollectorRegistry, Histogram, ProcessCollector, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector

from advisor.views import ComparisonView, ProducerView, Summary, VolumeView
from storage_agent.transfers import TRANSFER_BOUNDS_S

LabelValues = TypeVar("LabelValues", bound=tuple[str, ...])

_COMMIT_SECONDS = (0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5)

_REQUEST_SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 10.0)


class Family(Collector):
    """A counter or gauge whose values may be counted here or copied from a total that the service keeps anyway.

    The library's own counter cannot be set, and its gauge cannot drop the labels that are gone in one step.
    Thread-safe. Label values are given in the order of `labels`.
    """

    def __init__(
        self,
        registry: CollectorRegistry,
        kind: type[CounterMetricFamily] | type[GaugeMetricFamily],
        name: str,
        text: str,
        labels: Sequence[str] = (),
    ) -> None:
        self._kind = kind
        self._name = name
        self._text = text
        self._labels = tuple(labels)
        self._lock = threading.Lock()
        self._values: dict[tuple[str, ...], float] = {} if labels else {(): 0.0}
        registry.register(self)

    def add(self, amount: float = 1.0, *labels: str) -> None:
        with self._lock:
            self._values[labels] = self._values.get(labels, 0.0) + amount

    def set(self, value: float, *labels: str) -> None:
        """A counter's value must never fall in one life of the service."""
        with self._lock:
            self._values[labels] = value

    def replace(self, values: Mapping[LabelValues, float]) -> None:
        """Take `values` for all there are; other labels are gone."""
        with self._lock:
            self._values = {labels: value for labels, value in values.items()}  # noqa: C416 - widens the key type

    def collect(self) -> Iterable[Metric]:
        family = self._kind(self._name, self._text, labels=self._labels)
        with self._lock:
            values = sorted(self._values.items())
        for labels, value in values:
            family.add_metric(labels, value)
        return [family]


class ToldHistogram(Collector):
    """A histogram that somebody else counts. Thread-safe."""

    def __init__(
        self, registry: CollectorRegistry, name: str, text: str, labels: Sequence[str], bounds: Sequence[float]
    ) -> None:
        self._name = name
        self._text = text
        self._labels = tuple(labels)
        self._bounds = [*(f"{bound:g}" for bound in bounds), "+Inf"]
        self._told: Mapping[tuple[str, ...], tuple[Sequence[int], float]] = {}
        registry.register(self)

    def replace(self, told: Mapping[tuple[str, ...], tuple[Sequence[int], float]]) -> None:
        """By label values: how many lie under each bound and above the last, and the sum of all."""
        self._told = dict(told)

    def collect(self) -> Iterable[Metric]:
        family = HistogramMetricFamily(self._name, self._text, labels=self._labels)
        for labels, (counts, total) in sorted(self._told.items()):
            family.add_metric(labels, list(zip(self._bounds, accumulate(counts), strict=True)), total)
        return [family]


class Metrics:
    """The metrics of one service instance, in a registry of their own."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        ProcessCollector(registry=self.registry)
        self.build = self._gauge("build_info", "Always 1; the label names the version that runs.", "version")
        self.ready = self._gauge("ready", "1 when every readiness check passes.")
        self.paused = self._gauge("planning_paused", "1 when all planning is paused.")

        self.events = self._counter("events", "Events applied from logged batches.")
        self.refused_messages = self._counter("refused_messages", "Messages refused before the log.", "reason")
        self.batches = self._counter("batches", "Batches committed to the log.", "source")
        self.log_position = self._gauge("log_position", "Position of the last log entry applied.")
        self.commit_seconds = Histogram(
            "kvadvisor_log_commit_seconds",
            "Duration of one commit to the log, the disk's sync included.",
            registry=self.registry,
            buckets=_COMMIT_SECONDS,
        )
        self.request_seconds = Histogram(
            "kvadvisor_http_request_seconds",
            "From a request of the admin API to the first byte of its answer.",
            ["route"],
            registry=self.registry,
            buckets=_REQUEST_SECONDS,
        )
        self.requests = self._counter("http_requests", "Requests answered.", "route", "method", "status")
        self.refused_attempts = self._counter("refused_attempts", "Attempts to come in that were refused.", "by")
        self.queue_entries = self._gauge("queue_entries", "Logged entries that wait to be applied.")
        self.behind_seconds = self._gauge("behind_seconds", "Age of the oldest logged entry not applied yet.")
        self.skipped_records = self._counter("skipped_records", "Records that made no sense.", "reason")

        self.tier_blocks = self._gauge("tier_blocks", "Blocks present in a tier.", "tier")
        self.tier_bytes = self._gauge("tier_bytes", "Bytes of the blocks present in a tier.", "tier")
        self.volume_blocks = self._gauge("volume_blocks", "Blocks on a volume.", "volume")
        self.volume_bytes = self._gauge("volume_bytes", "Bytes of the blocks on a volume.", "volume")
        self.volume_capacity_blocks = self._gauge("volume_capacity_blocks", "Blocks that a volume can hold.", "volume")
        self.volume_away = self._gauge("volume_away", "1 while a volume cannot be used.", "volume")
        self.agent_reachable = self._gauge("agent_reachable", "1 while an agent answers.", "agent")
        self.checkpoint_failing = self._gauge("checkpoint_failing", "1 while no checkpoint can be written.")
        self.retention_failing = self._gauge("log_retention_failing", "1 while the log cannot be cut.")
        self.index_bytes = self._gauge("index_bytes", "Memory of the index that is in use.")
        self.index_room_blocks = self._gauge("index_room_blocks", "Blocks that the index has room for still.")
        self.volume_reads = self._counter("volume_reads", "Blocks read from a volume.", "volume")
        self.volume_transfer_seconds = ToldHistogram(
            self.registry,
            "kvadvisor_volume_transfer_seconds",
            "What an agent's transfers on a volume took, a batch of blocks each.",
            ("volume", "operation"),
            TRANSFER_BOUNDS_S,
        )

        self.moves = self._counter("moves", "Moves that reached a state.", "kind", "state")
        self.moves_open = self._gauge("moves_open", "Moves planned or under way.")
        self.moves_waiting = self._gauge("moves_waiting", "Moves of the plan that waits for a person.")
        self.moved_bytes = self._counter("moved_bytes", "Bytes copied by moves.")
        self.refusals = self._counter("refusals", "Moves that a plan wanted and a limit refused.")

        self.policy_uses = self._counter("policy_uses", "Uses of blocks that volumes hold, as compared.", "policy")
        self.policy_found = self._counter("policy_found", "Uses found on the fastest volume.", "policy")
        self.policy_moves = self._counter("policy_moves", "Moves that a policy made, a shadow's in thought.", "policy")
        self.policy_moved_bytes = self._counter("policy_moved_bytes", "Bytes copied by those moves.", "policy")
        self.policy_promoted = self._counter("policy_promoted", "Moves to the fastest volume.", "policy")
        self.policy_promoted_used = self._counter(
            "policy_promoted_used", "Those whose block was used before it left.", "policy"
        )
        self.policy_bounced = self._counter(
            "policy_bounced", "Moves of a block back to the fastest volume within 10 minutes.", "policy"
        )
        self.policy_saved_seconds = self._gauge(
            "policy_saved_seconds", "Est. seconds that readers saved against the slowest volume so far.", "policy"
        )
        self.policy_left_out = self._counter("policy_left_out", "Blocks that a shadow had no room for.", "policy")

        self.compactions = self._counter("compactions", "Compactions that ended.", "state")
        self.compactions_open = self._gauge("compactions_open", "Compactions planned or under way.")
        self.compaction_bytes = self._counter("compaction_bytes", "Bytes of blocks that compactions wrote.")
        self.compaction_freed_bytes = self._counter("compaction_freed_bytes", "Bytes that compactions gave back.")
        self.volume_reclaimable_bytes = self._gauge(
            "volume_reclaimable_bytes", "What a compaction would give back.", "volume"
        )
        self.volume_chain_spread = self._gauge(
            "volume_chain_spread", "Pieces that chains lie in, for each that would do.", "volume"
        )

        self.hook_calls = self._counter("hook_calls", "Calls of a hook.", "hook")
        self.hook_failures = self._counter("hook_failures", "Calls of a hook that failed.", "hook")
        self.hook_dropped = self._counter("hook_dropped", "What a hook was too slow for.", "hook")
        self.mover_ignored = self._counter(
            "mover_ignored_answers", "Answers to published plans that changed nothing.", "agent", "reason"
        )

        self.deletions_open = self._gauge("deletions_open", "Deletions that have not ended.")
        self.deletion_blocks = self._counter("deletion_blocks", "Copies of blocks that deletions freed.")
        self.deletion_bytes = self._counter("deletion_bytes", "Their bytes.")
        self.tenants_refused = self._gauge("tenants_refused", "Deleted tenants that were not enabled again.")

        self.source_connected = self._gauge("source_connected", "1 while the connection stands.", "source")
        self.source_reconnects = self._counter("source_reconnects", "Lost connections that were mended.", "source")
        self.source_dropped = self._counter(
            "source_dropped_messages", "Messages forgotten because the log was slow.", "source"
        )
        self.source_gaps_open = self._gauge("source_gaps_open", "Producers that something is missing of.", "source")
        self.source_resends = self._counter("source_resends", "Resends asked for.", "source")
        self.source_snapshots_asked = self._counter("source_snapshots_asked", "Snapshots asked for.", "source")
        self.source_heartbeats = self._counter("source_heartbeats", "Heartbeats heard.", "source")

        self.producer_duplicates = self._counter("producer_duplicates", "Batches received again.", "producer", "name")
        self.producer_gaps = self._counter("producer_gaps", "Gaps in the sequence of batches.", "producer", "name")
        self.producer_lost = self._counter("producer_lost_batches", "Batches that nobody had.", "producer", "name")
        self.producer_resends = self._counter("producer_resends", "Resends asked for.", "producer", "name")
        self.producer_snapshots = self._counter(
            "producer_snapshots", "Snapshots taken for all that a producer has placed.", "producer", "name"
        )
        self.producer_blocks = self._gauge("producer_blocks", "Blocks placed by a producer.", "producer", "name")

    def show(self, summary: Summary, volumes: Sequence[VolumeView], producers: Sequence[ProducerView]) -> None:
        """Copy one moment of the service. The rest is not in the views: see `exposition`."""
        self.build.replace({(summary.version,): 1})
        self.ready.set(summary.ready)
        self.paused.set(summary.paused)
        self.events.set(summary.events_total)
        self.log_position.set(summary.position)
        self.queue_entries.set(summary.queue_entries)
        self.behind_seconds.set(summary.behind_s)
        self.skipped_records.replace({(reason,): count for reason, count in summary.skipped_records.items()})
        self.tier_blocks.replace({(f"G{tier.tier}",): tier.blocks for tier in summary.tiers})
        self.tier_bytes.replace({(f"G{tier.tier}",): tier.block_bytes for tier in summary.tiers})
        self.moves_open.set(summary.moves_open)
        self.moved_bytes.set(summary.moved_bytes_total)
        self.refusals.set(summary.refusals_total)
        self.volume_blocks.replace({(volume.id,): volume.blocks for volume in volumes})
        self.volume_bytes.replace({(volume.id,): volume.block_bytes for volume in volumes})
        self.volume_capacity_blocks.replace({(volume.id,): volume.capacity_blocks for volume in volumes})
        self.volume_reads.replace({(volume.id,): volume.reads for volume in volumes})
        self.producer_gaps.replace({(each.id, each.name): each.gaps for each in producers})
        self.producer_resends.replace({(each.id, each.name): each.resends for each in producers})
        self.producer_snapshots.replace({(each.id, each.name): each.snapshots for each in producers})
        self.producer_blocks.replace({(each.id, each.name): each.blocks for each in producers})

    def show_policies(self, comparison: ComparisonView) -> None:
        """Copy the comparison of the live policy with its shadows; where there is none, nothing of it is shown."""
        for policy in comparison.policies:
            figures = policy.since_start
            for family, value in (
                (self.policy_uses, figures.uses),
                (self.policy_found, figures.found),
                (self.policy_moves, figures.moves),
                (self.policy_moved_bytes, figures.moved_bytes),
                (self.policy_promoted, figures.promoted),
                (self.policy_promoted_used, figures.promoted_used),
                (self.policy_bounced, figures.bounced),
                (self.policy_saved_seconds, figures.saved_s or 0.0),
                (self.policy_left_out, policy.left_out),
            ):
                family.set(value, policy.name)

    def observe_request(self, route: str, method: str, status: int, seconds: float) -> None:
        """One answer of the admin API."""
        self.requests.add(1, route, method, str(status))
        self.request_seconds.labels(route).observe(seconds)

    def render(self) -> bytes:
        """Prometheus' text format."""
        return generate_latest(self.registry)

    def _counter(self, name: str, text: str, *labels: str) -> Family:
        return Family(self.registry, CounterMetricFamily, f"kvadvisor_{name}", text, labels)

    def _gauge(self, name: str, text: str, *labels: str) -> Family:
        return Family(self.registry, GaugeMetricFamily, f"kvadvisor_{name}", text, labels)
