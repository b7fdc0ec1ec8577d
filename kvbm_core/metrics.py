"""The core's accounts as Prometheus metrics, read when they are scraped."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict
from itertools import accumulate

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector

from kvbm_core import metric_names as names
from kvbm_core.accounting import LATENCY_BOUNDS_S, CoreTotals, Latency, RequestAccount
from kvbm_core.manager import KvBlockManager
from kvbm_core.metric_names import MetricName

Values = Mapping[tuple[str, ...], float]


class CoreCollector(Collector):
    """One manager's metrics: `CollectorRegistry().register(CoreCollector(manager))`. Costs nothing between scrapes."""

    def __init__(self, manager: KvBlockManager) -> None:
        self._manager = manager

    def collect(self) -> Iterable[Metric]:
        """Every metric of `metric_names.ALL`, in that order."""
        totals = self._manager.totals()
        values = self._pools() | self._requests(totals.requests) | self._queues() | self._moved(totals)
        for name in names.ALL:
            if name is names.PATH_SECONDS:
                yield _histogram(name, {path: each.latency for path, each in totals.paths.items()})
            else:
                yield _family(name, values[name])

    def _pools(self) -> dict[MetricName, Values]:
        pools = self._manager.pools()
        counted = {
            names.ALLOCATED: "allocated",
            names.REFUSED: "refused",
            names.EVICTED: "evicted",
            names.EVICTED_UNMATCHED: "evicted_unmatched",
            names.REGISTERED: "registered",
            names.DEDUPLICATED: "duplicates",
        }
        values: dict[MetricName, Values] = {
            name: {(pool,): getattr(counters, field) for pool, (_, counters) in pools.items()}
            for name, field in counted.items()
        }
        values[names.POOL_BLOCKS] = {
            (pool, state): blocks
            for pool, (occupancy, _) in pools.items()
            for state, blocks in occupancy._asdict().items()
        }
        values[names.POOL_CAPACITY] = {
            (pool,): sum(occupancy) * self._manager.config.block_bytes for pool, (occupancy, _) in pools.items()
        }
        return values

    def _requests(self, requests: RequestAccount) -> dict[MetricName, Values]:
        columns: dict[tuple[str, ...], float] = {
            ("ready",): requests.ready,
            ("waiting",): requests.waiting,
            ("absent",): requests.absent,
            ("untried",): requests.untried,
        }
        return {
            names.TOKENS_REQUESTED: {(): requests.tokens_asked},
            names.TOKENS_MATCHED: {(): requests.tokens_matched},
            names.REQUEST_BYTES: {(): requests.bytes_asked},
            names.REQUEST_BLOCKS: columns | {(tier.name,): blocks for tier, blocks in requests.found.items()},
            names.LOADED: _by_one(requests.loaded),
            names.NOT_LOADED: _by_one(requests.not_loaded),
        }

    def _queues(self) -> dict[MetricName, Values]:
        depths = self._manager.queues()
        return {
            names.QUEUE_BLOCKS: {
                (path, state): blocks for path, depth in depths.items() for state, blocks in asdict(depth).items()
            },
            names.OFFLOAD_WAITING: {(): self._manager.occupancy().offload_waiting},
            names.HOOK_FAILURES: {(): self._manager.hooks.failures},
        }

    def _moved(self, totals: CoreTotals) -> dict[MetricName, Values]:
        return {
            names.PATH_BLOCKS: {(path,): each.blocks for path, each in totals.paths.items()},
            names.PATH_BYTES: {(path,): each.moved_bytes for path, each in totals.paths.items()},
            names.PATH_FAILURES: {
                (path, reason): blocks
                for path, each in totals.paths.items()
                for reason, blocks in each.failures.items()
            },
            names.OFFLOAD_SKIPPED: {(target, reason): n for (target, reason), n in totals.offload_skipped.items()},
            names.PUT: _by_one(totals.put),
            names.PUT_REFUSED: _by_one(totals.put_refused),
            names.PUT_PASSED_ON: _by_one(totals.put_fell_back),
            names.EVENTS_LOST: {(): totals.events_lost},
        }


def _by_one(counted: Mapping[str, float]) -> Values:
    return {(label,): value for label, value in counted.items()}


def _family(name: MetricName, values: Values) -> Metric:
    kind = CounterMetricFamily if name.kind == "counter" else GaugeMetricFamily
    family = kind(name.name, name.text, labels=name.labels)
    for labels, value in sorted(values.items()):
        family.add_metric(labels, value)
    return family


def _histogram(name: MetricName, latencies: Mapping[str, Latency]) -> Metric:
    family = HistogramMetricFamily(name.name, name.text, labels=name.labels)
    for label, latency in latencies.items():
        family.add_metric([label], list(_buckets(latency)), latency.seconds)
    return family


def _buckets(latency: Latency) -> Iterator[tuple[str, float]]:
    bounds = [*map(str, LATENCY_BOUNDS_S), "+Inf"]
    return zip(bounds, accumulate(latency.buckets), strict=True)
