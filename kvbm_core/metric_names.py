"""Every Prometheus metric of the core, named here and nowhere else (docs/kvbm.md, section "Metrics")."""

from __future__ import annotations

from typing import Literal, NamedTuple


class MetricName(NamedTuple):
    """A counter's `name` lacks the suffix `_total`, which Prometheus adds."""

    name: str
    kind: Literal["counter", "gauge", "histogram"]
    labels: tuple[str, ...]
    text: str

    @property
    def exposed(self) -> str:
        """The name that it is asked for by."""
        return self.name + "_total" if self.kind == "counter" else self.name


POOL_BLOCKS = MetricName("kvbm_pool_blocks", "gauge", ("pool", "state"), "Blocks of a pool: active, inactive or reset.")
POOL_CAPACITY = MetricName("kvbm_pool_capacity_bytes", "gauge", ("pool",), "Bytes that a pool's blocks can hold.")
ALLOCATED = MetricName("kvbm_pool_allocations", "counter", ("pool",), "Blocks allocated.")
REFUSED = MetricName("kvbm_pool_refused", "counter", ("pool",), "Blocks refused, since too many were in use.")
EVICTED = MetricName("kvbm_pool_evictions", "counter", ("pool",), "Blocks evicted to make room.")
EVICTED_UNMATCHED = MetricName(
    "kvbm_pool_evictions_unmatched", "counter", ("pool",), "Of those, blocks that nobody had matched."
)
REGISTERED = MetricName("kvbm_pool_registrations", "counter", ("pool",), "Blocks registered.")
DEDUPLICATED = MetricName(
    "kvbm_pool_duplicates", "counter", ("pool",), "Blocks registered under a key that was there already."
)

TOKENS_REQUESTED = MetricName("kvbm_tokens_requested", "counter", (), "Tokens of the blocks that requests asked for.")
TOKENS_MATCHED = MetricName("kvbm_tokens_matched", "counter", (), "Tokens of the blocks that requests got.")
REQUEST_BYTES = MetricName("kvbm_requested_bytes", "counter", (), "Bytes of the blocks that requests asked for.")
REQUEST_BLOCKS = MetricName(
    "kvbm_requested_blocks",
    "counter",
    ("found",),
    "Blocks that requests asked for, each in one column: ready, waiting, G2, G3, G4, absent or untried.",
)
LOADED = MetricName("kvbm_loaded_blocks", "counter", ("source",), "Blocks brought to the device for a request.")
NOT_LOADED = MetricName(
    "kvbm_not_loaded_blocks", "counter", ("reason",), "Blocks found in a lower tier and not brought to the device."
)

PATH_BLOCKS = MetricName("kvbm_path_blocks", "counter", ("path",), "Blocks moved along a path.")
PATH_BYTES = MetricName("kvbm_path_bytes", "counter", ("path",), "Bytes moved along a path.")
PATH_SECONDS = MetricName("kvbm_path_seconds", "histogram", ("path",), "Duration of a path's calls, one batch each.")
PATH_FAILURES = MetricName("kvbm_path_failures", "counter", ("path", "reason"), "Blocks that a path did not move.")
QUEUE_BLOCKS = MetricName(
    "kvbm_queue_blocks", "gauge", ("path", "state"), "Blocks of a path's queue: queued, running or in_doubt."
)

OFFLOAD_WAITING = MetricName("kvbm_offload_waiting_blocks", "gauge", (), "Device blocks that wait to be offloaded.")
OFFLOAD_SKIPPED = MetricName(
    "kvbm_offload_skipped_blocks", "counter", ("target", "reason"), "Blocks that were not offloaded to a tier."
)
PUT = MetricName("kvbm_put_blocks", "counter", ("volume",), "Blocks that a volume has after a put.")
PUT_REFUSED = MetricName("kvbm_put_refused_blocks", "counter", ("reason",), "Blocks that no volume took.")
PUT_PASSED_ON = MetricName(
    "kvbm_put_passed_on_blocks", "counter", ("volume",), "Blocks passed on to the next volume, since this was full."
)
EVENTS_LOST = MetricName("kvbm_events_lost", "counter", (), "Events not announced: the publisher was closed first.")
HOOK_FAILURES = MetricName("kvbm_hook_failures", "counter", (), "Times that a hook raised.")

ALL = tuple(value for value in list(globals().values()) if isinstance(value, MetricName))
"""In the order above."""
