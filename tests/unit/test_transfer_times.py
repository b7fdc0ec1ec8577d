"""Quantiles of transfers from what agents count, over their last minutes and over their restarts."""

from __future__ import annotations

import pytest

from advisor.metrics import Metrics
from advisor.transfer_times import MARK_S, WINDOW_S, RecentTransfers, quantile_s
from storage_agent.descriptor import VolumeDescriptor
from storage_agent.port import VolumeStat
from storage_agent.transfers import TRANSFER_BOUNDS_S, Transfers


def stat(reads: Transfers | None, name: str = "disk") -> VolumeStat:
    times = [] if reads is None else list(reads.times)
    descriptor = VolumeDescriptor(id=name, path="/srv/x.slab", capacity_blocks=8, block_bytes_max=512)
    return VolumeStat(descriptor, blocks=0, payload_bytes=0, slots_free=8, mode="", read_times=times)


def took(*seconds: float) -> Transfers:
    transfers = Transfers()
    for each in seconds:
        transfers.add(100, each)
    return transfers


def test_transfers_are_counted_under_the_bound_that_they_are_not_above() -> None:
    transfers = took(0.0, TRANSFER_BOUNDS_S[0], 0.00011, TRANSFER_BOUNDS_S[-1], 99.0)
    assert (transfers.payload_bytes, transfers.seconds) == (500, sum((0.0, 1e-4, 0.00011, TRANSFER_BOUNDS_S[-1], 99.0)))
    assert (transfers.times[0], transfers.times[1], transfers.times[-2], transfers.times[-1]) == (2, 1, 1, 1)


def test_quantiles_lie_within_the_bounds_that_transfers_were_counted_under() -> None:
    times = took(*[0.00015] * 98, 0.7, 60.0).times
    assert quantile_s(times, 0.5) == pytest.approx(1e-4 + 1e-4 * 50 / 98)
    low, high = (bound for bound in TRANSFER_BOUNDS_S if 0.35 < bound < 1.0)
    assert low < 0.7 < high
    assert quantile_s(times, 0.99) == pytest.approx(high)
    assert quantile_s(times, 1.0) == TRANSFER_BOUNDS_S[-1], "no more is known"
    assert quantile_s([0, 0], 0.5) is None
    assert quantile_s([], 0.5) is None


def test_what_is_older_than_the_window_or_of_an_agents_former_life_does_not_count() -> None:
    recent, reads = RecentTransfers(), took(0.5, 0.5)
    recent.note("agent", [stat(reads)], 0.0)
    assert sum(recent.counts("agent", "disk", "read")) == 0, "of no known time"
    now_s = 0.0
    for _ in range(200):
        now_s += MARK_S / 4
        reads.add(1, 0.001)
        recent.note("agent", [stat(reads)], now_s)
    lately = sum(recent.counts("agent", "disk", "read"))
    assert WINDOW_S / (MARK_S / 4) <= lately <= (WINDOW_S + MARK_S) / (MARK_S / 4)
    recent.note("agent", [stat(took(0.001))], now_s + 1)
    assert sum(recent.counts("agent", "disk", "read")) == 0
    recent.note("agent", [stat(took(0.001, 0.001))], now_s + 2)
    assert sum(recent.counts("agent", "disk", "read")) == 1
    recent.note("agent", [stat(None, "other")], now_s + 3)
    assert recent.counts("agent", "disk", "read") == []
    assert recent.counts("agent", "other", "read") == recent.counts("nobody", "disk", "read") == []


def test_the_histogram_of_transfers_says_what_the_agent_counted() -> None:
    metrics, reads = Metrics(), took(0.00005, 0.00015, 60.0)
    metrics.volume_transfer_seconds.replace({("disk", "read"): (reads.times, reads.seconds)})
    name, labels = "kvadvisor_volume_transfer_seconds", {"volume": "disk", "operation": "read"}
    sample = metrics.registry.get_sample_value
    assert [sample(f"{name}_bucket", {**labels, "le": le}) for le in ("0.0001", "0.0002", "+Inf")] == [1, 2, 3]
    assert (sample(f"{name}_count", labels), sample(f"{name}_sum", labels)) == (3, reads.seconds)
